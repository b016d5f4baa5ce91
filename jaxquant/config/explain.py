"""Descriptions of recipes for users, derived from the recipe dataclasses; no text is specific to one config string."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from jaxquant.config.options import Options
from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.recipes import RECIPES, RecipeRow, lookup, spell
from jaxquant.core.calibration import METHODS
from jaxquant.core.dtypes import ELEMENTS, Element, element
from jaxquant.core.quant_state import TENSORS
from jaxquant.core.recipe import FORWARD, DelayedSpec, Matmul, MatmulSpec, Operand, Recipe, Side
from jaxquant.core.tensor_spec import Micro, TensorSpec
from jaxquant.kernels.block_matmul.reference import BLOCK
from jaxquant.ops.implementation import (
    BLOCKS_PAY,
    HOPPER_CASTS_PAY,
    INT8_PAYS,
    STORED_CASTS_PAY,
    TPU_CASTS_PAY,
)
from jaxquant.terminal import table

MATMULS = {
    "fwd": ("the forward matmul, input · weight", ("input", "weight")),
    "dlhs": ("the input's gradient, output gradient · weight", ("output gradient", "weight")),
    "drhs": ("the weight's gradient, input · output gradient", ("input", "output gradient")),
}
"""Description of each matmul and names of its operands."""

LEAN_ARITHMETIC = (
    "Arithmetic: a bfloat16 operand is divided by its scale rounded to bfloat16, and the quotient is rounded to "
    "bfloat16, before it is rounded to the element; other operands are divided in float32. The product of two scales "
    "is rounded to the dtype that the matmul returns (docs/guide/delayed.md lists every rounding)."
)
"""Text about the roundings of recipes that compute in the operands' dtype."""

_ROWS = {
    "row": "does not depend on other rows of the batch",
    "batch": "depends on other rows of the batch, which share its scale",
    "history": "depends on the amax history (a constant in a converted model), and in the first step on other rows",
}
"""Description of each value of ``Recipe.row_dependence``."""


def names_of(row: RecipeRow) -> list[str]:
    """Return the config strings of a row, starting with its own name."""
    return [name for name, other in RECIPES.items() if other is row]


def strings() -> str:
    """Format a table of all config strings: operand dtypes of the three matmuls, and supported backends."""
    lines = [("quantization", *MATMULS, "auto", "also on")]
    for row in dict.fromkeys(RECIPES.values()):
        names = ", ".join(name or '""' for name in names_of(row))
        dtypes = [_format_dtypes(row.recipe, matmul) for matmul in MATMULS]
        if "quant_cfg_path" in row.fields:
            dtypes[0] = "from quant_cfg_path"
        lines.append((names, *dtypes, row.auto or "-", ", ".join(row.backends[1:]) or "-"))
    return table(lines)


def _format_dtypes(recipe: Recipe | None, matmul: Any) -> str:
    specs = [recipe and recipe.resolve(matmul, side) for side in get_args(Side)]
    if not any(specs):
        return "float"
    return " × ".join(ELEMENTS[spec.dtype].short if spec else "float" for spec in specs)


def explain(string: str | Mapping[str, str | None], options: Mapping[str, Any] | None = None) -> str:
    """Describe a config string: the operands of its three matmuls, residuals, backends and options.

    Args:
      string: key of ``RECIPES``, or a composition of keys.
      options: values of other fields of ``QuantConfig``; the rest have their defaults.

    Raises:
      ValueError, TypeError, NotImplementedError: raised by ``QuantConfig``.
    """
    name: str = spell(string)
    row = lookup(name)
    recipe = row.recipe
    if options and "quantization" in options:
        raise ValueError(
            f"explain describes one config string, got {name!r} and quantization {options['quantization']!r}; "
            "remove one of the two"
        )
    if options:
        recipe = QuantConfig.from_any({"quantization": name, **options}).recipe()
    lines = [f"{name or 'no string'}: {row.summary}"]
    others = [other for other in names_of(row) if other != name]
    if others:
        lines.append(f"The same recipe: {', '.join(others)}.")
    if row.auto:
        also = f"; also on {' and '.join(row.backends[1:])}" if row.backends[1:] else ""
        lines.append(f"Backend: {row.auto}{also}.")
    lines += ["", *(_describe_recipe(recipe) if recipe else ["The config string has no fixed recipe."])]
    fields = {field.name: field.default for field in dataclasses.fields(Options) if field.name in row.fields}
    if fields:
        lines += ["", "Options, with their defaults:"]
        lines += [f"  {field}: {json.dumps(default)}" for field, default in fields.items()]
    return "\n".join(lines)


def _describe_recipe(recipe: Recipe) -> Iterator[str]:
    for name, (about, sides) in MATMULS.items():
        spec: MatmulSpec = getattr(recipe, name)
        yield f"{name}: {about}"
        for side, tensor in zip(("lhs", "rhs"), sides, strict=True):
            forward = recipe.resolve(name, side)  # pyright: ignore[reportArgumentType]
            other = getattr(spec, "lhs" if side == "rhs" else "rhs")
            yield f"  {tensor}: {describe_operand(getattr(spec, side), forward, other is not None)}"
        yield f"  {describe_matmul(spec)}"
    specs = [spec for spec in recipe.specs.values() if isinstance(spec, TensorSpec)]
    used = dict.fromkeys(spec.dtype for spec in specs if spec.codec is None)  # a tensor format has its own scales
    if poisoned := poisoned_tensors(recipe):
        yield f"One NaN makes every element NaN in: {', '.join(poisoned)} (one scale covers the tensor)."
    yield describe_rows(recipe)
    if used:
        yield ""
        yield from (describe_element(element(name)) for name in used)
    of_input, of_weight = describe_residual(recipe, "lhs"), describe_residual(recipe, "rhs")
    yield f"Kept for the backward pass: the input {of_input}, the weight {of_weight}."
    if recipe.delayed:
        yield describe_delayed(recipe.delayed)
    if sparsity := recipe.sparsity:
        yield (
            f"Sparsity: {sparsity.n} of every {sparsity.m} weights along the contraction are kept, from step "
            f"{sparsity.start_step} on; they are selected again every {sparsity.update_step} steps."
        )
    if recipe.is_lean or any(recipe.for_matmul(matmul).is_lean for matmul in ("dlhs", "drhs")):
        yield LEAN_ARITHMETIC
    yield from describe_kernels(recipe)
    if recipe.shares_experts:
        yield "The experts of one weight share per-tensor scales and their state."


def describe_rows(recipe: Recipe) -> str:
    """Describe whether the forward matmul is batch invariant, and the reasons."""
    verdict, sums = "Not batch invariant", "float, so they depend on the order of addition"
    if (size := recipe.exact_contraction_size) is not None:
        sums = f"exact in any order for up to {size:,} contracted elements (dense matmuls split a longer sum)"
    if recipe.is_batch_invariant:
        verdict = "Batch invariant on native"
    return f"{verdict}: a row of the forward result {_ROWS[recipe.row_dependence]}. Its sums are {sums}."


def poisoned_tensors(recipe: Recipe) -> list[str]:
    """Return the names of the tensors that become all NaN if one element is NaN."""
    named = zip(("input", "weight", "output gradient"), TENSORS.values(), strict=True)
    return [name for name, places in named if any(getattr(recipe.specs[each], "spreads_nan", False) for each in places)]


def describe_kernels(recipe: Recipe) -> Iterator[str]:
    """Yield a description of the kernels that the native backend selects on each chip by default."""
    pairs = [[recipe.resolve(name, side) for side in get_args(Side)] for name in get_args(Matmul)]
    low = [[spec for spec in pair if spec and spec.codec is None] for pair in pairs]
    low = [pair for pair in low if len(pair) == 2]
    is_tiled = [all(spec.tile_size and spec.dtype.startswith("float8") for spec in pair) for pair in low]
    picked = []
    if any([spec.dtype for spec in pair] == ["int8", "int8"] for pair in low):
        picked.append(f"int8 matmuls on Hopper GPUs ({INT8_PAYS})")
    if any(tiled and pair[0].tile_size == BLOCK for tiled, pair in zip(is_tiled, low, strict=True)):
        picked.append(f"matmuls of blocks on Hopper GPUs ({BLOCKS_PAY})")
    if any(is_tiled):
        picked.append(f"casts of blocks on TPUs ({TPU_CASTS_PAY}) and on Hopper GPUs ({HOPPER_CASTS_PAY})")
    if recipe.delayed is not None and not recipe.matches_flax:
        picked.append(f"casts of tensors in memory on Hopper GPUs ({STORED_CASTS_PAY})")
    if picked:
        yield f"Kernels of quant_backend native: {'; '.join(picked)}. `implementation: xla` disables them."


def describe_residual(recipe: Recipe, side: Side) -> str:
    """Return a description of the residual of a forward operand."""
    kind = recipe.residual_kind(side)
    if kind == "own":
        return f"as the {'weight' if side == 'lhs' else 'input'}'s gradient reads it"
    return "as the forward matmul reads it" if kind == "forward" and recipe.resolve("fwd", side) else "in float"


def describe_matmul(spec: MatmulSpec) -> str:
    """Describe the accumulator of a matmul, the blocks of its contraction and the rotation."""
    into = f"accumulates in {spec.accumulator}" if spec.accumulator else "accumulates in the dtype of its result"
    into = f"{spec.arithmetic} arithmetic, {into}" if spec.arithmetic else into
    count = "one block for each device that shares it" if spec.shards < 0 else f"{spec.shards} blocks"
    shards = "" if spec.shards == 1 else f"; the first contraction axis is split into {count}, each with its own scales"
    if spec.rotation is None:
        return into + shards
    signs = "TransformerEngine's signs" if spec.rotation.signs == "fixed" else "fresh signs in every step"
    return f"{into}; both operands rotated in runs of {spec.rotation.size} (Hadamard, {signs})"


def describe_operand(operand: Operand, forward: TensorSpec | None = None, other_is_quantized: bool = True) -> str:
    """Return a description of one operand of a matmul.

    Args:
      operand: operand of a recipe's matmul.
      forward: spec of the forward operand, if the operand reuses it.
      other_is_quantized: whether the other operand of the matmul is quantized.
    """
    if operand is None:
        return "float"
    if operand == FORWARD:
        if forward is None:
            return "float, as in the forward matmul"
        is_folded = forward.granularity == "per_channel" and forward.codec is None
        before = " before that operand is quantized" if other_is_quantized else ""
        folded = f"; its scales are multiplied into the other operand{before}" if is_folded else ""
        return f"as quantized for the forward matmul{folded}"
    assert isinstance(operand, TensorSpec)
    if operand.codec is not None:
        return f"in the GGML tensor format {operand.codec}, with its blocks and scales"
    return ", ".join([operand.dtype, _describe_sharing(operand), _describe_scale(operand), *_describe_details(operand)])


def _describe_sharing(spec: TensorSpec) -> str:
    sharing = {
        "per_tensor": "one scale for the tensor",
        "per_channel": "one scale for each row along the contraction",
        "per_tile": f"one scale for {spec.tile_size} neighbours along the contraction",
        "per_block": f"one scale for a block of {spec.tile_size} along the contraction by {spec.free_size} across it",
    }[spec.granularity]
    return sharing + (", the tile along each contraction axis" if spec.tiling == "each_axis" else "")


def _describe_scale(spec: TensorSpec) -> str:
    calibration = spec.calibration
    if spec.scaling == "delayed":
        return "from the amax history of past steps"
    if spec.scaling == "static":
        return "from a scale stored in the model"
    if calibration.method == "fixed":
        return f"from the fixed range {calibration.minimum:g} to {calibration.maximum:g}"
    times = "" if calibration.factor == 1 else f"{calibration.factor:g} times "
    return f"from {times}this step's {METHODS[calibration.method].description}"


_DIRECTION = {"up": "up", "nearest": "to nearest"}


def _describe_details(spec: TensorSpec) -> Iterator[str]:
    """Yield a description of each field that is not at its default."""
    if spec.amax_bound is not None:
        yield f"at most {spec.amax_bound:g}"
    if spec.scale_dtype == "float8_e8m0fnu":
        yield f"with a power-of-two scale (8 bits, rounded {_DIRECTION[spec.scale_rounding]})"
    elif spec.scale_dtype != "float32":
        yield f"with the scale in {spec.scale_dtype} (rounded {_DIRECTION[spec.scale_rounding]})"
    elif spec.scale_rounding != "exact":
        yield f"with the scale rounded {_DIRECTION[spec.scale_rounding]} to a power of two"
    if spec.outer_scale:
        yield "with a second float32 scale for the tensor"
    if spec.micro is not None:
        yield from _describe_micro(spec.micro)
    if spec.has_grid_scale:
        yield f"on native with a scale of {element(spec.dtype).scale_bits} bits, to keep the codes of decoded values"
    if spec.source == "forward":
        yield "quantized from the operand of the forward matmul"
    yield "rounded to nearest" if spec.rounding == "nearest" else "rounded stochastically"
    if spec.reciprocal:
        yield "multiplied by 1/scale"


def _describe_micro(micro: Micro) -> Iterator[str]:
    if micro.four_over_six:
        yield "the largest value of a block at 4 or 6, whichever has the smaller error"
    if micro.scale_bound != 448:
        yield f"the largest scale at {micro.scale_bound:g}"
    if micro.headroom != 1:
        yield f"the largest value of a block at 6 / {micro.headroom:.4g}"
    if micro.eden:
        yield f"scales corrected in vectors of {micro.eden} and rounded stochastically (EDEN)"


def describe_element(known: Element) -> str:
    """Return a description of an element type."""
    inside = (
        f"magnitudes up to {known.max:g}"
        if known.kind == "int"
        else f"{known.mantissa_bits} mantissa bits, normal from 2^{known.min_exponent}, largest {known.max:g}"
    )
    of_weight = f" (for a weight on native / {known.max:g})" if known.max != known.bound else ""
    zero = f"1/{2 * known.bound / 2.0 ** (known.min_exponent - known.mantissa_bits):,.0f} of the statistic rounds to 0"
    return (
        f"{known.name}: {known.bits} bits, {inside}; a scale is the statistic / {known.bound:g}{of_weight}, and {zero}."
    )


def describe_delayed(spec: DelayedSpec) -> str:
    """Describe delayed scaling."""
    first = {
        "warmup": "a tensor without history is scaled by its own amax; an amax that is not finite is not recorded",
        "flax": "the first step has scale 1, as in flax's own fp8",
    }[spec.amax_init]
    margin = f", times 2^{spec.margin}" if spec.margin else ""
    return f"Delayed scaling: the largest amax of the last {spec.amax_history_length} steps{margin}; {first}."
