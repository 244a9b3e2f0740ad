"""Pictures that a run leaves in its folder for the report: synthetic images, and what FedCEO's smoothing did.

`synthetic/round-R.png` of the first, the middle and the last round of a method that sends images;
`figures/spectrum-round-R.png` and `figures/smoothness-round-R.png` of FedCEO's first and last smoothing round. All
are drawn from what went over the wire, so they show nobody more than the server has seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedveil.data.dataset import Dataset
from fedveil.linalg import t_tsvd
from fedveil.messages import Message
from fedveil.methods.fedceo import FedCEO, NoisyModel
from fedveil.methods.method import AnyMethod, At
from fedveil.methods.wrappers.wrapper import WrappedMethod
from fedveil.privacy.releases import Plan
from fedveil.session.loop import Callback

# Drawing is imported when something is drawn: most methods leave nothing, and need not wait for it.
_MOST_CLASSES, _MOST_OF_A_CLASS = 10, 4


def pictures_of(method: AnyMethod, plan: Plan, dataset: Dataset, folder: Path) -> list[Callback]:
    """The observers that draw for this method; none for a method that has nothing to show."""
    while isinstance(method, WrappedMethod):
        method = method.inner
    if isinstance(method, FedCEO) and method.personal:
        return [DrawSmoothing(method, plan, folder / "figures", dataset.classes)]
    shape = dataset.input_shape
    if {"images", "labels"} <= set(method.up_type.__dataclass_fields__) and len(shape) == 3:
        return [DrawSets(plan, folder / "synthetic", dataset)]
    return []


class DrawSets(Callback):
    """Draws the clients' synthetic images, a row for each class."""

    def __init__(self, plan: Plan, folder: Path, dataset: Dataset) -> None:
        self._rounds = {1, (plan.rounds + 1) // 2, plan.rounds}
        self._folder, self._dataset = folder, dataset

    def exchange_ends(self, at: At, cohort: Sequence[int], down: Message, up: Message | None) -> None:
        if at.round not in self._rounds or up is None:
            return
        from fedveil.figures.fedlap import Sets, images_figure
        from fedveil.figures.figure import save_figure

        sent = up.tensors()
        sets = Sets(sent["images"].cpu(), sent["labels"].cpu(), {})
        shown = sorted(set(sets.labels[sets.labels >= 0].tolist()))[:_MOST_CLASSES]
        if not shown:
            return
        data = self._dataset
        columns = min(_MOST_OF_A_CLASS, max(len(sets.of_class(label)) for label in shown))
        figure = images_figure(
            {at.round: sets}, shown, data.classes, columns=columns, mean=data.mean, std=data.std
        )
        save_figure(figure, self._folder / f"round-{at.round}.png")


class DrawSmoothing(Callback):
    """Draws the spectrum and the smoothness of the last smoothed layer, before and after smoothing."""

    def __init__(self, method: FedCEO, plan: Plan, folder: Path, classes: Sequence[str]) -> None:
        last = plan.rounds - plan.rounds % method.interval
        self._rounds = {method.interval, last} if last else set()
        self._method, self._folder, self._classes = method, folder, classes

    def exchange_ends(self, at: At, cohort: Sequence[int], down: Message, up: Message | None) -> None:
        if at.round not in self._rounds or not isinstance(up, NoisyModel):
            return
        chosen = self._method.smoothed_layers(up.params)
        matrices = [name for name in up.params if name in chosen and up.params[name].dim() > 2]
        if not matrices:
            return
        from fedveil.figures.fedceo import smoothness_figure, spectrum_figure
        from fedveil.figures.figure import save_figure

        name = matrices[-1]
        before = up.params[name].flatten(2).cpu()
        noise = self._method.noise_std(at, up.cohort)
        threshold = self._method.threshold(at.round, noise, *before.shape)
        after = t_tsvd(before, threshold)
        title = f"{name}, round {at.round}"
        spectrum = spectrum_figure(before, after, threshold, title=title)
        save_figure(spectrum, self._folder / f"spectrum-round-{at.round}.png")
        rows = self._classes if len(self._classes) == before.shape[1] else None
        smoothness = smoothness_figure(before, after, None, classes=rows, title=title)
        save_figure(smoothness, self._folder / f"smoothness-round-{at.round}.png")
