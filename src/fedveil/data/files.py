"""Find data files, open them with any compression, and check their content."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from fedveil.errors import DataError, InputError

_CHUNK = 1 << 20
_BOMB_RATIO = 10_000  # above the largest ratios of gzip (1032) and xz (about 7000)
_DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError)


def places(data_dir: Path | str | None = None) -> list[Path]:
    """The folders that are searched for data, in order: the given folder, `$FEDVEIL_DATA`, the user's cache."""
    found: list[Path] = []
    if data_dir is not None:
        if not isinstance(data_dir, (str, Path)):
            raise InputError("data_dir", data_dir, "is not a path", "Give the folder of data sets.")
        found.append(Path(data_dir).expanduser())
    if named := os.environ.get("FEDVEIL_DATA"):
        found.append(Path(named).expanduser())
    found.append(user_cache())
    return found


def user_cache() -> Path:
    """The user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path("~/.cache").expanduser()) / "fedveil"


def find(candidates: Sequence[str], data_dir: Path | str | None = None) -> Path | None:
    """The first of these relative paths that is a file in one of the `places`; None if there is none."""
    for place in places(data_dir):
        for candidate in candidates:
            path = place / candidate
            if path.is_file():
                return path
    return None


def find_together(
    files: Sequence[Sequence[str]], data_dir: Path | str | None = None, *, at_least: int | None = None
) -> list[Path | None] | None:
    """Files that belong together, all from the first folder that has them, so that copies are not mixed.

    Each file is given by its candidates. A folder must contain all of them, or `at_least` so many, and the last.
    """
    for place in places(data_dir):
        found = [next((place / name for name in names if (place / name).is_file()), None) for names in files]
        present = sum(path is not None for path in found)
        if found[-1] is not None and present >= (len(files) if at_least is None else at_least):
            return found
    return None


def locate(
    candidates: Sequence[str], data_dir: Path | str | None = None, *, what: str, how_to_get: str
) -> Path:
    """As `find`, but a missing file is a DataError with all searched paths and how to get the file."""
    path = find(candidates, data_dir)
    if path is None:
        raise not_found(candidates, data_dir, what=what, how_to_get=how_to_get)
    return path


def not_found(
    candidates: Sequence[str], data_dir: Path | str | None, *, what: str, how_to_get: str
) -> DataError:
    """The error for a missing file."""
    looked = "\n".join(f"  {place / candidate}" for place in places(data_dir) for candidate in candidates)
    return DataError(
        f"{what} was not found. Looked for:\n{looked}\n{how_to_get}", field="missing", value=what
    )


def given_file(field: str, path: object, data_dir: Path | str | None = None) -> Path:
    """A file named by the user: as given, or below one of the `places` if it is relative."""
    if not isinstance(path, (str, Path)):
        raise InputError(field, path, "is not a path", "Give the path of a file.")
    asked = Path(path).expanduser()
    if asked.is_file():
        return asked
    if asked.is_absolute():
        raise DataError(
            f"{field}: {asked} is not a file. Give the path of a file.", field=field, value=str(asked)
        )
    found = find([str(asked)], data_dir)
    if found is None:
        looked = "\n".join(f"  {place / asked}" for place in (Path.cwd(), *places(data_dir)))
        raise DataError(
            f"{asked} was not found. Looked for:\n{looked}\nGive the path of the file as {field}.",
            field=field,
            value=str(asked),
        )
    return found


def state_of(path: str, data_dir: Path | str | None = None) -> tuple[tuple[str, int, int], ...]:
    """All files that this path may refer to, with modification time and size, as a cache key.

    Inaccessible files are left out; reading them reports the problem.
    """
    found: dict[str, tuple[int, int]] = {}
    for place in (Path.cwd(), *places(data_dir)):
        # A name that is too long, an unknown user's home, a null character.
        with suppress(OSError, RuntimeError, ValueError):
            root = place / Path(path).expanduser()
            for file in [root] if root.is_file() else root.rglob("*"):
                with suppress(OSError):
                    seen = file.stat()
                    found[str(file)] = (seen.st_mtime_ns, seen.st_size)
    return tuple((name, *seen) for name, seen in sorted(found.items()))


class Content:
    """The decompressed bytes of a file, read sequentially. Every failure is a DataError that names the file."""

    def __init__(self, stream: BinaryIO, path: Path, most: int) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self.path = path
        self.most = most

    def read(self, count: int) -> bytearray:
        """Exactly `count` bytes; memory grows only with the actual content."""
        if count > self.most:
            raise DataError(
                f"{self.path}: the header claims {count} bytes, more than the file can contain ({self.most}). "
                "Get it again.",
                field="size",
                value=count,
            )
        content = bytearray()
        while len(content) < count:
            piece = self._piece(min(_CHUNK, count - len(content)))
            if not piece:
                raise DataError(
                    f"{self.path}: truncated, it ends after {len(content)} of {count} bytes. Get it again.",
                    field="size",
                    value=len(content),
                )
            content += piece
        return content

    def rest(self, most: int) -> bytearray:
        """The remaining content, at most `most` bytes."""
        content = bytearray()
        while piece := self._piece(_CHUNK):
            content += piece
            if len(content) > most:
                raise DataError(
                    f"{self.path}: contains more than {most} bytes, too many for this file. Get it again.",
                    field="size",
                    value=most,
                )
        return content

    def end(self) -> None:
        """Refuse bytes beyond the end."""
        if self._piece(1):
            raise DataError(
                f"{self.path}: has more bytes than its header declares. Get it again.", field="size"
            )

    def require_sha256(self, expected: str | None) -> None:
        """Refuse content with another hash; call it after everything has been read."""
        actual = self._digest.hexdigest()
        if expected is not None and actual != expected:
            raise DataError(
                f"{self.path}: the content is not the expected one: "
                f"sha256 expected {expected}, actual {actual}. Get the file again.",
                field="sha256",
                value=actual,
            )

    def _piece(self, count: int) -> bytes:
        try:
            piece = self._stream.read(count)
        except _DAMAGE as error:
            raise DataError(
                f"{self.path}: damaged or truncated ({error}). Get it again.",
                field="content",
                value=str(self.path),
            ) from error
        self._digest.update(piece)
        return piece


@contextmanager
def open_content(path: Path) -> Iterator[Content]:
    """Open a plain, gzip or xz file; the format is detected from its first bytes."""
    try:
        raw = path.open("rb")
    except OSError as error:
        raise DataError(
            f"{path}: cannot be opened ({error.strerror}). Make it readable.", field="file", value=str(path)
        ) from error
    with raw:
        size = os.fstat(raw.fileno()).st_size
        if size == 0:
            raise DataError(f"{path}: the file is empty. Get it again.", field="size", value=0)
        head = raw.read(6)
        raw.seek(0)
        if head[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield Content(cast(BinaryIO, unpacked), path, size * _BOMB_RATIO)
        elif head == b"\xfd7zXZ\x00":
            with lzma.LZMAFile(raw, format=lzma.FORMAT_XZ) as unpacked_xz:
                yield Content(cast(BinaryIO, unpacked_xz), path, size * _BOMB_RATIO)
        else:
            yield Content(raw, path, size)


def read_bytes(path: Path, *, most: int, sha256: str | None = None) -> bytearray:
    """The decompressed content of a file, at most `most` bytes, checked against its sha256 if given."""
    with open_content(path) as content:
        everything = content.rest(most)
        content.require_sha256(sha256)
    if not everything:
        raise DataError(f"{path}: the file has no content. Get it again.", field="size", value=0)
    return everything


def read_text(path: Path, *, most: int = 1 << 31, sha256: str | None = None) -> str:
    """The text of a strict UTF-8 file, without byte-order mark; errors name the line, never its content."""
    content = bytes(read_bytes(path, most=most, sha256=sha256))
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}: line {line} is not UTF-8. Convert the file to UTF-8.", field="line", value=line
        ) from None


def text_lines(path: Path, *, sha256: str | None = None) -> list[str]:
    """The lines of a text, split at "\\n" only (other Unicode line breaks belong to the text)."""
    lines = read_text(path, sha256=sha256).split("\n")
    if lines[-1] == "":
        lines.pop()
    return lines
