"""A method on data with a release before the first round, such as the scales of a table's columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedveil.errors import InputError
from fedveil.messages import Record
from fedveil.methods.method import AnyMethod
from fedveil.methods.wrappers.wrapper import Around
from fedveil.privacy.releases import Plan, PostProcessing, Release, Unprotected


@dataclass(frozen=True)
class ReleasedBefore(Around[Record]):
    """The method itself, with the release before the first round included in its guarantee."""

    release: Release

    def __post_init__(self) -> None:
        self.named("statistics", "the scales of columns are released before", self.inner.server_type)

    def releases(self, plan: Plan) -> Sequence[Release]:
        own = tuple(self.inner.releases(plan))
        private = [r for r in own if not isinstance(r.protection, Unprotected | PostProcessing)]
        if any(r.unit != self.release.unit for r in private) or not private:
            raise InputError(
                "task.data_options.statistics",
                "private",
                f"protects a {self.release.unit}, which {self.inner.name} does not in this configuration",
                f"Use a method that protects a {self.release.unit}, or constants in the schema.",
            )
        return (*own, self.release)


def released_before(method: AnyMethod, release: Release | None) -> AnyMethod:
    """The method with this release before the first round; the method itself if there is none."""
    return method if release is None else ReleasedBefore(method, release)
