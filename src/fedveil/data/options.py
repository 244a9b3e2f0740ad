"""What the options of data sets mean, by name, and the bounds of the numbers among them."""

from __future__ import annotations

from collections.abc import Mapping

_COUNT, _FRACTION = ">= 1", ">= 0 and < 1"
OPTIONS: Mapping[str, tuple[str, str]] = {
    "categorical": ("Columns that are categories even if they look like numbers or identifiers.", ""),
    "channels": ("Channels of the pictures: 1 for grey, 3 for colours.", _COUNT),
    "decimal": ("The decimal mark of numbers.", ""),
    "drop": ("Columns that are left out.", ""),
    "event": ("Of survival, the column that is 1 where the time is that of an event, 0 if censored.", ""),
    "intervals": (
        "Of survival, the ends of the intervals of discrete-time hazards; without them Cox's loss is used.",
        "> 0",
    ),
    "label": ("The column to predict; of survival, the time.", ""),
    "labels": ("Which of the two label sets is learned.", ""),
    "limit": ("Where standardised numbers are cut off; not given: nowhere.", "> 0"),
    "max_per_class": ("Keep the first so many pictures of each class.", _COUNT),
    "max_test": ("Keep the first so many test examples.", _COUNT),
    "max_train": ("Keep the first so many training examples.", _COUNT),
    "missing": (
        'Missing cells: "refuse" the file, "drop" their rows, take the "median" (of categories the most frequent) '
        'or make them a "category".',
        "",
    ),
    "normalise": (
        'Brightness: "dataset" with the constants of the data set, "unit" to 0..1 and "none" as in the file.',
        "",
    ),
    "numeric": ("Columns that are measurements even if they look like identifiers.", ""),
    "pad_to": ("Put images into the middle of a dark square of so many pixels a side.", _COUNT),
    "path": ("The file or folder; a relative one stands beside the configuration.", ""),
    "person": ("The column of people who may have several rows: nobody is in both splits.", ""),
    "rows_per_person": (
        "Training rows that a person may have, drawn with the seed; 1 if only person is given.",
        _COUNT,
    ),
    "scaling": (
        'Numbers standardised by "public" constants, by these and categories "centred" as if equally frequent, or '
        '"none".',
        "",
    ),
    "schema": ("A schema file of public scales, categories and classes.", ""),
    "seed": ("Of the split into training and test examples.", ">= 0"),
    "statistics": (
        'Scales and fills computed from "rows" without protection, from rows that are declared "public", or '
        '"private" with noise that is charged.',
        "",
    ),
    "statistics_noise": ('Of statistics = "private", in units of the sensitivity.', "> 0"),
    "target": ("What is predicted: classes, a number, or survival times.", ""),
    "test": ("Which of the published splits is tested on.", ""),
    "test_fraction": (
        "Share of the examples that is held out where the files have no test split.",
        _FRACTION,
    ),
    "test_path": ("A table of test rows; without it rows are split off.", ""),
    "unit_norm": ("Scale the features of every row to length 1.", ""),
    "user": ('The column that tells whose row it is, for partition.kind = "user".', ""),
}
