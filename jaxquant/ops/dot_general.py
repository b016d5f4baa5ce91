"""dot_general: the one definition of a quantized contraction with its backward pass.

Data flow of a call, for the operands of ``recipe``:

    lhs, rhs ── prepare ──► qvalues ── contract ──► y
        └── kept for backward: one byte an element and the scales (``prepared.py``)
    grad ── fold the residual's per-channel scale in ── quantize ── contract ──► dlhs, drhs
    quant state ── what was seen (``delayed.observe``) ──► leaves as the "gradient" of the state

The cast of an operand, the forward and the backward pass are each a nested jit: a model with many equal layers traces
and lowers them once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float, Key

from jaxquant.core import delayed
from jaxquant.core.dtypes import element
from jaxquant.core.qtensor import ConvertedKernel, QTensor, dequantize
from jaxquant.core.recipe import FORWARD, MatmulSpec, Operand, Recipe, TensorSpec
from jaxquant.core.rounding import Part, content_key, digest, key_of, two_keys
from jaxquant.core.scales import SMALLEST_GRADIENT_SCALE
from jaxquant.core.sharding import (
    Placement,
    Sharding,
    device_key,
    fit_varying,
    is_whole,
    named,
    platform_of,
    varying_axes,
)
from jaxquant.ops import converted
from jaxquant.ops.arguments import QuantState, check_float, check_state, hashable_precision, initial_state
from jaxquant.ops.contract import contract
from jaxquant.ops.dimensions import Dimensions, DotDimensionNumbers
from jaxquant.ops.gradients import align, first_order
from jaxquant.ops.implementation import choose_implementation
from jaxquant.ops.operand import Observation, quantize_operand, scale_dtype
from jaxquant.ops.prepared import Kept, Prepared, prepare, reads_clip

Array = jax.Array
__all__ = ["QuantState", "dot_general", "initial_state"]


@dataclasses.dataclass(frozen=True)
class _Static:
    """What of a call is fixed while tracing."""

    recipe: Recipe
    dims: Dimensions
    lhs_dtype: str
    rhs_dtype: str
    out_dtype: str
    precision: Any
    lhs_place: Placement
    rhs_place: Placement
    out_sharding: NamedSharding | None
    implementation: str | None
    parts: tuple[tuple[str, ...], ...] | None


def dot_general(
    lhs: Float[Array, "*lhs"],
    rhs: Float[Array, "*rhs"] | ConvertedKernel,
    dimension_numbers: DotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    recipe: Recipe,
    state: QuantState | None = None,
    key: Key[Array, ""] | None = None,
    out_sharding: Sharding = None,
    implementation: str | None = None,
    out_parts: PartitionSpec | None = None,
    prepared: Prepared | None = None,
) -> Float[Array, "*out"]:
    """Contract an activation with a weight in the low precision of a recipe, forward and backward.

    Takes the arguments of ``jax.lax.dot_general``; lhs is the activation, rhs the weight. The operands are quantized
    along the contraction axes of each of the three matmuls. Gradients pass straight through rounding; values cut off by
    a clipping calibration get none.

    Inside ``jax.shard_map`` (with its default ``check_vma``) a scale of the whole tensor, dynamic or delayed, is that
    of all devices on which the operand varies: the one that a single device computes. A scale a channel or a tile is
    that of the device's own part, also where the contraction axis is sharded. Each gradient is summed over the axes
    along which its operand does not vary.

    Args:
      lhs: activation, any float dtype.
      rhs: weight, any float dtype; or a converted one, for which the result is the same to the bit. The gradient with
        respect to lhs is then that of the dequantized weight, which has none itself.
      dimension_numbers: ``((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))``.
      precision: passed to the matmuls; None means DEFAULT forward and HIGHEST backward, which on GPUs turns fast fp8
        accumulation on and off.
      preferred_element_type: dtype of the result, None for the promoted dtype of the operands.
      recipe: all numbers.
      state: for a recipe with delayed scaling, the amax state from ``initial_state``. Its gradient tells
        ``jaxquant.state.update`` the state after the step.
      key: random key for stochastic rounding; None derives one from the bits of the operands' scales and amax
        histories, or of the output gradient where these are few.
      out_sharding: as in ``jax.lax.dot_general``, under a mesh with axes of ``AxisType.Explicit``. Gradients lie as
        their operands do.
      implementation: what computes the casts and matmuls, None to pick; see ``ops.choose_implementation``.
      out_parts: inside ``jax.shard_map``, which mesh axes cut the result, as its ``out_specs`` say. The noise of the
        output gradient's rounding is then that of one device; without it, devices draw their own.
      prepared: what ``share`` has made of lhs for several contractions, None to quantize it here.

    Raises:
      ValueError: missing state, tiles or shards that do not divide, an implementation that is not known.
      TypeError: operands that are not float.
      NotImplementedError: a derivative of the gradients.
    """
    for piece in ("dot_general", "quantize"):
        choose_implementation(piece, implementation)
    if isinstance(rhs, ConvertedKernel):
        check_float("dot_general", lhs=lhs)
        return converted.dot_general(
            lhs,
            rhs,
            Dimensions.of(dimension_numbers, lhs.ndim, rhs.ndim),
            hashable_precision(precision),
            preferred_element_type,
            recipe=recipe,
            key=key,
            out_sharding=named(out_sharding, lhs),
            implementation=implementation,
        )
    check_float("dot_general", lhs=lhs, rhs=rhs)
    check_state(recipe, state)
    out = preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)
    static = _Static(
        recipe,
        Dimensions.of(dimension_numbers, lhs.ndim, rhs.ndim),
        lhs.dtype.name,
        rhs.dtype.name,
        jnp.dtype(out).name,
        hashable_precision(precision),
        Placement.of(lhs, rhs),
        Placement.of(rhs, lhs),
        named(out_sharding, lhs),
        implementation,
        None if out_parts is None else tuple(_names(entry) for entry in out_parts),
    )
    return _dot(static, lhs, rhs, state or {}, key, prepared)


def _names(entry: Any) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(
    static: _Static, lhs: Array, rhs: Array, state: QuantState, key: Array | None, prepared: Prepared | None
) -> Array:
    return _dot_fwd(static, lhs, rhs, state, key, prepared)[0]


def _dot_fwd(static, lhs, rhs, state, key, prepared):
    out, left, right, witness = _forward(static, lhs if prepared is None else prepared, rhs, state, key)
    left = left if prepared is None else prepared.kept  # the one that its other readers keep
    kept_state = {name: delayed.without_bins(tensor) for name, tensor in state.items()}
    name, inputs = static.recipe.name, (lhs, rhs) if static.recipe.hides_slope else ()
    # What is kept has no slope either; the mark has, so that a derivative of the gradients is refused.
    mark = first_order(name, (jnp.zeros(()),), inputs) if inputs else ()
    return first_order(name, (out,), inputs)[0], ((left, right, kept_state, key, witness), mark)


def _dot_bwd(static, kept, grad):
    residuals, mark = kept
    dlhs, drhs, observed, key = _backward(static, residuals, grad)
    return *first_order(static.recipe.name, (dlhs, drhs), (grad, *mark) if mark else ()), observed, key, None


_dot.defvjp(_dot_fwd, _dot_bwd)


@functools.partial(jax.jit, static_argnums=0)
def _forward(
    static: _Static, lhs: Array | Prepared, rhs: Array, state: QuantState, key: Array | None
) -> tuple[Array, Kept, Kept, Array | None]:
    recipe, dims, implementation = static.recipe, static.dims, static.implementation
    left = lhs
    if not isinstance(left, Prepared):
        left = prepare(left, recipe, "lhs", dims.lhs_contract, dims.lhs_batch, state.get("input"), key, implementation)
    right = prepare(rhs, recipe, "rhs", dims.rhs_contract, dims.rhs_batch, state.get("kernel"), key, implementation)
    out = contract(
        left.forward,
        right.forward,
        dims,
        out_dtype=static.out_dtype,
        accumulator=recipe.fwd.accumulator,
        precision=static.precision,
        default_precision=jax.lax.Precision.DEFAULT,
        scale_dtype=scale_dtype(recipe, static.out_dtype),
        out_sharding=static.out_sharding,
        implementation=implementation,
        turns=_turns(static, left.forward, right.forward, static.out_sharding),
    )
    witness = _witness(static, left, right, state) if key is None else None
    return out, left.kept, right.kept, witness


@functools.partial(jax.jit, static_argnums=0)
def _backward(static: _Static, residuals, grad: Array):
    (lhs, lhs_mask, lhs_seen), (rhs, rhs_mask, rhs_seen), state, key, witness = residuals
    recipe = static.recipe
    part = _part(static, grad)
    if key is not None:
        key = device_key(key, grad) if part is None else key
    elif witness is not None:
        key = key_of(witness)
        key = device_key(key, grad) if part is None else key
    elif recipe.is_stochastic:
        key = content_key(grad)
    q_grad, grad_seen = None, None
    if "output_grad" in state or recipe.shares_gradient:
        assert isinstance(recipe.dlhs.lhs, TensorSpec)
        own = (None, None) if "output_grad" in state else (key, part)
        axes = static.dims.for_dlhs()[0].lhs_contract
        q_grad, grad_seen = _cast(static, grad, recipe.dlhs.lhs, axes, (), *own, state=state.get("output_grad"))
    keys = (None, None) if key is None else two_keys(key)
    dims, order = static.dims.for_dlhs()
    place = static.lhs_place.sharding_before(order)
    dlhs = _gradient(static, "dlhs", grad, q_grad, rhs, dims, place, keys[0], part)
    dlhs = _finish(dlhs, order, _clipped(lhs_mask, lhs, recipe.fwd.lhs), static.lhs_dtype, static.lhs_place)
    dims, order = static.dims.for_drhs()
    place = static.rhs_place.sharding_before(order)
    drhs = _gradient(static, "drhs", grad, q_grad, lhs, dims, place, keys[1], part)
    drhs = _finish(drhs, order, _clipped(rhs_mask, rhs, recipe.fwd.rhs), static.rhs_dtype, static.rhs_place)
    uses = {"input": (lhs, lhs_seen), "kernel": (rhs, rhs_seen), "output_grad": (q_grad, grad_seen)}
    observed = {}
    for name, old in state.items():
        tensor, seen = uses[name]
        assert recipe.delayed is not None
        assert seen is not None
        scale = tensor.scale.reshape(1) if seen.scale is None else seen.scale
        new = delayed.observe(old, scale, seen.amax, recipe.delayed)
        observed[name] = {field: fit_varying(x, varying_axes(old["scale"])) for field, x in new.items()}
    return dlhs, drhs, observed, None


def _cast(
    static: _Static,
    grad: Array,
    spec: TensorSpec,
    axes: tuple[int, ...],
    batch: tuple[int, ...],
    key: Array | None,
    part: Part | None,
    **more: Any,
) -> tuple[QTensor, Observation | None]:
    """Quantize the output gradient; layers whose outputs have one shape share the lowered function."""
    start, whole = (None, None) if part is None else part
    return _cast_gradient(grad, key, start, spec, axes, batch, static.recipe, static.implementation, whole, **more)


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6, 7, 8), static_argnames="shards")
def _cast_gradient(grad, key, start, spec, axes, batch, recipe, implementation, whole, state=None, shards=1):
    return quantize_operand(
        grad,
        spec,
        axes,
        recipe=recipe,
        batch=batch,
        state=state,
        key=key,
        shards=shards,
        floor=SMALLEST_GRADIENT_SCALE,
        implementation=implementation,
        part=None if whole is None else Part(start, whole),
    )


def _turns(static: _Static, lhs: QTensor | Array, rhs: QTensor | Array, place: NamedSharding | None) -> bool:
    """Check whether copies of the 8-bit operands pay: with delayed scaling, whose casts wait for nothing."""
    is_delayed = static.recipe.is_lean and static.recipe.delayed is not None and place is None
    return is_delayed and all(isinstance(each, QTensor) and each.scale.size == 1 for each in (lhs, rhs))


def _part(static: _Static, grad: Array) -> Part | None:
    """Return where this device's part of the output gradient lies in the whole."""
    if static.parts is None:
        return None
    names = (*static.parts, *[()] * (grad.ndim - len(static.parts)))
    counts = [math.prod(jax.lax.axis_size(name) for name in each) for each in names]
    start = [jax.lax.axis_index(each) * size if each else 0 for each, size in zip(names, grad.shape, strict=True)]
    return Part(tuple(start), tuple(size * n for size, n in zip(grad.shape, counts, strict=True)))


_ENOUGH = 16
"""Scales, of one gradient step's own, whose bits make a key that no other step or layer has."""


def _witness(static: _Static, lhs: Prepared, rhs: Prepared, state: QuantState) -> Array | None:
    """Return bits of this use to draw noise from, None where there are too few: of scales, and of amax histories.

    The activation's scales, or its own amax beside a history, change with every batch, the weight's with every step.
    Reading the output gradient instead would cost a pass over it.
    """
    if not static.recipe.is_stochastic:
        return None
    scales = [side.forward.scale for side in (lhs, rhs) if isinstance(side.forward, QTensor)]
    spec = static.recipe.fwd.lhs
    is_own = isinstance(spec, TensorSpec) and spec.scaling == "dynamic" and spec.calibration.method != "fixed"
    if not state and not (is_own and isinstance(lhs.forward, QTensor) and lhs.forward.scale.size >= _ENOUGH):
        return None
    scales += [] if lhs.kept.seen is None else [lhs.kept.seen.amax]
    return digest(scales, [tensor["amax_history"] for tensor in state.values()])


def _clipped(mask: Array | None, kept: QTensor | Array, operand: Operand) -> Array | None:
    """Return which elements of an operand get no gradient, from the packed mask or from its qvalues."""
    if mask is not None:
        return jnp.unpackbits(mask, axis=-1, count=kept.shape[-1]).astype(bool)
    if not (reads_clip(operand) and isinstance(kept, QTensor)):
        return None
    assert isinstance(operand, TensorSpec)
    return jnp.abs(kept.qvalue.astype(jnp.float32)) >= element(operand.dtype).max


def _finish(gradient: Array, order: tuple[int, ...], clipped: Array | None, dtype: str, place: Placement) -> Array:
    """Bring a gradient into its operand's layout, dtype and place, zero where the forward clipped."""
    gradient = gradient.transpose(order)
    if clipped is not None:
        gradient = jnp.where(clipped, 0, gradient)
    return fit_varying(gradient.astype(dtype), place.varying)


def _gradient(
    static: _Static,
    name: Literal["dlhs", "drhs"],
    grad: Array,
    q_grad: QTensor | None,
    residual: QTensor | Array,
    dims: Dimensions,
    place: NamedSharding | None,
    key: Array | None,
    part: Part | None,
) -> Array:
    """Contract the output gradient with what was kept of an operand; ``place`` is the sharding of the result."""
    recipe, out_dtype = static.recipe, grad.dtype.name
    keeps_dtype = name == "drhs" and recipe.is_lean and static.rhs_dtype != out_dtype
    if keeps_dtype and static.rhs_dtype == "float32":
        out_dtype = "float32"
    matmul: MatmulSpec = getattr(recipe, name)
    grad_spec, kept = (matmul.lhs, matmul.rhs) if name == "dlhs" else (matmul.rhs, matmul.lhs)
    left: QTensor | Array = grad
    if isinstance(grad_spec, TensorSpec):
        if isinstance(residual, QTensor) and kept == FORWARD:
            forward_spec = recipe.fwd.rhs if name == "dlhs" else recipe.fwd.lhs
            left, residual = align(grad, residual, dims, forward_spec, is_delayed=q_grad is not None)
        if q_grad is not None:
            left = q_grad
        else:
            left, _ = _cast(static, left, grad_spec, dims.lhs_contract, dims.lhs_batch, key, part, shards=matmul.shards)
    elif isinstance(residual, QTensor):
        residual = dequantize(residual, out_dtype)
    swaps = keeps_dtype and place is None and not dims.lhs_batch
    narrow = name == "drhs" and matmul.accumulator == "int32" and _is_sent(grad, left, residual, dims, matmul.shards)
    out = jax.named_scope(name)(contract)(
        # activation · gradient is laid out as the kernel is; the caller's transposition undoes ours
        *((residual, left, dims.swap()) if swaps else (left, residual, dims)),
        out_dtype=out_dtype,
        accumulator=None if narrow and matmul.shards == 1 else matmul.accumulator,
        precision=static.precision,
        default_precision=jax.lax.Precision.HIGHEST,
        scale_dtype=scale_dtype(recipe, out_dtype),
        out_sharding=place,
        implementation=static.implementation,
        turns=_turns(static, left, residual, place),
        parts_dtype=out_dtype if narrow else "float32",
    )
    n = len(dims.rhs_free)
    return out.transpose((*range(n, out.ndim), *range(n))) if swaps else out


def _is_sent(grad: Array, left: QTensor | Array, right: QTensor | Array, dims: Dimensions, shards: int) -> bool:
    """Check whether TPUs add up a weight's gradient, each of them its part, where the compiler cuts the batch.

    They send it in the dtype that the matmul returns, or in which the parts of ``shards`` are added: int32 and float32
    would double what the float model's takes. Sums of finer tiles stay float32.
    """
    is_cut = not is_whole(grad) and not varying_axes(grad) and platform_of(grad) == "tpu"
    if not (is_cut and isinstance(left, QTensor) and isinstance(right, QTensor)):
        return False
    sides = (left.scale, dims.lhs_contract), (right.scale, dims.rhs_contract)
    return all(scale.shape[axis] in (1, shards) for scale, axes in sides for axis in axes)
