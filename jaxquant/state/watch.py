"""Check of gradients: a quantized layer raises if its quant state would never be updated, in every framework.

The "gradient" of the state is the observation of a step, so a step that trains a weight, or passes a gradient on, must
also differentiate with respect to the state. While a layer is differentiated, jax reports which of its inputs are
(``symbolic_zeros`` of ``jax.custom_jvp``); the compiled step contains no trace of the check.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jaxquant.core.paths import layer_name

Array = jax.Array
FROZEN_MARK = "jaxquant_frozen_state"
"""Name, in a jaxpr, of quant state that was read under ``frozen``."""

# A user context is part of jit's cache key, so traces with different answers are cached separately.
_mode = jax.make_user_context(None)
StateMode = Literal["advances", "frozen"] | None
"""Effect of a gradient on quant state; None if no context is active."""


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Keep quant state unchanged although gradients are taken, for example for saliency maps or a teacher model.

    Enter it around the differentiated function, or around the call of one of several models in a loss. It works for
    Linen, NNX, plain functions and ``configure_quantization``.
    """
    with _mode("frozen"):
        yield


@contextlib.contextmanager
def by_hand() -> Iterator[None]:
    """Allow differentiating NNX quant state without ``value_and_grad``, for example by ``jax.grad`` after nnx.split.

    Inside this context, pass the gradient of the state to ``update``, ``advance`` or ``apply_gradients``; this cannot
    be checked. A gradient that leaves the state out is still an error.
    """
    with _mode(_mode.value or "advances"):
        yield


@dataclasses.dataclass(frozen=True)
class Watch:
    """Check that a framework's layers run when they read their quant state.

    Attributes:
      train: instructions, for errors, on taking a gradient that updates the state.
      by_hand: error message for a gradient of the state taken outside of ``by_hand``; "" if that is allowed.
    """

    train: str
    by_hand: str = ""

    def __call__(self, path: str, operands: Sequence[Array], state: Any) -> Any:
        """Return quant state unchanged; raise if a gradient is taken that would never update it.

        Args:
          path: path of the layer, for the error.
          operands: operands of the layer's contraction (activation and weight), or only the weight.
          state: pytree of the layer's quant state.

        Raises:
          ValueError: outside ``frozen``, an operand or the state is differentiated, and the gradient leaves the state
            out or is taken in an unsupported way.
        """
        mode: StateMode = _mode.value
        if mode == "frozen":
            return jax.tree.map(lambda leaf: checkpoint_name(leaf, FROZEN_MARK), state)
        return _watched(self, path, mode, tuple(operands), state)


FUNCTION = Watch(
    "differentiate with respect to params and quant_state, for example with jax.grad(loss, argnums=(0, 1)), and pass "
    "the gradient of quant_state to jaxquant.state.update"
)
LINEN = Watch(
    "differentiate with respect to all variables that model.init returned, and pass the gradient to "
    "jaxquant.state.TrainState or Optimizer"
)
STATELESS = (
    "if your loop differentiates only the parameters, as MaxText's SFT, GRPO, distillation and training engine do, "
    "use a config string without quant state, such as 'int8' or 'fp8_current' (in MaxText: 'te_fp8_currentscaling')"
)
NNX = Watch(
    f"differentiate with jaxquant.state.value_and_grad and call jaxquant.state.apply_gradients; {STATELESS}",
    "the gradient is taken without jaxquant.state.value_and_grad, so an optimizer would drop the quant state; use "
    "jaxquant.state.value_and_grad and jaxquant.state.apply_gradients, or call the step under jaxquant.state.by_hand() "
    "and pass the gradient of the quant state to jaxquant.state.update or advance (MaxText 0.2.5 and newer do this)",
)


def _is_overwritten() -> bool:
    """Return whether a train step of MaxText takes the gradient and overwrites the state with it.

    Since version 0.2.5 the step's loss function, ``diff_wrapper``, removes the state from its result with the filter
    ``custom_param_filter``. Earlier versions returned the old state, which then overwrote the new one.
    """
    frame: Any = sys._getframe()
    step = ("maxtext.trainers.pre_train.train", "diff_wrapper")
    while frame and (frame.f_globals.get("__name__"), frame.f_code.co_name) != step:
        frame = frame.f_back
    return frame is not None and "custom_param_filter" in frame.f_code.co_freevars


# custom_jvp, because after an error in a custom_vjp rule, jax (0.10) loses state that jitted callers rely on.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _watched(watch: Watch, path: str, mode: StateMode, operands: tuple[Array, ...], state: Any) -> Any:
    return state


def _watched_jvp(watch: Watch, path: str, mode: StateMode, primals: Any, tangents: Any) -> tuple[Any, Any]:
    *others, weight = map(_is_perturbed, tangents[0])
    state_perturbed = list(map(_is_perturbed, jax.tree.leaves(tangents[1])))
    if (any(others) or weight) and not all(state_perturbed):
        if weight:
            which, fix = "is taken with respect to the kernel but not the quant state", f"{watch.train}; to keep the "
            fix += "quant state unchanged, call the model under jaxquant.state.frozen()"
        else:
            # A teacher or the gradient of an input; the base layers of LoRA look the same.
            which, fix = "passes through the layer but leaves out the quant state", "if the model is not trained, "
            fix += f"call the model under jaxquant.state.frozen(); otherwise {watch.train}"
        raise ValueError(f"the quant state of {layer_name(path)} would never be updated: the gradient {which}; {fix}")
    if watch.by_hand and any(state_perturbed) and mode is None and not _is_overwritten():
        raise ValueError(f"{layer_name(path)} has quant state, but {watch.by_hand}")
    return primals[1], tangents[1]


def _is_perturbed(tangent: Any) -> bool:
    return not isinstance(tangent, SymbolicZero)


_watched.defjvp(_watched_jvp, symbolic_zeros=True)


NOT_TRAINED = (
    "which does not train; differentiate with respect to other parameters, or train the model before conversion"
)


def require_manual(message: str, x: Any) -> Any:
    """Return arrays unchanged; raise if one is differentiated outside ``by_hand``, ``frozen`` and MaxText's step.

    Args:
      message: text of the error.
      x: operands of a layer whose state this module does not get.

    Raises:
      ValueError: an operand is differentiated.
    """
    return x if _mode.value is not None else refuse_gradient(message, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def refuse_gradient(message: str, x: Any) -> Any:
    """Return arrays unchanged; raise ValueError with the message if one is differentiated."""
    return x


@refuse_gradient.defjvp
def _refused_jvp(message: str, primals: Any, tangents: Any) -> tuple[Any, Any]:
    if not _is_overwritten():
        raise ValueError(message)
    return primals[0], tangents[0]
