"""converted: parameters whose kernels are quantized already, made and run by the same traced function.

    leaf ── steps ──► weight as its op reads it ── the op's own quantization ──► QTensor ── steps undone ──► leaf
    leaf (ConvertedKernel) ── the same steps, on qvalues and scales ──► contraction; no float kernel is made

``routes.py`` finds the steps, ``structure.py`` does them. What a trace sees of a converted kernel is a stand-in of the
float shape and dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxquant.backends import Backend, load
from jaxquant.backends._weights import check_converted, settle_input_scale
from jaxquant.config.backends import BackendName
from jaxquant.core.paths import layer_name
from jaxquant.core.qtensor import INPUT_SCALE, ConvertedKernel, QTensor, stacked_blocks
from jaxquant.core.recipe import Recipe, TensorSpec
from jaxquant.trace.contract import batch_first, leading_axes, nested_state, without_batch
from jaxquant.trace.plan import Contraction, Key, Plan
from jaxquant.trace.routes import Lost, Route, Routes
from jaxquant.trace.structure import IDENTITIES, BlocksError, Step, steps_of

Array = jax.Array


# -- running -----------------------------------------------------------------------------------------------------------


def standin(leaf: Any) -> Any:
    """Return what a trace sees of a leaf: of a converted kernel, an array of its float shape, dtype and place."""
    if not isinstance(leaf, ConvertedKernel):
        return leaf
    if leaf.tensor.codec is not None:
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
    return jax.eval_shape(lambda qvalue: qvalue.astype(leaf.dtype), leaf.tensor.qvalue)


def refuse_bare(leaves: Sequence[Any]) -> None:
    """Refuse quantized parameters that do not say for which float dtype they stand.

    Raises:
      TypeError: a leaf is part of a ``QTensor``.
    """
    if any(isinstance(each, QTensor) for each in leaves):
        raise TypeError(
            "params hold a QTensor, which does not say the float dtype that it stands for; make it a "
            "jaxquant.core.qtensor.ConvertedKernel(tensor, dtype, input_scale), as the quantized function's "
            "convert(params, quant_state, *args) does"
        )


def read_checkpoint(params: Any, like: Any) -> Any:
    """Return parameters as a traced function takes them, from what ``jaxquant.convert`` and ``serving.load`` return.

    Args:
      params: nested mappings with ``QTensor`` leaves, and ``input_scale`` beside a kernel that has one.
      like: the float parameters, arrays or ``jax.ShapeDtypeStruct``, whose dtypes the kernels stand for.

    Raises:
      ValueError: a converted kernel whose float one ``like`` does not have, or has of another shape.
    """
    return _read(params, like, ())


def _read(params: Any, like: Any, path: tuple[str, ...]) -> Any:
    if not isinstance(params, Mapping):
        return params
    found: dict[str, Any] = {}
    for name, value in params.items():
        other = like.get(name) if isinstance(like, Mapping) else None
        if isinstance(value, QTensor):
            if other is None or tuple(other.shape) != value.shape:
                what = "none" if other is None else f"one of shape {tuple(other.shape)}"
                raise ValueError(
                    f"{'/'.join((*path, name))!r} is a converted kernel of shape {value.shape} and the float model "
                    f"has {what} there; load the checkpoint of this model"
                )
            found[name] = ConvertedKernel(value, jnp.dtype(other.dtype).name, params.get(INPUT_SCALE))
        elif name != INPUT_SCALE or other is not None:
            found[name] = _read(value, other, (*path, name))
    return found


def check_served(
    plan: Plan, leaves: Sequence[Any], paths: Sequence[str], *, must_be_converted: bool = False
) -> frozenset[Key]:
    """Check that every reader of a converted kernel is structure or its quantized contraction.

    Args:
      plan: of the function, on which was decided.
      leaves: the parameters.
      paths: of the layer of each.
      must_be_converted: whether a quantized layer with a float weight is an error (``checkpoint_is_quantized``).

    Returns:
      What needs no quant state: the keys of the contractions with a converted kernel.

    Raises:
      NotImplementedError: another operation reads one; names the layer and the operation.
      ValueError: a float weight, with ``must_be_converted``.
    """
    converted = {index for index, leaf in enumerate(leaves) if isinstance(leaf, ConvertedKernel)}
    if not converted and not must_be_converted:
        return frozenset()
    routes = Routes(plan, len(leaves))
    for stop in routes.stops:
        if stop.leaf in converted and stop.float_reason:
            dtype = leaves[stop.leaf].tensor.qvalue.dtype.name
            raise ValueError(
                f"{layer_name(stop.path)} has a converted kernel ({dtype}) and it stays in float ({stop.float_reason})"
            )
        if stop.leaf in converted and not stop.is_obstructed:
            raise NotImplementedError(
                f"{layer_name(paths[stop.leaf])} has a converted kernel, which {stop.operation} reads: only casts, "
                "transposes, reshapes that keep its blocks and slices of a scan may stand before its quantized "
                "contraction; leave the kernel in float"
            )
    served = frozenset(
        site.key for site, weight in routes.weights.items() if isinstance(weight, Route) and weight.leaf in converted
    )
    for site, weight in routes.weights.items():
        if isinstance(weight, Route) and weight.leaf in converted:
            _check_recipe(site, leaves[weight.leaf])
    read_otherwise = {stop.leaf for stop in routes.stops}
    for site, weight in routes.weights.items() if must_be_converted else ():
        assert site.recipe is not None
        is_convertible = isinstance(weight, Route) and weight.leaf not in read_otherwise
        if is_convertible and site.key not in served and site.recipe.fwd.rhs is not None:
            raise ValueError(
                f"{layer_name(site.path)} has a float kernel and checkpoint_is_quantized true asks for one converted "
                f"to {site.recipe.name!r}; convert the parameters with jaxquant.convert"
            )
    return served


def _check_recipe(site: Contraction, kernel: ConvertedKernel) -> None:
    """Refuse a kernel that another recipe converted; one of a codec is checked by its own op.

    Raises:
      ValueError: names the layer, what its kernel is and what its recipe takes.
    """
    assert site.recipe is not None
    left, right = site.recipe.fwd.lhs, site.recipe.fwd.rhs
    if isinstance(right, TensorSpec) and right.codec is not None:
        return
    is_scaled = isinstance(left, TensorSpec) and left.scaling in ("delayed", "static")
    has = kernel.tensor.qvalue.dtype.name, kernel.input_scale is not None
    wanted = right.dtype if isinstance(right, TensorSpec) else "float", is_scaled
    texts = [f"{dtype} {'with an' if scaled else 'without an'} input_scale" for dtype, scaled in (has, wanted)]
    check_converted(site.path, texts[0], repr(site.recipe.name), texts[1])


def replay(eqn: Any, kernel: ConvertedKernel, evaluate: Any) -> ConvertedKernel:
    """Do to a converted kernel what an equation of structure does to a float one.

    Args:
      eqn: the equation.
      kernel: its operand.
      evaluate: (equation, operands) -> results, for arrays.

    Raises:
      NotImplementedError: the equation is no structure, or breaks the blocks of the kernel's scales.
    """
    name, tensor = eqn.primitive.name, kernel.tensor
    if name in ("pvary", "pcast"):
        return jax.tree.map(lambda part: evaluate(eqn, [part])[0], kernel)
    if name in ("sharding_constraint", "reshard", "mesh_cast"):
        moved = dataclasses.replace(tensor, qvalue=evaluate(eqn, [tensor.qvalue])[0])
        return dataclasses.replace(kernel, tensor=moved)
    steps = () if name in IDENTITIES else steps_of(eqn)
    if steps is None:
        raise NotImplementedError(f"{name} of a converted kernel of shape {kernel.shape}")
    for step in steps:
        try:
            kernel = step.on_kernel(kernel)
        except BlocksError as error:
            raise NotImplementedError(f"{name} of a converted kernel of shape {tensor.shape}: {error}") from None
    return kernel


def part_specs(leaf: Any, spec: Any) -> Any:
    """Return the partition specs of a kernel's parts from that of the float one: none along shared axes."""
    if not isinstance(leaf, ConvertedKernel):
        return spec

    def fit(part: Array) -> PartitionSpec:
        entries = [*spec, *[None] * (part.ndim - len(spec))]
        return PartitionSpec(*(name if n > 1 else None for name, n in zip(entries, part.shape, strict=False)))

    return jax.tree.map(fit, leaf)


def part_shardings(leaf: Any, sharding: Any) -> Any:
    """Return the shardings of a kernel's parts from that of the float one; as ``part_specs``."""
    if not isinstance(leaf, ConvertedKernel) or sharding is None:
        return sharding
    if not isinstance(sharding, NamedSharding):
        return None
    return jax.tree.map(
        lambda spec: NamedSharding(sharding.mesh, spec),
        part_specs(leaf, sharding.spec),
        is_leaf=lambda each: isinstance(each, PartitionSpec),
    )


# -- making ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Job:
    """How one leaf is converted. Hashable, so that equal layers share a compiled program.

    Attributes:
      operation: primitive of the contraction.
      backend: whose quantization.
      recipe: all numbers.
      steps: from the leaf to the weight, with the batch axes of the weight behind those of its scans.
      lead: number of those axes.
      axes: contraction axes of what is left.
      batch: batch axes of it, whose elements share their scales.
    """

    operation: str
    backend: BackendName
    recipe: Recipe
    steps: tuple[Step, ...]
    lead: int
    axes: tuple[int, ...]
    batch: tuple[int, ...] = ()

    @classmethod
    def of(cls, chosen: Backend, site: Contraction, route: Route) -> _Job:
        assert site.side is not None
        assert site.recipe is not None
        backend = chosen.runner(site.operation, site.recipe).name
        axes, batch = site.weight_axes
        if site.operation == "ragged_dot_general" or site.recipe.shares_experts:  # all elements at once
            return cls(site.operation, backend, site.recipe, route.steps, len(site.stack), axes, batch)
        order = batch_first(batch, len(site.shapes[site.side]))
        steps, lead = route.then((order,)).steps, len(leading_axes(site))
        return cls(site.operation, backend, site.recipe, steps, lead, without_batch(axes, batch))


@functools.partial(jax.jit, static_argnums=0)
def _convert(job: _Job, leaf: Array, state: Mapping[str, Mapping[str, Array]]) -> ConvertedKernel:
    weight = leaf
    for step in job.steps:
        weight = step.on_array(weight)

    def convert_one(weight: Array, state: Any) -> tuple[QTensor, Array | None]:
        if job.operation == "ragged_dot_general":
            return load(job.backend).convert_groups(job.recipe, weight, state)
        tensor, scale = load(job.backend).convert_kernel(job.recipe, weight, job.axes, state, job.batch)
        return tensor, None if scale is None else scale.reshape((1,) * weight.ndim)

    run = convert_one
    for _ in range(job.lead):
        run = jax.vmap(run)
    tensor, scale = run(weight, state)
    kernel = ConvertedKernel(stacked_blocks(tensor, range(job.lead)), leaf.dtype.name, scale)
    for step in reversed(job.steps):
        back = step.inverse()
        kernel = kernel if back is None else back.on_kernel(kernel)
    return kernel


def convert(
    plan: Plan,
    leaves: Sequence[Any],
    states: Mapping[Key, Mapping[str, Array]],
    backend: Backend,
    skip: Collection[int] = (),
) -> tuple[list[Any], dict[str, str]]:
    """Convert every leaf that is the weight of a quantized contraction, as the training forward quantizes it.

    Args:
      plan: of the function, on which was decided.
      leaves: the parameters.
      states: quant state of every quantized contraction.
      backend: that quantizes.
      skip: leaves that are to stay as they are.

    Returns:
      The leaves, and for each layer whose weight stays float the reason.

    Raises:
      ValueError: the recipe has a static scale for an activation that was never seen.
    """
    routes = Routes(plan, len(leaves))
    reasons: dict[str, str] = {}
    jobs: dict[int, dict[_Job, Contraction]] = {}
    for site, weight in routes.weights.items():
        assert site.recipe is not None
        if site.recipe.fwd.rhs is None or (isinstance(weight, Route) and weight.leaf in skip):
            continue
        if isinstance(weight, Lost):
            whole = "is made of several parameters" if len(weight.leaves) > 1 else "is not the parameter itself"
            reasons[site.path] = f"its weight {whole}: {weight.why}"
        elif weight.obstacle:
            reasons[site.path] = f"its weight {weight.obstacle}"
        else:
            jobs.setdefault(weight.leaf, {})[_Job.of(backend, site, weight)] = site
    found = list(leaves)
    for index, ways in jobs.items():
        path = next(iter(ways.values())).path
        stops = [stop.operation for stop in routes.stops if stop.leaf == index]
        if isinstance(leaves[index], ConvertedKernel):
            continue
        if stops:
            reasons[path] = f"{stops[0]} reads its weight, too"
            continue
        if len(ways) > 1:
            reasons[path] = f"its weight is read in {len(ways)} ways, and one converted kernel cannot be all"
            continue
        ((job, site),) = ways.items()
        try:
            kernel = _convert(job, leaves[index], nested_state(job.recipe, states[site.key]))
        except BlocksError as error:
            reasons[path] = str(error)
            continue
        scale = settle_input_scale(site.path, job.recipe, kernel.input_scale)
        found[index] = dataclasses.replace(kernel, input_scale=scale)
    return found, reasons
