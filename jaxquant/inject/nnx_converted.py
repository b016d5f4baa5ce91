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

from jaxquant.backends import load, native_nnx
from jaxquant.backends._weights import settle_input_scale
from jaxquant.backends.base import chosen
from jaxquant.core.paths import at_layer, float_rule, join_path, layer_name
from jaxquant.core.qtensor import INPUT_SCALE, ConvertedKernel, QTensor
from jaxquant.core.recipe import Recipe
from jaxquant.core.trees import leaves_by_path
from jaxquant.inject import nnx_layers as inject_nnx
from jaxquant.inject.converted import LayerKernel
from jaxquant.inject.decided import Decided
from jaxquant.inject.layers import Layer, check_layers
from jaxquant.inject.linen import scale_name
from jaxquant.inject.nnx import ConvertedParam, Face, plain_model
from jaxquant.inject.nnx_held import Held
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
        self.names, self.block, self.codec = tuple(parts), tensor.block, tensor.codec
        for name in self.names:
            setattr(self, name, Quantized(parts[name]))

    @property
    def shape(self) -> tuple[int, ...]:
        return self[...].shape

    def __getitem__(self, index: Any) -> ConvertedKernel:
        assert index is Ellipsis, "a converted kernel is read whole"
        part = {name: getattr(self, name)[...] for name in self.names}
        scale = part.pop(INPUT_SCALE, None)
        return ConvertedKernel(QTensor.of_parts(part, self.block, self.codec), self.dtype, scale)


@dataclasses.dataclass(frozen=True)
class _Promote:
    """A layer's promotion of dtypes, for a kernel that is converted."""

    plain: Any
    path: str
    dtype: str

    def __call__(self, arrays: Any, /, **options: Any) -> Any:
        inputs, weight, *rest = arrays
        if not isinstance(weight, ConvertedKernel):
            return self.plain(arrays, **options)
        standin = jnp.zeros((1,) * weight.ndim, weight.dtype)
        inputs, standin, *rest = self.plain((inputs, standin, *rest), **options)
        if standin.dtype.name != self.dtype:
            raise ValueError(
                f"{layer_name(self.path)} was converted for a kernel read in {self.dtype}, and this call reads it in "
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
    implementation: str | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Array:
        with jax.named_scope(self.path):
            op = getattr(load(self.backend), self.name)
            return op(*args, recipe=self.recipe, **kwargs, **chosen(self.implementation))


def convert_nnx(model: nnx.Module, decided: Decided, *example_inputs: Any, **example_kwargs: Any) -> nnx.Module:
    """Convert the kernels of a model's quantized layers.

    Args:
      model: float, or quantized by ``quantize_nnx``, whose quant state then counts; it stays as it is.
      decided: what was decided on its layers.
      example_inputs, example_kwargs: arguments of its ``__call__``, which layers that are not flax's need.

    Raises:
      ValueError: a recipe needs quant state and the layer has none, or it has not seen what a static scale must know;
        a layer that is not flax's, without example inputs.
      NotImplementedError: an einsum that sums its kernel by itself, or a layer under ``nnx.WeightNorm``.
    """
    backend, recipes, implementation = decided.backend or "native", decided.recipes, decided.config.implementation
    for recipe in dict.fromkeys(recipes.values()):
        load(backend).check(recipe)
    check_layers(backend, (layer for layer in decided.layers if layer.path in recipes))
    float_model, copy = plain_model(model), plain_model(model)
    by_path = {layer.path: layer for layer in decided.layers}
    weight_norms = (path for path, node in nnx.iter_graph(copy) if isinstance(node, nnx.WeightNorm))
    normalized = tuple("".join(f"{name}/" for name in path) for path in weight_norms)
    wide: set[str] = set()
    for path, module in list(inject_nnx.linear_modules(copy)):
        recipe = recipes.get(path)
        if recipe is None:
            continue
        op = getattr(module, inject_nnx.op_name(module))
        if not isinstance(op, native_nnx.QuantizedOp):
            inject_nnx.check_op(path, module, by_path[path], recipe)
        if recipe.fwd.rhs is None:  # the kernel stays in float, the activation is quantized
            if not isinstance(op, native_nnx.QuantizedOp):
                quantized = inject_nnx.quantized_op(backend, path, module, recipe, implementation)
                setattr(module, inject_nnx.op_name(module), nnx.data(quantized))
            continue
        if path.startswith(normalized):
            raise NotImplementedError(
                f"{layer_name(path)} is under nnx.WeightNorm, which cannot scale a converted kernel; {float_rule(path)}"
            )
        layer_kernel = _kernel(by_path[path], module, recipe, backend)
        if layer_kernel.is_one_matmul(decided.sites.get(path)):
            wide.add(path)
            if isinstance(op, native_nnx.QuantizedOp):
                name = inject_nnx.op_name(module)
                delattr(module, name)
                setattr(module, name, jnp.einsum if name == "einsum_op" else jax.lax.dot_general)
            continue
        state = op.state() if isinstance(op, native_nnx.QuantizedOp) else {}
        if recipe.is_stateful and not state:
            raise ValueError(
                f"recipe {recipe.name!r} at {at_layer(path)} keeps quant state, and the layer has none; convert the "
                "model that was trained, or calibrate it with jaxquant.calibrate"
            )
        tensor, scale = layer_kernel.convert_stacked(module.kernel[...], state)
        scale = settle_input_scale(layer_kernel.path, layer_kernel.recipe, scale)
        dtype = module.kernel[...].dtype.name
        setattr(module, "kernel", nnx.data(Kernel(tensor, scale, dtype)))  # noqa: B010
        module.promote_dtype = _Promote(module.promote_dtype, path, layer_kernel.dtype)
        name = inject_nnx.op_name(module)
        delattr(module, name)
        kind = "einsum" if name == "einsum_op" else "dot_general"
        setattr(module, name, _Op(recipe, backend, path, kind, implementation))
    if not (decided.other_kernels or wide):
        return copy
    if not (example_inputs or example_kwargs):
        raise ValueError(
            f"layers {', '.join(decided.other_kernels)} are not flax's own; give convert example inputs whose call "
            "runs them"
        )
    face = Face.of(decided.config, float_model)
    known = [f"{path}/kernel" if path else "kernel" for path in recipes if path not in wide]
    kernels, reasons = face.convert(float_model, known, *example_inputs, **example_kwargs)
    _put_kernels(copy, kernels, has_state=bool(reasons))
    return face.adopt(copy)


def _put_kernels(model: nnx.Module, kernels: Mapping[str, ConvertedKernel], *, has_state: bool) -> None:
    """Set converted kernels in the place of parameters, wherever a module has them, and drop quant state."""
    nodes = list(nnx.iter_graph(model))
    paths = {join_path(path): node for path, node in nodes if isinstance(node, nnx.Variable)}
    new = {id(paths[path]): ConvertedParam(kernel) for path, kernel in kernels.items()}
    for _, node in nodes:
        for name, value in list(vars(node).items()) if isinstance(node, nnx.Module) else ():
            if id(value) in new:
                setattr(node, name, new[id(value)])
            elif isinstance(value, Held) and not has_state:
                delattr(node, name)


def nnx_params(model: nnx.Module) -> dict[str, Any]:
    """Return a converted model's parameters as nested dicts of arrays and ``QTensor``, as a Linen model has them.

    Other variables that the model keeps, such as ``nnx.BatchStat``, are among them; random states, intermediates and
    quant state are not.

    Args:
      model: from ``jaxquant.convert``.
    """
    blocks = {
        path: (module.block, module.codec) for path, module in nnx.iter_modules(model) if isinstance(module, Kernel)
    }
    return _as_in_linen(_kept(model), blocks)


def _kept(model: nnx.Module) -> dict[Any, Any]:
    """Return what ``nnx_params`` and ``update_nnx`` handle."""
    left_out = nnx.Any(nnx.RngState, nnx.Intermediate, QuantState)
    return nnx.to_pure_dict(nnx.state(model, nnx.Not(left_out)))


def update_nnx(model: nnx.Module, params: Mapping[str, Any]) -> None:
    """Set the parameters of a converted model, in place, to what ``nnx_params`` or ``jaxquant.serving.load`` gave.

    Args:
      model: converted, perhaps under ``nnx.eval_shape``, without any array.
      params: nested dicts of arrays and ``QTensor``.

    Raises:
      ValueError: a path that only one of them has; nothing is put in.
    """
    kept = _kept(model)
    given = _as_in_nnx(params, kept)
    here, there = (set(leaves_by_path(tree, _is_kernel)) for tree in (kept, given))
    if here != there:
        raise ValueError(
            f"the model has {', '.join(sorted(here - there)) or 'nothing'} that the parameters do not, and they have "
            f"{', '.join(sorted(there - here)) or 'nothing'} that it does not; give what nnx_params gave for this model"
        )
    nnx.update(model, given)


def _as_in_linen(
    tree: Mapping[Any, Any], blocks: Mapping[tuple[Any, ...], Any], path: tuple[Any, ...] = ()
) -> dict[str, Any]:
    new: dict[str, Any] = {}
    for name, value in tree.items():
        here = (*path, name)
        if here in blocks:  # how the kernel is cut, and its tensor format
            parts = dict(value)
            scale = parts.pop(INPUT_SCALE, None)
            new |= {str(name): QTensor.of_parts(parts, *blocks[here])} | ({} if scale is None else {INPUT_SCALE: scale})
        elif isinstance(value, ConvertedKernel):
            scale = value.input_scale
            new |= {str(name): value.tensor} | ({} if scale is None else {scale_name(str(name)): scale})
        else:
            new[str(name)] = _as_in_linen(value, blocks, here) if isinstance(value, Mapping) else value
    return new


def _as_in_nnx(tree: Mapping[str, Any], kept: Any) -> dict[Any, Any]:
    new: dict[Any, Any] = {}
    scales = {scale_name(name) for name, value in tree.items() if isinstance(value, QTensor)}
    for name, value in tree.items():
        key = int(name) if name.isdigit() else name  # a place in an nnx.List
        own = kept.get(key) if isinstance(kept, Mapping) else None
        if isinstance(value, QTensor):
            scale = tree.get(scale_name(name))
            if isinstance(own, ConvertedKernel):
                new[key] = ConvertedKernel(value, own.dtype, scale)
            else:
                new[key] = value.parts | ({} if scale is None else {INPUT_SCALE: scale})
        elif isinstance(value, Mapping):
            new[key] = _as_in_nnx(value, own)
        elif name not in scales:
            new[key] = value
    return new


def _is_kernel(node: Any) -> bool:
    return isinstance(node, ConvertedKernel)


def _kernel(layer: Layer, module: Any, recipe: Recipe, backend: str) -> LayerKernel:
    path = layer.path
    stacked = inject_nnx.stacked_axes(path, module)
    shape = tuple(module.kernel.shape[stacked:])
    if isinstance(module, nnx.Einsum):
        plan = plan_einsum(module.einsum_str, native_nnx.lhs_labels(module.einsum_str), len(shape))
        axes = plan.kernel_axes(f"{layer_name(path)} (equation {module.einsum_str!r})")
        batch = tuple(plan.dimension_numbers[1][1])
    else:
        axes = inject_nnx.contraction_axes(module)
        batch = tuple(range(len(getattr(module, "batch_axis", ()))))
    dtype = layer.kernel_dtype or _dtype_as_read(module)
    return LayerKernel(path, recipe, backend, axes, shape, dtype, tuple(range(stacked)), batch)


def _dtype_as_read(module: Any) -> str:
    """Return the dtype in which the op reads the kernel, for inputs no wider than it."""
    kernel = jnp.zeros((1,) * module.kernel.ndim, module.kernel.dtype)
    return module.promote_dtype((kernel, kernel, None), dtype=module.dtype)[1].dtype.name
