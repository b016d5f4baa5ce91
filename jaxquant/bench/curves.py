"""Line plots as SVG, without a plotting library."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

COLORS = ("#111111", "#d62728", "#ff7f0e", "#bcbd22", "#1f77b4", "#17becf", "#2ca02c", "#9467bd", "#e377c2")
SHARES = (0, 0.25, 0.5, 0.75, 1)  # places of the ticks on a linear axis
_TEXT = '<text x="{:.0f}" y="{:.0f}" text-anchor="{}">{}</text>'


class Panel(NamedTuple):
    """A plot of curves.

    Attributes:
      title: text above the vertical axis.
      label: text below the horizontal axis.
      curves: points (x, y) of each curve, by its name in the legend; points that are not finite are left out.
      is_log: whether the vertical axis is logarithmic; zeros are then drawn one decade below the lowest one, at "0".
    """

    title: str
    label: str
    curves: Mapping[str, Sequence[tuple[float, float]]]
    is_log: bool = False


def draw(panels: Sequence[Panel]) -> str:
    """Return panels below each other as an SVG document.

    Raises:
      ValueError: a panel has no finite point.
    """
    size = f'viewBox="0 0 760 {370 * len(panels)}" font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', '<rect width="100%" height="100%" fill="white"/>']
    for number, panel in enumerate(panels):
        parts += [f'<g transform="translate(0 {370 * number})">', *_draw(panel), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _draw(panel: Panel) -> list[str]:
    curves = {name: [point for point in curve if math.isfinite(point[1])] for name, curve in panel.curves.items()}
    xs, ys = ([point[n] for curve in curves.values() for point in curve] for n in (0, 1))
    if not xs:
        raise ValueError(f"the curves of {panel.title!r} have no finite point to draw")
    left, right, low, high = 0.0, max(xs), min(ys), max(ys)
    zero = math.floor(math.log10(min((y for y in ys if y > 0), default=1))) - 1
    scale = (lambda y: math.log10(y) if y > 0 else zero) if panel.is_log else lambda y: y
    ticks = {f"{y:.2f}": y for y in (low + share * (high - low) for share in SHARES)}
    if panel.is_log:
        low, high = math.floor(scale(low)), math.ceil(scale(high))
        ticks = {"0" if power == zero else f"1e{power}": power for power in range(low, high + 1)}
    place = lambda x, y: (60 + 500 * (x - left) / (right - left), 20 + 300 * (high - y) / (high - low or 1))  # noqa: E731
    parts = ['<path d="M60 20V320H560" fill="none" stroke="#888"/>', _TEXT.format(60, 12, "start", panel.title)]
    parts += [_TEXT.format(60 + 500 * share, 338, "middle", f"{left + share * (right - left):g}") for share in SHARES]
    parts += [_TEXT.format(54, place(0, y)[1] + 4, "end", name) for name, y in ticks.items()]
    parts.append(_TEXT.format(310, 360, "middle", panel.label))
    for number, (name, curve) in enumerate(curves.items()):
        color, points = (
            COLORS[number % len(COLORS)],
            " ".join("{:.1f},{:.1f}".format(*place(x, scale(y))) for x, y in curve),
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts.append(f'<rect x="580" y="{24 + 20 * number}" width="12" height="4" fill="{color}"/>')
        parts.append(_TEXT.format(598, 31 + 20 * number, "start", html.escape(name)))
    return parts
