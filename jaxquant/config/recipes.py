"""The table of config strings: the numbers of each, the backends that run it, the options that it reads.

An alias shares the row of the string that it stands for. A composition takes each of the three matmuls from the row of
another string; its own string is its mapping as text, ``{fwd: fp8_current, dlhs: quartet2, drhs: null}``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxquant.config.backends import BACKENDS
from jaxquant.config.composition import compose
from jaxquant.config.loader import parse
from jaxquant.config.options import CALIBRATION, GROUPS, PROBE, Options, apply
from jaxquant.core.recipe import FORWARD, DelayedSpec, MatmulSpec, Recipe, Rotation
from jaxquant.core.tensor_spec import Micro, TensorSpec, keeping_grid
from jaxquant.core.typed import build, nearest, show


@dataclasses.dataclass(frozen=True, slots=True)
class RecipeRow:
    """One config string.

    Attributes:
      recipe: its numbers with every option at its default (one shard where the option says "device count"); None
        where there are none (``""``) or where they come from a file (``intmp``).
      summary: one line for a reader.
      libraries: the libraries whose backends run it; those of our own run every string.
      auto: the backend that ``quant_backend: auto`` means, "" for none.
      options: the groups of options that it reads, by their names in ``GROUPS``.
      parts: of a composition, the row of each matmul, None for a float one.
    """

    recipe: Recipe | None
    summary: str
    libraries: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    parts: tuple[RecipeRow | None, ...] = ()
    auto: str = "native"

    @property
    def backends(self) -> tuple[str, ...]:
        """Every backend that runs it, ``auto`` first."""
        found = [name for name, row in BACKENDS.items() if not row.package] if self.auto else []
        return tuple(sorted((*found, *self.libraries), key=lambda name: name != self.auto))

    @property
    def fields(self) -> frozenset[str]:
        """Names of the QuantConfig fields that it reads."""
        return frozenset(field.name for field in dataclasses.fields(Options) if field.metadata["group"] in self.options)

    def numbers(self, options: Options) -> Recipe | None:
        """Return the recipe as the options that it reads make it: ``options.apply``, of a composition on each part."""
        if not self.parts:
            return apply(self.recipe, self.options, options)
        assert self.recipe is not None
        return compose(self.recipe.name, [part and part.numbers(options) for part in self.parts])


def _reusing(name: str, spec: TensorSpec, grad: TensorSpec, accumulator: str | None = None, **rest: Any) -> Recipe:
    """Quantize activation and weight once, forward, and the output gradient once for each backward matmul."""
    return Recipe(
        name,
        fwd=MatmulSpec(spec, keeping_grid(spec), accumulator),
        dlhs=MatmulSpec(grad, FORWARD, accumulator),
        drhs=MatmulSpec(FORWARD, grad, accumulator),
        delayed=DelayedSpec() if spec.scaling == "delayed" else None,
        **rest,
    )


def _same(name: str, dtype: str, accumulator: str | None = None) -> Recipe:
    """One dtype for weights, activations and gradients."""
    return _reusing(name, TensorSpec(dtype), TensorSpec(dtype), accumulator)


def _per_tensor(name: str, dtype: str, grad_dtype: str, scaling: Literal["dynamic", "delayed"]) -> Recipe:
    spec, grad = (TensorSpec(each, "per_tensor", scaling=scaling) for each in (dtype, grad_dtype))
    return _reusing(name, spec, grad, arithmetic="lean")


def _weight_only(name: str, spec: TensorSpec) -> Recipe:
    """Quantized weight forward and in dlhs; its own gradient passes straight through the rounding."""
    return Recipe(name, fwd=MatmulSpec(None, keeping_grid(spec)), dlhs=MatmulSpec(None, FORWARD))


def _encoded(codec: str, dtype: str) -> RecipeRow:
    """Weights as a tensor format has them, encoded and decoded in the forward pass."""
    summary = f"weights only, in GGML's {codec.upper()} as llama.cpp has them, straight-through gradient"
    return RecipeRow(_weight_only(f"ggml_{codec}", TensorSpec(dtype, codec=codec)), summary)


def _everywhere(name: str, forward: TensorSpec, backward: TensorSpec, accumulator: str) -> Recipe:
    """Quantize all six operands for themselves, nothing reused."""
    grad = MatmulSpec(backward, backward, accumulator)
    return Recipe(name, fwd=MatmulSpec(forward, keeping_grid(forward), accumulator), dlhs=grad, drhs=grad)


def _mx(dtype: str) -> TensorSpec:
    """Tiles of 32 along the contraction, with scales that are powers of two."""
    return TensorSpec(dtype, "per_tile", tile_size=32, scale_dtype="float8_e8m0fnu", scale_rounding="up")


def _microscaling(name: str, dtype: str) -> Recipe:
    """Quantize each operand in tiles along its own contraction."""
    return _everywhere(name, _mx(dtype), _mx(dtype), "float32")


# AQT multiplies by 1/scale and rounds the gradient alone stochastically.
_INT8 = _reusing(
    "int8", TensorSpec("int8", reciprocal=True), TensorSpec("int8", rounding="stochastic", reciprocal=True), "int32"
)
# For TPUs: scales that are known before the step, one cast of the gradient for both backward matmuls.
_INT8_DELAYED = _reusing(
    "int8_delayed",
    TensorSpec("int8", "per_tensor", scaling="delayed"),
    TensorSpec("int8", "per_tensor", rounding="stochastic"),
    "int32",
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
_BLOCK_TILE = TensorSpec("float8_e4m3fn", "per_tile", tile_size=128)
_BLOCK_WEIGHT = TensorSpec("float8_e4m3fn", "per_block", tile_size=128, free_size=128)
# The weight's blocks tile either contraction; the activation is tiled along the tokens for its own gradient.
_FP8_BLOCK = Recipe(
    "fp8_block",
    fwd=MatmulSpec(_BLOCK_TILE, _BLOCK_WEIGHT, "float32"),
    dlhs=MatmulSpec(_BLOCK_TILE, FORWARD, "float32"),
    drhs=MatmulSpec(_BLOCK_TILE, _BLOCK_TILE, "float32"),
)


def _nvfp4(**changes: Any) -> TensorSpec:
    spec = TensorSpec("float4_e2m1fn", "per_tile", tile_size=16, scale_dtype="float8_e4m3fn", scale_rounding="nearest")
    return dataclasses.replace(spec, outer_scale=True, **{"micro": Micro(), **changes})


# As TransformerEngine: blocks of 16 by 16 serve both matmuls of the weight; its gradient's operands are rotated.
_TE_TILE = _nvfp4(reciprocal=True)
_TE_GRAD = _nvfp4(reciprocal=True, rounding="stochastic")
_NVFP4 = Recipe(
    "nvfp4",
    fwd=MatmulSpec(_TE_TILE, _nvfp4(reciprocal=True, granularity="per_block", free_size=16), "float32"),
    dlhs=MatmulSpec(_TE_GRAD, FORWARD, "float32"),
    drhs=MatmulSpec(_TE_TILE, _TE_GRAD, "float32", rotation=Rotation(16)),
)
_NVFP4_NO_RHT = dataclasses.replace(
    _NVFP4, name="te_nvfp4_no_rht", drhs=dataclasses.replace(_NVFP4.drhs, rotation=None)
)


def _requantized(name: str, size: int, rounding: str, micro: Micro) -> Recipe:
    """Rotate both operands of both backward matmuls with fresh signs and round them without bias."""
    spec, grad = (_nvfp4(rounding=rounding, micro=micro, source=source) for source in ("forward", "original"))
    rotation = Rotation(size, "fresh")
    return Recipe(
        name,
        fwd=MatmulSpec(_nvfp4(), _nvfp4(), "float32"),
        dlhs=MatmulSpec(grad, spec, "float32", rotation=rotation),
        drhs=MatmulSpec(spec, grad, "float32", rotation=rotation),
    )


_QUARTET2 = _requantized("quartet2", 128, "nearest", Micro(17 / 16 * 0.93, 255.99, eden=128))
_TETRAJET_V2 = _requantized("tetrajet_v2", 32, "stochastic", Micro(17 / 16))

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
        _per_tensor("fp8", "float8_e4m3fn", "float8_e5m2", "delayed"),
        "delayed scaling per tensor: e4m3 operands, e5m2 output gradient",
        options=_DELAYED,
    ),
    "nanoo_fp8": RecipeRow(
        _per_tensor("nanoo_fp8", "float8_e4m3fnuz", "float8_e5m2fnuz", "delayed"),
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
        _per_tensor("fp8_current", "float8_e4m3fn", "float8_e5m2", "dynamic"),
        "this step's amax per tensor: e4m3 operands, e5m2 output gradient",
        options=("experts",),
    ),
    "fp8_block": RecipeRow(
        _FP8_BLOCK,
        "e4m3 everywhere: tiles of 128 of activations and gradients, blocks of 128 by 128 of weights",
        options=(*CALIBRATION, "scale format", "activation bound"),
    ),
    "mxfp8": RecipeRow(
        _microscaling("mxfp8", "float8_e4m3fn"),
        "e4m3 everywhere in tiles of 32 with power-of-two scales (OCP MX)",
        options=("activation bound", "square blocks"),
    ),
    "mxfp4": RecipeRow(
        _microscaling("mxfp4", "float4_e2m1fn"), "e2m1 everywhere in tiles of 32 with power-of-two scales (OCP MX)"
    ),
    "nvfp4": RecipeRow(
        _NVFP4,
        "NVFP4 as TransformerEngine trains: weights 16 by 16, gradients stochastic, rotated for the weight's",
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
    "int8w": RecipeRow(_weight_only("int8w", TensorSpec("int8")), "int8 weights only, straight-through gradient"),
    "int4w": RecipeRow(_weight_only("int4w", TensorSpec("int4")), "int4 weights only, straight-through gradient"),
    "mxfp4w": RecipeRow(
        _weight_only("mxfp4w", _mx("float4_e2m1fn")), "weights only, MXFP4 as gpt-oss has it, straight-through gradient"
    ),
    "nvfp4w": RecipeRow(
        _weight_only("nvfp4w", _nvfp4(micro=None)),
        "weights only, NVFP4 as checkpoints have it, straight-through gradient",
    ),
    "fp8_blockw": RecipeRow(
        _weight_only("fp8_blockw", _BLOCK_WEIGHT),
        "weights only, e4m3 in blocks of 128 by 128 as DeepSeek has them, straight-through gradient",
    ),
    "ggml_q4_0": _encoded("q4_0", "int4"),
    "ggml_q8_0": _encoded("q8_0", "int8"),
    "ggml_q4_k": _encoded("q4_k", "int4"),
    "ggml_q5_k": _encoded("q5_k", "int8"),
    "ggml_q6_k": _encoded("q6_k", "int8"),
}
"""Every config string that runs."""

_ALIASES = {
    "fp8_gpu": "fp8",
    "te_fp8_delayedscaling": "fp8",
    "fp8_nanoo": "nanoo_fp8",
    "fp4_e2m1": "fp4",
    "te_fp8_currentscaling": "fp8_current",
    "te_mxfp8": "mxfp8",
    "te_nvfp4": "nvfp4",
}
_MAXTEXTS_OWN = {
    "te_no_quant": "is MaxText's name of TransformerEngine's float matmuls; leave it empty",
    "serve_fp8_weight": "serves fp8 weights in MaxText's own layers; keep MaxText's own module of quantization for it",
}
RECIPES |= {alias: RECIPES[name] for alias, name in _ALIASES.items()}


@dataclasses.dataclass(frozen=True)
class Composition:
    """The three matmuls, each by the config string that it is taken from; None is float."""

    fwd: str | None
    dlhs: str | None = None
    drhs: str | None = None

    def __str__(self) -> str:
        parts = (f"{matmul}: {string or 'null'}" for matmul, string in dataclasses.asdict(self).items())
        return f"{{{', '.join(parts)}}}"


def spell(recipe: Any, place: str = "quantization") -> Any:
    """Return a composition as its config string, whether it came as a mapping or as text; all else as it is.

    Raises:
      ValueError, TypeError: another key than ``fwd``, ``dlhs`` and ``drhs``, ``fwd`` left out, or no string behind one.
    """
    if isinstance(recipe, str) and recipe.lstrip().startswith("{"):
        recipe = parse(recipe, place)
    return str(build(Composition, recipe, place)) if isinstance(recipe, Mapping) else recipe


@functools.lru_cache(maxsize=256)
def _composition(name: str, place: str) -> RecipeRow:
    """Return the row of a composition."""
    strings = build(Composition, parse(name, place), place)
    rows: dict[str, RecipeRow | None] = {}
    for matmul, string in dataclasses.asdict(strings).items():
        rows[matmul] = lookup(string, f"{place}.{matmul}") if string else None
        if string and RECIPES[string].recipe is None:
            raise ValueError(f"{place}.{matmul} {string!r} has no numbers of its own; name another string, or null")
    parts = tuple(rows.values())
    if not any(parts):
        raise ValueError(f"{place} {name} quantizes nothing; name a string, or leave {place} empty")
    alike = parts[0] if parts[0] and len(set(map(id, parts))) == 1 else RecipeRow(None, "")
    summary = "each matmul from the row that it names, its operands quantized from the tensors themselves"
    recipe = compose(name, [row and row.recipe for row in parts])
    options = tuple(group for group in GROUPS if _reads(recipe, parts, group))
    return RecipeRow(recipe, summary, alike.libraries, options, parts, alike.auto)


def _reads(composed: Recipe, parts: Sequence[RecipeRow | None], group: str) -> bool:
    """Return whether a group of options changes a composition, through a row of it that reads the group."""
    if GROUPS[group].change is None:  # stored scales, those of the forward's weight
        return parts[0] is not None and group in parts[0].options
    probed = [row and apply(row.recipe, {group}.intersection(row.options), PROBE) for row in parts]
    return compose(composed.name, probed) != composed


_FLOAT = ("none", "null", "float", "off", "bf16", "bfloat16", "float32")
"""Words that mean no quantization elsewhere."""


def lookup(name: str, place: str = "quantization") -> RecipeRow:
    """Find the row of a config string.

    Args:
      name: the string; of a composition as ``spell`` writes it.
      place: where the user wrote it, for errors.

    Raises:
      TypeError: no string.
      ValueError: unknown string; names the nearest known ones. A composition that quantizes nothing, or of rows that do
        not go together.
      NotImplementedError: a composition with a weight in a tensor format in a backward matmul alone; a string that only
        MaxText's own module can run.
    """
    if not isinstance(name, str):
        raise TypeError(f"{place} must be a string, got {show(name)} ({type(name).__name__})")
    if name.startswith("{"):
        return _composition(name, place)
    if name in _MAXTEXTS_OWN:
        raise NotImplementedError(f"{place} {name!r} {_MAXTEXTS_OWN[name]}")
    if name not in RECIPES:
        near = f"{nearest(name, RECIPES, 3, 0.4, '')} 'python -m jaxquant strings' lists all".lstrip()
        fix = 'write null (in Python, "") for float' if name.lower() in _FLOAT else near
        raise ValueError(f"{place} {show(name)} is not a known recipe; {fix}")
    return RECIPES[name]
