"""FP4 schemes, whose held-out losses are compared with those of float training."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxquant.bench.schemes import RESULTS, Row
from jaxquant.bench.seeds import Trial
from jaxquant.config.recipes import RECIPES
from jaxquant.config.rules import Rule
from jaxquant.core.recipe import Recipe, TensorSpec

RECORD, STEPS = RESULTS / "fp4-losses.jsonl", 300


def _nvfp4_nearest() -> Recipe:
    """Return the NVFP4 recipe with output gradients that are rounded to nearest."""
    recipe = RECIPES["nvfp4"].recipe
    assert recipe is not None
    dlhs, drhs = recipe.dlhs, recipe.drhs
    assert isinstance(dlhs.lhs, TensorSpec)
    assert isinstance(drhs.rhs, TensorSpec)
    return dataclasses.replace(
        recipe,
        name="nvfp4_nearest",
        dlhs=dataclasses.replace(dlhs, lhs=dataclasses.replace(dlhs.lhs, rounding="nearest")),
        drhs=dataclasses.replace(drhs, rhs=dataclasses.replace(drhs.rhs, rounding="nearest")),
    )


def _native_config(quantization: str | dict[str, str], **options: Any) -> Row:
    return {"quantization": quantization, "quant_backend": "native", **options}


_SPLIT = {"fwd": "fp8_current", "dlhs": "quartet2", "drhs": "quartet2"}
_NEAREST: Row = {"rules": (Rule("layers/.*", _nvfp4_nearest()),), "quant_backend": "native"}
_SCHEMES: dict[str, tuple[int, Row]] = {
    "float": (3, {}),
    "nvfp4": (3, _native_config("nvfp4")),
    "quartet2 4/6": (3, _native_config("quartet2", four_over_six=True)),
    "fp8_current forward, quartet2 backward": (3, _native_config(_SPLIT)),
    "quartet2": (3, _native_config("quartet2")),
    "tetrajet_v2": (3, _native_config("tetrajet_v2")),
    "nvfp4 4/6": (2, _native_config("nvfp4", four_over_six=True)),
    "nvfp4 without Hadamard": (2, _native_config("te_nvfp4_no_rht")),
    "nvfp4 without stochastic rounding": (2, _NEAREST),
    "fp8_block": (2, _native_config("fp8_block")),
    "mxfp8": (2, _native_config("mxfp8")),
}
TRIALS = {name: Trial("float", fields, count) for name, (count, fields) in _SCHEMES.items()}
