"""Tables for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def html_table(title: str, rows: Sequence[Sequence[str]], remarks: Iterable[str] = ()) -> str:
    """A table, the first of whose rows is its head, under a title and above remarks; all texts are escaped."""
    from html import escape  # reads a table of 2,000 names: only notebooks need it

    def line(row: Sequence[str], cell: str) -> str:
        return f"<tr>{''.join(f'<{cell}>{escape(text)}</{cell}>' for text in row)}</tr>"

    head, *body = rows
    parts = [f"<div><b>{escape(title)}</b><table><thead>{line(head, 'th')}</thead><tbody>"]
    parts += [line(row, "td") for row in body]
    parts.append("</tbody></table>")
    parts += [f"<div>{escape(remark)}</div>" for remark in remarks]
    return "".join([*parts, "</div>"])
