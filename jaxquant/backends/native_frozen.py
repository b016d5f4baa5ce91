"""native in the convert and serve modes of models that pass quantization to their layers by hand.

Convert mode runs the training forward and writes the quantized kernel to the collection "aqt", at
``LAYER/OP/qrhs/frozen``, with the static scale of the activation, where the recipe has one, at
``LAYER/OP/qrhs/input_scale``. Serve mode reads them and looks at shape and dtype alone of the kernel that the layer
hands over, which may be zeros. Collection and names are AQT's, so that a model which lists them in its ``nn.scan`` and
its checkpoints runs on either backend.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxquant.backends import native
from jaxquant.backends._weights import check_converted, never_seen
from jaxquant.backends.base import chosen
from jaxquant.core.paths import join_path, layer_name
from jaxquant.core.qtensor import INPUT_SCALE, ConvertedKernel, QTensor
from jaxquant.core.recipe import Recipe
from jaxquant.ops.dot_general import initial_state
from jaxquant.ops.einsum import plan_einsum

Array = jax.Array
COLLECTION = "aqt"


class _Frozen(nn.Module):
    """Hold a converted kernel in the collection."""

    @nn.compact
    def write(self, values: dict[str, Any]) -> None:
        """Store what was converted."""
        if not self.is_mutable_collection(COLLECTION):
            raise ValueError(
                f"{_layer(self)} converts and the collection {COLLECTION!r} cannot be written; apply the model "
                f"with mutable=[{COLLECTION!r}]"
            )
        for name, value in values.items():
            self.variable(COLLECTION, name, lambda value=value: value).value = value

    @nn.compact
    def read(self, make: Any) -> dict[str, Any]:
        """Return what is stored; while initializing, ``make()`` it."""
        if self.is_initializing() and self.is_mutable_collection(COLLECTION):
            return {name: self.variable(COLLECTION, name, lambda v=value: v).value for name, value in make().items()}
        if not self.has_variable(COLLECTION, "frozen"):
            raise ValueError(
                f"{_layer(self)} serves and the collection {COLLECTION!r} has no converted kernel "
                f"for it; convert first: apply the model of configure_quantization(config, 'convert') with "
                f"mutable=[{COLLECTION!r}]"
            )
        names = [name for name in ("frozen", INPUT_SCALE) if self.has_variable(COLLECTION, name)]
        return {name: self.get_variable(COLLECTION, name) for name in names}


def _layer(frozen: _Frozen) -> str:
    return layer_name(join_path(frozen.path[:-2]))


class FrozenDotGeneral(native.DotGeneral):
    """``native.DotGeneral`` that writes its converted kernel, or runs on it.

    Attributes:
      recipe: all numbers.
      quant_mode: "convert" or "serve".
      mesh_axes: logical axis names of the kernel, for what is stored.
      replicate_scale: leave every axis of stored scales unnamed.
    """

    quant_mode: str = "serve"
    mesh_axes: tuple[str | None, ...] = ()
    replicate_scale: bool = False

    @nn.compact
    def __call__(
        self, lhs: Array, rhs: Array, dimension_numbers, precision: Any = None, preferred_element_type: Any = None
    ) -> Array:
        axes, batch = (tuple(axis % rhs.ndim for axis in each[1]) for each in dimension_numbers)
        weight: Any = _read(self, rhs, axes, batch)
        out = super().__call__(lhs, weight, dimension_numbers, precision, preferred_element_type)
        _write(self, rhs, axes, batch)
        return out


class FrozenEinsum(native.Einsum):
    """``native.Einsum`` that writes its converted kernel, or runs on it; attributes as in ``FrozenDotGeneral``."""

    quant_mode: str = "serve"
    mesh_axes: tuple[str | None, ...] = ()
    replicate_scale: bool = False

    @nn.compact
    def __call__(
        self, equation: str, lhs: Array, rhs: Array, precision: Any = None, preferred_element_type: Any = None
    ) -> Array:
        operands: list[Any] = [lhs, rhs]
        kernel = operands[self.weight]
        text = equation.replace(" ", "")
        if self.weight == 0:
            inputs, arrow, output = text.partition("->")
            text = ",".join(reversed(inputs.split(","))) + arrow + output
        plan = plan_einsum(text, operands[1 - self.weight].ndim, kernel.ndim)
        axes, batch = plan.kernel_axes(f"einsum {equation!r}"), tuple(plan.dimension_numbers[1][1])
        operands[self.weight] = _read(self, kernel, axes, batch)
        lhs, rhs = operands
        out = super().__call__(equation, lhs, rhs, precision, preferred_element_type)
        _write(self, kernel, axes, batch)
        return out


def _write(op: Any, kernel: Array, axes: tuple[int, ...], batch: tuple[int, ...]) -> None:
    """Store the kernel in convert mode, with the quant state that the op has just made or read."""
    if op.quant_mode != "convert" or op.recipe.fwd.rhs is None:
        return
    state: dict[str, dict[str, Any]] = {tensor: dict(fields) for tensor, fields in initial_state(op.recipe).items()}
    if op.recipe.sparsity is not None:
        state["sparsity"] = {"mask": None}
    for tensor, fields in state.items():
        for field in fields:
            fields[field] = op.get_variable(native.OVERWRITE_WITH_GRADIENT, f"{tensor}_{field}")
    converted, scale = native.convert_kernel(op.recipe, kernel, axes, state, batch)
    # Under jit there is no telling, and what is served is NaN.
    if scale is not None and not op.is_initializing() and not isinstance(scale, Tracer) and not scale.all():
        raise never_seen(join_path(op.path[:-1]), op.recipe)
    _Frozen(name="qrhs").write({"frozen": converted} | ({} if scale is None else {INPUT_SCALE: scale}))


def _read(op: Any, kernel: Array, axes: tuple[int, ...], batch: tuple[int, ...]) -> Array | ConvertedKernel:
    """Return the stored kernel in serve mode, else the float one; that too where the recipe leaves kernels in float."""
    if op.quant_mode != "serve" or op.recipe.fwd.rhs is None:
        return kernel

    tensor, scale = jax.eval_shape(functools.partial(_shapes, op.recipe, axes=axes, batch=batch), kernel)
    wanted = {"frozen": tensor} | ({} if scale is None else {INPUT_SCALE: scale})

    def make() -> dict[str, Any]:
        values = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), wanted)
        if op.mesh_axes:
            values["frozen"] = _named(values["frozen"], op.mesh_axes, op.replicate_scale)
        return values

    stored = nn.meta.unbox(_Frozen(name="qrhs").read(make))
    check_converted(join_path(op.path[:-1]), _describe(stored), repr(op.recipe.name), _describe(wanted))
    return ConvertedKernel(stored["frozen"], kernel.dtype.name, stored.get(INPUT_SCALE))


def _describe(values: dict[str, Any]) -> str:
    tensor = values["frozen"]
    scale = ", with an input_scale" if INPUT_SCALE in values else ""
    return f"{tensor.description}{scale}"


def _shapes(
    recipe: Recipe, kernel: Array, *, axes: tuple[int, ...], batch: tuple[int, ...]
) -> tuple[QTensor, Array | None]:
    state: Any = initial_state(recipe)
    if recipe.sparsity is not None:
        state["sparsity"] = {"mask": kernel}
    return native.convert_kernel(recipe, kernel, axes, state, batch)


def _named(tensor: QTensor, mesh_axes: tuple[str | None, ...], replicate_scale: bool) -> Any:
    """Label the axes of a stored kernel as those of the float one; a scale has no name where it is shared."""

    def names(part: str, array: Array) -> tuple[str | None, ...]:
        if part == "qvalue":
            return mesh_axes
        sizes = zip(mesh_axes, array.shape, strict=True)
        return tuple(None if replicate_scale or size == 1 else name for name, size in sizes)

    return tensor.replace(lambda part, array: nn.LogicallyPartitioned(array, names(part, array)))


def dot_general_cls(
    recipe: Recipe,
    *,
    mesh_axes: tuple[str | None, ...],
    quant_mode: str,
    replicate_scale: bool,
    implementation: str | None = None,
) -> functools.partial[FrozenDotGeneral]:
    """Make a ``dot_general_cls`` for convert or serve mode; see ``FrozenDotGeneral``."""
    options: dict[str, Any] = {"quant_mode": quant_mode, "mesh_axes": mesh_axes, "replicate_scale": replicate_scale}
    options |= chosen(implementation)
    kind = _like(native.dot_general_cls(recipe).func, FrozenDotGeneral)
    return functools.partial(kind, recipe=recipe, **options)


def einsum_cls(
    recipe: Recipe,
    *,
    mesh_axes: tuple[str | None, ...],
    quant_mode: str,
    replicate_scale: bool,
    implementation: str | None = None,
) -> functools.partial[FrozenEinsum]:
    """Make an einsum factory for convert or serve mode; see ``FrozenEinsum``."""
    options: dict[str, Any] = {"quant_mode": quant_mode, "mesh_axes": mesh_axes, "replicate_scale": replicate_scale}
    options |= chosen(implementation)
    return functools.partial(_like(native.einsum_cls(recipe).func, FrozenEinsum), recipe=recipe, **options)


@functools.cache
def _like(trained: type, kind: type) -> Any:
    """Return a class of frozen ops with the training op's name, after which Linen names modules and their state."""
    return type(trained.__name__, (kind,), {"__module__": __name__, "__doc__": kind.__doc__})
