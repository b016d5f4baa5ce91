"""The table of config strings: the numbers of each, the backends that run it, the options that it reads.

Aliases are rows of their own that share a recipe object. The strings of NVFP4 training are known and refused.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxquant.config.backends import BACKENDS
from jaxquant.config.options import (
    BOUND_OPTIONS,
    CALIBRATION_OPTIONS,
    DELAYED_OPTIONS,
    EXPERT_OPTIONS,
    FILE_OPTIONS,
    SCALE_OPTIONS,
    SHARD_OPTIONS,
    SPARSITY_OPTIONS,
    OptionGroup,
)
from jaxquant.core.recipe import FORWARD, DelayedSpec, MatmulSpec, Operand, Recipe, TensorSpec
from jaxquant.core.typed import nearest, show


@dataclasses.dataclass(frozen=True, slots=True)
class RecipeRow:
    """One config string.

    Attributes:
      recipe: its numbers with every option at its default (one shard where the option says "device count"); None
        where there are none (``""``) or where they come from a file (``intmp``).
      auto: backend that ``quant_backend: auto`` means, or "" for none.
      backends: every backend that runs it.
      options: the groups of options that it reads.
      summary: one line for a reader.
    """

    recipe: Recipe | None
    auto: str
    backends: tuple[str, ...]
    options: frozenset[OptionGroup]
    summary: str

    @property
    def fields(self) -> frozenset[str]:
        """Names of the QuantConfig fields that it reads."""
        return frozenset(field for group in self.options for field in group.fields)


def _reusing(name: str, spec: TensorSpec, grad: TensorSpec, accumulator: str | None = None) -> Recipe:
    """Quantize activation and weight once, forward, and the output gradient once for each backward matmul."""
    return Recipe(
        name,
        fwd=MatmulSpec(spec, spec, accumulator),
        dlhs=MatmulSpec(grad, FORWARD, accumulator),
        drhs=MatmulSpec(FORWARD, grad, accumulator),
        delayed=DelayedSpec() if spec.scaling == "delayed" else None,
    )


def _same(name: str, dtype: str, accumulator: str | None = None) -> Recipe:
    """One dtype for weights, activations and gradients."""
    return _reusing(name, TensorSpec(dtype), TensorSpec(dtype), accumulator)


def _per_tensor(name: str, dtype: str, grad_dtype: str, scaling: Literal["dynamic", "delayed"]) -> Recipe:
    spec, grad = (TensorSpec(each, "per_tensor", scaling=scaling) for each in (dtype, grad_dtype))
    return dataclasses.replace(_reusing(name, spec, grad), arithmetic="lean")


def _weight_only(name: str, dtype: str) -> Recipe:
    """Quantized weight forward and in dlhs; its own gradient passes straight through the rounding."""
    return Recipe(name, fwd=MatmulSpec(None, TensorSpec(dtype)), dlhs=MatmulSpec(None, FORWARD))


def _encoded(codec: str, dtype: str) -> RecipeRow:
    """Weights as a tensor format has them, encoded and decoded in the forward pass."""
    name = f"ggml_{codec}"
    spec = TensorSpec(dtype, codec=codec)
    return RecipeRow(
        Recipe(name, fwd=MatmulSpec(None, spec), dlhs=MatmulSpec(None, FORWARD)),
        "native",
        ("native",),
        frozenset(),
        f"weights only, in GGML's {codec.upper()} as llama.cpp has them, straight-through gradient",
    )


def _everywhere(name: str, forward: Operand, backward: Operand, accumulator: str) -> Recipe:
    """Quantize all six operands for themselves, nothing reused."""
    grad = MatmulSpec(backward, backward, accumulator)
    return Recipe(name, fwd=MatmulSpec(forward, forward, accumulator), dlhs=grad, drhs=grad)


def _microscaling(name: str, dtype: str, tile_size: int) -> Recipe:
    """Quantize each operand in tiles along its own contraction, with scales that are powers of two."""
    spec = TensorSpec(dtype, "per_tile", tile_size=tile_size, scale_dtype="float8_e8m0fnu", scale_rounding="up")
    return _everywhere(name, spec, spec, "float32")


# AQT multiplies by 1/scale and rounds the gradient alone stochastically.
_INT8 = _reusing(
    "int8", TensorSpec("int8", reciprocal=True), TensorSpec("int8", rounding="stochastic", reciprocal=True), "int32"
)
# For TPUs: scales that are known before the step, one cast of the gradient for both backward matmuls.
_INT8_DELAYED = dataclasses.replace(
    _reusing(
        "int8_delayed",
        TensorSpec("int8", "per_tensor", scaling="delayed"),
        TensorSpec("int8", "per_tensor", rounding="stochastic"),
        "int32",
    ),
    arithmetic="lean",
)
_AQT_E4M3 = TensorSpec("float8_e4m3fn", reciprocal=True)
_AQT_FP8 = Recipe("aqt_fp8", fwd=MatmulSpec(_AQT_E4M3, _AQT_E4M3, "bfloat16"))
_AQT_FP8_FULL = _everywhere(
    "aqt_fp8_full",
    TensorSpec("float8_e4m3fn", "per_tensor", reciprocal=True),
    TensorSpec("float8_e5m2", "per_tensor", reciprocal=True),
    "bfloat16",
)
_FP8_FULL = _reusing("fp8_full", TensorSpec("float8_e4m3fn"), TensorSpec("float8_e5m2"))

_BLOCK_TILE = TensorSpec("float8_e4m3fn", "per_tile", tile_size=128)
_BLOCK_WEIGHT = TensorSpec("float8_e4m3fn", "per_block", tile_size=128, free_size=128)
# The weight's blocks tile either contraction; the activation is tiled along the tokens for its own gradient.
_FP8_BLOCK = Recipe(
    "fp8_block",
    fwd=MatmulSpec(_BLOCK_TILE, _BLOCK_WEIGHT, "float32"),
    dlhs=MatmulSpec(_BLOCK_TILE, FORWARD, "float32"),
    drhs=MatmulSpec(_BLOCK_TILE, _BLOCK_TILE, "float32"),
)

_ALL, _AQT, _QWIX, _NATIVE = tuple(BACKENDS), ("aqt", "native"), ("qwix", "native"), ("native",)

_FP8 = RecipeRow(
    _per_tensor("fp8", "float8_e4m3fn", "float8_e5m2", "delayed"),
    "native",
    _NATIVE,
    DELAYED_OPTIONS | EXPERT_OPTIONS,
    "delayed scaling per tensor: e4m3 operands, e5m2 output gradient",
)
_NANOO = RecipeRow(
    _per_tensor("nanoo_fp8", "float8_e4m3fnuz", "float8_e5m2fnuz", "delayed"),
    "native",
    _NATIVE,
    DELAYED_OPTIONS | EXPERT_OPTIONS,
    "delayed scaling per tensor in AMD MI300's e4m3fnuz and e5m2fnuz",
)
_FP4 = RecipeRow(_same("fp4", "float4_e2m1fn"), "qwix", _QWIX, SHARD_OPTIONS, "e2m1 everywhere, dynamic per channel")
_CURRENT = RecipeRow(
    _per_tensor("fp8_current", "float8_e4m3fn", "float8_e5m2", "dynamic"),
    "native",
    _NATIVE,
    EXPERT_OPTIONS,
    "this step's amax per tensor: e4m3 operands, e5m2 output gradient",
)

_MXFP8 = RecipeRow(
    _microscaling("mxfp8", "float8_e4m3fn", 32),
    "native",
    _NATIVE,
    frozenset(),
    "e4m3 everywhere in tiles of 32 with power-of-two scales (OCP MX)",
)

RECIPES: dict[str, RecipeRow] = {
    "": RecipeRow(None, "", (), frozenset(), "no quantization"),
    "int8": RecipeRow(
        _INT8, "aqt", _ALL, SHARD_OPTIONS | SCALE_OPTIONS, "int8 per channel, stochastic output gradient"
    ),
    "int4": RecipeRow(
        _same("int4", "int4", "int32"), "qwix", _QWIX, SHARD_OPTIONS, "int4 weights, activations and gradients"
    ),
    "intmp": RecipeRow(
        None, "aqt", _AQT, FILE_OPTIONS | SCALE_OPTIONS, "mixed precision by layer from quant_cfg_path, forward only"
    ),
    "fp8": _FP8,
    "fp8_gpu": _FP8,
    "te_fp8_delayedscaling": _FP8,
    "nanoo_fp8": _NANOO,
    "fp8_nanoo": _NANOO,
    "fp8_full": RecipeRow(
        _FP8_FULL,
        "qwix",
        _QWIX,
        CALIBRATION_OPTIONS | SPARSITY_OPTIONS,
        "e4m3 operands, e5m2 gradients, calibration strings, N:M weight sparsity",
    ),
    "fp8_e4m3": RecipeRow(
        _same("fp8_e4m3", "float8_e4m3fn"), "qwix", _QWIX, SHARD_OPTIONS, "e4m3 everywhere, dynamic per channel"
    ),
    "fp8_e5m2": RecipeRow(
        _same("fp8_e5m2", "float8_e5m2"), "qwix", _QWIX, SHARD_OPTIONS, "e5m2 everywhere, dynamic per channel"
    ),
    "fp4": _FP4,
    "fp4_e2m1": _FP4,
    "aqt_fp8": RecipeRow(_AQT_FP8, "aqt", _AQT, SCALE_OPTIONS, "e4m3 forward, float backward, bf16 accumulation"),
    "aqt_fp8_full": RecipeRow(
        _AQT_FP8_FULL,
        "aqt",
        _AQT,
        BOUND_OPTIONS | EXPERT_OPTIONS | SCALE_OPTIONS,
        "e4m3 forward, e5m2 on both backward operands, bf16 accumulation, constant bounds",
    ),
    "fp8_current": _CURRENT,
    "te_fp8_currentscaling": _CURRENT,
    "fp8_block": RecipeRow(
        _FP8_BLOCK,
        "native",
        _NATIVE,
        frozenset(),
        "e4m3 everywhere: tiles of 128 of activations and gradients, blocks of 128 by 128 of weights",
    ),
    "mxfp8": _MXFP8,
    "te_mxfp8": _MXFP8,
    "mxfp4": RecipeRow(
        _microscaling("mxfp4", "float4_e2m1fn", 32),
        "native",
        _NATIVE,
        frozenset(),
        "e2m1 everywhere in tiles of 32 with power-of-two scales (OCP MX)",
    ),
    "int8_delayed": RecipeRow(
        _INT8_DELAYED,
        "native",
        _NATIVE,
        DELAYED_OPTIONS | EXPERT_OPTIONS,
        "int8 for TPUs: delayed scaling of operands, this step's amax and stochastic rounding of the output gradient",
    ),
    "int8w": RecipeRow(
        _weight_only("int8w", "int8"), "native", _NATIVE, frozenset(), "int8 weights only, straight-through gradient"
    ),
    "int4w": RecipeRow(
        _weight_only("int4w", "int4"), "native", _NATIVE, frozenset(), "int4 weights only, straight-through gradient"
    ),
    "ggml_q4_0": _encoded("q4_0", "int4"),
    "ggml_q8_0": _encoded("q8_0", "int8"),
    "ggml_q4_k": _encoded("q4_k", "int4"),
    "ggml_q5_k": _encoded("q5_k", "int8"),
    "ggml_q6_k": _encoded("q6_k", "int8"),
}
"""Every config string that runs."""

REFUSED: dict[str, str] = {
    "nvfp4": "mxfp4",
    "te_nvfp4": "mxfp4",
    "te_nvfp4_no_rht": "mxfp4",
}
"""Config strings that train in NVFP4, known but not implemented, and the string that comes closest."""


def lookup(name: str, place: str = "quantization") -> RecipeRow:
    """Find the row of a config string.

    Args:
      name: the string.
      place: where the user wrote it, for errors.

    Raises:
      TypeError: no string.
      ValueError: unknown string; names the nearest known ones.
      NotImplementedError: a string that trains in NVFP4.
    """
    if not isinstance(name, str):
        raise TypeError(f"{place} must be a string, got {show(name)} ({type(name).__name__})")
    if name in REFUSED:
        raise NotImplementedError(
            f"{place} {name!r} trains in NVFP4, which is not implemented; the closest is {REFUSED[name]!r}"
        )
    if name not in RECIPES:
        raise ValueError(f"{place} {show(name)} is not a known recipe; {nearest(name, (*RECIPES, *REFUSED), 3)}")
    return RECIPES[name]


def check_backend(name: str, backend: str, place: str = "quantization", wrote: str = "") -> None:
    """Refuse a pair of config string and backend that is not in the table.

    Args:
      name: the string.
      backend: the backend.
      place: where the user wrote the string, for errors.
      wrote: how the user wrote the backend, for errors; ``quant_backend '...'`` if empty.

    Raises:
      ValueError: names both and what would do.
    """
    row = lookup(name, place)
    if backend in row.backends:
        return
    offers = [f"quant_backend {' or '.join(repr(known) for known in ('auto', *row.backends))}"]
    if backend == "qwix" and row is RECIPES["fp8"]:
        offers.insert(0, "'fp8_e4m3', which is the recipe that MaxText runs for 'fp8' on Qwix,")
    raise ValueError(
        f"{place} {name!r} does not run on {wrote or f'quant_backend {backend!r}'}; use {' or '.join(offers)}"
    )


def strings_reading(option: str) -> list[str]:
    """Return the config strings that read an option."""
    return [name for name, row in RECIPES.items() if option in row.fields]
