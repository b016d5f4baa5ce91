"""Table of config strings: the recipe of each string, the backends that run it, and the options that it reads.

An alias shares the row of another string. A composition takes each of the three matmuls from the row of another string.
The config string of a composition is a mapping as text: ``{fwd: fp8_current, dlhs: quartet2, drhs: null}``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxquant.config.backends import BACKENDS
from jaxquant.config.composition import compose
from jaxquant.config.loader import parse_yaml
from jaxquant.config.options import CALIBRATION, GROUPS, PROBE, Options, apply_groups
from jaxquant.core.recipe import FORWARD, DelayedSpec, MatmulSpec, Recipe, Rotation
from jaxquant.core.tensor_spec import Micro, TensorSpec, keep_grid
from jaxquant.core.typed import build, nearest, show


@dataclasses.dataclass(frozen=True, slots=True)
class RecipeRow:
    """Recipe, backends and options of one config string.

    Attributes:
      recipe: recipe with every option at its default (one shard if the default is the device count); None for ``""``,
        which does not quantize, and for ``intmp``, whose recipes come from a file.
      summary: description in one line.
      libraries: libraries whose backends run the string; jaxquant's own backends run every string.
      auto: backend that ``quant_backend: auto`` selects, or "".
      options: names of the groups in ``GROUPS`` that the string reads.
      parts: row of each matmul of a composition, or None for a float matmul; empty for other strings.
    """

    recipe: Recipe | None
    summary: str
    libraries: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    parts: tuple[RecipeRow | None, ...] = ()
    auto: str = "native"

    @property
    def backends(self) -> tuple[str, ...]:
        """All backends that run the config string, starting with the backend that ``auto`` selects."""
        found = [name for name, row in BACKENDS.items() if not row.package] if self.auto else []
        return tuple(sorted((*found, *self.libraries), key=lambda name: name != self.auto))

    @property
    def fields(self) -> frozenset[str]:
        """Names of the QuantConfig fields that the config string reads."""
        return frozenset(field.name for field in dataclasses.fields(Options) if field.metadata["group"] in self.options)

    def apply_options(self, options: Options) -> Recipe | None:
        """Return the recipe with the options applied; for a composition, they are applied to each part."""
        if not self.parts:
            return apply_groups(self.recipe, self.options, options)
        assert self.recipe is not None
        return compose(self.recipe.name, [part and part.apply_options(options) for part in self.parts])


def _reusing(name: str, spec: TensorSpec, grad: TensorSpec, accumulator: str | None = None, **rest: Any) -> Recipe:
    """Return a recipe that quantizes activation and weight once, and the output gradient for each backward matmul."""
    return Recipe(
        name,
        fwd=MatmulSpec(spec, keep_grid(spec), accumulator),
        dlhs=MatmulSpec(grad, FORWARD, accumulator),
        drhs=MatmulSpec(FORWARD, grad, accumulator),
        delayed=DelayedSpec() if spec.scaling == "delayed" else None,
        **rest,
    )


def _same(name: str, dtype: str, accumulator: str | None = None) -> Recipe:
    """Return a recipe that uses the same dtype for weights, activations and gradients."""
    return _reusing(name, TensorSpec(dtype), TensorSpec(dtype), accumulator)


def _per_tensor_recipe(name: str, dtype: str, grad_dtype: str, scaling: Literal["dynamic", "delayed"]) -> Recipe:
    spec, grad = (TensorSpec(each, "per_tensor", scaling=scaling) for each in (dtype, grad_dtype))
    return _reusing(name, spec, grad, arithmetic="lean")


def _weight_recipe(name: str, spec: TensorSpec) -> Recipe:
    """Return a recipe that quantizes the weight in forward and dlhs, with a straight-through gradient."""
    return Recipe(name, fwd=MatmulSpec(None, keep_grid(spec)), dlhs=MatmulSpec(None, FORWARD))


def _codec_row(codec: str, dtype: str) -> RecipeRow:
    """Return a row whose weights are encoded in a tensor format and decoded in the forward pass."""
    summary = f"weights only, in GGML's {codec.upper()} as in llama.cpp, straight-through gradient"
    return RecipeRow(_weight_recipe(f"ggml_{codec}", TensorSpec(dtype, codec=codec)), summary)


def _separate_recipe(name: str, forward: TensorSpec, backward: TensorSpec, accumulator: str) -> Recipe:
    """Return a recipe that quantizes all six operands separately, without reusing forward operands."""
    grad = MatmulSpec(backward, backward, accumulator)
    return Recipe(name, fwd=MatmulSpec(forward, keep_grid(forward), accumulator), dlhs=grad, drhs=grad)


def _mx(dtype: str) -> TensorSpec:
    """Return the spec of an operand in tiles of 32 along the contraction, with power-of-two scales."""
    return TensorSpec(dtype, "per_tile", tile_size=32, scale_dtype="float8_e8m0fnu", scale_rounding="up")


def _mx_recipe(name: str, dtype: str) -> Recipe:
    """Return a recipe that quantizes each operand in tiles along its own contraction."""
    return _separate_recipe(name, _mx(dtype), _mx(dtype), "float32")


# AQT multiplies by 1/scale, and rounds only the gradient stochastically.
_INT8 = _reusing(
    "int8", TensorSpec("int8", reciprocal=True), TensorSpec("int8", rounding="stochastic", reciprocal=True), "int32"
)
# For TPUs: the scales are known before the step, and one cast of the gradient serves both backward matmuls.
_INT8_DELAYED = _reusing(
    "int8_delayed",
    TensorSpec("int8", "per_tensor", scaling="delayed"),
    TensorSpec("int8", "per_tensor", rounding="stochastic"),
    "int32",
    arithmetic="lean",
)
_AQT_E4M3 = TensorSpec("float8_e4m3fn", reciprocal=True)
_AQT_FP8 = Recipe("aqt_fp8", fwd=MatmulSpec(_AQT_E4M3, _AQT_E4M3, "bfloat16"))
_AQT_FP8_FULL = _separate_recipe(
    "aqt_fp8_full",
    TensorSpec("float8_e4m3fn", "per_tensor", reciprocal=True),
    TensorSpec("float8_e5m2", "per_tensor", reciprocal=True),
    "bfloat16",
)
_BLOCK_TILE = TensorSpec("float8_e4m3fn", "per_tile", tile_size=128)
_BLOCK_WEIGHT = TensorSpec("float8_e4m3fn", "per_block", tile_size=128, free_size=128)
# The weight's blocks tile both contractions; for the weight gradient, the activation is tiled along the tokens.
_FP8_BLOCK = Recipe(
    "fp8_block",
    fwd=MatmulSpec(_BLOCK_TILE, _BLOCK_WEIGHT, "float32"),
    dlhs=MatmulSpec(_BLOCK_TILE, FORWARD, "float32"),
    drhs=MatmulSpec(_BLOCK_TILE, _BLOCK_TILE, "float32"),
)


def _nvfp4_spec(**changes: Any) -> TensorSpec:
    spec = TensorSpec("float4_e2m1fn", "per_tile", tile_size=16, scale_dtype="float8_e4m3fn", scale_rounding="nearest")
    return dataclasses.replace(spec, outer_scale=True, **{"micro": Micro(), **changes})


# As in TransformerEngine: blocks of 16 by 16 serve both matmuls of the weight; its gradient's operands are rotated.
_TE_TILE = _nvfp4_spec(reciprocal=True)
_TE_GRAD = _nvfp4_spec(reciprocal=True, rounding="stochastic")
_NVFP4 = Recipe(
    "nvfp4",
    fwd=MatmulSpec(_TE_TILE, _nvfp4_spec(reciprocal=True, granularity="per_block", free_size=16), "float32"),
    dlhs=MatmulSpec(_TE_GRAD, FORWARD, "float32"),
    drhs=MatmulSpec(_TE_TILE, _TE_GRAD, "float32", rotation=Rotation(16)),
)
_NVFP4_NO_RHT = dataclasses.replace(
    _NVFP4, name="te_nvfp4_no_rht", drhs=dataclasses.replace(_NVFP4.drhs, rotation=None)
)


def _rotated_recipe(name: str, size: int, rounding: str, micro: Micro) -> Recipe:
    """Return a recipe that rotates all backward operands with fresh signs and rounds them without bias."""
    spec, grad = (_nvfp4_spec(rounding=rounding, micro=micro, source=source) for source in ("forward", "original"))
    rotation = Rotation(size, "fresh")
    return Recipe(
        name,
        fwd=MatmulSpec(_nvfp4_spec(), _nvfp4_spec(), "float32"),
        dlhs=MatmulSpec(grad, spec, "float32", rotation=rotation),
        drhs=MatmulSpec(spec, grad, "float32", rotation=rotation),
    )


_QUARTET2 = _rotated_recipe("quartet2", 128, "nearest", Micro(17 / 16 * 0.93, 255.99, eden=128))
_TETRAJET_V2 = _rotated_recipe("tetrajet_v2", 32, "stochastic", Micro(17 / 16))

_AQT, _QWIX, _AQT_AND_QWIX = ("aqt",), ("qwix",), ("aqt", "qwix")
_DELAYED, _FP4 = ("delayed", "experts"), ("four over six",)

RECIPES: dict[str, RecipeRow] = {
    "": RecipeRow(None, "no quantization", auto=""),
    "int8": RecipeRow(
        _INT8, "int8 per channel, stochastic output gradient", _AQT_AND_QWIX, ("shards", "stored scales")
    ),
    "int4": RecipeRow(_same("int4", "int4", "int32"), "int4 weights, activations and gradients", _QWIX, ("shards",)),
    "intmp": RecipeRow(
        None, "mixed precision by layer from quant_cfg_path, forward only", _AQT, ("file", "stored scales")
    ),
    "fp8": RecipeRow(
        _per_tensor_recipe("fp8", "float8_e4m3fn", "float8_e5m2", "delayed"),
        "delayed scaling per tensor: e4m3 operands, e5m2 output gradient",
        options=_DELAYED,
    ),
    "nanoo_fp8": RecipeRow(
        _per_tensor_recipe("nanoo_fp8", "float8_e4m3fnuz", "float8_e5m2fnuz", "delayed"),
        "delayed scaling per tensor in AMD MI300's e4m3fnuz and e5m2fnuz",
        options=_DELAYED,
    ),
    "fp8_full": RecipeRow(
        _reusing("fp8_full", TensorSpec("float8_e4m3fn"), TensorSpec("float8_e5m2")),
        "e4m3 operands, e5m2 gradients, calibration strings, N:M weight sparsity",
        _QWIX,
        (*CALIBRATION, "sparsity"),
    ),
    "fp8_e4m3": RecipeRow(
        _same("fp8_e4m3", "float8_e4m3fn"), "e4m3 everywhere, dynamic per channel", _QWIX, ("shards",)
    ),
    "fp8_e5m2": RecipeRow(_same("fp8_e5m2", "float8_e5m2"), "e5m2 everywhere, dynamic per channel", _QWIX, ("shards",)),
    "fp4": RecipeRow(_same("fp4", "float4_e2m1fn"), "e2m1 everywhere, dynamic per channel", _QWIX, ("shards",)),
    "aqt_fp8": RecipeRow(
        _AQT_FP8, "e4m3 forward, float backward, bf16 accumulation", _AQT, ("stored scales",), auto="aqt"
    ),
    "aqt_fp8_full": RecipeRow(
        _AQT_FP8_FULL,
        "e4m3 forward, e5m2 on both backward operands, bf16 accumulation, constant bounds",
        _AQT,
        ("bounds", "experts", "stored scales"),
        auto="aqt",
    ),
    "fp8_current": RecipeRow(
        _per_tensor_recipe("fp8_current", "float8_e4m3fn", "float8_e5m2", "dynamic"),
        "this step's amax per tensor: e4m3 operands, e5m2 output gradient",
        options=("experts",),
    ),
    "fp8_block": RecipeRow(
        _FP8_BLOCK,
        "e4m3 everywhere: tiles of 128 of activations and gradients, blocks of 128 by 128 of weights",
        options=(*CALIBRATION, "scale format", "activation bound"),
    ),
    "mxfp8": RecipeRow(
        _mx_recipe("mxfp8", "float8_e4m3fn"),
        "e4m3 everywhere in tiles of 32 with power-of-two scales (OCP MX)",
        options=("activation bound", "square blocks"),
    ),
    "mxfp4": RecipeRow(
        _mx_recipe("mxfp4", "float4_e2m1fn"), "e2m1 everywhere in tiles of 32 with power-of-two scales (OCP MX)"
    ),
    "nvfp4": RecipeRow(
        _NVFP4,
        "NVFP4 as in TransformerEngine: weights in 16 by 16, stochastic gradients, rotation in the weight gradient",
        options=_FP4,
    ),
    "te_nvfp4_no_rht": RecipeRow(_NVFP4_NO_RHT, "nvfp4 without the rotation", options=_FP4),
    "quartet2": RecipeRow(
        _QUARTET2, "NVFP4 forward; backward rotated with fresh signs and rounded by EDEN (Quartet II)", options=_FP4
    ),
    "tetrajet_v2": RecipeRow(
        _TETRAJET_V2,
        "NVFP4 forward; backward rotated with fresh signs and rounded stochastically (TetraJet-v2)",
        options=_FP4,
    ),
    "int8_delayed": RecipeRow(
        _INT8_DELAYED,
        "int8 for TPUs: delayed scaling of operands, this step's amax and stochastic rounding of the output gradient",
        options=_DELAYED,
    ),
    "int8w": RecipeRow(_weight_recipe("int8w", TensorSpec("int8")), "int8 weights only, straight-through gradient"),
    "int4w": RecipeRow(_weight_recipe("int4w", TensorSpec("int4")), "int4 weights only, straight-through gradient"),
    "mxfp4w": RecipeRow(
        _weight_recipe("mxfp4w", _mx("float4_e2m1fn")), "weights only, MXFP4 as in gpt-oss, straight-through gradient"
    ),
    "nvfp4w": RecipeRow(
        _weight_recipe("nvfp4w", _nvfp4_spec(micro=None)),
        "weights only, NVFP4 as in checkpoints, straight-through gradient",
    ),
    "fp8_blockw": RecipeRow(
        _weight_recipe("fp8_blockw", _BLOCK_WEIGHT),
        "weights only, e4m3 in blocks of 128 by 128 as in DeepSeek, straight-through gradient",
    ),
    "ggml_q4_0": _codec_row("q4_0", "int4"),
    "ggml_q8_0": _codec_row("q8_0", "int8"),
    "ggml_q4_k": _codec_row("q4_k", "int4"),
    "ggml_q5_k": _codec_row("q5_k", "int8"),
    "ggml_q6_k": _codec_row("q6_k", "int8"),
}
"""All config strings except the compositions."""

_ALIASES = {
    "fp8_gpu": "fp8",
    "te_fp8_delayedscaling": "fp8",
    "fp8_nanoo": "nanoo_fp8",
    "fp4_e2m1": "fp4",
    "te_fp8_currentscaling": "fp8_current",
    "te_mxfp8": "mxfp8",
    "te_nvfp4": "nvfp4",
}
_MAXTEXT_ONLY = {
    "te_no_quant": "is MaxText's name for TransformerEngine's float matmuls; leave quantization empty",
    "serve_fp8_weight": "runs only in MaxText's own layers; use MaxText's own quantization for this string",
}
RECIPES |= {alias: RECIPES[name] for alias, name in _ALIASES.items()}


@dataclasses.dataclass(frozen=True)
class Composition:
    """Config string of each of the three matmuls; None is float."""

    fwd: str | None
    dlhs: str | None = None
    drhs: str | None = None

    def __str__(self) -> str:
        parts = (f"{matmul}: {string or 'null'}" for matmul, string in dataclasses.asdict(self).items())
        return f"{{{', '.join(parts)}}}"


def spell(recipe: Any, place: str = "quantization") -> Any:
    """Return a composition (mapping or text) as its config string; return any other value unchanged.

    Raises:
      ValueError, TypeError: the composition has an unknown key, no key ``fwd``, or a value that is not a string.
    """
    if isinstance(recipe, str) and recipe.lstrip().startswith("{"):
        recipe = parse_yaml(recipe, place)
    return str(build(Composition, recipe, place)) if isinstance(recipe, Mapping) else recipe


@functools.lru_cache(maxsize=256)
def _composition_row(name: str, place: str) -> RecipeRow:
    """Return the row of a composition."""
    strings = build(Composition, parse_yaml(name, place), place)
    rows: dict[str, RecipeRow | None] = {}
    for matmul, string in dataclasses.asdict(strings).items():
        rows[matmul] = lookup(string, f"{place}.{matmul}") if string else None
        if string and RECIPES[string].recipe is None:
            raise ValueError(f"{place}.{matmul} cannot be {string!r}; use another config string, or null for float")
    parts = tuple(rows.values())
    if not any(parts):
        raise ValueError(f"{place} {name} leaves fwd, dlhs and drhs in float; set one of these, or leave {place} empty")
    alike = parts[0] if parts[0] and len(set(map(id, parts))) == 1 else RecipeRow(None, "")
    summary = "each matmul has the recipe of its own config string, with operands quantized from float tensors"
    recipe = compose(name, [row and row.recipe for row in parts])
    options = tuple(group for group in GROUPS if _reads(recipe, parts, group))
    return RecipeRow(recipe, summary, alike.libraries, options, parts, alike.auto)


def _reads(composed: Recipe, parts: Sequence[RecipeRow | None], group: str) -> bool:
    """Return whether a group of options affects a composition through a row that reads the group."""
    if GROUPS[group].change is None:  # only the forward weight has stored scales
        return parts[0] is not None and group in parts[0].options
    probed = [row and apply_groups(row.recipe, {group}.intersection(row.options), PROBE) for row in parts]
    return compose(composed.name, probed) != composed


_FLOAT_WORDS = ("none", "null", "float", "off", "bf16", "bfloat16", "float32")
"""Words that mean "no quantization" in other tools."""


def lookup(name: str, place: str = "quantization") -> RecipeRow:
    """Find the row of a config string.

    Args:
      name: config string; for a composition, the text that ``spell`` returns.
      place: config field that contains the string, for errors.

    Raises:
      TypeError: the name is not a string.
      ValueError: the string is unknown (the error suggests similar strings), or a composition is not valid.
      NotImplementedError: a backward matmul of a composition has its weight in a tensor format that the forward matmul
        does not use, or only MaxText's own module can run the string.
    """
    if not isinstance(name, str):
        raise TypeError(f"{place} must be a string, got {show(name)} ({type(name).__name__})")
    if name.startswith("{"):
        return _composition_row(name, place)
    if name in _MAXTEXT_ONLY:
        raise NotImplementedError(f"{place} {name!r} {_MAXTEXT_ONLY[name]}")
    if name not in RECIPES:
        suggestion = f"{nearest(name, RECIPES, 3, 0.4, '')} run 'jaxquant strings' to list all recipes".lstrip()
        fix = "write null (in Python: None) for float" if name.lower() in _FLOAT_WORDS else suggestion
        raise ValueError(f"{place} {show(name)} is not a known recipe; {fix}")
    return RECIPES[name]
