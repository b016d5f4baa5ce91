"""Plots of tables, as SVG: dots of losses."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Sequence

from benchmarks.schemes import Row

_BAR, _LEFT, _WIDTH = 24, 190, 420


def losses(title: str, rows: Sequence[Row]) -> str:
    """Draw each scheme's gap from float in units of NVFP4's: seeds, their mean ± its standard error, and open data.

    Args:
      title: above the dots.
      rows: of a table with the columns scheme, gap %, of nvfp4's, goal and open data, in their order from above.
    """
    found = [(row, [float(word) for word in row["gap %"].split(" / ")]) for row in rows if row["of nvfp4's"] != "–"]
    unit = next(statistics.mean(seeds) for row, seeds in found if row["scheme"] == "nvfp4")
    least, most = (end(0.0, *(gap / unit for _, seeds in found for gap in seeds)) for end in (min, max))
    left, height = _LEFT + 90, 84 + _BAR * len(found)

    def at(share: float) -> float:
        return left + _WIDTH * (share - least) / (max(most, 1.0) - least)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + _WIDTH + 130}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{html.escape(title)}</text>',
    ]
    for tick in (n / 4 for n in range(math.ceil(4 * least), math.floor(4 * max(most, 1.0)) + 1)):
        x, below, color = at(tick), height - 46, "#888" if tick == 1 else "#ddd"
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="34" y2="{below}" stroke="{color}"/>')
        parts.append(f'<text x="{x:.1f}" y="{below + 15}" text-anchor="middle" fill="#555">{tick:g}</text>')
    for n, (row, seeds) in enumerate(found):
        y, mean = 48 + n * _BAR, statistics.mean(seeds)
        error = statistics.stdev(seeds) / math.sqrt(len(seeds)) if len(seeds) > 1 else 0.0
        low, middle, high = (at(gap / unit) for gap in (mean - error, mean, mean + error))
        parts.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{html.escape(row["scheme"])}</text>')
        parts.append(f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}" stroke="#4878a8" stroke-width="3"/>')
        parts += [f'<circle cx="{at(gap / unit):.1f}" cy="{y}" r="3" fill="none" stroke="#4878a8"/>' for gap in seeds]
        parts.append(f'<circle cx="{middle:.1f}" cy="{y}" r="5" fill="#4878a8"/>')
        parts.append(f'<text x="{left + _WIDTH + 16}" y="{y + 4}" fill="#4878a8">{row["mean gap %"]} %</text>')
        if row["goal"] != "–":
            x = at(float(row["goal"].split()[1].rstrip(":")))
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 9}" y2="{y + 9}" stroke="#c33" stroke-width="2"/>')
        if row["open data"] != "–":
            x = at(row["open data"])
            parts.append(f'<path d="M{x:.1f} {y - 6}l5 6l-5 6l-5 -6z" fill="none" stroke="#d80" stroke-width="2"/>')
    legend = (("#4878a8", "● mean ± standard error, ○ seeds"), ("#d80", "◇ open data"), ("#c33", "| goal: at most"))
    for (color, text), x in zip(legend, (10, 270, 370), strict=True):
        parts.append(f'<text x="{x}" y="{height - 10}" fill="{color}">{text}</text>')
    return "\n".join([*parts, "</svg>", ""])
