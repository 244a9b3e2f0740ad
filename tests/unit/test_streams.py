from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from fedveil.streams import ClientStreams, EntropyStream, ServerStreams, named_stream, normal


def test_a_name_decides_the_bits() -> None:
    a, b = named_stream(3, 1, "x"), named_stream(3, 1, "x")
    assert np.array_equal(a.random(100), b.random(100))


@pytest.mark.parametrize("other", [(4, 1, "x"), (3, 2, "x"), (3, 1, "y"), (3, "1x"), (31, "x")])
def test_another_name_is_independent(other: tuple[int | str, ...]) -> None:
    seed, *name = other
    assert isinstance(seed, int)
    a = named_stream(3, 1, "x").standard_normal(20_000)
    b = named_stream(seed, *name).standard_normal(20_000)
    assert abs(float(np.corrcoef(a, b)[0, 1])) < 0.03


def test_a_clients_draws_do_not_depend_on_its_company() -> None:
    alone = ClientStreams(0, 5, (7,)).noise()[0].standard_normal(10)
    together = ClientStreams(0, 5, (2, 7, 9)).noise()[1].standard_normal(10)
    assert np.array_equal(alone, together)


def test_privacy_noise_is_no_other_purposes_stream() -> None:
    streams = ClientStreams(0, 1, (0,))
    noise = streams.noise("dropout")[0].random(5)
    assert not np.array_equal(noise, streams.of_exchange("dropout")[0].random(5))
    assert not np.array_equal(noise, ServerStreams(0, 1).noise("dropout").random(5))


def test_a_rounds_stream_stays_and_an_exchanges_stream_changes() -> None:
    first, second = (ClientStreams(0, 1, (3,), exchange=e) for e in (0, 1))
    assert np.array_equal(first.of_round("b")[0].random(4), second.of_round("b")[0].random(4))
    assert not np.array_equal(first.of_exchange("b")[0].random(4), second.of_exchange("b")[0].random(4))


def test_entropy_has_the_right_moments_and_never_repeats() -> None:
    stream = EntropyStream()
    draws = stream.standard_normal(200_001)
    assert len(draws) == 200_001
    assert abs(draws.mean()) < 0.02
    assert abs(draws.std() - 1) < 0.02
    assert not np.array_equal(stream.random(10), stream.random(10))
    streams = ClientStreams(0, 1, (0,), noise_source="entropy")
    assert not np.array_equal(streams.noise()[0].random(4), streams.noise()[0].random(4))


def test_tensors_of_noise_take_row_k_from_stream_k() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    streams = ClientStreams(1, 1, (4, 5))
    both = normal(streams.noise(), (2, 3), like)
    assert both.shape == (2, 2, 3)
    assert torch.equal(both[1:], normal(streams.rows([1]).noise(), (2, 3), like))


def test_a_stream_is_philox_keyed_by_the_hash_of_its_name() -> None:
    digest = hashlib.blake2b(b"3\x1f1\x1fx", digest_size=16).digest()
    keyed = np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype="<u8")))
    stream = named_stream(3, 1, "x")
    assert stream.bytes(9) == keyed.bytes(9)
    assert np.array_equal(stream.permutation(50), keyed.permutation(50))
