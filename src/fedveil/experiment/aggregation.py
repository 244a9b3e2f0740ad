"""`[aggregation]` of a configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedveil.errors import InputError
from fedveil.secure_sum.settings import DEFAULT_COLLUDERS, SecureSum
from fedveil.validation import Section


class AggregationSection(Section):
    """What the server learns of the uploads: all of them, or only their sum."""

    kind: Literal["plain", "secure"] = "plain"
    """What the server learns of the uploads: all of them, or only their sum."""
    threshold: Annotated[int, Field(ge=1)] | None = None
    """Number of answers needed to reveal a secure sum; by default the smallest safe number."""
    colluders: Annotated[int, Field(ge=0)] | None = None
    """Number of clients that may collude with the server without breaking the guarantee; default 1."""

    @property
    def assumed_colluders(self) -> int:
        return DEFAULT_COLLUDERS if self.colluders is None else self.colluders

    def settings(self) -> SecureSum | None:
        """The settings of secure aggregation; None for plain."""
        if self.kind == "secure":
            return SecureSum(self.threshold, self.assumed_colluders)
        for key in ("threshold", "colluders"):
            if (value := getattr(self, key)) is not None:
                raise InputError(
                    f"aggregation.{key}",
                    value,
                    "is for secure aggregation",
                    'Set kind = "secure", or leave it out.',
                )
        return None

    def require_engine(self, engine: str) -> None:
        """Refuse engines without keys for masks; the simulator omits masks, because they cancel."""
        if self.kind == "secure" and engine == "flower-simulation":
            raise InputError(
                "aggregation.kind",
                self.kind,
                f"the clients of the engine {engine!r} have no keys",
                'Use run.engine = "simulation" or "flower".',
            )
