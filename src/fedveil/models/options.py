"""What the options of models mean, by name, and the bounds of the numbers among them."""

from __future__ import annotations

from collections.abc import Mapping

_COUNT = ">= 1"
OPTIONS: Mapping[str, tuple[str, str]] = {
    "bias": ("Whether linear layers have a bias.", ""),
    "blocks": ("Number of convolution blocks; each halves the image.", _COUNT),
    "conv_relu": ("Whether a ReLU follows each convolution.", ""),
    "dropout": ("Probability that a unit is left out in training.", ">= 0 and < 1"),
    "embedding": ("Size of a token's embedding.", _COUNT),
    "embedding_path": (
        'A transformers folder whose embeddings are taken, frozen; "default" for the MiniLM package.',
        "",
    ),
    "frozen_embedding": ("Whether token embeddings keep their start: nobody trains or sends them.", ""),
    "groups": ("Groups of group normalisation; not given: one for each channel.", _COUNT),
    "heads": ("Attention heads; they divide the width.", _COUNT),
    "hidden": ("Units of the hidden layer.", _COUNT),
    "layers": ("Number of layers.", _COUNT),
    "padding": (
        "Of the convolutions; not given: 0 for images of 16 pixels a side or more, else 2.",
        ">= 0 and <= 4",
    ),
    "path": ('The transformers folder; "default" for the MiniLM package where it may be left out.', ""),
    "pooling": ("From which states a text is classified.", ""),
    "tied": ("Whether tokens are scored with their own embeddings, which halves the parameters.", ""),
    "trained_layers": (
        "Train the last so many layers and the new one; 0: the new one alone; not given: all.",
        ">= 0",
    ),
    "width": ("Channels, or the size of a token's state.", _COUNT),
    "zero": ("Whether weights start at zero: noisy steps need not undo a random start first.", ""),
}
