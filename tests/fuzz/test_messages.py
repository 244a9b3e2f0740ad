"""A stranger's bytes are a message of the expected type, or refused; they never run and never crash."""

from __future__ import annotations

import contextlib
import functools
import json
import struct

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil import METHODS
from fedveil.engines.simulation import Simulation
from fedveil.messages import Message, MessageError
from fedveil.methods.method import At
from tests.contract.federation import make_clients, make_method, make_plan, make_task

pytestmark = pytest.mark.usefixtures("bounded")


@functools.cache
def upload(name: str) -> Message:
    """What a client of this method sends."""
    task, method, plan = make_task(), make_method(name), make_plan()
    with contextlib.closing(Simulation(task, make_clients(), method, plan, seed=0, workers=1)) as engine:
        server = method.init_server(task.init(0), plan)
        at = At(plan, 1)
        up = engine.exchange((0, 1, 3), method.broadcast(at, server, (0, 1, 3)), at).up
        assert up is not None
        return up.map(lambda _, leaf: leaf.clone())


def receive(kind: type[Message], data: bytes) -> None:
    try:
        message = kind.from_bytes(data)
    except MessageError:
        return
    assert isinstance(message, kind)
    assert all(isinstance(leaf, torch.Tensor) for leaf in message.tensors().values())


@pytest.mark.parametrize("name", sorted(METHODS))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_changed_bytes(name: str, data: st.DataObject) -> None:
    content = bytearray(upload(name).to_bytes())
    head = min(len(content), 400)  # where lengths, names, shapes and types are
    places = st.one_of(st.integers(0, head - 1), st.integers(0, len(content) - 1))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(places)
        content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    receive(type(upload(name)), bytes(content))


_json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=10,
)


@pytest.mark.parametrize("name", sorted(METHODS))
@settings(max_examples=20, deadline=None)
@given(head=_json, data=st.data())
def test_another_head_or_other_tensors(name: str, head: object, data: st.DataObject) -> None:
    names = [*upload(name).tensors(), "params/0", "x", ""]
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=4))
    shapes = st.lists(st.integers(0, 3), max_size=4)
    kinds = st.sampled_from([torch.float32, torch.float64, torch.int8, torch.bool, torch.bfloat16])
    tensors = {key: torch.zeros(data.draw(shapes), dtype=data.draw(kinds)) for key in chosen}
    text = json.dumps(head).encode()
    receive(type(upload(name)), struct.pack("<I", len(text)) + text + safetensors.torch.save(tensors))


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=200), name=st.sampled_from(sorted(METHODS)))
def test_random_bytes(content: bytes, name: str) -> None:
    receive(type(upload(name)), content)
