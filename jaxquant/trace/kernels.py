"""Parameters of a traced function that can be converted, and their conversion, which matches the training forward pass.

    leaf ── steps ──► weight as its op reads it ── quantization of the op ──► QTensor ── steps undone ──► leaf

Conversion runs on the whole leaf, or on one layer of a stack at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxquant.backends import Backend, load
from jaxquant.backends._weights import fill_missing_input_scales
from jaxquant.config.backends import BackendName
from jaxquant.core.blocks import BlocksError
from jaxquant.core.delayed import merge_states
from jaxquant.core.paths import layer_name
from jaxquant.core.qtensor import QTensor
from jaxquant.core.quant_state import HISTORY, LayerState
from jaxquant.core.recipe import Recipe
from jaxquant.trace.analysis import Analysis
from jaxquant.trace.contract import batch_steps, without_batch
from jaxquant.trace.flow import Derived, Route
from jaxquant.trace.plan import Contraction, Key, readers_of
from jaxquant.trace.structure import Step, dtype_read, run_steps, sliced, sources_of, without_axes

Array = jax.Array
_FAR = 16.0  # the amaxes of two batches from one distribution differ by less than this factor


@dataclasses.dataclass(frozen=True)
class _Job:
    """Conversion of one leaf. Hashable, so that equal layers share a compiled program.

    Attributes:
      operation: primitive of the contraction.
      backend: backend that quantizes.
      recipe: recipe of the layer.
      steps: steps from the leaf to one weight that is quantized separately (one scan step, one batch element).
      axes: contraction axes of the weight.
      batch: batch axes of the weight whose elements share their scales.
    """

    operation: str
    backend: BackendName
    recipe: Recipe
    steps: tuple[Step, ...]
    axes: tuple[int, ...]
    batch: tuple[int, ...] = ()

    @classmethod
    def of(cls, chosen: Backend, site: Contraction, route: Route) -> _Job:
        assert site.recipe is not None
        backend = chosen.runner(site.operation, site.recipe, site.dtype, bool(site.split)).name
        axes, batch = site.weight_axes
        if site.operation == "ragged_dot_general" or site.recipe.shares_experts:  # all elements together
            return cls(site.operation, backend, site.recipe, route.steps, axes, batch)
        steps = (*route.steps, *batch_steps(site))
        return cls(site.operation, backend, site.recipe, steps, without_batch(axes, batch))


@functools.partial(jax.jit, static_argnums=0)
def _convert(job: _Job, leaf: Array, state: Mapping[str, Mapping[str, Array]]) -> QTensor:
    dtype = leaf.dtype.name

    def convert(weight: Array, state: Any) -> QTensor:
        quantize = load(job.backend).quantize_weight
        tensor = quantize(job.operation, job.recipe, weight, job.axes, state, job.batch)
        return dataclasses.replace(tensor, dtype=dtype, read_as=dtype_read(job.steps, dtype))

    return run_steps(job.steps, convert, leaf, state)


def as_converted(backend: Backend, site: Contraction, leaf: Any) -> QTensor | None:
    """Return the shapes of the kernel that a leaf converts to, or None if that requires quant state or a mask.

    Args:
      backend: backend that quantizes.
      site: contraction with a recipe and a route to the leaf.
      leaf: float parameter, or any object with its shape and dtype.
    """
    recipe, route = site.recipe, site.route
    if recipe is None or recipe.delayed is not None or recipe.sparsity is not None or not isinstance(route, Route):
        return None
    shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    try:
        return jax.eval_shape(_convert, _Job.of(backend, site, route), shape, {})
    except BlocksError:
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class LayerKernel:
    """Kernel of one layer that can be converted.

    Attributes:
      path: path of the layer.
      name: path of the parameter.
      dtype: dtype name in which the op reads it.
      states: quant state of the layer, as passed; then the states of the contractions that read the same activation.
      axes: contraction axes of the parameter without stacked layers.
      stacked: axes of the parameter along which scans stack layers, outermost first.
      shape: shape of the parameter without the stacked axes.
      made: abstract value of the whole converted parameter.
    """

    path: str
    name: tuple[str, ...]
    dtype: str
    states: tuple[Mapping[str, Any], ...]
    axes: tuple[int, ...]
    stacked: tuple[int, ...]
    shape: tuple[int, ...]
    made: QTensor
    _whole: _Job
    _one: _Job

    @classmethod
    def of(
        cls, site: Contraction, job: _Job, leaf: Any, name: tuple[str, ...], states: Any, made: QTensor
    ) -> LayerKernel:
        try:
            steps, stacked = sliced(job.steps, len(site.stack))
        except BlocksError:  # the layers are interleaved, so they are converted together
            steps, stacked = job.steps, []
        axes = set().union(*(sources_of(job.steps, axis) for axis in job.axes))
        axes = without_batch(tuple(sorted(axes)), tuple(stacked))
        shape = without_axes(tuple(leaf.shape), stacked)
        dtype = dtype_read(job.steps, jnp.dtype(leaf.dtype).name)
        one = dataclasses.replace(job, steps=steps)
        return cls(site.path, name, dtype, states, axes, tuple(stacked), shape, made, job, one)

    @property
    def recipe(self) -> Recipe:
        return self._whole.recipe

    def convert(self, kernel: Array, index: tuple[int, ...] | None) -> QTensor:
        """Convert the kernel of one of the stacked layers.

        Args:
          kernel: float kernel of shape ``shape``.
          index: index of the layer along the stacked axes of ``states``; () without stacked axes. None converts with
            the initial state, without observations.

        Returns:
          The converted kernel. Its ``input_scale`` is 0 if the recipe has a static scale without an observation.

        Raises:
          ValueError: the kernel has NaN or infinity.
        """
        self._check_finite(kernel)
        count = len(self.stacked)
        part = lambda x: jnp.zeros(x.shape[count:], x.dtype) if index is None else jnp.asarray(x[index])  # noqa: E731
        return _convert(self._one, kernel, _joined(jax.tree.map(part, self.states)))

    def convert_stacked(self, leaf: Array) -> QTensor:
        """Convert the parameter, all its layers together, with ``states``, which must be arrays.

        Raises:
          ValueError: the recipe has a static scale without an observation, or the leaf has NaN or infinity.
        """
        self._check_finite(leaf)
        return self.filled(_convert(self._whole, leaf, _joined(self.states)))

    def filled(self, kernel: QTensor) -> QTensor:
        """Return the converted parameter, in which missing static scales of experts are filled in.

        Experts that never received a row have no scale.

        Raises:
          ValueError: the recipe has a static scale for an activation that was never observed.
        """
        scale = fill_missing_input_scales(self.path, self.recipe, kernel.input_scale, self.stacked)
        return dataclasses.replace(kernel, input_scale=scale)

    def _check_finite(self, kernel: Array) -> None:
        """Raise if the kernel has NaN or infinity, which conversion would hide. Not checked under jit."""
        found = _is_finite(kernel)
        if not isinstance(found, Tracer) and not found:
            raise ValueError(
                f"{layer_name(self.path)} has NaN or infinity in its kernel {'/'.join(self.name)!r}, which recipe "
                f"{self.recipe.name!r} cannot represent; use parameters of an earlier step, or leave the layer in float"
            )


def far_examples(analysis: Analysis, examples: Sequence[Any], states: Mapping[Key, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a warning for each layer that reads an example input whose magnitude differs from the layer's history.

    Args:
      analysis: analysis of the function, with decisions.
      examples: last arguments of the function. Shapes and constant arrays, such as zeros, are not compared.
      states: quant state of every quantized contraction.
    """
    for site, example in readers_of(analysis.plan, examples):
        pair: Any = example, states.get(site.key, {}).get("input", {}).get(HISTORY)
        if all(isinstance(each, jax.Array | np.ndarray) and not isinstance(each, Tracer) for each in pair):
            amax, seen = (float(np.max(np.abs(each))) for each in pair)
            if seen and np.ptp(example) and not seen / _FAR <= amax <= seen * _FAR:
                yield (
                    f"{layer_name(site.path)} reads an example input of largest magnitude {amax:.3g}, but its static "
                    f"scale was calibrated for {seen:.3g}; calibrate the model with inputs like those in serving"
                )


@jax.jit
def _is_finite(kernel: Array) -> Array:
    return jnp.isfinite(kernel).all()


def _joined(states: Sequence[Mapping[str, Any]]) -> LayerState:
    """Return the state of a contraction; its activation's state is merged with the states of the other readers."""
    own, *others = states
    inputs = [each["input"] for each in others if "input" in each]
    return {**own} | ({"input": merge_states(inputs)} if inputs else {})


def find_kernels(
    analysis: Analysis,
    leaves: Sequence[Any],
    names: Sequence[tuple[str, ...]],
    states: Mapping[Key, Mapping[str, Any]],
    backend: Backend,
) -> tuple[dict[tuple[str, ...], LayerKernel], dict[str, str]]:
    """Find every leaf that is the weight of a quantized contraction. Only traces.

    Args:
      analysis: analysis of the function, with decisions.
      leaves: parameters; arrays or any objects with a shape and a dtype.
      names: paths of the parameters.
      states: quant state of every quantized contraction; arrays or any objects with a shape and a dtype.
      backend: backend that quantizes.

    Returns:
      Kernels by the path of their leaf, and the reason for each layer whose weight stays in float.
    """
    reasons: dict[str, str] = {}
    jobs: dict[int, dict[_Job, Contraction]] = {}
    for site in analysis.plan.chosen:
        assert site.recipe is not None
        weight = site.route
        if site.recipe.fwd.rhs is None or weight is None:
            continue
        if site.split and site.recipe.shares_experts:
            reasons[site.path] = "its experts are split over devices by a shard_map and share one scale"
        elif isinstance(weight, Derived):
            source = "several parameters" if len(weight.leaves) > 1 else "a parameter"
            reasons[site.path] = f"its weight is computed from {source} by {weight.why}"
        elif weight.obstacle:
            reasons[site.path] = f"its weight {weight.obstacle}"
        else:
            jobs.setdefault(weight.leaf, {})[_Job.of(backend, site, weight)] = site
    found: dict[tuple[str, ...], LayerKernel] = {}
    for index, ways in jobs.items():
        path = next(iter(ways.values())).path
        others = [reader for leaf, reader in analysis.readers.float_readers() if leaf == index]
        if isinstance(leaves[index], QTensor):
            continue
        if others:
            use = others[0] if isinstance(others[0], str) else others[0].operation
            reasons[path] = f"its weight is also used in {use}"
            continue
        if len(ways) > 1:
            reasons[path] = f"its weight is quantized in {len(ways)} different ways, but can be converted only once"
            continue
        ((job, site),) = ways.items()
        shared = [] if site.shared_activation is None or not states[site.key] else site.shared_activation.keys
        given = (states[site.key], *(states[key] for key in shared if states[key]))
        shapes = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype), (leaves[index], given))
        try:
            made = jax.eval_shape(_convert, job, shapes[0], jax.eval_shape(_joined, shapes[1]))
        except BlocksError as error:
            reasons[path] = str(error)
            continue
        found[names[index]] = LayerKernel.of(site, job, leaves[index], names[index], given, made)
    return found, reasons
