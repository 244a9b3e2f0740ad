"""Terminal output in any encoding: characters that it lacks are replaced by similar ones."""

# ruff: noqa: RUF001  # the letters to be replaced

from __future__ import annotations

import codecs
import sys
import unicodedata
from io import TextIOWrapper
from typing import Any

from rich.console import Console
from rich.text import Text

_ERRORS = "fedveil.plain"
_WORDS = {
    "ε": "eps",
    "δ": "delta",
    "σ": "sigma",
    "λ": "lambda",
    "θ": "theta",
    "±": "+-",
    "×": "x",
    "·": ".",
    "…": "...",
    "–": "-",
    "—": "-",
    "−": "-",
    "→": "->",
    "≤": "<=",
    "≥": ">=",
    "≈": "~",
    "‘": "'",
    "’": "'",
    "“": '"',
    "”": '"',
    "━": "-",
    "╸": "-",
    "╺": "-",
}


class TerminalConsole(Console):
    """A console that replaces characters before it measures tables, so that columns stay aligned."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(plain(text, self.encoding), **options)


def plain(text: str, encoding: str) -> str:
    """The text in characters of this encoding."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return "".join(_replaced(letter, encoding) for letter in text)
    return text


def write_plainly() -> None:
    """Let stdout and stderr replace characters that they cannot encode, instead of failing."""
    codecs.register_error(_ERRORS, _on_error)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)


def _on_error(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    rest = error.object[error.start : error.end]
    return "".join(_replaced(letter, error.encoding) for letter in rest), error.end


def _replaced(letter: str, encoding: str) -> str:
    """The letter itself if it can be encoded; else its Greek name, its base letter, or a question mark."""
    for form in (letter, _WORDS.get(letter, ""), unicodedata.normalize("NFKD", letter)):
        kept = form.encode(encoding, "ignore").decode(encoding)
        if kept:
            return kept
    return "?"
