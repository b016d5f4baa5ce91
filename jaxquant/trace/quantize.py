"""The public function ``quantize`` and the quantized function that it returns."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from jaxquant.config.quant_config import ConfigLike, QuantConfig, refuse_fields
from jaxquant.core.qtensor import is_tensor
from jaxquant.state.table import Tables
from jaxquant.trace.decisions import FaceHooks
from jaxquant.trace.engine import Engine
from jaxquant.trace.paths import replace_leaves
from jaxquant.trace.report import Report


def quantize(fn: Callable[..., Any], config: ConfigLike, *, like: QuantizedFunction | None = None) -> QuantizedFunction:
    """Return a function whose matmuls with parameters run in the low precision that a config selects.

    The function is traced. Every ``dot_general`` with one operand that is computed only from parameters is a linear
    layer, in any library. Its path is the path of its parameter, without a last name such as ``kernel``; rules and
    ``intmp`` files match this path. Call the quantized function as ``qfn(params, quant_state, *args, key=None)``. Its
    training loop is

        quant_state = qfn.init(params, *args)
        grads, seen = jax.grad(lambda p, s: loss(qfn(p, s, *args)), argnums=(0, 1))(params, quant_state)
        params, quant_state = optimizer_step(params, grads), jaxquant.state.update(quant_state, seen)

    A weight that a scan slices has state for each step; a weight that is the same in every step has one state. Each
    element of a weight's batch axes (experts) has its own scales and state. (``vmap`` over weights that all read one
    activation leaves no batch axis: it becomes one wide matmul, with one scale.) Recipes are chosen once, on the first
    trace (by ``init`` or the first call), and hold for these parameters in all later calls.

    By default, these stay in float unless a rule selects them: embedding tables that are also looked up; the last
    layer, if its result is an input of a softmax, a log-sum-exp or an argmax; layers whose result is ranked (routers);
    and the layers that ``maybe_quantize_model`` excludes by name. A layer that cannot be quantized is listed with the
    reason in ``qfn.report(params, *args)`` and in a warning, and is an error if the config is ``strict``.

    Args:
      fn: function ``fn(params, *args)`` with any tree of parameters. Arrays that it closes over are constants. As under
        ``jax.jit``, arrays and numbers are traced; other leaves of the arguments (bool, str, functions) are static.
      config: any value that ``QuantConfig.from_any`` accepts.
      like: quantized whole model, if ``fn`` computes a part of it with the same parameters. Its decisions and quant
        state are used.

    Raises:
      NotImplementedError: the backend does not support a recipe, or the config has a setting that only serving reads.
      ValueError: the function has no positional argument, or has an argument named ``quant_state``.
      TypeError: ``fn`` is a Flax module or class instead of a function.
      TypeError, ValueError, NotImplementedError: the config is invalid; see ``QuantConfig.from_any``.

    Source: the interpreter pattern of "Writing custom interpreters in JAX"; quax does the same for array types.
    """
    if issubclass(kind := fn if isinstance(fn, type) else type(fn), (nn.Module, nnx.Module)):
        raise TypeError(
            f"quantize takes a function (params, *args), got the Flax module {kind.__name__}; use maybe_quantize_model"
        )
    config = QuantConfig.from_any(config)
    refuse_fields(config, _NOT_OF_FUNCTIONS)
    return QuantizedFunction(fn, config, like)


_NOT_OF_FUNCTIONS = {
    "save_quantized_params_path": "is not supported by jaxquant.quantize; save converted parameters with "
    "jaxquant.serving.save",
    "quantize_kvcache": "is not supported by jaxquant.quantize; use a cache of jaxquant.serving.kv_cache in the "
    "model's attention",
}


class QuantizedFunction:
    """Quantized function of parameters, quant state and arguments; create it with ``jaxquant.quantize``.

    Attributes:
      config: quantization config.
      engine: engine that traces and chooses recipes.
      hashable: original function, in a hashable form for the engine.
    """

    def __init__(self, fn: Callable[..., Any], config: QuantConfig, like: QuantizedFunction | None) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._plain = _signature(fn)
        self._stateful = _with_state(self._plain)
        self.__signature__ = _with_key(self._stateful)
        self.init, self.report = _signed(self.init, self._plain), _signed(self.report, self._plain)
        self.convert = _signed(self.convert, self._stateful)
        if like is not None and config != like.config:
            raise ValueError(
                f"jaxquant.quantize got a config with quantization {config.quantization!r} but the function "
                f"that was passed as like= has {like.config.quantization!r}; pass like.config"
            )
        self.config = config
        self.hashable, self._like = _hashable(fn), like
        self.engine = Engine(config, FaceHooks()) if like is None else like.engine

    def __call__(self, *args: Any, key: jax.Array | None = None, **kwargs: Any) -> Any:
        """Compute the function in low precision: ``qfn(params, quant_state, *args, key=None)``.

        Args:
          args, kwargs: arguments of the function, with its names. ``quant_state`` follows the first argument, the
            parameters. It comes from ``init`` and ``jaxquant.state.update``; pass {} for recipes without state. Its
            gradient holds the new observations.
          key: RNG key for stochastic rounding. None derives the noise from the bits of the rounded values.

        Raises:
          TypeError: another argument is in the position of the quant state.
          ValueError: state is missing or does not fit, a layer has no decision, a rule matches no layer, or there is no
            layer to quantize.
          NotImplementedError: the config is strict, and a layer cannot be quantized.
        """
        if key is not None and "key" in self._plain.parameters:
            raise TypeError(
                "the quantized function has an argument named 'key', but key= is the random key of stochastic "
                "rounding; rename the argument of the function, or pass its value by position"
            )
        fn, (params, quant_state, *rest) = self._bound(self._stateful, args, kwargs)
        return self.engine.run(fn, params, tuple(rest), _checked(quant_state), key)

    def init(self, *args: Any, **kwargs: Any) -> Tables | dict[str, Any]:
        """Create the quant state, {} for recipes without state. Only traces the function.

        Args:
          args, kwargs: arguments of the function, parameters first; arrays may be ``jax.ShapeDtypeStruct``. If the
            function has collectives, their axes must be bound, as in a call of the function.

        Raises:
          ValueError, NotImplementedError: see ``__call__``.
        """
        fn, (params, *rest) = self._bound(self._plain, args, kwargs)
        return self.engine.init(fn, params, tuple(rest)) or {}

    def convert(self, *args: Any, **kwargs: Any) -> Any:
        """Quantize the weight of every layer like the training forward pass.

        The quantized function runs on the result, with the same codes and scales, and needs no quant state:
        ``qfn(converted, {}, *args)``. A weight that its layer does not read directly (sums, fused weights that are
        split) stays in float, and a warning names the reason. Such a layer is quantized as in training and needs its
        quant state: ``qfn(converted, quant_state, *args)``.

        Args:
          args, kwargs: arguments of a call, with the quant state of training or calibration; arrays as for ``init``.

        Returns:
          The parameters, with a ``QTensor`` for the leaf of every converted layer.

        Raises:
          ValueError: quant state is missing, or has no observation for a static scale.
          NotImplementedError: the config is strict, and the weight of a quantized layer stays in float.
        """
        fn, (params, quant_state, *rest) = self._bound(self._stateful, args, kwargs)
        found, _ = self.engine.convert(fn, params, tuple(rest), _checked(quant_state))
        return replace_leaves(params, found, is_tensor)

    def report(self, *args: Any, **kwargs: Any) -> Report:
        """Return every contraction of the function, with its recipe or the reason for which it is in float.

        Args:
          args, kwargs: see ``init``.
        """
        fn, (params, *rest) = self._bound(self._plain, args, kwargs)
        return self.engine.report(fn, params, tuple(rest))

    def _bound(self, signature: inspect.Signature, args: Any, kwargs: Any) -> tuple[Callable[..., Any], list[Any]]:
        """Return a function with positional arguments only, and its arguments in order.

        Raises:
          TypeError: the arguments do not fit the signature.
          ValueError: the function is part of a whole model that has no decisions yet.
        """
        if self._like is not None and self.engine.resolver is not None and self.engine.decisions is None:
            raise ValueError("jaxquant.quantize: the function passed as like has no recipes yet; call like.init first")
        if not kwargs and len(args) > (signature is self._stateful):
            return self.hashable, list(args)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"the quantized function must be called as {signature}: {error}") from None
        named = bound.kwargs
        fn = _Named(self.hashable, tuple(named)) if named else self.hashable
        return fn, [*bound.args, *named.values()]


@dataclasses.dataclass(frozen=True)
class _Named:
    """Function that receives its last arguments by name."""

    fn: Callable[..., Any]
    names: tuple[str, ...]

    def __call__(self, *args: Any) -> Any:
        count = len(args) - len(self.names)
        return self.fn(*args[:count], **dict(zip(self.names, args[count:], strict=True)))


def _checked(quant_state: Any) -> Any:
    if not isinstance(quant_state, Mapping | Tables):
        raise TypeError(
            "a quantized function is called as qfn(params, quant_state, *args): quant_state must be the "
            f"result of qfn.init(params, *args), or {{}}, got {type(quant_state).__name__}"
        )
    return quant_state


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function of parameters, or a generic one if it has no readable signature."""
    try:
        return inspect.signature(fn)
    except ValueError:
        return inspect.signature(lambda params, /, *args, **kwargs: None)


def _with_state(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature with the quant state after the parameters, which are the first argument.

    Raises:
      ValueError: the function has an argument named ``quant_state``, or no positional argument.
    """
    if "quant_state" in signature.parameters:
        raise ValueError("the function to quantize has an argument named 'quant_state'; rename the argument")
    first, *rest = signature.parameters.values() or [inspect.Parameter("params", inspect.Parameter.POSITIONAL_ONLY)]
    if first.kind is first.VAR_POSITIONAL:
        first, rest = inspect.Parameter("params", first.POSITIONAL_ONLY), [first, *rest]
    if first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise ValueError("the function to quantize has no positional argument; make the parameters its first argument")
    first = first.replace(default=first.empty)
    return signature.replace(parameters=[first, first.replace(name="quant_state", annotation=first.empty), *rest])


def _with_key(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature with the RNG key, unless the function has an argument of that name."""
    parameters = list(signature.parameters.values())
    if "key" not in signature.parameters:
        at = len(parameters) - any(each.kind is each.VAR_KEYWORD for each in parameters)
        parameters.insert(at, inspect.Parameter("key", inspect.Parameter.KEYWORD_ONLY, default=None))
    return signature.replace(parameters=parameters)


def _signed(method: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """Return a method of a quantized function with its call signature."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    call.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    return call


def _hashable(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hashable function; a callable that holds arrays is not hashable."""
    try:
        hash(fn)
    except TypeError:
        return lambda *args, **kwargs: fn(*args, **kwargs)
    return fn
