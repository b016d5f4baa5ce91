"""Convert an NNX model: its quantized layers get converted kernels and ops that read them.

A kernel becomes a small module of variables: ``layer/kernel/qvalue``, ``scale``, ``zero_point`` and ``input_scale``.
Indexed with an ellipsis, as flax's layers read a kernel, it gives them what the layer's promotion and op understand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from jaxquant.backends import native_nnx
from jaxquant.backends._weights import serving_ops
from jaxquant.core.qtensor import INPUT_SCALE, QTensor, Weight
from jaxquant.core.recipe import Recipe
from jaxquant.inject import nnx as inject_nnx
from jaxquant.inject.converted import Site
from jaxquant.inject.layers import Layer, check_for_qwix
from jaxquant.ops import dot_general, einsum
from jaxquant.ops.einsum import plan_einsum
from jaxquant.state.nnx import QuantState

Array = jax.Array


class Quantized(nnx.Variable):
    """A part of a converted kernel; no optimizer that trains ``nnx.Param`` touches it."""


class Kernel(nnx.Module):
    """A converted kernel.

    Args:
      tensor: the quantized kernel.
      input_scale: static scale of the activation, or None.
      dtype: name of the dtype that the float kernel is stored in.
    """

    def __init__(self, tensor: QTensor, input_scale: Array | None, dtype: str):
        self.dtype = dtype
        parts = tensor.parts | ({} if input_scale is None else {INPUT_SCALE: input_scale})
        self.names, self.block = tuple(parts), tensor.block
        for name in self.names:
            setattr(self, name, Quantized(parts[name]))

    @property
    def shape(self) -> tuple[int, ...]:
        return getattr(self, self.names[0]).shape

    def __getitem__(self, index: Any) -> Weight:
        assert index is Ellipsis, "a converted kernel is read whole"
        part = {name: getattr(self, name)[...] for name in self.names}
        scale = part.pop(INPUT_SCALE, None)
        return Weight(QTensor.of_parts(part, self.block), self.dtype, scale)


@dataclasses.dataclass(frozen=True)
class _Promote:
    """A layer's promotion of dtypes, for a kernel that is converted."""

    plain: Any
    path: str
    dtype: str

    def __call__(self, arrays: Any, /, **options: Any) -> Any:
        inputs, weight, *rest = arrays
        if not isinstance(weight, Weight):
            return self.plain(arrays, **options)
        standin = jnp.zeros((1,) * weight.ndim, weight.dtype)
        inputs, standin, *rest = self.plain((inputs, standin, *rest), **options)
        if standin.dtype.name != self.dtype:
            raise ValueError(
                f"layer {self.path!r} was converted for a kernel read in {self.dtype}, and this call reads it in "
                f"{standin.dtype.name}; convert the model with example inputs of the dtype that it is called with"
            )
        return inputs, dataclasses.replace(weight, dtype=standin.dtype.name), *rest


@dataclasses.dataclass(frozen=True)
class _Op:
    """A layer's op on a converted kernel."""

    recipe: Recipe
    backend: str
    path: str
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Array:
        with jax.named_scope(self.path):
            if self.backend == "native":
                return self._native(*args, **kwargs)
            return getattr(serving_ops(self.backend), f"{self.name}_cls")(self.recipe)()(*args, **kwargs)

    def _native(self, *args: Any, **kwargs: Any) -> Array:
        at = 1 if self.name == "einsum" else 0
        operands = list(args)
        operands[at] = native_nnx.activation_as_read(self.recipe, operands[at], operands[at + 1])
        return (einsum if self.name == "einsum" else dot_general)(*operands, recipe=self.recipe, **kwargs)


def convert_nnx(
    model: nnx.Module, backend: str | None, recipes: Mapping[str, Recipe], layers: list[Layer]
) -> nnx.Module:
    """Convert the kernels of a model's quantized layers.

    Args:
      model: float, or quantized by ``quantize_nnx`` on the native backend, whose quant state then counts; it stays as
        it is.
      backend: "native" or "qwix".
      recipes: of the layers to quantize, by path.
      layers: all layers of the model, float.

    Raises:
      ValueError: a recipe needs quant state and the layer has none, or it has not seen what a static scale must know.
      NotImplementedError: an einsum that sums its kernel by itself, or a layer under ``nnx.WeightNorm``.
    """
    if backend == "qwix":
        check_for_qwix(layer for layer in layers if layer.path in recipes)
    copy = inject_nnx.copy_model(model)
    by_path = {layer.path: layer for layer in layers}
    weight_norms = (path for path, node in nnx.iter_graph(copy) if isinstance(node, nnx.WeightNorm))
    normalized = tuple("".join(f"{name}/" for name in path) for path in weight_norms)
    for path, module in list(inject_nnx.linear_modules(copy)):
        recipe = recipes.get(path)
        if recipe is None:
            continue
        op = getattr(module, inject_nnx.op_name(module))
        if not isinstance(op, native_nnx.QuantizedOp):
            inject_nnx.check_op(path, module, by_path[path], recipe)
        if recipe.fwd.rhs is None:  # the kernel stays in float, the activation is quantized
            if not isinstance(op, native_nnx.QuantizedOp):
                setattr(module, inject_nnx.op_name(module), nnx.data(inject_nnx.quantized_op(path, module, recipe)))
            continue
        if path.startswith(normalized):
            raise NotImplementedError(
                f"layer {path!r} is under nnx.WeightNorm, which cannot scale a converted kernel; add the rule "
                f"{{path: {path}, recipe: null}}"
            )
        site = _site(by_path[path], module, recipe, backend or "native")
        state = op.state() if isinstance(op, native_nnx.QuantizedOp) else {}
        if recipe.is_stateful and not state:
            raise ValueError(
                f"recipe {recipe.name!r} at {path!r} keeps quant state, and the layer has none; convert the model that "
                "was trained, or calibrate it with jaxquant.calibrate"
            )
        tensor, scale = site.convert_stacked(module.kernel[...], state)
        site.check_seen(scale)
        dtype = module.kernel[...].dtype.name
        setattr(module, "kernel", nnx.data(Kernel(tensor, scale, dtype)))  # noqa: B010
        module.promote_dtype = _Promote(module.promote_dtype, path, site.dtype)
        name = inject_nnx.op_name(module)
        delattr(module, name)
        kind = "einsum" if name == "einsum_op" else "dot_general"
        setattr(module, name, _Op(recipe, backend or "native", path, kind))
    return copy


def nnx_params(model: nnx.Module) -> dict[str, Any]:
    """Give a converted model's parameters as nested dicts of arrays and ``QTensor``, as a Linen model has them.

    Other variables that the model keeps, such as ``nnx.BatchStat``, are among them; random states, intermediates and
    quant state are not.

    Args:
      model: from ``jaxquant.convert``.
    """
    blocks = {path: module.block for path, module in nnx.iter_modules(model) if isinstance(module, Kernel)}
    return _as_in_linen(_kept(model), blocks)


def _kept(model: nnx.Module) -> dict[Any, Any]:
    """Give what ``nnx_params`` and ``update_nnx`` handle."""
    left_out = nnx.Any(nnx.RngState, nnx.Intermediate, QuantState)
    return nnx.to_pure_dict(nnx.state(model, nnx.Not(left_out)))


def update_nnx(model: nnx.Module, params: Mapping[str, Any]) -> None:
    """Put parameters into a converted model, in place; what ``nnx_params`` or ``jaxquant.serving.load`` gave.

    Args:
      model: converted, perhaps under ``nnx.eval_shape``, without any array.
      params: nested dicts of arrays and ``QTensor``.

    Raises:
      ValueError: a path that only one of them has; nothing is put in.
    """
    given = _as_in_nnx(params)
    here, there = (set(_paths(tree)) for tree in (_kept(model), given))
    if here != there:
        raise ValueError(
            f"the model has {', '.join(sorted(here - there)) or 'nothing'} that the parameters do not, and they have "
            f"{', '.join(sorted(there - here)) or 'nothing'} that it does not; give what nnx_params gave for this model"
        )
    nnx.update(model, given)


def _paths(tree: Mapping[Any, Any]) -> list[str]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def _as_in_linen(
    tree: Mapping[Any, Any], blocks: Mapping[tuple[Any, ...], Any], path: tuple[Any, ...] = ()
) -> dict[str, Any]:
    new: dict[str, Any] = {}
    for name, value in tree.items():
        here = (*path, name)
        if here in blocks:
            parts = dict(value)
            scale = parts.pop(INPUT_SCALE, None)
            new |= {str(name): QTensor.of_parts(parts, blocks[here])} | ({} if scale is None else {INPUT_SCALE: scale})
        else:
            new[str(name)] = _as_in_linen(value, blocks, here) if isinstance(value, Mapping) else value
    return new


def _as_in_nnx(tree: Mapping[str, Any]) -> dict[Any, Any]:
    new: dict[Any, Any] = {}
    for name, value in tree.items():
        key = int(name) if name.isdigit() else name  # a place in an nnx.List
        if isinstance(value, QTensor):
            scale = tree.get(INPUT_SCALE)
            new[key] = value.parts | ({} if scale is None else {INPUT_SCALE: scale})
        elif isinstance(value, Mapping):
            new[key] = _as_in_nnx(value)
        elif name != INPUT_SCALE or not any(isinstance(other, QTensor) for other in tree.values()):
            new[key] = value
    return new


def _site(layer: Layer, module: Any, recipe: Recipe, backend: str) -> Site:
    path = layer.path
    stacked = inject_nnx.stacked_axes(path, module)
    shape = tuple(module.kernel.shape[stacked:])
    if isinstance(module, nnx.Einsum):
        plan = plan_einsum(module.einsum_str, native_nnx.lhs_labels(module.einsum_str), len(shape))
        if plan.rhs_sum:
            raise NotImplementedError(
                f"layer {path!r} sums its kernel by itself (equation {module.einsum_str!r}), which a converted kernel "
                "cannot be; leave it in float with a rule"
            )
        axes = tuple(plan.dimension_numbers[0][1])
    else:
        axes = inject_nnx.contraction_axes(module)
    dtype = layer.kernel_dtype or _dtype_as_read(module)
    return Site(path, recipe, backend, axes, shape, dtype, tuple(range(stacked)))


def _dtype_as_read(module: Any) -> str:
    """Give the dtype in which the op reads the kernel, for inputs no wider than it."""
    kernel = jnp.zeros((1,) * module.kernel.ndim, module.kernel.dtype)
    return module.promote_dtype((kernel, kernel, None), dtype=module.dtype)[1].dtype.name
