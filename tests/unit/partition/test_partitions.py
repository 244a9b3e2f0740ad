from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.refusals import refuses
from torch import Tensor

from fedveil.errors import InputError
from fedveil.partition.by_class import class_groups, classes_per_client, shards
from fedveil.partition.by_user import by_user
from fedveil.partition.dirichlet import dirichlet
from fedveil.partition.iid import iid
from fedveil.partition.partition import Partition
from fedveil.partition.registry import make_partition
from fedveil.streams import named_stream


def everyone_once(partition: Partition, n: int) -> bool:
    together = torch.cat(partition.parts)
    in_order = all(bool((part.diff() > 0).all()) for part in partition.parts)
    return in_order and torch.equal(together.sort().values, torch.arange(n))


labels = st.lists(st.integers(0, 5), min_size=1, max_size=200).map(lambda y: torch.tensor(y))
seeds = st.integers(0, 2**31)


@settings(max_examples=60, deadline=None)
@given(y=labels, clients=st.integers(1, 40), seed=seeds)
def test_iid_sizes_differ_by_one_at_most(y: Tensor, clients: int, seed: int) -> None:
    if clients > len(y):
        with refuses("clients"):
            iid(y, clients, named_stream(seed))
    partition = iid(y, clients, named_stream(seed), allow_empty=True)
    assert everyone_once(partition, len(y))
    assert max(partition.sizes) - min(partition.sizes) <= 1


@settings(max_examples=60, deadline=None)
@given(y=labels, clients=st.integers(1, 20), alpha=st.floats(1e-3, 1e4), seed=seeds)
def test_dirichlet_uses_everything_once(y: Tensor, clients: int, alpha: float, seed: int) -> None:
    partition = dirichlet(y, clients, alpha, named_stream(seed), 0, allow_empty=True)
    assert everyone_once(partition, len(y))
    assert len(partition) == clients
    if clients <= len(y):
        try:
            full = dirichlet(y, clients, alpha, named_stream(seed))
        except InputError as error:
            assert "larger alpha, fewer clients" in str(error)  # noqa: PT017 - some draws cannot succeed
        else:
            assert min(full.sizes) >= 1
            assert everyone_once(full, len(y))


@settings(max_examples=60, deadline=None)
@given(y=labels, clients=st.integers(1, 12), n=st.integers(1, 6), seed=seeds)
def test_classes_per_client_holds_at_most_n_classes_each(y: Tensor, clients: int, n: int, seed: int) -> None:
    present = len(set(y.tolist()))
    if n > present or clients * n < present:
        with refuses("classes_per_client"):
            classes_per_client(y, clients, n, named_stream(seed), allow_empty=True)
        return
    partition = classes_per_client(y, clients, n, named_stream(seed), allow_empty=True)
    assert everyone_once(partition, len(y))
    counts = partition.counts(y, 6)
    assert int((counts > 0).sum(1).max()) <= n
    for column in counts.T:  # those who hold a class share it equally
        held = column[column > 0]
        assert not len(held) or int(held.max() - held.min()) <= 1


@settings(max_examples=60, deadline=None)
@given(y=labels, clients=st.integers(1, 12), each=st.integers(1, 4), seed=seeds)
def test_shards_are_equal_runs_of_the_sorted_labels(y: Tensor, clients: int, each: int, seed: int) -> None:
    partition = shards(y, clients, each, named_stream(seed), allow_empty=True)
    assert everyone_once(partition, len(y))
    assert max(partition.sizes) - min(partition.sizes) <= each
    # a run of the sorted labels that crosses b borders holds b + 1 classes, and there are 5 borders in all
    extra = (partition.counts(y, 6) > 0).sum(1) - each
    assert int(extra.clamp(min=0).sum()) <= 5


@settings(max_examples=60, deadline=None)
@given(users=st.lists(st.integers(-3, 9), min_size=1, max_size=100), clients=st.integers(1, 15))
def test_users_stay_whole(users: list[int], clients: int) -> None:
    ids = torch.tensor(users)
    alone = by_user(ids)
    assert everyone_once(alone, len(ids))
    assert [set(ids[part].tolist()) for part in alone.parts] == [{user} for user in sorted(set(users))]
    if clients > len(set(users)):
        with refuses("clients"):
            by_user(ids, clients)
        return
    gathered = by_user(ids, clients)
    assert everyone_once(gathered, len(ids))
    assert len(gathered) == clients
    assert min(gathered.sizes) >= 1
    homes = [set(ids[part].tolist()) for part in gathered.parts]
    assert sum(len(home) for home in homes) == len(set(users))


def test_users_are_gathered_by_size_not_by_number() -> None:
    ids = torch.arange(6).repeat_interleave(torch.tensor([9, 1, 4, 2, 5, 3]))
    assert list(by_user(ids, 3).sizes) == [9, 8, 7]  # 9; 5 + 3 and 4 + 2 + 1: not four users in one


Y = torch.arange(10).repeat_interleave(100)[torch.from_numpy(named_stream(1).permutation(1000))]
PAIRS = [(5, 6), (1, 2), (0, 8), (9, 3), (4, 7)]


@pytest.mark.parametrize(
    "kind, options",
    [
        ("iid", {}),
        ("dirichlet", {"alpha": 0.5}),
        ("classes", {"classes_per_client": 2}),
        ("shards", {"shards_per_client": 2}),
    ],
)
def test_the_stream_alone_decides(kind: Any, options: dict[str, Any]) -> None:
    a, b, c = (make_partition(kind, Y, 10, named_stream(seed, "p"), **options) for seed in (0, 0, 1))
    assert everyone_once(a, 1000)
    assert all(torch.equal(x, y) for x, y in zip(a.parts, b.parts, strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(a.parts, c.parts, strict=True))


def test_given_pairs_of_classes() -> None:
    partition = make_partition("classes", Y, 5, named_stream(0), groups=PAIRS)
    assert everyone_once(partition, 1000)
    assert [set(Y[part].tolist()) for part in partition.parts] == [set(pair) for pair in PAIRS]
    assert partition.sizes == (200,) * 5


def test_random_pairs_are_disjoint_when_there_are_just_enough_classes() -> None:
    counts = classes_per_client(Y, 5, 2, named_stream(0)).counts(Y, 10)
    assert (counts > 0).sum(1).tolist() == [2] * 5
    assert (counts > 0).sum(0).tolist() == [1] * 10


def test_classes_are_dealt_evenly() -> None:
    counts = classes_per_client(Y, 33, 3, named_stream(0)).counts(Y, 10)
    assert (counts > 0).sum(1).tolist() == [3] * 33
    assert sorted(set((counts > 0).sum(0).tolist())) == [9, 10]


def test_two_shards_of_a_balanced_set_hold_at_most_two_classes() -> None:
    partition = shards(Y, 20, 2, named_stream(0))  # 40 shards of 25: none crosses a border
    counts = partition.counts(Y, 10)
    assert partition.sizes == (50,) * 20
    assert int((counts > 0).sum(1).max()) <= 2
    assert set(counts.flatten().tolist()) <= {0, 25, 50}


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_shares_have_the_distributions_moments(alpha: float) -> None:
    """The oracle is the Dirichlet's own mean 1/K and variance (K-1) / (K^2 (K alpha + 1)), and the covariance
    -1 / (K^2 (K alpha + 1)) of two clients' shares."""
    clients, draws, size = 5, 400, 2000
    y = torch.arange(10).repeat_interleave(size)
    shares = np.concatenate(
        [
            dirichlet(y, clients, alpha, named_stream(k, "moments"), 0, allow_empty=True)
            .counts(y, 10)
            .numpy()
            .T
            / size
            for k in range(draws // 10)
        ]
    )
    variance = (clients - 1) / (clients**2 * (clients * alpha + 1))
    n = len(shares)
    assert n == draws
    assert shares.sum(1) == pytest.approx(np.ones(n))
    assert np.abs(shares.mean(0) - 1 / clients).max() < 4.5 * np.sqrt(variance / n)
    pooled = shares.var(0, ddof=1).mean()
    assert pooled == pytest.approx(variance, rel=0.12)
    covariance = np.cov(shares.T)[~np.eye(clients, dtype=bool)].mean()
    assert covariance == pytest.approx(-variance / (clients - 1), rel=0.12)


def test_dirichlet_keeps_the_smallest_size_or_is_refused_with_a_remedy() -> None:
    partition = dirichlet(Y, 10, 0.5, named_stream(0), min_size=20)
    assert min(partition.sizes) >= 20
    with refuses("alpha"):
        dirichlet(Y, 100, 0.001, named_stream(0))
    with refuses("min_size", value=11):
        dirichlet(Y, 100, 1.0, named_stream(0), min_size=11)
    assert 0 in make_partition("dirichlet", Y, 100, named_stream(0), alpha=0.001, allow_empty=True).sizes


@pytest.mark.parametrize(
    "kind, clients, options, field",
    [
        ("idd", 2, {}, "kind"),
        ("iid", 0, {}, "clients"),
        ("iid", None, {}, "clients"),
        ("iid", 2.0, {}, "clients"),
        ("iid", True, {}, "clients"),
        ("iid", 2, {"alpha": 1.0}, "alpha"),
        ("dirichlet", 2, {}, "alpha"),
        ("dirichlet", 2, {"alpha": 0.0}, "alpha"),
        ("dirichlet", 2, {"alpha": float("nan")}, "alpha"),
        ("dirichlet", 2, {"alpha": float("inf")}, "alpha"),
        ("dirichlet", 2, {"alpha": "1"}, "alpha"),
        ("dirichlet", 2, {"alpha": 1.0, "min_size": 0}, "min_size"),
        ("dirichlet", 2, {"alpha": 1.0, "min_size": 1.5}, "min_size"),
        ("classes", 2, {}, "classes_per_client"),
        ("classes", 2, {"classes_per_client": 0}, "classes_per_client"),
        ("classes", 2, {"classes_per_client": 11}, "classes_per_client"),
        ("classes", 4, {"classes_per_client": 2}, "classes_per_client"),
        ("classes", 4, {"groups": PAIRS}, "clients"),
        ("classes", 5, {"groups": PAIRS, "classes_per_client": 3}, "classes_per_client"),
        ("classes", 5, {"groups": PAIRS[:4]}, "groups"),
        ("classes", 5, {"groups": [*PAIRS, (5,)]}, "groups"),
        ("classes", 5, {"groups": "pairs"}, "groups"),
        ("classes", 5, {"groups": 5}, "groups"),
        ("classes", 5, {"groups": [["0"]]}, "groups"),
        ("classes", 6, {"groups": [*PAIRS, (77,)]}, "clients"),
        ("shards", 2, {}, "shards_per_client"),
        ("shards", 2, {"shards_per_client": 501}, "shards_per_client"),
        ("user", None, {}, "kind"),
        ("user", None, {"users": torch.zeros(3, dtype=torch.int64)}, "users"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_their_name(
    kind: Any, clients: Any, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InputError) as caught:
        make_partition(kind, Y, clients, named_stream(0), **options)
    assert caught.value.field == field


@pytest.mark.parametrize("y", [torch.zeros(0, dtype=torch.int64), torch.zeros(4), torch.zeros(2, 2).long()])
def test_labels_that_are_none_are_refused(y: Tensor) -> None:
    with refuses("y"):
        iid(y, 1, named_stream(0))


def test_an_empty_group_needs_allow_empty() -> None:
    groups: Sequence[Sequence[int]] = [*PAIRS, ()]
    with refuses("clients"):
        class_groups(Y, groups)
    assert class_groups(Y, groups, allow_empty=True).sizes[-1] == 0


def test_a_partition_without_clients_or_with_a_repeated_example_is_refused() -> None:
    with refuses("parts"):
        Partition((torch.tensor([0, 1]), torch.tensor([1])))
    with refuses("clients"):
        Partition(())


def test_counts() -> None:
    partition = Partition((torch.tensor([0, 1, 2]), torch.tensor([3])))
    assert partition.counts(torch.tensor([0, 2, 2, 1]), 4).tolist() == [[1, 0, 2, 0], [0, 1, 0, 0]]
