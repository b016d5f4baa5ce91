"""The quantized op of one contraction of a traced function, on any backend, and its quant state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxquant.backends import Backend
from jaxquant.backends.base import Setup
from jaxquant.core.paths import layer_name
from jaxquant.core.qtensor import QTensor
from jaxquant.core.quant_state import HISTORY, MASK, SCALE, SPARSITY, LayerState
from jaxquant.core.recipe import Recipe, TensorSpec
from jaxquant.core.rounding import RandomKey
from jaxquant.core.sharding import untransposed
from jaxquant.ops import sparsity
from jaxquant.ops.converted import map_batch
from jaxquant.ops.dimensions import Dimensions
from jaxquant.ops.dot_general import initial_state
from jaxquant.ops.implementation import select_implementation
from jaxquant.trace.flow import Route
from jaxquant.trace.plan import Contraction
from jaxquant.trace.structure import MAP, Step, run_steps

Array = jax.Array
Shapes = dict[str, tuple[int, ...]]
_CONVOLUTION = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers", "feature_group_count")


# -- state -------------------------------------------------------------------------------------------------------------


def make_state(site: Contraction, leaves: Sequence[Any]) -> LayerState:
    """Return the initial state of a contraction by tensor and field, {} for a recipe without state.

    Its leading axes are the scans over the weight, then the batch axes of the weight.

    Args:
      site: contraction with its recipe.
      leaves: parameters, read only if the state depends on the weight (sparsity that starts at step 0).

    Raises:
      NotImplementedError: the state depends on the weight, and the weight is not one leaf with moved elements.
      TypeError: the state depends on the weight, and its leaf is a shape without values.
    """
    assert site.recipe is not None
    spec, shape = site.recipe.sparsity, _layout_of(site)
    state = _blank_state(*shape)
    if spec is not None and spec.start_step == 0:
        route = _route_of(site, leaves)
        make = functools.partial(sparsity.initial_state, spec=spec, axes=shape[-1])
        state[SPARSITY] = run_steps((*route.steps, *batch_steps(site)), make, leaves[route.leaf])
    return state


def _layout_of(site: Contraction) -> tuple[Recipe, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return what the state depends on: recipe, leading axes, and shape and contraction axes of one weight element."""
    assert site.recipe is not None
    return site.recipe, leading_axes(site), _inner_shape(site), without_batch(*site.weight_axes)


def _blank_state(recipe: Recipe, lead: tuple[int, ...], inner: tuple[int, ...], axes: tuple[int, ...]) -> LayerState:
    """Return initial state that does not depend on a weight."""
    state: LayerState = {**initial_state(recipe)}
    if recipe.sparsity is not None:
        dense = dataclasses.replace(recipe.sparsity, start_step=1)
        state[SPARSITY] = sparsity.initial_state(jnp.ones(inner), dense, axes)
    return jax.tree.map(lambda value: jnp.broadcast_to(value, (*lead, *value.shape)), state)


@functools.lru_cache
def _blank_shapes(*layout: Any) -> dict[str, Shapes]:
    blank = jax.eval_shape(functools.partial(_blank_state, *layout))
    return {tensor: {name: tuple(value.shape) for name, value in each.items()} for tensor, each in blank.items()}


def _route_of(site: Contraction, leaves: Sequence[Any]) -> Route:
    """Return the route from a leaf to its weight, for the first sparsity mask."""
    what, route = f"weight_sparsity_start_step 0 at {site.path!r}", site.route
    if not isinstance(route, Route) or route.obstacle:
        why = route.obstacle if isinstance(route, Route) else f"is the result of {route.why if route else 'a sum'}"
        raise NotImplementedError(
            f"{what} needs the weight as a single parameter, but the weight {why}; set weight_sparsity_start_step to 1"
        )
    if isinstance(leaves[route.leaf], jax.ShapeDtypeStruct):
        raise TypeError(f"{what} computes the first mask from the weight, but init got a shape; pass the parameter")
    return route


def state_fields(site: Contraction) -> dict[str, Shapes]:
    """Return the shapes of a contraction's state by tensor and field."""
    return dict(_blank_shapes(*_layout_of(site)))


def kernel_fields(site: Contraction) -> dict[str, Shapes]:
    """Return the shapes of the state fields that the conversion of a kernel needs."""
    found = state_fields(site)
    found.pop("output_grad", None)
    kept = (SCALE, HISTORY, MASK)
    return {tensor: {name: n for name, n in each.items() if name in kept} for tensor, each in found.items()}


def leading_axes(site: Contraction) -> tuple[int, ...]:
    """Return the leading axes of a contraction's state: the lengths of its scans, then its batch sizes.

    If the batch elements share their scales, the batch sizes are left out.
    """
    is_shared = site.recipe is not None and site.recipe.shares_experts
    return (*(length for _, length in site.stack), *(() if is_shared else site.batch))


# -- batch axes: each element is a separate contraction, as under jax.vmap ---------------------------------------------


def batch_steps(site: Contraction) -> tuple[Step, ...]:
    """Return the steps from a weight to one element of its batch axes, or () if the elements share their scales."""
    assert site.side is not None
    if site.recipe is not None and site.recipe.shares_experts:
        return ()
    batch = site.weight_axes[1]
    others = (axis for axis in range(len(site.shapes[site.side])) if axis not in batch)
    return Step("transpose", (*batch, *others)), *[MAP] * len(batch)


def without_batch(axes: Sequence[int], batch: Sequence[int]) -> tuple[int, ...]:
    """Renumber axes of an operand after its batch axes were mapped over."""
    return tuple(axis - sum(other < axis for other in batch) for axis in axes)


def _inner_shape(site: Contraction) -> tuple[int, ...]:
    assert site.side is not None
    return tuple(n for axis, n in enumerate(site.shapes[site.side]) if axis not in site.weight_axes[1])


# -- the ops -----------------------------------------------------------------------------------------------------------


def check_layout(site: Contraction, kernel: QTensor) -> None:
    """Raise if exactly one of the converted kernel and the recipe shares a scale among experts.

    Raises:
      ValueError: names the layer and the option.
    """
    assert site.recipe is not None
    spec, shares = site.recipe.fwd.rhs, site.recipe.shares_experts
    if not isinstance(spec, TensorSpec) or spec.granularity != "per_tensor" or kernel.codec is not None:
        return
    counts = [kernel.scale.shape[axis] for axis in site.weight_axes[1] if kernel.shape[axis] > 1]
    if counts and shares != all(n == 1 for n in counts):
        has = "a scale for each expert" if shares else "one scale for all experts"
        raise ValueError(
            f"{layer_name(site.path)} has a converted kernel with {has}, but quantization_share_expert_scales is "
            f"{str(shares).lower()}; serve with the config of the conversion"
        )


def contract(
    backend: Backend,
    site: Contraction,
    eqn: Any,
    operands: list[Any],
    state: LayerState,
    key: RandomKey | None,
    prepared: Any = None,
) -> Array:
    """Compute a contraction equation in the low precision of its recipe.

    Each element of the weight's batch axes is quantized separately, as under ``jax.vmap``, unless the recipe shares the
    scales.

    Args:
      backend: backend that runs the op.
      site: contraction with its recipe.
      eqn: equation of the contraction, one of ``CONTRACTIONS``.
      operands: operands in the order of the equation; the weight may be a converted kernel, which needs no state.
      state: quant state of this contraction, without scan axes.
      key: RNG key for stochastic rounding, or None.
      prepared: quantized activation that is shared by all contractions that read it, or None to quantize it here.
    """
    recipe = site.recipe
    assert recipe is not None
    assert site.side is not None
    if site.split and not recipe.shares_experts:
        recipe = dataclasses.replace(recipe, expert_axes=tuple(name for names in site.split for name in names))
    backend, own = backend.runner(site.operation, recipe, site.dtype, bool(site.split)), {}
    if not isinstance(operands[site.side], QTensor):
        own = dict(state)
    elif backend.name == "native":
        check_layout(site, operands[site.side])
    window = tuple((n, eqn.params[n]) for n in _CONVOLUTION) if site.operation == "conv_general_dilated" else ()
    setup = Setup(
        recipe,
        precision=eqn.params["precision"],
        dtype=eqn.outvars[0].aval.dtype,
        operation=site.operation,
        window=window,
        state=own,
        key=key,
        prepared=prepared,
        implementation=site.implementation,
    )
    if site.operation != "dot_general":
        lhs, rhs, *sizes = operands
        for piece in ("quantize",) if sizes else ("dot_general", "quantize"):
            select_implementation(piece, site.implementation, lambda: f"{site.operation} has no kernel")
        return backend.contract(lhs, rhs, setup, *sizes)
    dims = Dimensions.of(eqn.params["dimension_numbers"], *(x.ndim for x in operands))
    # The result has the axes (batch, free axes of the activation, free axes of the weight); in the equation, the free
    # axes of lhs come first.
    order = tuple(range(dims.out_ndim))
    if site.side == 0:
        dims, operands, order = dims.swap(), operands[::-1], dims.order_of_swapped
    inner = dims if recipe.shares_experts else dims.without_batch()
    place, mapped = untransposed(eqn.params.get("out_sharding"), order), dims.out_ndim - inner.out_ndim
    place = place and NamedSharding(place.mesh, PartitionSpec(*place.spec[mapped:]))
    setup = dataclasses.replace(setup, numbers=inner.numbers, out_sharding=place, stored=site.stored)
    run = functools.partial(_dot, backend, setup)
    lhs, rhs = operands
    out = run(lhs, rhs, key, own) if inner is dims else map_batch(run, lhs, rhs, dims, key, own)
    return out if site.side == 1 else jnp.transpose(out, order)


def _dot(
    backend: Backend,
    setup: Setup,
    activation: Array,
    weight: Array | QTensor,
    key: RandomKey | None,
    state: dict[str, dict[str, Array]],
) -> Array:
    spec = setup.recipe.sparsity
    if spec is not None and not isinstance(weight, QTensor):
        weight = sparsity.sparsify(spec, setup.numbers[0][1], weight, state[SPARSITY])
    amaxes = {tensor: fields for tensor, fields in state.items() if tensor != SPARSITY}
    return backend.contract(activation, weight, dataclasses.replace(setup, state=amaxes, key=key))
