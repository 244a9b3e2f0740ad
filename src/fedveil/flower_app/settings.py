"""What a run is told through Flower's run configuration: the whole experiment as one text."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.config import Config, make_config
from fedveil.errors import InputError

_KEYS = ("config", "seed", "experiment", "results", "data")


@dataclass(frozen=True)
class RunSettings:
    """An experiment's seed. Where results and data are is the server's business; a deployed node ignores both."""

    config: Config
    seed: int
    experiment: str
    results: Path
    data: Path | None = None

    def to_run_config(self) -> dict[str, str | int]:
        """As flat keys with values of TOML, which is all that Flower hands on."""
        values = (
            self.config.to_toml(),
            self.seed,
            self.experiment,
            str(self.results),
            "" if self.data is None else str(self.data),
        )
        return {f"fedveil-{key}": value for key, value in zip(_KEYS, values, strict=True)}

    @classmethod
    def from_run_config(cls, values: Mapping[str, Any]) -> RunSettings:
        try:
            text, seed, experiment, results, data = (values[f"fedveil-{key}"] for key in _KEYS)
            config = parse_config(str(text))
        except (KeyError, ValueError) as error:
            raise InputError(
                "run configuration", sorted(values), "is not one of fedveil", "Submit the run with fedveil."
            ) from error
        return cls(config, int(seed), str(experiment), Path(str(results)), Path(str(data)) if data else None)


@functools.lru_cache(maxsize=4)
def parse_config(text: str) -> Config:
    return make_config(tomllib.loads(text))
