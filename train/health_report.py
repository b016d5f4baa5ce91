"""The health of runs for the comparison's page: one map a statistic, layers down, steps across."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from jaxquant.core.quant_state import TENSORS
from train.runs import Run

STATISTICS: dict[str, dict[str, Any]] = {
    "sqnr": {
        "title": "SQNR",
        "unit": " dB",
        "is_worse": "low",
        "about": "Signal over rounding error. Bad: under 20 dB in eight bits, under 10 in four, or falling.",
    },
    "saturated": {
        "title": "Saturated",
        "is_worse": "high",
        "about": "Share of elements that were clipped. Bad: above 1 %; the scale is too small for the tensor.",
    },
    "flushed": {
        "title": "Flushed to zero",
        "is_worse": "high",
        "about": "Share of nonzero elements that became 0. Bad: growing in output gradients; those are lost.",
    },
    "amax": {
        "title": "Amax",
        "is_worse": "",
        "about": "Largest magnitude. Bad: a row that grows step by step, or jumps; what follows may overflow.",
    },
    "scale": {
        "title": "Scale",
        "is_worse": "",
        "about": "The largest that the tensor was quantized with. Bad: a jump; small elements are flushed then.",
    },
    "nonfinite": {
        "title": "Not finite",
        "is_worse": "high",
        "about": "Share of elements that are infinite or NaN. Bad: any; it began in the layer that has them first.",
    },
}
"""What is drawn. ``is_worse``: the end of the colours that stands out, "" for neither."""

SHARES = ("saturated", "flushed", "nonfinite")
_SMALLEST_SHARE = 1e-5
_SHARE_TICKS = {1e-5: "0", 1e-4: "0.01 %", 1e-3: "0.1 %", 1e-2: "1 %", 1e-1: "10 %", 1.0: "100 %"}
# The range of SQNR that every map shows at least, so that a format has one colour in all of them.
_SQNR_RANGE = (10.0, 40.0)
_MOST_TICKS = 7


def health_maps(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the maps of the runs that measured health, as plain data.

    Returns:
      A dict a run: ``name``, ``steps``, ``layers`` (labels), ``names`` (full), ``sequences`` and ``maps``: by tensor
      and statistic the ``values`` [layer][step], None where there is none, with ``low``, ``high`` and ``ticks`` of
      their colours, as logarithms where ``log`` says so. A statistic without values has no map.
    """
    found = []
    for run in runs:
        if not run.health:
            continue
        names = run.health[0]["layers"]
        maps = {tensor: _maps(run.health, tensor, len(names)) for tensor in TENSORS}
        found.append(
            {
                "name": html.escape(run.name),
                "steps": [row["step"] for row in run.health],
                "sequences": run.health[-1]["sequences"],
                "layers": _labels(names),
                "names": names,
                "maps": maps,
            }
        )
    return found


def _maps(rows: Sequence[dict[str, Any]], tensor: str, layers: int) -> dict[str, Any]:
    maps: dict[str, Any] = {}
    for statistic in STATISTICS:
        values = [[_finite(row[tensor][statistic][layer]) for row in rows] for layer in range(layers)]
        known = [value for line in values for value in line if value is not None]
        if not known or (statistic == "nonfinite" and not any(known)):
            continue
        maps[statistic] = {"values": values} | _colours(statistic, known)
    return maps


def _colours(statistic: str, known: Sequence[float]) -> dict[str, Any]:
    if statistic == "sqnr":
        low, high = min(*known, _SQNR_RANGE[0]), max(*known, _SQNR_RANGE[1])
        ticks = {value: str(value) for value in range(math.ceil(low / 5) * 5, math.floor(high) + 1, 5)}
        return {"log": False, "low": low, "high": high, "ticks": ticks}
    if statistic in SHARES:
        return {"log": True, "low": _SMALLEST_SHARE, "high": 1.0, "ticks": _SHARE_TICKS}
    positive = [value for value in known if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    if high < 2 * low:  # a map of one colour would show noise as an event
        low, high = low / 2, high * 2
    return {"log": True, "low": low, "high": high, "ticks": _log_ticks(low, high)}


def _log_ticks(low: float, high: float) -> dict[float, str]:
    """Choose round numbers between two bounds, in steps that are as small as ``_MOST_TICKS`` allows."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for digits, every in (((1, 1.5, 2, 3, 5, 7), 1), ((1, 2, 5), 1), ((1,), 1), ((1,), 2), ((1,), 3), ((1,), 5)):
        values = [d * 10.0**power for power in range(first, last + 1, every) for d in digits]
        values = [value for value in values if low <= value <= high]
        if len(values) <= _MOST_TICKS:
            break
    return {value: f"{value:g}" for value in values}


def _labels(names: Sequence[str]) -> list[str]:
    """Shorten "layers/mlp/wo, layer 3" to "3 mlp/wo" where no two names fall together."""
    short = []
    for name in names:
        path, _, index = name.partition(", layer ")
        short.append(f"{index} {path.partition('/')[2] or path}" if index else path)
    return short if len(set(short)) == len(short) else list(names)


def _finite(value: float | None) -> float | None:
    # Four digits: a page of a large model holds a million of these.
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None
