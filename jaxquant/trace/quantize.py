"""quantize: the public function, and the quantized function that it returns."""

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
    """Return a function whose matmuls with parameters run in the low precision that a config asks for.

    The function is traced, and every ``dot_general`` of which one operand is made of parameters alone is a linear
    layer, whatever library wrote it. Its path is that of its parameter, without a last name such as ``kernel``; rules
    and ``intmp`` files match this path. The quantized function is called as ``qfn(params, quant_state, *args,
    key=None)``, and its training loop is

        quant_state = qfn.init(params, *args)
        grads, seen = jax.grad(lambda p, s: loss(qfn(p, s, *args)), argnums=(0, 1))(params, quant_state)
        params, quant_state = optimizer_step(params, grads), jaxquant.state.update(quant_state, seen)

    Weights that a scan slices have state for each of its steps, a weight that is the same in every step has one state,
    and each element of a weight's batch axes (experts) has scales and state of its own. (``vmap`` over weights of which
    all take one activation leaves no batch axis: that is one wide matmul, with one scale.) Decisions are made once, on
    the first trace (that of ``init``, or of the first call), and hold for the parameters whatever is called later.

    Left in float by default, below rules: tables of embeddings that are also looked up; the last layer where its result
    goes into a softmax, a log-sum-exp or an argmax; layers whose result is ranked (routers); and what
    ``maybe_quantize_model`` excludes by name. A layer that cannot be replaced is in ``qfn.report(params, *args)``
    with the reason and in a warning, and is an error if the config is ``strict``.

    Args:
      fn: ``fn(params, *args)``, of any tree of parameters. What it closes over is constant. As under ``jax.jit``,
        arrays and numbers are traced; other leaves of the arguments (bool, str, functions) are static.
      config: anything that ``QuantConfig.from_any`` takes.
      like: the quantized whole model, of whose parameters ``fn`` computes a part: its decisions are taken, and its
        quant state.

    Raises:
      NotImplementedError: what the backend does not honour, and settings of serving.
      ValueError: a function without an argument by position, or with one called ``quant_state``.
      TypeError: a Flax module or class instead of a function.
      TypeError, ValueError, NotImplementedError: the config, as ``QuantConfig.from_any``.

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
    "save_quantized_params_path": "does not run in jaxquant.quantize; write converted parameters with "
    "jaxquant.serving.save",
    "quantize_kvcache": "does not run in jaxquant.quantize; give the model's attention a cache of "
    "jaxquant.serving.kv_cache",
}


class QuantizedFunction:
    """A function of parameters, quant state and arguments; make it with ``jaxquant.quantize``.

    Attributes:
      config: what it was quantized with.
      engine: what traces and decides.
      hashable: the function, as the engine takes it.
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
                f"jaxquant.quantize like: the other function was quantized with {like.config.quantization!r}, and this "
                f"config asks for {config.quantization!r} or has other options; give one config to both"
            )
        self.config = config
        self.hashable, self._like = _hashable(fn), like
        self.engine = Engine(config, FaceHooks()) if like is None else like.engine

    def __call__(self, *args: Any, key: jax.Array | None = None, **kwargs: Any) -> Any:
        """Compute the function in low precision: ``qfn(params, quant_state, *args, key=None)``.

        Args:
          args, kwargs: of the function, by its own names, behind whose first, the parameters, stands ``quant_state``:
            from ``init`` and ``jaxquant.state.update``; {} for recipes that keep none. Its gradient is
            what was seen.
          key: for stochastic rounding; None makes noise from the bits of what is rounded.

        Raises:
          TypeError: an argument of the function where the quant state goes.
          ValueError: state that is missing or does not fit, a layer on which was not decided, a rule that matches no
            layer, or no layer at all.
          NotImplementedError: the config is strict, and a layer is out of reach.
        """
        if key is not None and "key" in self._plain.parameters:
            raise TypeError(
                "key= is the random key of stochastic rounding, and the quantized function has an argument 'key' of "
                "its own; give its own by position, or quantize a function that calls it otherwise"
            )
        fn, (params, quant_state, *rest) = self._bound(self._stateful, args, kwargs)
        return self.engine.run(fn, params, tuple(rest), _checked(quant_state), key)

    def init(self, *args: Any, **kwargs: Any) -> Tables | dict[str, Any]:
        """Make the quant state, {} for recipes that keep none, without computing anything of the function.

        Args:
          args, kwargs: as the function takes them, parameters first; arrays may be ``jax.ShapeDtypeStruct``.
            Where the function has collectives, their axes must be bound, as for the function itself.

        Raises:
          ValueError, NotImplementedError: as the function itself.
        """
        fn, (params, *rest) = self._bound(self._plain, args, kwargs)
        return self.engine.init(fn, params, tuple(rest)) or {}

    def convert(self, *args: Any, **kwargs: Any) -> Any:
        """Quantize the weight of every layer as the training forward does.

        The function itself runs on what comes back, on the same codes and scales, and needs quant state no more:
        ``qfn(converted, {}, *args)``. A weight that its layer does not read as it is (sums, fused weights that are
        split) stays float, with a warning that says why; such a layer is quantized as in training, with the quant state
        that it has there: ``qfn(converted, quant_state, *args)``.

        Args:
          args, kwargs: as of a call; the quant state is that of training or calibration, arrays may be as for ``init``.

        Returns:
          The parameters, with a ``QTensor`` for the leaf of every layer that is converted.

        Raises:
          ValueError: quant state that is missing, or has not seen what a static scale must know.
          NotImplementedError: the config is strict, and the weight of a quantized layer stays float.
        """
        fn, (params, quant_state, *rest) = self._bound(self._stateful, args, kwargs)
        found, _ = self.engine.convert(fn, params, tuple(rest), _checked(quant_state))
        return replace_leaves(params, found, is_tensor)

    def report(self, *args: Any, **kwargs: Any) -> Report:
        """List every contraction of the function, with its recipe or the reason for which it is in float.

        Args:
          args, kwargs: as for ``init``.
        """
        fn, (params, *rest) = self._bound(self._plain, args, kwargs)
        return self.engine.report(fn, params, tuple(rest))

    def _bound(self, signature: inspect.Signature, args: Any, kwargs: Any) -> tuple[Callable[..., Any], list[Any]]:
        """Return a function of positions alone, and the arguments for it in order.

        Raises:
          TypeError: arguments that do not fit the signature.
          ValueError: the function is part of a whole model that has no decisions yet.
        """
        if self._like is not None and self.engine.resolver is not None and self.engine.decisions is None:
            raise ValueError("jaxquant.quantize like: the whole model has no decisions yet; call its init first")
        if not kwargs and len(args) > (signature is self._stateful):
            return self.hashable, list(args)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"the quantized function is called as {signature}: {error}") from None
        named = bound.kwargs
        fn = _Named(self.hashable, tuple(named)) if named else self.hashable
        return fn, [*bound.args, *named.values()]


@dataclasses.dataclass(frozen=True)
class _Named:
    """A function whose last arguments go to it by name."""

    fn: Callable[..., Any]
    names: tuple[str, ...]

    def __call__(self, *args: Any) -> Any:
        count = len(args) - len(self.names)
        return self.fn(*args[:count], **dict(zip(self.names, args[count:], strict=True)))


def _checked(quant_state: Any) -> Any:
    if not isinstance(quant_state, Mapping | Tables):
        raise TypeError(
            "a quantized function is called as qfn(params, quant_state, *args): quant_state must be what "
            f"qfn.init(params, *args) returned, or {{}}, got {type(quant_state).__name__}"
        )
    return quant_state


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function of parameters; of one that has none to read, that of any."""
    try:
        return inspect.signature(fn)
    except ValueError:
        return inspect.signature(lambda params, /, *args, **kwargs: None)


def _with_state(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature with the quant state behind the parameters, the first argument.

    Raises:
      ValueError: an argument of the function is called so already, or it takes none by position.
    """
    if "quant_state" in signature.parameters:
        raise ValueError("the function to quantize has an argument 'quant_state' of its own; call it otherwise")
    first, *rest = signature.parameters.values() or [inspect.Parameter("params", inspect.Parameter.POSITIONAL_ONLY)]
    if first.kind is first.VAR_POSITIONAL:
        first, rest = inspect.Parameter("params", first.POSITIONAL_ONLY), [first, *rest]
    if first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise ValueError("the function to quantize takes no argument by position; the parameters must be its first")
    first = first.replace(default=first.empty)
    return signature.replace(parameters=[first, first.replace(name="quant_state", annotation=first.empty), *rest])


def _with_key(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature with the random key, where no argument of the function is called so."""
    parameters = list(signature.parameters.values())
    if "key" not in signature.parameters:
        at = len(parameters) - any(each.kind is each.VAR_KEYWORD for each in parameters)
        parameters.insert(at, inspect.Parameter("key", inspect.Parameter.KEYWORD_ONLY, default=None))
    return signature.replace(parameters=parameters)


def _signed(method: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """Return a method of a quantized function with the signature that it is called with."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    call.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    return call


def _hashable(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that can be hashed; a callable that holds arrays cannot."""
    try:
        hash(fn)
    except TypeError:
        return lambda *args, **kwargs: fn(*args, **kwargs)
    return fn
