r"""Equations of the pages as MathML, which browsers set by themselves: no script, no font, no request.

A page writes equations as GitHub reads them: a block fenced by ```math, or $`...`$ within a line. The part of TeX that
the pages use is understood here; anything else is an error, so that no page shows raw TeX.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

_TOKEN = re.compile(r"\\\\|\\[A-Za-z]+|\\.|[{}^_&]|\d+(?:\.\d+)?|\s+|.")
_BLOCK = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"\$`([^`]+)`\$")

_LETTERS = {
    name: html.unescape(f"&{name};")  # HTML has the same names
    for name in (
        *(
            "alpha",
            "beta",
            "gamma",
            "delta",
            "epsilon",
            "varepsilon",
            "zeta",
            "eta",
            "theta",
            "lambda",
            "mu",
            "pi",
            "rho",
        ),
        *("sigma", "tau", "phi", "Delta", "Sigma", "nabla", "infin", "ell"),
    )
}
_OPERATORS = {
    **{
        name: html.unescape(f"&{name};")
        for name in ("times", "le", "ge", "ne", "sim", "approx", "langle", "rangle")
    },
    **{name: html.unescape(f"&{name};") for name in ("lceil", "rceil", "cup", "odot", "leftarrow")},
    **dict.fromkeys(("lVert", "rVert", "|"), "\N{DOUBLE VERTICAL LINE}"),
    "cdot": "\N{MIDDLE DOT}",
    "in": "\N{ELEMENT OF}",
    "mid": "|",
    "ldots": "\N{HORIZONTAL ELLIPSIS}",
    "{": "{",
    "}": "}",
}
_SIGNS = {"-": "\N{MINUS SIGN}", "*": "\N{ASTERISK OPERATOR}", "'": "\N{PRIME}"}
_LARGE = {"sum": "\N{N-ARY SUMMATION}", "prod": "\N{N-ARY PRODUCT}", "bigcup": "\N{N-ARY UNION}"}
_NAMES = ("min", "max", "exp", "ln", "log", "cos")
_ACCENTS = {"hat": "^", "bar": "\N{OVERLINE}", "tilde": "~"}
_SPACES = {",": "0.17em", ";": "0.28em", " ": "0.25em", "quad": "1em", "qquad": "2em"}
_DOUBLE = {"R": "\N{DOUBLE-STRUCK CAPITAL R}"}
_SCRIPT = {"N": "\N{MATHEMATICAL SCRIPT CAPITAL N}", "L": "\N{SCRIPT CAPITAL L}", "B": "\N{SCRIPT CAPITAL B}"}


class MathError(ValueError):
    """An equation that this file does not understand."""


class _Reader:
    """Reads one equation from left to right."""

    def __init__(self, tex: str) -> None:
        self.tokens = _TOKEN.findall(tex)
        self.tex = tex
        self.at = 0

    def peek(self) -> str | None:
        while self.at < len(self.tokens) and self.tokens[self.at].isspace():
            self.at += 1
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self, wanted: str | None = None) -> str:
        token = self.peek()
        if token is None or (wanted is not None and token != wanted):
            raise MathError(f"expected {wanted or 'more'}, found {token!r} in {self.tex!r}")
        self.at += 1
        return token

    def row(self, *ends: str) -> str:
        """Everything up to one of these tokens, which stays; to the end of the equation if none is named."""
        parts: list[str] = []
        while (token := self.peek()) is not None and token not in ends:
            parts.append(self.scripted())
        if ends and self.peek() is None:
            raise MathError(f"no {' or '.join(ends)} in {self.tex!r}")
        return parts[0] if len(parts) == 1 else f"<mrow>{''.join(parts)}</mrow>"

    def scripted(self) -> str:
        """One item with what stands above and below it."""
        large = (self.peek() or "").removeprefix("\\") in (*_LARGE, "min", "max", "operatorname")
        base = self.item()
        marks = {}
        while (mark := self.peek()) in ("^", "_"):
            self.take()
            marks[mark] = self.item()
        if not marks:
            return base
        kind = ("munder", "mover", "munderover") if large else ("msub", "msup", "msubsup")
        if len(marks) == 2:
            return f"<{kind[2]}>{base}{marks['_']}{marks['^']}</{kind[2]}>"
        tag = kind[0] if "_" in marks else kind[1]
        return f"<{tag}>{base}{''.join(marks.values())}</{tag}>"

    def item(self) -> str:
        token = self.take()
        if token == "{":
            inside = self.row("}")
            self.take("}")
            return inside
        if token.startswith("\\"):
            return self.command(token[1:])
        if token[0].isdigit():
            return f"<mn>{token}</mn>"
        if token.isalpha():
            return f"<mi>{token}</mi>"
        if token in "}^_&":
            raise MathError(f"{token!r} does not belong there in {self.tex!r}")
        return f"<mo>{html.escape(_SIGNS.get(token, token))}</mo>"

    def words(self) -> str:
        """The words between braces, as written."""
        self.take("{")
        end = self.tokens.index("}", self.at)
        found = "".join(self.tokens[self.at : end])
        self.at = end + 1
        return html.escape(found.replace(" ", "\N{NO-BREAK SPACE}"))

    def command(self, name: str) -> str:
        for table, tag in ((_LETTERS, "mi"), (_OPERATORS, "mo"), (_LARGE, "mo")):
            if name in table:
                return f"<{tag}>{table[name]}</{tag}>"
        if name in _SPACES:
            return f'<mspace width="{_SPACES[name]}"/>'
        if name in _NAMES:
            return f"<mi>{name}</mi>"
        if name in _ACCENTS:
            return f'<mover accent="true">{self.item()}<mo stretchy="false">{_ACCENTS[name]}</mo></mover>'
        known = self.structures().get(name)
        if known is None:
            raise MathError(f"unknown \\{name} in {self.tex!r}")
        return known()

    def structures(self) -> dict[str, Callable[[], str]]:
        return {
            "frac": lambda: f"<mfrac>{self.item()}{self.item()}</mfrac>",
            "sqrt": lambda: f"<msqrt>{self.item()}</msqrt>",
            "text": lambda: f"<mtext>{self.words()}</mtext>",
            "operatorname": lambda: f'<mi mathvariant="normal">{self.words()}</mi>',
            "mathrm": lambda: f'<mi mathvariant="normal">{self.words()}</mi>',
            "mathbb": lambda: f"<mi>{_DOUBLE[self.words()]}</mi>",
            "mathcal": lambda: f"<mi>{_SCRIPT[self.words()]}</mi>",
            "left": self.fenced,
            "begin": self.table,
        }

    def fenced(self) -> str:
        opened = self.fence()
        inside = self.row("\\right")
        self.take("\\right")
        return f"<mrow>{opened}{inside}{self.fence()}</mrow>"

    def fence(self) -> str:
        token = self.take()
        shown = _OPERATORS.get(token[1:], token) if token.startswith("\\") else token
        return "" if shown == "." else f'<mo stretchy="true">{html.escape(shown)}</mo>'

    def table(self) -> str:
        kind = self.words()
        if kind not in ("aligned", "cases"):
            raise MathError(f"unknown environment {kind} in {self.tex!r}")
        rows, cells = [], []
        while True:
            cells.append(f"<mtd>{self.row('&', chr(92) * 2, chr(92) + 'end')}</mtd>")
            token = self.take()
            if token == "&":
                continue
            rows.append(f"<mtr>{''.join(cells)}</mtr>")
            cells = []
            if token == "\\end":
                self.words()
                body = f'<mtable class="{kind}">{"".join(rows)}</mtable>'
                return body if kind == "aligned" else f'<mrow><mo stretchy="true">{{</mo>{body}</mrow>'


def mathml(tex: str, *, block: bool = False) -> str:
    """The equation as a <math> element; raises MathError for what is not understood."""
    body = _Reader(tex).row()
    kind = ' display="block"' if block else ""
    return f'<math xmlns="http://www.w3.org/1998/Math/MathML"{kind}>{body}</math>'


def equations(markdown: str) -> str:
    """The page with every equation as MathML."""
    text = _BLOCK.sub(lambda found: f'<div class="equation">{mathml(found[1], block=True)}</div>', markdown)
    # In a <span>, because Markdown takes <math> at the beginning of a line for a block of its own.
    return _INLINE.sub(lambda found: f"<span>{mathml(found[1])}</span>", text)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this for every page."""
    return equations(markdown)
