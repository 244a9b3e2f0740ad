"""Pieces of the page: sections, tables, legends and pictures. Text enters them through `escape` only."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

from fedveil.report.attack_files import Picture
from fedveil.report.groups import Setting
from fedveil.report.svg import swatch

NOTHING = "&ndash;"
Cell = str | tuple[str, float | None]
"""HTML, or HTML and the value that it is sorted by."""


def section(anchor: str, title: str, *parts: str, lead: str = "") -> str:
    """A titled part; nothing if all its parts are empty."""
    body = "".join(parts)
    if not body:
        return ""
    said = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return (
        f'<section id="{anchor}" aria-labelledby="{anchor}-title">'
        f'<h2 id="{anchor}-title">{escape(title)}</h2>{said}{body}</section>'
    )


def table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    sortable: bool = True,
    numeric_from: int = 1,
    labels: Sequence[str] = (),
) -> str:
    """A table whose first column heads its rows. Cells are HTML, or HTML and the value it is sorted by.

    Cells of the columns in `labels` carry the column's name, for phones, where a row is a block of its own.
    """
    head = "".join(
        f'<th scope="col"{" aria-sort=" + chr(34) + "none" + chr(34) if sortable else ""}'
        f"{' class=num' if place >= numeric_from else ''}>"
        + (
            f'<button type="button">{escape(name)}<span aria-hidden="true"></span></button>'
            if sortable
            else escape(name)
        )
        + "</th>"
        for place, name in enumerate(heads)
    )
    body = []
    for row in rows:
        cells = []
        for place, cell in enumerate(row):
            text, value = cell if isinstance(cell, tuple) else (cell, None)
            tag = "th scope=row" if place == 0 else "td"
            classes = " class=num" if place >= numeric_from else ""
            data = "" if value is None else f' data-value="{value!r}"'
            label = f' data-label="{escape(heads[place])}"' if text and heads[place] in labels else ""
            cells.append(f"<{tag}{classes}{data}{label}>{text}</{tag.split()[0]}>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    kind = ' class="sortable"' if sortable else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table{kind}>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def named(setting: Setting) -> str:
    """A setting's mark and name, kept together."""
    return f'<span class="named">{swatch(setting.look)}<span>{escape(setting.name)}</span></span>'


def legend(settings: Sequence[Setting]) -> str:
    items = "".join(f"<li>{named(s)}</li>" for s in settings)
    return f'<ul class="legend">{items}</ul>'


def picture(item: Picture, alt: str, *, kind: str, caption: bool = False) -> str:
    data = base64.b64encode(item.png).decode()
    said = alt if caption else item.name.rpartition("/")[2].replace("_", " ").replace("-", " ")
    return (
        f'<figure class="{kind}"><img alt="{escape(alt)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(said)}</figcaption></figure>"
    )
