"""Tables of a benchmark's results, on the terminal and as a page."""

from __future__ import annotations

import statistics

Table = tuple[str, list[str], list[list[str]]]
"""A title, columns, and rows."""


def ratio(a: list[float], b: list[float]) -> str:
    """Min and median of ``a``, of those of ``b``."""
    return f"{min(a) / min(b):.2f} / {statistics.median(a) / statistics.median(b):.2f}"


def show(tables: list[Table]) -> None:
    from rich.console import Console
    from rich.table import Table as Drawn

    console = Console(width=130)
    for title, columns, rows in tables:
        table = Drawn(*columns, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def page(title: str, machine: dict, about: str, exactness: str, tables: list[Table]) -> str:
    """A page in Markdown. ``machine``: of :func:`ranks.about_machine`. ``about``: what ran;
    ``exactness``: how far results are apart."""
    lines = [
        f"# {title}",
        "",
        f"`{machine['command']}` on {machine['cpus']} cores, torch {machine['torch']}; the load "
        f"was {machine['load'][0]:.1f} at the start and {machine['load'][1]:.1f} at the end, "
        f"{machine['note']}. {about}",
        "",
        exactness,
    ]
    for heading, columns, rows in tables:
        lines += [
            "",
            f"## {heading}",
            "",
            "| " + " | ".join(columns) + " |",
            "|" + "---|" * len(columns),
        ]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
