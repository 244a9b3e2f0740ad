"""The sum is exact whoever drops out and whenever; below the threshold nothing is learnt."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from fedveil.errors import InputError
from fedveil.secure_sum.identities import Roster
from fedveil.secure_sum.masks import mask
from fedveil.secure_sum.messages import AbandonedError
from fedveil.secure_sum.settings import Group, SecureSum, smallest_threshold
from tests.unit.secure_sum.in_process import LEGS, NEVER, Federation, modular_sum


@pytest.mark.parametrize("count", [3, 4, 5, 6])
def test_the_sum_is_exact_under_every_pattern_of_dropouts(count: int) -> None:
    """Every assignment of a leg to leave at (or none) up to the order of nodes, each with a random order."""
    federation = Federation(count, SecureSum(colluders=0))
    threshold = federation.terms().threshold
    rng = np.random.default_rng(count)
    patterns = list(itertools.combinations_with_replacement(range(NEVER + 1), count))
    for number, pattern in enumerate(patterns):
        order = rng.permutation(count)
        leaves = {federation.names[i]: pattern[place] for place, i in enumerate(order)}
        values = federation.values(number)
        left = {leg: sum(when > leg for when in pattern) for leg in range(len(LEGS))}
        short = [leg for leg, here in left.items() if here < threshold]
        terms = federation.terms(round_=number + 1)
        if short:
            with pytest.raises(AbandonedError) as caught:
                federation.run(values, leaves, terms)
            assert caught.value.leg == LEGS[short[0]]
            continue
        total, survivors = federation.run(values, leaves, terms)
        assert survivors == tuple(name for name in federation.names if leaves[name] > 2)
        assert (total == modular_sum(values, survivors)).all()


def test_any_four_of_five_survive_at_every_leg() -> None:
    federation = Federation(5)
    for round_, (name, leg) in enumerate(itertools.product(federation.names, range(len(LEGS))), start=1):
        values = federation.values(round_)
        total, survivors = federation.run(values, {name: leg}, federation.terms(round_))
        assert (name in survivors) == (leg > 2)
        assert (total == modular_sum(values, survivors)).all()


def test_forty_nodes_with_dropouts() -> None:
    federation = Federation(40, SecureSum(threshold=30, colluders=5), length=100)
    values = federation.values()
    leaves = dict(zip(federation.names, (0, 1, 1, 2, 2, 2, 3, 4, 4), strict=False))
    total, survivors = federation.run(values, leaves)
    assert len(survivors) == 34
    assert (total == modular_sum(values, survivors)).all()


@pytest.mark.parametrize(
    ("nodes", "threshold", "colluders", "field"),
    [
        (2, 2, 0, "nodes"),
        (1, None, 0, "nodes"),
        (6, 4, 0, "aggregation.threshold"),  # 4 = 2n/3
        (7, 4, 0, "aggregation.threshold"),
        (10, 7, 4, "aggregation.threshold"),  # 2t = n + c
        (10, 11, 0, "aggregation.threshold"),
        (3, 3, 2, "aggregation.colluders"),  # t - c = 1
        (10, 10, 9, "aggregation.colluders"),
        (5, None, 4, "aggregation.colluders"),
        (5, 4, -1, "aggregation.colluders"),
        (5, 0, 0, "aggregation.threshold"),
        (5, 4.5, 0, "aggregation.threshold"),
    ],
)
def test_impossible_groups_are_refused(nodes: int, threshold: int | None, colluders: int, field: str) -> None:
    with pytest.raises(InputError) as caught:
        SecureSum(threshold, colluders).group(nodes)
    assert caught.value.field == field
    assert caught.value.remedy


def test_the_conditions_are_those_of_the_proof() -> None:
    """A group is accepted exactly if t > 2n/3, 2t > n + c, t - c >= 2 and 3 <= n, t <= n."""
    for n, t, c in itertools.product(range(1, 13), range(1, 14), range(13)):
        possible = n >= 3 and 2 * n / 3 < t <= n and 2 * t > n + c and t - c >= 2
        try:
            Group(n, t, c)
        except InputError:
            assert not possible, (n, t, c)
        else:
            assert possible, (n, t, c)
        if possible:
            assert smallest_threshold(n, c) <= t


def test_rosters_differ_in_their_digest_and_refuse_shared_keys() -> None:
    one, other = Federation(3), Federation(3)
    assert one.roster.digest != other.roster.digest
    assert one.roster.digest == Roster(dict(reversed(list(one.roster.keys.items())))).digest
    keys = dict(one.roster.keys)
    with pytest.raises(InputError) as caught:
        Roster(keys | {"node-001": keys["node-000"]})
    assert caught.value.field == "roster"
    with pytest.raises(InputError):
        Roster(keys | {"node-001": b"short"})


def test_a_masked_upload_is_uniform_and_independent_of_the_input() -> None:
    """Chi-square of every byte of the uploads of zeros and of constants, alone and against each other."""
    federation = Federation(3, length=20_000)
    p_values = []
    for round_, constant in enumerate((0, 0xFFFFFFFF, 1), start=1):
        terms = federation.terms(round_)
        nodes = list(federation.nodes(terms).values())
        keys = [node.advertise() for node in nodes]
        sealed = [share for node in nodes for share in node.share(keys)]
        for node in nodes:
            mine = [share for share in sealed if share.receiver == node.node]
            values = np.full(federation.length, constant, dtype=np.uint32)
            sent = node.upload(mine, values).values
            for place in range(4):
                counts = np.bincount((sent >> np.uint32(8 * place)) & np.uint32(255), minlength=256)
                p_values.append(float(stats.chisquare(counts).pvalue))
    assert min(p_values) > 1e-4 / len(p_values)
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3


def test_masks_of_two_rounds_are_independent() -> None:
    federation = Federation(3, length=50_000)
    sent = []
    for round_, attempt in ((1, 1), (1, 2), (2, 1)):
        terms = federation.terms(round_, attempt)
        nodes = list(federation.nodes(terms).values())
        keys = [node.advertise() for node in nodes]
        sealed = [share for node in nodes for share in node.share(keys) if share.receiver == nodes[0].node]
        sent.append(nodes[0].upload(sealed, np.zeros(federation.length, dtype=np.uint32)).values)
    for one, other in itertools.combinations(sent, 2):
        difference = one - other
        counts = np.bincount(difference >> np.uint32(24), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-5
        assert (one == other).mean() < 1e-3


def test_masks_take_every_value() -> None:
    """Flower's masks never took the value modulus - 1: here the top byte has all 256 values, 255 included."""
    words = mask(bytes(range(32)), 1_000_000)
    counts = np.bincount(words >> np.uint32(24), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-5
    assert int(words.max()) > 0xFFFFFFFF - 10_000
