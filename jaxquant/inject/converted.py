"""Where the kernels of a Linen model lie, and how each is read: what conversion must know of every layer.

A layer is found by tracing a call of the float model. Its kernel may lie in the tree of parameters with more axes than
the layer sees, as under ``nn.scan`` or ``nn.vmap``. Which axes those are is not guessed from sizes: while tracing, each
layer writes a parameter of size 1 beside its kernel, and the transformations of Linen add to it what they add to the
kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxquant.backends import load
from jaxquant.backends._linen import kind_of, layers_apart
from jaxquant.config.rules import Decision
from jaxquant.core.paths import float_rule, layer_name
from jaxquant.core.qtensor import QTensor, stacked_blocks
from jaxquant.core.recipe import Recipe, TensorSpec
from jaxquant.inject.faces import STREAMS
from jaxquant.inject.layers import call_einsum, out_features, relative_path, split_arrays, substituted
from jaxquant.ops.einsum import plan_einsum
from jaxquant.state.tree import OVERWRITE_WITH_GRADIENT
from jaxquant.trace.plan import Contraction

Array = jax.Array
Decide = Callable[[str, int], Decision]
_PROBE = "jaxquant_probe"


@dataclasses.dataclass(frozen=True)
class LayerKernel:
    """The kernel of one layer that is converted.

    Attributes:
      path: "/"-joined module path.
      recipe: its numbers.
      backend: the name of the backend that runs it.
      axes: contraction axes of the kernel that the layer sees.
      batch: its batch axes.
      shape: shape of that kernel.
      dtype: name of the dtype in which the op reads it.
      stacked: axes that the stored kernel has beside those, positions in its shape, ascending.
    """

    path: str
    recipe: Recipe
    backend: str
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    stacked: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()

    @property
    def elements(self) -> tuple[int, ...]:
        """Batch axes along which each element is quantized by itself, with state of its own."""
        spec = self.recipe.fwd.rhs
        is_split = isinstance(spec, TensorSpec) and spec.granularity == "per_tensor"
        return self.batch if is_split and not self.recipe.shares_experts else ()

    def is_one_matmul(self, site: Contraction | None) -> bool:
        """Whether layers that are stacked all take one activation: in the trace, one wide matmul with one scale.

        Args:
          site: what a trace showed at the layer's path, None without one.
        """
        if site is None or site.side is None:
            return False
        is_wider = math.prod(site.shapes[site.side]) > math.prod(self.shape)
        return is_wider and len(site.stack) + len(site.batch) < len(self.stacked) + len(self.batch)

    def convert(self, kernel: Array, state: Mapping[str, Mapping[str, Array]]) -> tuple[QTensor, Array | None]:
        """Convert the kernel of one layer.

        Args:
          kernel: float, of shape ``shape``.
          state: the layer's quant state by tensor and field.

        Returns:
          The kernel and the static scale of the activation, of the kernel's rank (None where it is dynamic; 0 where the
          recipe has one and its tensor was never seen).
        """
        return _convert(self._numbers(), kernel, state)

    def _numbers(self) -> LayerKernel:
        """Leave out the path, so that layers which look alike share a compiled program."""
        return dataclasses.replace(self, path="")

    def convert_stacked(self, kernel: Array, state: Mapping[str, Mapping[str, Array]]) -> tuple[QTensor, Array | None]:
        """Convert a stored kernel, all its stacked layers at once; their state has the same axes in front."""
        return _convert_stacked(self._numbers(), kernel, state)


@functools.partial(jax.jit, static_argnums=0)
def _convert(layer: LayerKernel, kernel: Array, state: Any) -> tuple[QTensor, Array | None]:
    elements = layer.elements
    axes = tuple(axis - sum(other < axis for other in elements) for axis in layer.axes)
    batch = () if elements else layer.batch

    def convert(kernel: Array, state: Any) -> tuple[QTensor, Array | None]:
        tensor, scale = load(layer.backend).convert_kernel(layer.recipe, kernel, axes, state, batch)
        return tensor, None if scale is None else scale.reshape((1,) * kernel.ndim)

    return _mapped(convert, elements)(kernel.astype(layer.dtype), state)


def _mapped(function: Any, axes: tuple[int, ...]) -> Any:
    """Map over axes of a kernel, in this order the first ones of its state."""
    places: list[int] = []
    for axis in axes:  # outer axes are gone when an inner vmap runs
        places.append(axis - sum(other < axis for other in axes[: len(places)]))
    for place in reversed(places):
        function = jax.vmap(function, in_axes=(place, 0), out_axes=place)
    return function


@functools.partial(jax.jit, static_argnums=0)
def _convert_stacked(layer: LayerKernel, kernel: Array, state: Any) -> tuple[QTensor, Array | None]:
    tensor, scale = _mapped(functools.partial(_convert, layer), layer.stacked)(kernel, state)
    return stacked_blocks(tensor, layer.stacked), scale


def linen_kernels(
    model: nn.Module, backend: str, decide: Decide, variables: Any, *example_inputs: Any, **example_kwargs: Any
) -> dict[str, LayerKernel]:
    """Find the layers of a Linen model whose kernels a config quantizes, without computing anything.

    Args:
      model: the float model, not bound.
      backend: of the config.
      decide: the decision on a layer, of (path, number of outputs).
      variables: the model's, arrays or ``jax.ShapeDtypeStruct``.
      example_inputs, example_kwargs: arguments of its ``__call__``.

    Raises:
      ValueError: one layer reads its kernel in two ways, or in a dtype that its converted kernel does not tell.
      NotImplementedError: a layer that does not use its op, sums its kernel by itself, or reads it through
        ``nn.map_variables``.
    """
    kernels: dict[str, LayerKernel] = {}

    def intercept(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module = context.module
        if kind_of(module) is None or context.method_name != "__call__":
            return next_fun(*args, **kwargs)
        path = relative_path(module, ())
        recipe = decide(path, out_features(module, args, kwargs)).recipe
        if recipe is None or recipe.fwd.rhs is None:
            return next_fun(*args, **kwargs)

        assert module.scope is not None
        if "/map_variables(" in module.scope.path_text:
            raise NotImplementedError(
                f"{layer_name(path)} reads its kernel through nn.map_variables, as under nn.WeightNorm, and what that "
                f"does to a float kernel it cannot do to a converted one; {float_rule(path)}"
            )
        _check_stored_dtype(path, module)

        def note(kernel: Any, axes: tuple[int, ...], batch: tuple[int, ...]) -> None:
            layer = LayerKernel(path, recipe, backend, axes, tuple(kernel.shape), kernel.dtype.name, batch=batch)
            if kernels.setdefault(path, layer) != layer:
                raise ValueError(
                    f"{layer_name(path)} reads its kernel in two ways, {kernels[path].dtype} along "
                    f"{kernels[path].axes} and {layer.dtype} along {layer.axes}; one converted kernel cannot be both"
                )

        out = _call_noting(module, next_fun, args, kwargs, note)
        if path not in kernels:
            raise NotImplementedError(
                f"{layer_name(path)} ({type(module).__name__}) does not use its dot_general_cls, so {recipe.name!r} "
                f"cannot reach it; {float_rule(path)}"
            )
        module.put_variable("params", _PROBE, jnp.zeros((1,) * len(kernels[path].shape)))
        return out

    arrays, rebuild = split_arrays((example_inputs, example_kwargs))

    def call(variables: Any, arrays: list[Any], key: jax.Array) -> Any:
        args, kwargs = rebuild(arrays)
        rngs = dict.fromkeys(STREAMS, key)
        return model.apply(variables, *args, rngs=rngs, mutable=True, **kwargs)[1]["params"]

    plain = {name: collection for name, collection in variables.items() if name != OVERWRITE_WITH_GRADIENT}
    with layers_apart(owner=object()), nn.intercept_methods(intercept):
        written = jax.eval_shape(call, plain, arrays, jax.random.key(0))
    return {path: dataclasses.replace(layer, stacked=_stacked(layer, written)) for path, layer in kernels.items()}


def _check_stored_dtype(path: str, module: Any) -> None:
    """Refuse a kernel whose dtype decides the computation's and is not the layer's ``param_dtype``.

    A converted kernel has no float dtype of its own; the layer tells in which it would be read.
    """
    kernel = module.get_variable("params", "kernel")
    if module.dtype is None and kernel is not None and kernel.dtype != jnp.dtype(module.param_dtype):
        raise ValueError(
            f"{layer_name(path)} has a kernel of {kernel.dtype.name}, param_dtype {jnp.dtype(module.param_dtype).name} "
            "and no dtype of its own, so the kernel's decides what it computes in; give the layer that dtype or "
            "param_dtype"
        )


def _call_noting(module: nn.Module, next_fun: Any, args: Any, kwargs: Any, note: Callable[..., None]) -> Any:
    """Run a layer in float, and note its kernel as the op gets it, with its contraction axes."""
    if kind_of(module) == "einsum":

        def einsum(equation: str, lhs: Array, rhs: Array, precision: Any = None, dtype: Any = None) -> Array:
            plan = plan_einsum(equation, lhs.ndim, rhs.ndim)
            where = f"{layer_name(relative_path(module, ()))} (equation {equation!r})"
            note(rhs, plan.kernel_axes(where), tuple(plan.dimension_numbers[1][1]))
            return jnp.einsum(equation, lhs, rhs, precision=precision, preferred_element_type=dtype)

        return call_einsum(module, einsum, args, kwargs)  # pyright: ignore[reportArgumentType]

    def dot_general(lhs: Array, rhs: Array, dimension_numbers: Any, *options: Any, **named: Any) -> Array:
        contract, batch = (tuple(axis % rhs.ndim for axis in each[1]) for each in dimension_numbers)
        note(rhs, contract, batch)
        return jax.lax.dot_general(lhs, rhs, dimension_numbers, *options, **named)

    with substituted(module, "dot_general_cls", lambda: dot_general):
        return next_fun(*args, **kwargs)


def _stacked(layer: LayerKernel, written: Any) -> tuple[int, ...]:
    """Return which axes of the stored kernel the layer does not see, from what was added to its probe."""
    parameters = written
    for name in layer.path.split("/") if layer.path else ():
        parameters = parameters[name]
    probe, kernel = parameters[_PROBE].shape, parameters["kernel"].shape
    added = len(kernel) - len(layer.shape)
    axes = [axis for axis, size in enumerate(probe) if size != 1]
    # An axis of size 1 can be any of the kernel's: which one it is called changes no number.
    axes += [axis for axis, size in enumerate(kernel) if size == 1 and axis not in axes][: added - len(axes)]
    return tuple(sorted(axes))
