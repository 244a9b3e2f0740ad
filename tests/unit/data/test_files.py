from __future__ import annotations

import gzip
import hashlib
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from fedveil.data.files import find, given_file, locate, read_bytes, read_text, text_lines
from fedveil.data.idx import read_idx, read_idx_pair
from fedveil.errors import DataError
from tests.refusals import refuses

from .makers import idx_bytes, tiles, write


def test_places_are_tried_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, named, cache = tmp_path / "given", tmp_path / "named", tmp_path / "cache"
    monkeypatch.setenv("FEDVEIL_DATA", str(named))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert find(["f"], given) is None
    for folder in (cache / "fedveil", named, given):
        found = write(folder / "f", b"1")
        assert find(["missing", "f"], given) == found


def test_a_missing_file_names_every_place_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / "named"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(DataError) as caught:
        locate(["a/b.gz"], tmp_path / "given", what="b.gz", how_to_get="Ask the library.")
    message = str(caught.value)
    for place in ("given", "named", "home/.cache/fedveil"):
        assert str(tmp_path / place / "a/b.gz") in message
    assert message.startswith("b.gz was not found")
    assert message.endswith("Ask the library.")


def test_a_named_file_may_be_absolute_or_below_a_place(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", b"1")
    assert given_file("path", str(path)) == path
    assert given_file("path", "x.csv", tmp_path) == path
    with refuses("path", DataError):
        given_file("path", tmp_path / "no.csv")
    with refuses("path", DataError, value="no.csv") as missing:
        given_file("path", "no.csv", tmp_path)
    assert f"  {Path.cwd() / 'no.csv'}\n  {tmp_path / 'no.csv'}" in str(missing.value)
    with refuses("path"):
        given_file("path", 3)


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
def test_compression_is_detected_from_content_not_from_the_name(tmp_path: Path, ending: str) -> None:
    packed = write(tmp_path / f"a{ending}", b"hello" * 100)
    unnamed = packed.rename(tmp_path / "anything")
    assert read_bytes(unnamed, most=1000) == b"hello" * 100
    with refuses("size", DataError, value=499):
        read_bytes(unnamed, most=499)


def test_the_sha256_is_of_the_content_and_a_mismatch_names_both(tmp_path: Path) -> None:
    right = hashlib.sha256(b"content").hexdigest()
    for ending in ("", ".gz", ".xz"):
        path = write(tmp_path / f"a{ending}", b"content")
        assert read_bytes(path, most=100, sha256=right) == b"content"
    with refuses("sha256", DataError):
        read_bytes(path, most=100, sha256="0" * 64)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    for name in ("empty", "empty.gz"):
        with refuses("size", DataError, value=0):
            read_bytes(write(tmp_path / name, b""), most=10)


@pytest.mark.parametrize("ending", [".gz", ".xz"])
def test_a_cut_compressed_file_is_refused(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / f"a{ending}", np.random.default_rng(0).bytes(1000))
    path.write_bytes(path.read_bytes()[:-20])
    with refuses("content", DataError):
        read_bytes(path, most=10_000)


def test_text_is_strict_utf8_and_the_line_is_named_but_not_quoted(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", b"one\nsecret \xff words\nthree\n")
    with refuses("line", DataError, value=2) as caught:
        read_text(path)
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(caught.value.__cause__)


def test_lines_end_with_newline_only(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", "\ufeffa\u2028b\x85c\r\nd\x0b\n".encode())
    assert text_lines(path) == ["a\u2028b\x85c\r", "d\x0b"]


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
def test_idx_reads_back_what_was_written(tmp_path: Path, ending: str) -> None:
    images = tiles(np.random.default_rng(0), 9, 5)
    path = write(tmp_path / f"i{ending}", idx_bytes(images))
    assert np.array_equal(read_idx(path, axes=3), images)


@pytest.mark.parametrize(
    "content, field",
    [
        (b"\x00\x00\x0d\x01" + struct.pack(">I", 1) + b"\0\0\0\0", "header"),
        (b"PK\x03\x04" + bytes(50), "header"),
        (idx_bytes(np.zeros((2, 2))), "axes"),
        (idx_bytes(np.zeros((0, 2, 2))), "shape"),
        (idx_bytes(np.zeros((3, 2, 2)))[:-1], "size"),
        (idx_bytes(np.zeros((3, 2, 2))) + b"\0", "size"),
        (b"\x00\x00\x08", "size"),
    ],
)
def test_idx_that_is_wrong_is_refused(tmp_path: Path, content: bytes, field: str) -> None:
    for name in ("a", "a.gz"):
        with refuses(field, DataError):
            read_idx(write(tmp_path / name, content), axes=3)


@pytest.mark.parametrize("name", ["a", "a.gz", "a.xz"])
def test_an_absurd_header_takes_no_memory(tmp_path: Path, name: str) -> None:
    header = struct.pack(">HBBIII", 0, 8, 3, 2**32 - 1, 1000, 1000)
    path = write(tmp_path / name, header + bytes(100))
    tracemalloc.start()
    with refuses("size", DataError, value=4294967295000000):
        read_idx(path, axes=3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000


def test_images_and_labels_must_be_as_many(tmp_path: Path) -> None:
    images = write(tmp_path / "i.gz", idx_bytes(np.zeros((3, 2, 2))))
    labels = write(tmp_path / "l.gz", idx_bytes(np.zeros(4)))
    with refuses("labels", DataError):
        read_idx_pair(images, labels)


def test_a_second_gzip_member_that_is_garbage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(idx_bytes(np.zeros(4))) + b"garbage!")
    with pytest.raises(DataError):
        read_idx(path, axes=1)
