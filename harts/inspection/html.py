"""One HTML page with every table and picture: no scripts, nothing loaded from elsewhere."""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from harts.errors import InputError
from harts.inspection.drawing import Picture
from harts.inspection.tables import TextTable

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 72rem;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2.5rem 0 .5rem; }
p.note, figcaption { color: #555; font-size: .9rem; max-width: 60rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .15rem .9rem .15rem 0; text-align: right; white-space: nowrap; }
th { vertical-align: bottom; border-bottom: 1px solid #999; font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
tbody + tbody td { border-top: 1px solid #999; font-weight: 600; }
figure { margin: 2.5rem 0 0; } figure svg { width: 100%; height: auto; }
"""


def page(title: str, tables: Sequence[TextTable], pictures: Sequence[Picture]) -> str:
    """The page as text: tables first, then pictures with their captions."""
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{escape(title)}</h1>",
        *map(_table, tables),
        *map(_figure, pictures),
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def write_page(text: str, path: Path) -> None:
    """Write the page.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write the page {path}: {error.strerror}") from error


def _table(table: TextTable) -> str:
    head = ""
    if table.columns:
        # A hyphen at the end of a line joins the two halves of a word in narrow terminals.
        names = [c.replace("-\n", "").replace("\n", " ") for c in table.columns]
        head = f"<thead>{_row(names, 'th')}</thead>"
    bodies = [f"<tbody>{''.join(map(_row, rows))}</tbody>" for rows in (table.rows, table.totals)]
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f"<h2>{escape(table.title)}</h2>\n"
        f'<div class="wide"><table>{head}{"".join(bodies)}</table></div>{note}'
    )


def _row(cells: Sequence[str], tag: str = "td") -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(c)}</{tag}>' for c in cells)}</tr>\n"


def _figure(picture: Picture) -> str:
    svg = picture.svg.decode()
    # The XML declaration belongs to a file of its own, and ids must be those of one picture.
    svg = svg[svg.index("<svg") :].replace("<svg", '<svg role="img"', 1)
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{picture.name}-", svg)
    return f"<figure>\n{svg}<figcaption>{escape(picture.caption)}</figcaption>\n</figure>"
