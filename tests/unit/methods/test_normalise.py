"""Updates scaled to a norm of exactly the clip."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch

from fedveil.errors import DivergedError, InputError
from fedveil.experiment.config import build_method, make_config
from fedveil.methods.method import At
from fedveil.privacy.clipping import clip_rows, hidden_divergence, normalise_rows, row_norms
from fedveil.streams import ClientStreams
from fedveil.tree import expand, with_axis
from tests.contract.federation import make_clients, make_plan, make_task


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1e-30, 1e-3, 1.0, 1e20])
def test_normalised_updates_have_the_norm_of_the_clip(dtype: torch.dtype, length: float) -> None:
    generator = torch.Generator().manual_seed(0)
    update = {
        "a": length * torch.randn(50, 3, 4, dtype=dtype, generator=generator),
        "b": length * torch.randn(50, dtype=dtype, generator=generator),
    }
    norms = row_norms(list(normalise_rows(update, 0.7).values()))
    assert float(norms.max()) <= 0.7
    torch.testing.assert_close(norms, torch.full_like(norms, 0.7), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip", [1e-3, 0.3, 1.0, 7e5])
def test_no_normalised_row_is_longer_than_the_clip_in_exact_arithmetic(
    dtype: torch.dtype, clip: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    for scale in (1e-25, 1e-3, 1.0, 1e15):
        update = {"a": (scale * torch.randn(40, 300, dtype=torch.float64, generator=generator)).to(dtype)}
        scaled = normalise_rows(update, clip)
        for row in scaled["a"].tolist():
            assert sum(Fraction(value) ** 2 for value in row) <= Fraction(clip) ** 2
        assert torch.equal(clip_rows(scaled, clip)["a"], scaled["a"])  # the clip that follows changes nothing


def test_one_client_moves_the_sum_of_normalised_updates_by_no_more_than_the_clip() -> None:
    """Zero-out and add-remove: C. Replace-one: 2 C, reached by opposite directions."""
    generator = torch.Generator().manual_seed(2)
    update = torch.randn(3, 8, dtype=torch.float64, generator=generator) * torch.tensor(
        [[1e-9], [1.0], [1e9]]
    )
    scaled = normalise_rows({"a": update}, 0.5)["a"]
    turned = normalise_rows({"a": torch.cat([-update[:1], update[1:]])}, 0.5)["a"]
    whole = scaled.sum(0)
    for k in range(3):
        without = normalise_rows({"a": torch.cat([update[:k], 0 * update[k : k + 1], update[k + 1 :]])}, 0.5)
        assert float((whole - without["a"].sum(0)).norm()) <= 0.5 * (1 + 1e-12)
    assert float((whole - turned.sum(0)).norm()) == pytest.approx(1.0, rel=1e-5)


def test_an_update_of_zero_stays_zero() -> None:
    scaled = normalise_rows({"a": torch.tensor([[0.0, 0.0], [0.0, 3.0]])}, 1.0)["a"]
    assert torch.equal(scaled[0], torch.zeros(2))
    assert float(scaled[1].norm()) == pytest.approx(1.0)


def test_an_update_that_is_not_finite_is_refused_or_hidden() -> None:
    update = {"a": torch.tensor([[float("nan"), 1.0], [0.0, 3.0]])}
    with pytest.raises(DivergedError):
        normalise_rows(update, 1.0)
    with hidden_divergence() as happened:
        scaled = normalise_rows(update, 1.0)["a"]
    assert happened == [1]
    assert torch.equal(scaled[0], torch.zeros(2))


@pytest.mark.parametrize("name", ["udp-fedavg", "dp-fedavg"])
def test_what_clients_send_has_the_norm_of_the_clip(name: str) -> None:
    scope: dict[str, Any] = {"noise_scope": "central"} if name == "dp-fedavg" else {"noise_multiplier": 0.0}
    method = build_method({"name": name, "clip": 0.25, "normalise": True, "lr": 1e-4} | scope)
    task, plan = make_task(), make_plan()
    start = task.init(0)
    at = At(plan, 1)
    clients = (0, 1, 3)
    down = method.broadcast(at, method.init_server(start, plan), clients)
    up, _ = method.client_update(
        task, at, down, make_clients().load(clients), {}, ClientStreams(0, 1, clients)
    )
    sent = up.update if name == "dp-fedavg" else up.params
    if name != "dp-fedavg":
        sent = {key: leaf - expand(with_axis(start), 3)[key] for key, leaf in sent.items()}
    norms = row_norms(list(sent.values()))
    torch.testing.assert_close(norms, torch.full_like(norms, 0.25), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("method", "field"),
    [
        ({"name": "dp-fedavg", "unit": "record", "normalise": True}, "method.normalise"),
        ({"name": "dp-fedavg", "normalise": True, "clip": float("inf")}, "method.clip"),
        ({"name": "udp-fedavg", "normalise": True, "clip": float("inf")}, "method.clip"),
        ({"name": "dp-fedsgd", "normalise": True}, "method.normalise"),
    ],
)
def test_where_there_is_no_update_to_scale_it_is_refused(method: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as refusal:
        make_config({"method": method})
    assert refusal.value.field == field


def test_the_guarantee_is_that_of_clipping() -> None:
    plan = make_plan()
    for name in ("udp-fedavg", "dp-fedavg"):
        plain, scaled = (build_method({"name": name, "normalise": value}) for value in (False, True))
        assert plain.releases(plan) == scaled.releases(plan)
