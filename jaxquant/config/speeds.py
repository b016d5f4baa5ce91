"""Table of training speeds relative to bfloat16 by chip and config string, and a warning for slow config strings."""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any, get_args

import jax

from jaxquant.config.recipes import RECIPES, lookup
from jaxquant.core.recipe import Matmul, Side

TABLE = """\
string           h100  h200  b200  v5e   v6e   v7x
int8             1.16  1.26  0.93  1.13  0.92  0.82
int4             0.98  1.11  0.93  1.15  0.99  0.93
fp8              1.31  1.42  1.36  1.0   1.02  1.91
nanoo_fp8        0.76  0.81  0.73  1.0   1.02  1.0
fp8_full         1.11  1.24  1.05  0.84  0.78  0.27
fp8_e4m3         1.11  1.24  1.05  0.84  0.78  0.27
fp8_e5m2         1.14  1.27  1.05  1.13  0.94  0.27
fp4              1.08  1.2   1.11  0.84  0.82  0.9
aqt_fp8          1.04  1.08  1.05  0.76  0.68  1.09
aqt_fp8_full     1.33  1.44  1.34  0.95  0.9   0.28
fp8_current      1.16  1.29  1.23  0.84  0.85  -
fp8_block        1.16  1.3   0.8   0.76  0.66  -
mxfp8            0.77  0.82  1.03  0.75  0.57  -
mxfp4            0.74  0.79  0.74  0.54  0.41  -
nvfp4            0.68  0.75  0.94  0.3   0.2   -
te_nvfp4_no_rht  0.77  0.78  1.18  0.3   0.19  -
quartet2         0.49  0.57  0.74  0.22  0.13  -
tetrajet_v2      0.59  0.66  0.8   0.36  0.26  -
int8_delayed     1.38  1.48  1.4   1.34  1.22  -
"""
"""Estimated speedup of an MLP step; ``jaxquant bench speeds --target CHIP --out benchmarks/results`` writes this."""

_CHIPS = {
    r"\bH100": "h100",
    r"\bH200": "h200",
    r"\bB200": "b200",
    "v5 lite|v5e": "v5e",
    "v6 lite|v6e": "v6e",
    "TPU ?v?7": "v7x",
}
"""Chip by a regex that matches JAX's device kind."""


def speeds_on(chip: str) -> dict[str, float]:
    """Return the speedup over bfloat16 of each config string on a chip, or {} if the table does not have the chip."""
    (_, *chips), *rows = (line.split() for line in TABLE.splitlines())
    found = {string: cells[chips.index(chip)] for string, *cells in rows if chip in chips}
    return {string: float(cell) for string, cell in found.items() if cell != "-"}


@functools.cache
def warn_if_slow(string: str, backend: str | None) -> None:
    """Warn once if a training step with a config string is slower than a bfloat16 step on the first device.

    Args:
      string: config string.
      backend: backend that runs the string; the table is valid only for the backend of ``quant_backend: auto``.

    Warns:
      UserWarning: the string is slower; the message names the faster string with the nearest numerics.
    """
    kind = jax.devices()[0].device_kind
    chip = next((chip for pattern, chip in _CHIPS.items() if re.search(pattern, kind)), "")
    row, speeds = lookup(string), speeds_on(chip)
    speed = next((speeds[name] for name in speeds if RECIPES[name] is row), 1.0)
    if speed >= 1 or backend != row.auto:
        return
    faster = [name for name in speeds if speeds[name] > 1 and RECIPES[name].auto == "native"]  # without AQT
    near = min(faster, key=lambda name: (*_distance(row.recipe, RECIPES[name].recipe), -speeds[name]), default="")
    hint = f"use {near!r} for {speeds[near]} times" if near else "no config string is faster than bfloat16 there"
    about = f"an MLP at {speed} times the speed of bfloat16 on one {kind} (from benchmarks/results/strings-speed.md)"
    warnings.warn(f"quantization {string!r} trains {about}; {hint}", stacklevel=3)


def _distance(one: Any, other: Any) -> tuple[int, int, bool]:
    """Return how much two recipes differ: in bits of operands, in number of dtypes, and in delayed scaling."""
    pairs = [
        [getattr(recipe.resolve(name, side), "dtype", "bfloat16") for recipe in (one, other)]
        for name in get_args(Matmul)
        for side in get_args(Side)
    ]
    bits = sum(abs(jax.dtypes.itemsize_bits(a) - jax.dtypes.itemsize_bits(b)) for a, b in pairs)
    return bits, sum(a != b for a, b in pairs), (one.delayed is None) != (other.delayed is None)
