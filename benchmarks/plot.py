"""A bar chart of a table's speedups, as SVG."""

from __future__ import annotations

import html
from collections.abc import Sequence

from benchmarks.schemes import Row

_BAR, _LEFT, _WIDTH = 24, 190, 420


def speedups(title: str, rows: Sequence[Row]) -> str:
    """Draw the speedup of each library and recipe that ran, with a line where the first one is.

    Args:
      title: above the bars.
      rows: of a table with the columns library, recipe and speedup.
    """
    known = [row for row in rows if isinstance(row["speedup"], int | float)]
    most = max([1.0, *(row["speedup"] for row in known)])
    height = 50 + _BAR * len(known)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 70}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{html.escape(title)}</text>',
    ]
    for n, row in enumerate(known):
        y, width = 36 + n * _BAR, _WIDTH * row["speedup"] / most
        name = html.escape(f"{row['library']} {row['recipe']}")
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">{name}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y + 3}" width="{width:.1f}" height="{_BAR - 7}" fill="#4878a8"/>')
        parts.append(f'<text x="{_LEFT + width + 6:.1f}" y="{y + 15}">{row["speedup"]}</text>')
    x = _LEFT + _WIDTH / most
    parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="32" y2="{height - 12}" stroke="#888" stroke-dasharray="4"/>')
    return "\n".join([*parts, "</svg>", ""])
