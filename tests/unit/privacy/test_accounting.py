from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedveil.errors import InputError
from fedveil.privacy import loss
from fedveil.privacy.accounting import (
    Guarantee,
    account,
    account_participation,
    account_rounds,
    epsilon_by_round,
    epsilon_of,
    rounds_of,
)
from fedveil.privacy.calibrate import calibrate
from fedveil.privacy.releases import (
    ADVERSARIES,
    ApproximateDP,
    GaussianNoise,
    LaplaceNoise,
    Plan,
    PostProcessing,
    Protection,
    PureDP,
    RandomGaussianNoise,
    Release,
    RenyiCurve,
    Sampler,
    Unprotected,
    ZeroConcentratedDP,
)
from tests.refusals import refuses
from tests.unit.privacy import declarations as declared

PLAN = Plan(100, 10, "poisson", 50)
DELTA = 1e-5


def _one(rows: tuple[Guarantee, ...], adversary: str = "server") -> Guarantee:
    (row,) = [row for row in rows if row.adversary == adversary]
    return row


def _epsilon(releases: list[Release], plan: Plan = PLAN, adversary: str = "server", **more: Any) -> float:
    value = _one(account(releases, plan, more.pop("delta", DELTA), **more), adversary).epsilon
    assert value is not None
    return value


def _client(protection: Protection, **more: Any) -> Release:
    return Release("x", "client", ("server",), protection, **more)


# --- every method declares itself ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "releases",
    [
        declared.udp_fedavg(1.0),
        declared.udp_fedavg_poisson(1.0),
        declared.fedceo(1.0, 10),
        declared.fedceo(1.0, 10, scope="local"),
        declared.record_dp_sgd(1.0, 64, 400, 2),
        declared.fedlap_dp(),
        declared.fedlap_dp(hidden=0.5),
        declared.dp_fedags_all_or_masked(8.04),
        declared.dp_fedags_gumbel(4.0, 100, 0.1),
        declared.dp_fedags_sparse_vector(0.1, 0.1, 0.8),
        declared.cpsgd(2**20),
    ],
)
def test_a_protected_method_has_a_finite_epsilon_against_everybody(releases: list[Release]) -> None:
    rows = account(releases, PLAN, DELTA)
    assert [row.adversary for row in rows] == list(ADVERSARIES)
    for row in rows:
        assert row.epsilon is not None
        assert 0 < row.epsilon < math.inf
        assert row.theorem not in ("", "none")


@pytest.mark.parametrize("releases", [declared.dp_fedags_as_printed(), declared.fedem()])
def test_an_unprotected_method_proves_nothing_and_states_the_reason(releases: list[Release]) -> None:
    for row in account(releases, PLAN, DELTA):
        assert row.epsilon is None
        assert row.to_json()["epsilon"] is None
        assert "noise" in row.reason


def test_one_unprotected_release_spoils_all_others() -> None:
    releases = [*declared.udp_fedavg(1.0), Release("the loss", "client", ("server",), Unprotected("plain"))]
    rows = account(releases, PLAN, DELTA)
    assert _one(rows).epsilon is None
    assert _one(rows).reason == "the loss: plain"
    assert _one(rows, "observer").epsilon is not None


def test_undeclared_releases_are_not_claimed() -> None:
    rows = account([_client(GaussianNoise(1.0))], PLAN, DELTA)
    assert _one(rows, "observer").epsilon is None
    assert "declared" in _one(rows, "observer").reason


def test_a_guarantee_of_one_unit_is_none_for_another() -> None:
    releases = [_client(GaussianNoise(1.0)), Release("y", "record", ("server",), GaussianNoise(1.0))]
    for row in account(releases, PLAN, DELTA):
        assert row.epsilon is None


def test_post_processing_is_free() -> None:
    base = declared.udp_fedavg(1.0)
    more = [*base, Release("the model", "client", ADVERSARIES, PostProcessing("of the uploads"))]
    assert [r.epsilon for r in account(more, PLAN, DELTA)] == [r.epsilon for r in account(base, PLAN, DELTA)]


# --- rounds -------------------------------------------------------------------------------------------------


def test_schedules_count_rounds() -> None:
    releases = declared.fedceo(1.0, 15)
    assert [sum(r.happens_in(t) for t in range(1, 301)) for r in releases] == [300, 20, 261, 19]
    rounds = rounds_of(releases, Plan(100, 10, "fixed", 300))
    counts = {tuple((r.what, r.participation) for r in round_.releases): n for round_, n in rounds.items()}
    assert counts == {
        (("each upload", "seen"), ("the noisy mean", "hidden")): 261,
        (("each upload", "seen"), ("the noisy mean", "seen")): 19,
        (("each upload", "seen"), ("the personal models", "seen")): 20,
    }


def test_releases_of_one_round_share_one_participation() -> None:
    """Two Gaussians observed in one round cost as their joint Gaussian, not as two separate draws of a cohort."""
    pair = [_client(GaussianNoise(2.0)), Release("y", "client", ("server",), GaussianNoise(2.0))]
    joint = [_client(GaussianNoise(2.0 / math.sqrt(2)))]
    assert _epsilon(pair) == pytest.approx(_epsilon(joint), rel=1e-9)
    hidden = [_client(GaussianNoise(2.0), participation="hidden") for _ in range(2)]
    one = [_client(GaussianNoise(2.0 / math.sqrt(2)), participation="hidden")]
    assert _epsilon(hidden) == pytest.approx(_epsilon(one), rel=1e-9)


def test_a_visible_release_makes_a_hidden_one_visible() -> None:
    mixed = [_client(GaussianNoise(2.0)), _client(GaussianNoise(2.0), participation="hidden")]
    seen = [_client(GaussianNoise(2.0)), _client(GaussianNoise(2.0))]
    assert _epsilon(mixed) == _epsilon(seen)


def test_epsilon_of_hidden_participation_is_below_visible_and_visible_below_charged() -> None:
    values = [_epsilon([_client(GaussianNoise(1.0), participation=p)]) for p in ("hidden", "seen", "charged")]
    assert values == sorted(values)
    assert values[0] < values[1] < values[2]


@pytest.mark.parametrize(
    "protection", [PureDP(0.3), ApproximateDP(0.3, 1e-8), ZeroConcentratedDP(0.01), LaplaceNoise(0.3)]
)
def test_every_protection_is_accounted_for_with_visible_hidden_and_charged_participation(
    protection: Protection,
) -> None:
    hidden, seen, charged = (
        _epsilon([_client(protection, participation=p)]) for p in ("hidden", "seen", "charged")
    )
    assert hidden <= seen * (1 + 1e-9)
    assert seen < charged


def test_pure_dp_bounds_laplace_and_basic_composition_bounds_pure_dp() -> None:
    plan = Plan(10, 10, "all", 20)
    laplace, pure = _epsilon([_client(LaplaceNoise(0.2))], plan), _epsilon([_client(PureDP(0.2))], plan)
    assert laplace < pure <= 20 * 0.2 + 0.021
    assert _epsilon([_client(PureDP(0.2))], plan, accountant="rdp") >= pure - 0.03


def test_delta_of_the_mechanisms_themselves_is_counted() -> None:
    plan = Plan(10, 10, "all", 20)
    releases = [_client(ApproximateDP(0.2, 1e-6))]
    assert _one(account(releases, plan, DELTA)).epsilon is None  # 20 * 1e-6 > 1e-5
    assert _one(account(releases, plan, DELTA, "rdp")).epsilon is None
    assert _epsilon(releases, plan, delta=1e-4) > _epsilon([_client(PureDP(0.2))], plan, delta=1e-4)


def test_a_renyi_curve_is_used_as_given() -> None:
    orders = tuple(float(a) for a in range(2, 100))
    curve = RenyiCurve(orders, tuple(a / 18 for a in orders))
    plan = Plan(10, 10, "all", 20)
    renyi = _epsilon([_client(ZeroConcentratedDP(1 / 18))], plan)
    assert _epsilon([_client(curve)], plan) == pytest.approx(renyi, abs=0.05)
    other = RenyiCurve((2.0, 3.0), (0.1, 0.2))
    with refuses("orders"):
        account([_client(curve), _client(other)], plan, DELTA)


def test_tiny_delta_is_handled_by_renyi_divergence() -> None:
    rows = account([_client(GaussianNoise(2.0))], PLAN, 1e-14)
    assert _one(rows).theorem.startswith("Renyi")
    assert _one(rows).epsilon is not None


def test_next_to_no_noise_has_a_huge_epsilon_and_does_not_overflow() -> None:
    """One Gaussian of multiplier m is 1 / (2 m^2)-zero-concentrated; the bound lies above that and not far."""
    plan = Plan(10, 10, "fixed", 1)
    for multiplier in (1e-3, 1e-5):
        release = Release("upload", "client", ("server",), GaussianNoise(multiplier))
        found = epsilon_of([release], plan, 1e-5, "server", "client")
        rho = 1 / (2 * multiplier**2)
        assert found is not None
        assert rho < found < 1.2 * rho + 100


@pytest.mark.parametrize("sampler", ["fixed", "poisson"])
@pytest.mark.parametrize("delta", [1e-12, 1e-5])
def test_next_to_no_noise_on_a_hidden_sum_is_accounted_for_too(sampler: Any, delta: float) -> None:
    plan = Plan(3, 2, sampler, 7)
    release = Release("sum", "client", ("observer",), GaussianNoise(1e-4), participation="hidden")
    (row,) = [row for row in account([release], plan, delta) if row.adversary == "observer"]
    assert row.epsilon is not None
    assert 7 * 0.5 / 1e-8 * 0.9 < row.epsilon < 7 * 4 * 0.5 / 1e-8 * 1.2


def test_fixed_cohorts_under_zero_out_take_the_better_of_two_valid_bounds() -> None:
    plan = Plan(100, 10, "fixed", 100)
    hidden = _client(GaussianNoise(1.0), participation="hidden", adjacency="zero-out")
    seen = _client(GaussianNoise(1.0))
    replace_one = _client(GaussianNoise(1.0), participation="hidden")
    assert _epsilon([hidden], plan) <= _epsilon([seen], plan) + 1e-9
    assert _epsilon([hidden], plan) <= _epsilon([replace_one], plan) + 1e-9


def test_adjacency_is_stated_or_refused() -> None:
    with refuses("adjacency"):
        account([_client(GaussianNoise(1.0), adjacency="add-remove")], PLAN, DELTA)
    mixed = [_client(GaussianNoise(1.0), adjacency=a) for a in ("zero-out", "replace-one")]
    with refuses("adjacency"):
        account(mixed, PLAN, DELTA)
    with refuses("adjacency"):
        account([_client(LaplaceNoise(1.0), adjacency="replace-one")], PLAN, DELTA)
    replaced = _epsilon([_client(GaussianNoise(1.0), adjacency="replace-one")])
    assert replaced == pytest.approx(_epsilon([_client(GaussianNoise(0.5))]), abs=1e-3)


def test_a_hidden_cohort_does_not_hide_records() -> None:
    """Whoever knows the client's other records sees from the sum whether it participated."""
    seen = Release("g", "record", ("server",), GaussianNoise(1.0), rate=0.2)
    hidden = replace(seen, participation="hidden")
    together = replace(seen, participation="charged", rate=0.02)
    assert _epsilon([hidden]) == _epsilon([seen]) > 3 * _epsilon([together])


def test_two_rates_lie_between_the_single_ones() -> None:
    plan = Plan(5, 5, "all", 3)
    low, high = declared.fedlap_dp(hidden=0.5), declared.fedlap_dp()
    assert _epsilon(low, plan) < _epsilon(high, plan)
    assert _epsilon(low, plan) == pytest.approx(_epsilon(high, plan), rel=0.05)


def test_the_first_access_has_a_rate_of_its_own() -> None:
    together = Release("g", "record", ("server",), GaussianNoise(1.0), accesses=5, rate=0.3, first_rate=0.05)
    first = Release("a", "record", ("server",), GaussianNoise(1.0), rate=0.05)
    rest = Release("b", "record", ("server",), GaussianNoise(1.0), accesses=4, rate=0.3)
    plan = Plan(5, 5, "all", 3)
    assert _epsilon([together], plan) == pytest.approx(_epsilon([first, rest], plan), rel=1e-9)


def test_runs_compose() -> None:
    one = rounds_of(declared.udp_fedavg(1.0), PLAN)
    other = rounds_of(declared.udp_fedavg(2.0), Plan(100, 20, "poisson", 30))
    both = {row.adversary: row.epsilon for row in account_rounds(one + other, DELTA)}
    for part in (one, other):
        for row in account_rounds(part, DELTA):
            total = both[row.adversary]
            assert row.epsilon is not None
            assert total is not None
            assert total > row.epsilon
    assert account_rounds(one + one, DELTA) == account(
        declared.udp_fedavg(1.0), Plan(100, 10, "poisson", 100), DELTA
    )


def test_the_curve_over_rounds_grows() -> None:
    curves = epsilon_by_round(declared.udp_fedavg(1.0), PLAN, DELTA, points=5)
    assert set(curves) == {("client", adversary) for adversary in ADVERSARIES}
    for curve in curves.values():
        assert [t for t, _ in curve] == [10, 20, 30, 40, 50]
        values = [value for _, value in curve if value is not None]
        assert values == sorted(values)
        assert len(values) == 5


def test_two_releases_of_one_round_depend_on_the_same_draw() -> None:
    """Given the draw they are one Gaussian; drawn apart they would seem to cost less."""
    noise, joint = (RandomGaussianNoise((m, 4 * m), (0.1, 0.9)) for m in (1.0, 1 / math.sqrt(2)))
    pair = [_client(noise), Release("y", "client", ("server",), noise)]
    assert _epsilon(pair) == pytest.approx(_epsilon([_client(joint)]), rel=1e-9)
    other = RandomGaussianNoise((1.0, 4.0), (0.5, 0.5))
    with refuses("weights"):
        account([_client(noise), _client(other)], PLAN, DELTA)


@pytest.mark.parametrize(
    ("multipliers", "weights"), [((1.0,), ()), ((), ()), ((1.0, -1.0), (0.5, 0.5)), ((1.0,), (0.9,))]
)
def test_impossible_draws_are_refused(multipliers: tuple[float, ...], weights: tuple[float, ...]) -> None:
    with pytest.raises(InputError):
        RandomGaussianNoise(multipliers, weights)


def test_a_client_of_a_cohort_of_one_learns_of_others_only_from_outside() -> None:
    release = Release("m", "client", ("observer", "client"), GaussianNoise(1.0), participation="hidden")
    plan = Plan(50, 1, "fixed", 40)
    observer, client = (_epsilon([release], plan, who) for who in ("observer", "client"))
    assert client == pytest.approx(observer, rel=0.01)  # drawn out of 49 in 49 of 50 rounds
    whole = Plan(2, 1, "fixed", 5)
    assert _epsilon([release], whole, "client") > 0


def test_sampling_does_not_amplify_against_a_client_that_observes_the_cohort_size() -> None:
    """It may know no noise at all: in its own share of the rounds a Poisson cohort is observed."""
    told = Release(
        "m", "client", ("observer", "client"), GaussianNoise(1.0), participation="hidden", insider=GaussianNoise(1.0)
    )  # fmt: skip
    plan = Plan(100, 10, "poisson", 20)
    seen = Release("m", "client", ("client",), GaussianNoise(1.0))
    assert 1.3 * _epsilon([told], plan, "observer") < _epsilon([told], plan, "client")
    assert _epsilon([told], plan, "client") < _epsilon([seen], plan, "client")


# --- properties ---------------------------------------------------------------------------------------------

FEW = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SIGMA = st.floats(0.6, 6.0)
SAMPLER = st.sampled_from(["poisson", "fixed", "all"])


@FEW
@given(sigma=SIGMA, sampler=SAMPLER, rounds=st.integers(1, 60), more=st.integers(1, 60))
def test_epsilon_grows_with_rounds(sigma: float, sampler: Any, rounds: int, more: int) -> None:
    releases = declared.udp_fedavg(sigma)
    fewer = account(releases, Plan(50, 5, sampler, rounds), DELTA)
    many = account(releases, Plan(50, 5, sampler, rounds + more), DELTA)
    for a, b in zip(fewer, many, strict=True):
        assert a.epsilon is not None
        assert b.epsilon is not None
        assert a.epsilon <= b.epsilon + 1e-6


@FEW
@given(sigma=SIGMA, factor=st.floats(1.05, 3.0), sampler=SAMPLER)
def test_epsilon_shrinks_with_noise(sigma: float, factor: float, sampler: Any) -> None:
    plan = Plan(50, 5, sampler, 20)
    for a, b in zip(
        account(declared.udp_fedavg(sigma), plan, DELTA),
        account(declared.udp_fedavg(sigma * factor), plan, DELTA),
        strict=True,
    ):
        assert a.epsilon is not None
        assert b.epsilon is not None
        assert a.epsilon > b.epsilon


@FEW
@given(target=st.floats(0.8, 20.0), adversary=st.sampled_from(ADVERSARIES), sampler=SAMPLER)
def test_calibrating_then_accounting_returns_the_target(target: float, adversary: Any, sampler: Any) -> None:
    plan = Plan(50, 5, sampler, 20)
    sigma = calibrate(lambda s: declared.udp_fedavg(s, 5), plan, DELTA, target, adversary, "client")
    epsilon = epsilon_of(declared.udp_fedavg(sigma, 5), plan, DELTA, adversary, "client")
    assert epsilon is not None
    assert 0.99 * target <= epsilon <= target


def test_calibration_refuses_what_noise_cannot_reach() -> None:
    with refuses("target_epsilon"):
        calibrate(lambda _: declared.fedem(), PLAN, DELTA, 1.0, "server", "client")
    with pytest.raises(InputError):
        calibrate(declared.udp_fedavg, PLAN, DELTA, -1.0, "server", "client")


# --- releases -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "releases",
    [
        declared.fedceo(1.0, 10),
        declared.udp_fedavg_poisson(1.0),
        declared.fedlap_dp(hidden=0.5),
        declared.record_dp_sgd(1.0, 64, 400, 2),
        declared.dp_fedags_gumbel(4.0, 100, 0.1),
        declared.dp_fedags_sparse_vector(0.1, 0.1, 0.8),
        declared.cpsgd(2**20),
        declared.fedem(),
        [_client(RenyiCurve((2.0, 3.0), (0.1, 0.2)), adjacency="zero-out"), _client(LaplaceNoise(0.1))],
    ],
)
def test_releases_survive_json(releases: list[Release]) -> None:
    assert [Release.from_json(json.loads(json.dumps(r.to_json()))) for r in releases] == releases


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_every_round_is_an_interval_one_follows_one_or_neither(interval: int) -> None:
    regular = _client(GaussianNoise(1.0), every=interval)
    following, neither = (
        _client(GaussianNoise(1.0), except_every=interval, following=which) for which in (True, False)
    )
    for t in range(1, 10):
        happens = [release.happens_in(t) for release in (regular, following, neither)]
        assert happens.count(True) == 1
        assert happens[1] == (regular.happens_in(t - 1) and t > 1 and not regular.happens_in(t))


@pytest.mark.parametrize(
    "change",
    [
        {"unit": "household"},
        {"visible_to": ("spy",)},
        {"visible_to": ()},
        {"participation": "secret"},
        {"accesses": 0},
        {"every": 0},
        {"every": 3, "except_every": 3},
        {"following": True},
        {"rate": 0.0},
        {"rate": 0.5},  # batches hide records, not clients
        {"adjacency": "near"},
    ],
)
def test_impossible_releases_are_refused(change: dict[str, Any]) -> None:
    values: dict[str, Any] = {
        "what": "x",
        "unit": "client",
        "visible_to": ("server",),
        "protection": GaussianNoise(1.0),
    }
    with pytest.raises(InputError):
        Release(**{**values, **change})


def test_impossible_numbers_are_refused() -> None:
    for make in (GaussianNoise, LaplaceNoise, PureDP, ZeroConcentratedDP):
        for bad in (0.0, -1.0, math.inf, math.nan):
            with pytest.raises(InputError):
                make(bad)
    for field, change in (
        ("cohort", {"cohort": 11}),
        ("clients", {"clients": 0}),
        ("sampler", {"sampler": "some"}),
        ("rounds", {"rounds": -1}),
    ):
        with pytest.raises(InputError) as refused:
            replace(Plan(10, 5, "fixed", 5), **change)
        assert refused.value.field == field
    for delta in (0.0, 1.0, -0.1):
        with pytest.raises(InputError):
            account([_client(GaussianNoise(1.0))], PLAN, delta)
    with pytest.raises(InputError):
        Release.from_json({"what": "x"})
    with pytest.raises(InputError):
        Release.from_json({**_client(GaussianNoise(1.0)).to_json(), "protection": {"kind": "magic"}})


def test_one_participation_is_accounted_as_one_upload() -> None:
    plan = Plan(100, 10, "fixed", 300)
    row = _one(account_participation([_client(GaussianNoise(1.0), every=7)], plan, DELTA))
    assert row.epsilon == pytest.approx(4.377, abs=1e-3)


@pytest.mark.parametrize("sampler", ["fixed", "poisson"])
def test_one_participation_is_in_one_round_not_in_two_that_differ(sampler: Sampler) -> None:
    """FedCEO discloses uploads in smoothing rounds and the mean in the others, never both at once."""
    once = account_participation(declared.fedceo(1.5, 10), Plan(100, 10, sampler, 300), DELTA)
    upload = account_participation(declared.udp_fedavg(1.5), Plan(100, 10, sampler, 300), DELTA)
    server, observer, client = (row.epsilon for row in once)
    assert server == observer == client == upload[0].epsilon


def test_a_release_that_never_happens_has_epsilon_zero() -> None:
    row = _one(
        account_participation([_client(GaussianNoise(1.0), every=7)], Plan(100, 10, "fixed", 3), DELTA)
    )
    assert row.epsilon is None


def test_a_hundred_times_the_rounds_builds_no_more_distributions() -> None:
    built = []
    for rounds in (30, 3000):
        loss._step_pld.cache_clear()
        account(declared.udp_fedavg(1.037), Plan(100, 10, "poisson", rounds), DELTA)
        built.append(loss._step_pld.cache_info().misses)
    assert 0 < built[1] == built[0]
