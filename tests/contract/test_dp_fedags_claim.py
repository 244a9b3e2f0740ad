"""The audits that refute DP-FedAGS's claim do so, and find nothing in its provable form."""

from __future__ import annotations

import numpy as np
import pytest

from fedveil.errors import InputError
from fedveil.experiment.config import build_method
from fedveil.privacy.releases import Plan
from tests.contract import untouched

PLAN = Plan(100, 10, "fixed", 200, 600, 600)


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_the_claimed_epsilon_of_dp_fedags_is_refuted(kind: str) -> None:
    """With 99 % confidence, by clients and by the records of a single upload."""
    method = build_method({"name": "dp-fedags", "epsilon": 0.1, "noise_kind": kind})
    clients = untouched.audit_untouched_client(method, PLAN, delta=1e-3, samples=1000, confidence=0.99)
    assert clients.lower_bound > 3
    assert clients.contradicts(0.1)
    records = untouched.audit_untouched_records(method, PLAN, delta=1e-5, confidence=0.99)
    assert records.lower_bound > 1
    assert records.contradicts(0.1)


def test_the_same_audits_do_not_refute_the_proven_variant() -> None:
    method = build_method({"name": "dp-fedags-proven", "variant": "everywhere", "noise_multiplier": 8.04})
    assert untouched.audit_untouched_client(method, PLAN, delta=1e-3, samples=1000).lower_bound == 0
    assert untouched.audit_untouched_records(method, PLAN, delta=1e-5).lower_bound == 0


def test_an_event_bounds_epsilon_no_better_than_its_rates() -> None:
    found = untouched.audit_event(500, 50, 1000, delta=0.0, confidence=0.95, kind="event")
    assert 0 < found.lower_bound < np.log(10)
    assert untouched.audit_event(50, 500, 1000, delta=0.0, confidence=0.95, kind="event").lower_bound == 0
    assert untouched.audit_event(10, 0, 1000, delta=0.5, confidence=0.95, kind="event").lower_bound == 0
    with pytest.raises(InputError) as error:
        untouched.audit_event(11, 0, 10, delta=0.0, confidence=0.95, kind="event")
    assert error.value.field == "samples"
