"""Whatever bytes a file holds, a reader gives data or a DataError, never another exception."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedveil.data.cifar import read_cifar_binary, read_cifar_pickle
from fedveil.data.digits import read_mnist5k
from fedveil.data.emnist import BYCLASS, read_sheets
from fedveil.data.idx import read_idx
from fedveil.data.own import read_npz
from fedveil.data.pictures import read_pictures
from fedveil.data.table import load_table
from fedveil.data.text import load_text, read_rows
from fedveil.errors import DataError

from .makers import cifar_bytes, idx_bytes, tiles

pytestmark = pytest.mark.usefixtures("bounded")


def _png() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(tiles(_RNG, 1, 8)[0]).save(stream, "PNG")
    return stream.getvalue()


def _webp() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.repeat(tiles(_RNG, 1, 56)[0][:, :, None], 3, 2)).save(stream, "WEBP", lossless=True)
    return stream.getvalue()


def _parquet() -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"a": [1.0, 2.5, 3.0, 4.0], "label": [0, 1, 0, 1]}), stream)
    return stream.getvalue()


def _read_sheet(path: Path) -> object:
    """The sheet at `path`, through an index beside it that is as it should be."""
    index = path.with_name("test.json")
    described = {
        "files": [path.name],
        "id": [0, 1, 2, 3],
        "height": 28,
        "width": 28,
        "mapping": [ord(name) for name in BYCLASS],
    }
    index.write_text(json.dumps(described))
    return read_sheets(index, {})


def _npz() -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, x=np.ones((4, 2), np.float32), y=np.zeros(4, np.int64))
    return stream.getvalue()


_RNG = np.random.default_rng(0)
_PIXELS = _RNG.integers(0, 256, (2, 3, 32, 32), dtype=np.uint8)
_LABELS = np.array([3, 9])
_IDX = idx_bytes(tiles(_RNG, 3, 4))
_PICKLE = pickle.dumps({b"data": _PIXELS.reshape(2, -1), b"labels": [3, 9]}, protocol=2)
_CSV = b'a,b,c,label\n1,2.5,red,0\n2,1.5,blue,1\n3,"0.5",red,0\n4,4.0,blue,1\n'

READERS: dict[str, tuple[bytes, Callable[[Path], object]]] = {
    "idx": (_IDX, lambda path: read_idx(path, axes=3)),
    "idx.gz": (gzip.compress(_IDX), lambda path: read_idx(path, axes=3)),
    "idx.xz": (lzma.compress(_IDX), lambda path: read_idx(path, axes=3)),
    "cifar": (
        cifar_bytes(_PIXELS, _LABELS),
        lambda path: read_cifar_binary(path, label_bytes=1, num_classes=10),
    ),
    "cifar.pickle": (_PICKLE, lambda path: read_cifar_pickle(path, b"labels", num_classes=10)),
    "csv": (_CSV, lambda path: load_table(path=path, label="label")),
    "mnist5k": (b",".join([b"7"] * 785) + b"\n", read_mnist5k),
    "npz": (_npz(), read_npz),
    "parquet": (
        _parquet(),
        lambda path: load_table(path=path.rename(path.with_suffix(".parquet")), label="label"),
    ),
    "webp": (_webp(), _read_sheet),
    "cola": (b"gj04\t1\t\tOne sentence.\nbc01\t0\t*\tOther one.\n", lambda path: read_rows(path, 4, "none")),
    "text": ("One line.\n\nAnother, \u2028 longer.\n".encode(), lambda path: load_text(path=path)),
    "png": (_png(), lambda path: read_pictures([path])),
}


def survives(content: bytes, read: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)
        try:
            read(path)
        except DataError as error:
            assert str(path.parent) in str(error)  # noqa: PT017 - either outcome is right


@pytest.mark.parametrize("name", READERS)
def test_the_unharmed_file_is_read(name: str, tmp_path: Path) -> None:
    content, read = READERS[name]
    path = tmp_path / "file"
    path.write_bytes(content)
    read(path)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=300))
def test_random_bytes(name: str, content: bytes) -> None:
    survives(content, READERS[name][1])


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_truncations(name: str, data: st.DataObject) -> None:
    content, read = READERS[name]
    survives(content[: data.draw(st.integers(0, len(content) - 1))], read)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_changed_bytes(name: str, data: st.DataObject) -> None:
    content, read = READERS[name]
    changed = bytearray(content)
    # most of the structure is near the start
    places = st.one_of(st.integers(0, min(len(content), 120) - 1), st.integers(0, len(content) - 1))
    for place, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=4)):
        changed[place] = value
    survives(bytes(changed), read)


@pytest.mark.parametrize("name", ["idx", "idx.gz", "idx.xz", "cifar", "npz"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_truncated_binary_file_is_refused(name: str, data: st.DataObject) -> None:
    content, read = READERS[name]
    keep = data.draw(st.integers(0, len(content) - 1))
    if name == "cifar" and keep % 3073 == 0:  # whole records are a smaller file, not a damaged one
        keep += 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(content[:keep])
        with pytest.raises(DataError):
            read(path)


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet='a1,."\n\r\0 é\u2028-enif', max_size=60))
def test_any_text_as_a_table(text: str) -> None:
    survives(("label," + text).encode(), lambda path: load_table(path=path, label="label"))
