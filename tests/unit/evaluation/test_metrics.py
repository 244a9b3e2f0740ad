from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn import metrics as reference

from fedveil.evaluation.metrics import ONE_CLASS, metrics_of, wilson
from fedveil.evaluation.targets import concordance
from fedveil.losses import Cox, Hazard, Squared, survival_of
from fedveil.task import cross_entropy


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("classes", [2, 4])
def test_metrics_are_those_of_scikit_learn(rng: np.random.Generator, classes: int) -> None:
    y = torch.from_numpy(rng.integers(0, classes, 300))
    outputs = torch.from_numpy(rng.normal(size=(300, classes)).round(1)) + torch.eye(classes)[y]
    found = metrics_of(cross_entropy, outputs, y, classes)
    p = torch.softmax(outputs, -1).numpy()
    hot = np.eye(classes)[y.numpy()]
    precision = [reference.average_precision_score(hot[:, k], p[:, k]) for k in range(classes)]
    expected = {
        "accuracy": reference.accuracy_score(y, p.argmax(1)),
        "balanced_accuracy": reference.balanced_accuracy_score(y, p.argmax(1)),
        "auc": reference.roc_auc_score(y, p[:, 1] if classes == 2 else p, multi_class="ovr"),
        "average_precision": precision[1] if classes == 2 else np.mean(precision),
    }
    for name, value in expected.items():
        assert found[name]["value"] == pytest.approx(value, abs=1e-9), name
        assert found[name]["low"] <= value <= found[name]["high"], name
    assert found["confusion"] == reference.confusion_matrix(y, p.argmax(1)).tolist()
    assert sum(row["examples"] for row in found["calibration"]) == 300


def test_intervals_hold_the_true_value_about_95_times_in_100() -> None:
    stream = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        found = wilson(int(stream.binomial(50, 0.8)), 50)
        hits += found["low"] <= 0.8 <= found["high"]
    assert 180 <= hits <= 199


def calibrated(rng: np.random.Generator, count: int, off: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs for two classes, of which the first is predicted with probability p and true with p - off."""
    p = rng.uniform(0.6, 0.9, count)
    y = torch.from_numpy((rng.random(count) >= p - off).astype(np.int64))
    return torch.log(torch.from_numpy(np.stack([p, 1 - p], axis=1))), y


@pytest.mark.parametrize("count", [10, 40, 300])
@pytest.mark.parametrize("off", [0.0, 0.03, 0.3])
def test_the_interval_of_the_calibration_error_holds_the_error(
    rng: np.random.Generator, count: int, off: float
) -> None:
    """Its own value always, and the true one, which is `off`, in at least 90 of 100 samples; 80 of ten examples."""
    covered = 0
    for _ in range(100):
        found = metrics_of(cross_entropy, *calibrated(rng, count, off), 2)["calibration_error"]
        assert 0 <= found["low"] <= found["value"] <= found["high"] <= 1
        covered += found["low"] <= off <= found["high"]
    assert covered >= (90 if count >= 40 else 80)


def test_intervals_of_many_examples_are_as_wide_as_their_number_says(rng: np.random.Generator) -> None:
    """More than are resampled: four times the examples halve the intervals."""
    widths = []
    for count in (15_000, 60_000):
        found = metrics_of(cross_entropy, *calibrated(rng, count, 0.1), 2)
        widths.append(
            {name: found[name]["high"] - found[name]["low"] for name in ("auc", "calibration_error")}
        )
    for name, width in widths[0].items():
        assert widths[1][name] == pytest.approx(width / 2, rel=0.35), name
    numbers = []
    for count in (2000, 32_000):
        y = torch.from_numpy(rng.normal(size=count))
        outputs = (y + torch.from_numpy(rng.normal(size=count))).unsqueeze(-1)
        rmse = metrics_of(Squared(1.0), outputs, y, 1)["rmse"]
        assert rmse["low"] <= rmse["value"] <= rmse["high"]
        numbers.append(rmse["high"] - rmse["low"])
    assert numbers[1] == pytest.approx(numbers[0] / 4, rel=0.35)


def test_the_auc_of_one_class_is_reported_as_undefined() -> None:
    found = metrics_of(cross_entropy, torch.randn(10, 2), torch.ones(10, dtype=torch.int64), 2)
    assert found["auc"] == {"value": None, "why": ONE_CLASS}
    assert found["accuracy"]["value"] is not None


def test_errors_of_numbers_are_in_the_units_of_the_table(rng: np.random.Generator) -> None:
    y = torch.from_numpy(rng.normal(size=400))
    outputs = (y + torch.from_numpy(rng.normal(size=400)) * 0.5).unsqueeze(-1)
    found = metrics_of(Squared(10.0), outputs, y, 1)
    assert found["rmse"]["value"] == pytest.approx(5.0, rel=0.1)
    assert found["r2"]["value"] == pytest.approx(reference.r2_score(y, outputs[:, 0]))


def test_concordance_counts_pairs_whose_order_is_known() -> None:
    risk, time = torch.tensor([3.0, 2.0, 2.0, 1.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert concordance(risk, time, torch.tensor([True, True, True, False])) == pytest.approx(5.5 / 6)
    assert concordance(risk, time, torch.zeros(4, dtype=torch.bool)) is None


def test_hazard_is_the_likelihood_of_an_event_in_its_interval() -> None:
    outputs = torch.randn(1, 4, dtype=torch.float64)
    survival = survival_of(outputs)[0]
    events = [-Hazard()(outputs, torch.tensor([2 * k + 1])).item() for k in range(4)]
    after = -Hazard()(outputs, torch.tensor([8])).item()  # censored after the last interval
    assert np.exp([*events, after]).sum() == pytest.approx(1.0)
    assert np.exp(after) == pytest.approx(survival[-1].item())
    assert Hazard()(outputs, torch.tensor([0])).item() == 0.0  # censored in the first: nothing is known


def test_cox_is_the_partial_likelihood_and_padding_is_at_no_risk() -> None:
    risk, y = torch.tensor([[0.3], [-0.2], [1.0]]), torch.tensor([2.0, 1.0, -3.0])
    expected = [
        np.log(np.exp(0.3) + np.exp(1.0)) - 0.3,
        np.log(np.exp(0.3) + np.exp(-0.2) + np.exp(1.0)) + 0.2,
        0.0,
    ]
    torch.testing.assert_close(Cox()(risk, y), torch.tensor(expected, dtype=torch.float32))
    padded = Cox()(torch.cat([risk, torch.tensor([[9.0]])]), torch.cat([y, torch.zeros(1)]))
    torch.testing.assert_close(padded[:3], torch.tensor(expected, dtype=torch.float32))
