"""Bounds and sums in the computer are those of the proof: exact norms, exact sums, one Gaussian (docs/noise.md)."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn

from fedveil.data.client_data import ClientData
from fedveil.errors import DivergedError, InputError
from fedveil.models.registry import make_model
from fedveil.privacy import private_sum as module
from fedveil.privacy.clipping import clip_rows, clip_rows_l1
from fedveil.privacy.mechanisms import Unnoised, gaussian
from fedveil.privacy.noise import choice, grid
from fedveil.privacy.private_sum import CohortNoise, noisy_models, private_sum
from fedveil.privacy.releases import Plan
from fedveil.streams import ClientStreams, Stream, named_stream
from fedveil.task import Task
from fedveil.training.per_example import MARGIN, clipped_gradient_sum, per_example_gradients
from fedveil.training.private_sgd import PoissonBatches, StepStreams, private_sgd
from fedveil.tree import Params, with_axis
from tests.refusals import refuses

SCALE = 2**1100


def exactly(value: float) -> int:
    """A float in units of 2^-1100."""
    top, bottom = value.as_integer_ratio()
    return top * (SCALE // bottom)


def adversarial_rows(dtype: torch.dtype, clip: float) -> list[Tensor]:
    """Rows around the border of the clip, of many, of denormal, of huge and of mixed entries."""
    draws = torch.from_numpy(named_stream(0, "rows").standard_normal(3000))
    unit = draws / draws.norm()
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 2**20
    border = [unit * clip * (1 + k * 2.0**-24) for k in range(-12, 13)]
    border += [unit * clip * (1 + k * 2.0**-50) for k in range(-12, 13)]
    spread = unit * clip * torch.from_numpy(2.0 ** named_stream(1, "p").uniform(-60, 20, 3000))
    others = [
        torch.full((30_000,), 1.1 * clip / math.sqrt(30_000), dtype=torch.float64),
        torch.full((30_000,), clip / math.sqrt(30_000), dtype=torch.float64),
        torch.full((5000,), smallest, dtype=torch.float64),
        torch.full((5000,), largest, dtype=torch.float64),
        torch.tensor([largest, clip, smallest, 1.0, -largest], dtype=torch.float64),
        torch.tensor([clip], dtype=torch.float64),
        torch.tensor([math.nextafter(clip, math.inf)], dtype=torch.float64),
        spread,
    ]
    return [row.to(dtype).unsqueeze(0) for row in (*border, *others)]


@pytest.mark.parametrize("clip", [1.0, 0.3, 1e-29, 1e29])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_clipped_row_is_longer_than_the_clip_in_exact_arithmetic(dtype: torch.dtype, clip: float) -> None:
    limit = exactly(clip)
    for row in adversarial_rows(dtype, clip):
        before = [exactly(value) for value in row[0].tolist()]
        for bound, power in ((clip_rows, 2), (clip_rows_l1, 1)):
            found = bound({"w": row}, clip)["w"][0]
            after = sum(abs(exactly(value)) ** power for value in found.tolist())
            assert after <= limit**power
            if row.abs().max() > 1e300:
                continue  # the norm is beyond double precision: nothing is left of the row
            if sum(abs(value) ** power for value in before) > limit**power:  # and hardly shorter than that
                assert after >= int(limit * Fraction(999_998, 10**6)) ** power
            elif (
                sum(abs(value) ** power for value in before) <= int(limit * Fraction(999_998, 10**6)) ** power
            ):
                assert torch.equal(found, row[0])


def test_a_clip_that_float32_cannot_keep_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        clip_rows({"w": torch.ones(1, 3)}, 1e-40)
    assert caught.value.field == "clip"


PLAN = Plan(6, 6, "all", 1, 10, 10)


def far_draws(value: np.ndarray, std: float, step: float, stream: Stream) -> np.ndarray:
    """The multiples next to 16 deviations on either side, which are the furthest there are."""
    signs = np.where(np.asarray(stream.random(len(value))) < 0.5, -1, 1)
    found: np.ndarray = (np.rint((value.astype(np.float64) + signs * 15.99 * std) / step) * step).astype(
        value.dtype
    )
    return found


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("lr", [1.0, 0.7, 3.3, 1e-3])
@pytest.mark.parametrize("scope", ["shared", "local"])
def test_the_sum_of_uploads_is_exact(
    scope: str, lr: float, far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models as large as they are accepted, updates and draws as large as they come."""
    if far:
        monkeypatch.setattr(grid, "rounded_normal", far_draws)
    noise = CohortNoise(0.37, 1.3, scope, PLAN)  # type: ignore[arg-type]
    upload, size = noise.upload(), 4000
    most = (module._HELD * upload.step - upload.clip - 16 * upload.std) * lr * (1 - 2.0**-20)
    draws = named_stream(2, "models")
    start = {"w": torch.from_numpy(draws.uniform(-most, most, (1, size))).float()}
    update = {"w": torch.from_numpy(draws.standard_normal((6, size))).float()}
    streams = [ClientStreams(0, 1, tuple(range(6))).noise() for _ in range(2)]
    added = upload(update, streams[0])["w"].double()
    assert bool((added / upload.step == (added / upload.step).round()).all())
    models = noisy_models(upload, {"w": start["w"].expand(6, -1)}, update, streams[1], lr)
    assert models["w"].dtype == torch.float32
    for sent in (models, {"w": models["w"].double()}):
        kept = sent["w"].clone()
        assert torch.equal(module._updates(sent, start, lr, upload.step)["w"], added)
        assert torch.equal(sent["w"], kept)
    like = {"w": start["w"][0]}
    summed = private_sum(
        models, like, 6, PLAN, Unnoised(), named_stream(0, "none"), upload=upload, start=start, lr=lr
    )
    multiples = (added / upload.step).numpy().astype(object)
    whole = [sum(int(value) for value in column) for column in multiples.T]
    assert (summed.total["w"][0] / upload.step).tolist() == whole


def test_models_and_noise_that_float32_cannot_hold_together_are_refused() -> None:
    upload = CohortNoise(1.0, 1.0, "shared", PLAN).upload()
    update = {"w": torch.zeros(1, 2)}
    for size, refused in ((1e3, False), (1e8, True)):
        start = {"w": torch.full((1, 2), size)}
        if refused:
            with pytest.raises(DivergedError):
                noisy_models(upload, start, update, [named_stream(0, "n")])
        else:
            noisy_models(upload, start, update, [named_stream(0, "n")])
    with pytest.raises(InputError) as caught:
        CohortNoise(1.0, 1e-6, "shared", PLAN).upload()
    assert caught.value.field == "noise_multiplier"


def rounded(value: float, tau: float, reach: int) -> np.ndarray:
    """The distribution of the rounding of `value` plus noise, on -reach ... reach."""
    edges = np.arange(-reach - 0.5, reach + 1) - value
    upper, lower = norm.sf(edges / tau), norm.cdf(edges / tau)
    mass: np.ndarray = np.where(edges[:-1] > 0, upper[:-1] - upper[1:], lower[1:] - lower[:-1])
    return mass


def sum_of_rounded(values: list[float], tau: float, reach: int) -> np.ndarray:
    found = np.ones(1)
    for value in values:
        found = np.convolve(found, rounded(value, tau, reach))
    return found


def rounding_of_one_gaussian(values: list[float], tau: float, reach: int) -> np.ndarray:
    """The rounding of the sum of `values`, of noise of tau sqrt(n) and of n - 1 uniform numbers."""
    places, weights = np.polynomial.legendre.leggauss(24)
    uniform, chance = np.zeros(1), np.ones(1)
    for _ in values[1:]:
        uniform = (uniform[:, None] + places / 2).ravel()
        chance = (chance[:, None] * weights / 2).ravel()
    total, spread = math.fsum(values), tau * math.sqrt(len(values))
    rows = [rounded(total + moved, spread, len(values) * reach) for moved in uniform]
    found: np.ndarray = chance @ np.stack(rows)
    return found


@pytest.mark.parametrize("values", [[0.3, -0.41], [0.5, 7.13], [0.25, -3.9, 0.77]])
def test_a_sum_of_rounded_uploads_is_the_rounding_of_one_gaussian(values: list[float]) -> None:
    """Claim 3, on the coarsest grid that is used; on a grid coarser than the noise it does not hold."""
    for tau, reach, equal in ((16.0, 200, True), (0.3, 12, False)):
        one, other = (made(values, tau, reach) for made in (sum_of_rounded, rounding_of_one_gaussian))
        distance = 0.5 * float(np.abs(one - other).sum())
        assert distance < 1e-13 if equal else distance > 1e-3


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0, 3.0])
def test_a_sum_of_rounded_uploads_leaks_no_more_than_one_gaussian(epsilon: float) -> None:
    """Two uploads of sensitivity 20 on the coarsest grid: brute-force divergence against the formula."""
    tau, moved = 16.0, 20.0
    arms = [sum_of_rounded([0.3, value], tau, 260) for value in (0.2, 0.2 + moved)]
    mu = moved / (tau * math.sqrt(2))
    allowed = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    for one, other in (arms, arms[::-1]):
        delta = float(np.maximum(one - math.exp(epsilon) * other, 0).sum())
        assert delta <= allowed + 1e-12
        assert delta >= 0.98 * allowed  # and the grid costs next to nothing


def small_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(4, 8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.Flatten(),
        nn.Linear(8 * 36, 10),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lenet-5": (lambda: make_model("lenet-5", (3, 32, 32), 10), (3, 32, 32)),
    "group-norm": (small_network, (3, 8, 8)),
    "mlp": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10)), (3, 8, 8)),
}


def examples(name: str, count: int) -> tuple[nn.Module, Params, Tensor, Tensor]:
    build, shape = NETWORKS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = build()
        x, y = torch.randn(count, *shape), torch.randint(0, 10, (count,))
    return network, {key: leaf.detach() for key, leaf in network.named_parameters()}, x, y


@pytest.mark.parametrize("name", NETWORKS)
def test_batch_mates_do_not_change_a_gradient(name: str) -> None:
    """By more than a few units in the last place of float32; claim 4 assumes that they do not change it at all."""
    network, params, x, y = examples(name, 104)

    def gradients(rows: slice) -> Tensor:
        found = per_example_gradients(network, params, x[rows], y[rows])
        return torch.cat([leaf.flatten(1) for leaf in found.values()], 1).double()

    whole = gradients(slice(None))
    for rows in (slice(1), slice(5, 7), slice(17), slice(3, 22), slice(40), slice(1, None), slice(103)):
        part = whole[rows]
        change = (gradients(rows) - part).norm(dim=1) / part.norm(dim=1)
        assert float(change.max()) < 8 * 2.0**-23
        assert int((change > 2.0**-23).sum()) <= 3 or len(part) < 20


@pytest.mark.parametrize("name", NETWORKS)
def test_a_record_moves_the_sum_by_no_more_than_the_clip(name: str) -> None:
    """Whatever its batch mates make of it: the margin covers what the last test measures."""
    network, params, x, y = examples(name, 104)
    clip = 1e-3

    def total(count: int) -> Tensor:
        found, _ = clipped_gradient_sum(network, params, x[:count], y[:count], clip)
        return torch.cat([leaf.flatten() for leaf in found.values()])

    for count in (1, 2, 4, 17, 18, 20, 21, 64, 101, 102, 103, 104):
        moved = float((total(count) - total(count - 1)).norm()) if count > 1 else float(total(1).norm())
        assert clip * (1 - 2 * MARGIN) <= moved <= clip


def test_batches_whose_rounding_errors_are_not_covered_are_refused() -> None:
    task = Task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(2, 2)))
    data = ClientData(torch.zeros(1, 4, 2), torch.zeros(1, 4, dtype=torch.long), torch.tensor([4]))
    streams = StepStreams.of(ClientStreams(0, 1, (0,)))
    for expected, refused in ((2.0**17, False), (2.0**17 + 1, True)):
        batches = PoissonBatches([1], [0.5], [expected])
        if refused:
            with pytest.raises(InputError) as caught:
                private_sgd(task, with_axis(task.init(0)), data, streams, batches, gaussian(1.0, 1.0), lr=0.1)
            assert caught.value.field == "batch_size"
        else:
            private_sgd(task, with_axis(task.init(0)), data, streams, batches, gaussian(1.0, 1.0), lr=0.1)


def test_the_largest_of_uncertain_numbers_are_among_those_that_may_be() -> None:
    """Also where one number is far less certain than the others."""
    stream = named_stream(6, "intervals")
    for trial in range(300):
        size = 2 + trial % 9
        truth = stream.standard_normal(size)
        doubt = 10.0 ** stream.uniform(-6, 1, size)
        middle = truth + stream.uniform(-1, 1, size) * doubt
        for count in range(1, size + 1):
            sure, close = choice._certain_and_close(middle - doubt, middle + doubt, count)
            largest = set(np.argsort(-truth)[:count].tolist())
            assert set(sure.tolist()) <= largest <= set(sure.tolist()) | set(close.tolist())


@pytest.mark.parametrize(("cohort", "refused"), [(2**15, False), (2**15 + 1, True)])
def test_sums_too_long_for_the_margin_of_the_clip_are_refused(cohort: int, refused: bool) -> None:
    """Without noise updates lie on no grid, so that their sum in float64 is rounded."""
    plan = Plan(10**6, cohort, "fixed", 1)
    noise = CohortNoise(1.0, 1.0, "central", plan)
    with refuses("run.cohort") if refused else nullcontext():
        noise.releases()
    assert CohortNoise(1.0, 0.0, "central", plan).releases()
