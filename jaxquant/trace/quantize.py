"""quantize: the public function, and the quantized function that it returns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxquant.config.quant_config import QuantConfig
from jaxquant.trace.engine import Dialect, Engine
from jaxquant.trace.report import Report


def quantize(fn: Callable[..., Any], config: Any, *, like: QuantizedFunction | None = None) -> QuantizedFunction:
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
    ``maybe_quantize_model`` excludes by name. What cannot be replaced is in ``qfn.report(params, *args)`` with the
    reason, and an error where the config is ``strict``.

    Args:
      fn: ``fn(params, *args)``, of any tree of parameters. What it closes over is constant. As under ``jax.jit``,
        arrays and numbers are traced; other leaves of the arguments (bool, str, functions) are static.
      config: anything that ``QuantConfig.from_any`` takes. ``quant_backend: auto`` is what it is
        for a Linen model.
      like: the quantized whole model, of whose parameters ``fn`` computes a part: its decisions are taken, and its
        quant state.

    Raises:
      NotImplementedError: what the backend does not honour, and settings of serving.

    Source: the interpreter pattern of "Writing custom interpreters in JAX"; quax does the same for array types.
    """
    config = QuantConfig.from_any(config)
    _refuse(config)
    return QuantizedFunction(fn, config, like)


def _refuse(config: QuantConfig) -> None:
    for name, advice in (
        ("save_quantized_params_path", "write converted parameters with jaxquant.serving.save"),
        ("quantize_kvcache", "give the model's attention a cache of jaxquant.serving.kv_cache"),
    ):
        if getattr(config, name):
            raise NotImplementedError(f"{name} {getattr(config, name)!r} does not run in jaxquant.quantize; {advice}")


class QuantizedFunction:
    """A function of parameters, quant state and arguments; make it with ``jaxquant.quantize``.

    Attributes:
      config: what it was quantized with.
      engine: what traces and decides.
      hashable: the function, as the engine takes it.
    """

    def __init__(self, fn: Callable[..., Any], config: QuantConfig, like: QuantizedFunction | None) -> None:
        functools.update_wrapper(self, fn, updated=())
        if like is not None and config != like.config:
            raise ValueError(
                f"jaxquant.quantize like: the other function was quantized with {like.config.quantization!r}, and this "
                f"config asks for {config.quantization!r} or has other options; give one config to both"
            )
        self.config = config
        self.hashable, self._like = _hashable(fn), like
        self.engine = Engine(config, Dialect(), config.resolved_backend) if like is None else like.engine

    def __call__(self, params: Any, quant_state: Mapping[str, Any], *args: Any, key: jax.Array | None = None) -> Any:
        """Compute the function in low precision.

        Args:
          params: parameters.
          quant_state: from ``init`` and ``jaxquant.state.update``; {} for recipes that keep none. Its gradient is what
            was seen.
          args: further arguments.
          key: for stochastic rounding; None makes noise from the bits of what is rounded.

        Raises:
          TypeError: an argument of the function where the quant state goes.
          ValueError: state that is missing or does not fit, a layer on which was not decided, a rule that matches no
            layer, or no layer at all.
          NotImplementedError: the config is strict, and a layer is out of reach.
        """
        self._check_bound()
        if not isinstance(quant_state, Mapping):
            raise TypeError(
                "a quantized function is called as qfn(params, quant_state, *args): quant_state must be what "
                f"qfn.init(params, *args) returned, or {{}}, got {type(quant_state).__name__}"
            )
        return self.engine.run(self.hashable, params, args, quant_state, key)

    def init(self, params: Any, *args: Any) -> dict[str, Any]:
        """Make the quant state, {} for recipes that keep none, without computing anything of the function.

        Args:
          params, args: as the function takes them; arrays may be ``jax.ShapeDtypeStruct``. Where the function has
            collectives, their axes must be bound, as for the function itself.

        Raises:
          ValueError, NotImplementedError: as the function itself.
        """
        self._check_bound()
        return self.engine.init(self.hashable, params, args)

    def convert(self, params: Any, quant_state: Mapping[str, Any], *args: Any) -> Any:
        """Quantize the weight of every layer as the training forward does.

        The function itself runs on what comes back, to the same bits, and needs quant state no more: ``qfn(converted,
        {}, *args)``. A weight that its layer does not read as it is (sums, fused weights that are split) stays float,
        with a warning that says why; such a layer is quantized as in training, with the quant state that it has there:
        ``qfn(converted, quant_state, *args)``.

        Args:
          params: parameters.
          quant_state: from training or calibration; {} for recipes that keep none.
          args: as for ``init``.

        Returns:
          The parameters, with a ``ConvertedKernel`` for the leaf of every layer that is converted.

        Raises:
          ValueError: quant state that is missing, or has not seen what a static scale must know.
          NotImplementedError: the config is strict, and the weight of a quantized layer stays float.
        """
        self._check_bound()
        return self.engine.convert(self.hashable, params, args, quant_state)[0]

    def report(self, params: Any, *args: Any) -> Report:
        """List every contraction of the function, with its recipe or the reason for which it is in float.

        Args:
          params, args: as for ``init``.
        """
        self._check_bound()
        return self.engine.report(self.engine.trace(self.hashable, params, args))

    def _check_bound(self) -> None:
        if self._like is not None and self.engine.resolver is not None and self.engine.decisions is None:
            raise ValueError("jaxquant.quantize like: the whole model has no decisions yet; call its init first")


def _hashable(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that can be hashed; a callable that holds arrays cannot."""
    try:
        hash(fn)
    except TypeError:
        return lambda *args: fn(*args)
    return fn
