"""Quantize a Linen model that knows nothing of jaxquant.

The model's class gets a subclass whose methods run under a Linen method interceptor. When a linear layer is called, the
interceptor asks the resolver for its recipe and lends it a quantized ``dot_general_cls`` for that call. The layer still
makes its own parameters, so their tree, their names and their initial values are those of the float model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxquant.backends import Backend, load
from jaxquant.backends._linen import kind_of, layers_apart
from jaxquant.backends._weights import check_converted
from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.rules import Decision, Resolver
from jaxquant.core.paths import float_rule, layer_name
from jaxquant.core.qtensor import INPUT_SCALE, ConvertedKernel, QTensor
from jaxquant.core.recipe import Recipe, TensorSpec
from jaxquant.inject.layers import (
    Layer,
    check_layers,
    einsum_equation,
    out_features,
    relative_path,
    substituted,
)

# jit caches by function and shapes. This is part of their key: a function that was traced for the float model is traced
# again for the quantized one, and the other way round.
_active_quantizer = jax.make_user_context(None)


def quantize_linen(
    model: nn.Module, config: QuantConfig, resolver: Resolver, recipes: dict[str, Recipe], layers: list[Layer]
) -> nn.Module:
    """Quantize a Linen model on the backend of a config.

    Args:
      model: the model; it stays as it is.
      config, resolver: what is asked.
      recipes: of the layers to quantize, by path.
      layers: all that the example call ran; empty where there was none, and the rules are then checked at the first
        call.

    Raises:
      ValueError: an input that the backend would take for a weight.
    """
    backend = load(config.resolved_backend or "native")
    check_layers(backend.name, (layer for layer in layers if layer.path in recipes))
    if not (backend.row.has_layer_ops or config.checkpoint_is_quantized):
        paths = [layer.path for layer in layers]
        return backend.quantize_linen(model, recipes, _model_methods(type(model)), paths)
    return _subclass(model, _Quantizer(config, backend, resolver, check_at_call=not layers))


def refuse_nothing(config: QuantConfig, reasons: dict[str, str], found: bool) -> None:
    """Refuse a model in which a config quantizes nothing: that is never what was asked."""
    if found:
        return
    what = "; ".join(f"{path}: {reason}" for path, reason in reasons.items()) or "it has no linear layer"
    raise ValueError(f"quantization {config.quantization!r} would quantize no layer of this model ({what})")


class _Quantizer:
    """Intercept the calls of linear layers below one model."""

    def __init__(self, config: QuantConfig, backend: Backend, resolver: Resolver, check_at_call: bool):
        self._config, self._backend, self._resolver = config, backend, resolver
        self._check_at_call = check_at_call
        self._local = threading.local()

    @contextlib.contextmanager
    def active(self, root: nn.Module, method: str) -> Iterator[None]:
        """Intercept for the length of one call of a method of the model; a nested call changes nothing."""
        if getattr(self._local, "root", None) is not None:
            yield
            return
        self._local.root, self._local.decisions = root.path, {}
        try:
            with _active_quantizer(self), layers_apart(), nn.intercept_methods(self._intercept):
                yield
            if self._check_at_call and method == "__call__":
                decisions: dict[str, Decision] = self._local.decisions
                self._resolver.check_used(decisions)
                found = any(decision.recipe is not None for decision in decisions.values())
                refuse_nothing(self._config, {path: d.reason for path, d in decisions.items()}, found)
        finally:
            self._local.root = None

    def _intercept(
        self, next_fun: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        module, kind = context.module, kind_of(context.module)
        if kind is None or context.method_name != "__call__":
            return next_fun(*args, **kwargs)
        path = relative_path(module, self._local.root)
        decision = self._resolver(path, out_features(module, args, kwargs))
        self._local.decisions[path] = decision
        kernel = self._converted_kernel(module, path, decision)
        if decision.recipe is None:
            return next_fun(*args, **kwargs)
        make = self._backend.linen_op if kernel is None else self._backend.converted_linen_op
        make = functools.partial(make, recipe=decision.recipe, implementation=decision.implementation)
        with contextlib.ExitStack() as while_called:
            if kernel is not None:
                while_called.enter_context(substituted(module, "promote_dtype", _promoter(module)))
            return self._call(make, next_fun, args, kwargs, module, path, decision)

    def _converted_kernel(self, module: nn.Module, path: str, decision: Decision) -> QTensor | None:
        """Read a layer's kernel where it is a converted one.

        Raises:
          ValueError: it is float where the config has it converted, or the other way round.
        """
        recipe, kernel = decision.recipe, module.get_variable("params", "kernel")
        is_wanted = self._config.checkpoint_is_quantized and recipe is not None and recipe.fwd.rhs is not None
        if is_wanted and not isinstance(kernel, QTensor):
            raise ValueError(
                f"{layer_name(path)} has {'no kernel' if kernel is None else 'a float kernel'} and "
                f"checkpoint_is_quantized true asks for one converted to {recipe.name!r}; convert the parameters "  # pyright: ignore[reportOptionalMemberAccess]
                "with jaxquant.convert"
            )
        if isinstance(kernel, QTensor) and not is_wanted:
            why = "checkpoint_is_quantized is false" if recipe is not None else f"it stays in float ({decision.reason})"
            raise ValueError(f"{layer_name(path)} has a converted kernel ({kernel.qvalue.dtype.name}) and {why}")
        if not isinstance(kernel, QTensor):
            return None
        assert recipe is not None
        spec, scaled = recipe.fwd.rhs, isinstance(recipe.fwd.lhs, TensorSpec) and recipe.fwd.lhs.scaling == "delayed"
        dtype = spec.dtype if isinstance(spec, TensorSpec) else "float"
        has = _describe(kernel.qvalue.dtype.name, module.has_variable("params", INPUT_SCALE))
        check_converted(path, has, repr(recipe.name), _describe(dtype, scaled))
        return kernel

    def _call(
        self, make: Callable[..., Any], next_fun: Any, args: Any, kwargs: Any, module: Any, path: str, decision: Any
    ) -> Any:
        if kind_of(module) == "einsum":
            _check_call(path, module, decision.recipe, decision.reason)
            return call_einsum(module, make("einsum")(), args, kwargs)
        plumbed = getattr(module, "dot_general", None) or getattr(module, "dot_general_cls", None)
        if plumbed is not None:
            raise ValueError(
                f"{layer_name(path)} has a dot_general of its own ({plumbed}) and config asks for "
                f"{decision.recipe.name!r} there ({decision.reason}); drop one, or {float_rule(path)}"
            )
        called = []

        def make_op() -> nn.Module:
            called.append(path)
            return make("dot_general")()

        with substituted(module, "dot_general_cls", make_op):
            out = next_fun(*args, **kwargs)
        if not called:
            raise NotImplementedError(
                f"{layer_name(path)} ({type(module).__name__}) does not use its dot_general_cls, so "
                f"{decision.recipe.name!r} cannot reach it; {float_rule(path)}"
            )
        return out


def _describe(dtype: str, has_scale: bool) -> str:
    return f"{dtype} {'with an' if has_scale else 'without an'} input_scale"


def _promoter(module: Any) -> Callable[..., Any]:
    """Return, for a layer with a converted kernel, what its ``promote_dtype`` would make of the float one."""
    plain, scale = module.promote_dtype, module.get_variable("params", INPUT_SCALE)

    def promote_dtype(inputs: Any, kernel: QTensor, bias: Any, **options: Any) -> Any:
        standin = jnp.zeros((1,) * kernel.ndim, module.param_dtype)
        inputs, standin, bias = plain(inputs, standin, bias, **options)
        return inputs, ConvertedKernel(kernel, standin.dtype.name, scale), bias

    return promote_dtype


def _check_call(path: str, module: nn.Einsum, recipe: Recipe, reason: str) -> None:
    """Refuse a subclass of ``nn.Einsum`` whose own ``__call__`` would be lost; ``nn.jit`` and the like give none."""
    if inspect.unwrap(type(module).__call__) is not inspect.unwrap(nn.Einsum.__call__):
        raise NotImplementedError(
            f"{layer_name(path)} ({type(module).__name__}) has a __call__ of its own, which {recipe.name!r} ({reason}) "
            f"would replace by that of nn.Einsum; call an nn.Einsum as a submodule, or {float_rule(path)}"
        )


def call_einsum(module: nn.Einsum, op: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Do what ``nn.Einsum.__call__`` does, which has no place for another einsum.

    Args:
      module: bound.
      op: called as ``op(equation, inputs, kernel, precision, preferred_element_type)``.
      args, kwargs: of the call.
    """
    inputs = args[0] if args else kwargs["inputs"]
    equation = einsum_equation(module, args, kwargs).replace(" ", "")
    kernel = module.param("kernel", module.kernel_init, module.shape, module.param_dtype)
    bias, bias_shape = None, ()
    if module.use_bias:
        shape, bias_shape = module._get_bias_shape(equation, inputs, kernel)  # pyright: ignore[reportArgumentType]
        bias = module.param("bias", module.bias_init, shape, module.param_dtype)
    inputs, kernel, bias = module.promote_dtype(inputs, kernel, bias, dtype=module.dtype)
    out = op(equation, inputs, kernel, module.precision, module.preferred_element_type)
    return out if bias is None else out + jnp.reshape(bias, bias_shape)


def _subclass(model: nn.Module, quantizer: _Quantizer) -> nn.Module:
    """Copy a model into a subclass of its class, of the same name, whose methods run under the quantizer."""
    base = type(model)

    def wrap(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            method = getattr(super(quantized, self), name)
            if self.scope is None:  # an unbound model runs no layers
                return method(*args, **kwargs)
            with quantizer.active(self, name):
                return method(*args, **kwargs)

        method.__name__ = name
        method.__doc__ = getattr(base, name).__doc__
        method.__wrapped__ = getattr(base, name)  # pyright: ignore[reportFunctionMemberAccess]
        return method

    def fill(namespace: dict[str, Any]) -> None:
        namespace["__module__"], namespace["__doc__"] = base.__module__, base.__doc__
        namespace["__qualname__"] = base.__qualname__
        namespace.update({name: wrap(name) for name in _model_methods(base)})

    quantized = types.new_class(base.__name__, (base,), {}, fill)
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.init and f.name != "parent"}  # pyright: ignore[reportArgumentType]
    return quantized(parent=None, **fields)


def _model_methods(base: type) -> list[str]:
    """Return the methods that a model's own classes define, for which layers may run: ``__call__`` and public ones."""
    own = [cls for cls in reversed(base.__mro__) if cls not in nn.Module.__mro__]
    methods = {name: value for cls in own for name, value in vars(cls).items() if inspect.isfunction(value)}
    return [
        name
        for name, value in methods.items()
        if name == "__call__" or not (name == "setup" or name.startswith("_") or getattr(value, "nowrap", False))
    ]
