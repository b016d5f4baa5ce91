"""Watch quant state: a gradient after which it would stand still is refused, in every framework.

The "gradient" of the state is what a step observed, so a step that trains a weight, or passes a gradient on, must
differentiate with respect to the state too. A layer asks jax, while it is differentiated, which of its inputs are
(``symbolic_zeros`` of ``jax.custom_jvp``); nothing of it is left in the compiled step.
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
"""Name, in a traced program, of quant state that was read under ``frozen``."""

# jit caches by function and shapes; a user context is part of the key, so that all answers are kept apart.
_answer = jax.make_user_context(None)
Answer = Literal["advances", "stands still"] | None
"""What becomes of quant state when a gradient is taken; None where nobody has said."""


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Keep quant state as it is where gradients are taken, on purpose: as for saliency maps, or a model that teaches.

    Hold it around the function that differentiates, or around the call of one model in a loss of several. It holds for
    Linen, NNX, plain functions and ``configure_quantization`` alike.
    """
    with _answer("stands still"):
        yield


@contextlib.contextmanager
def by_hand() -> Iterator[None]:
    """Allow quant state of NNX to be differentiated without ``value_and_grad``, as by ``jax.grad`` after nnx.split.

    Who holds it hands the gradient of the state to ``update``, ``advance`` or ``apply_gradients``: nothing can
    check that. What it does not allow is a gradient that leaves the state out.
    """
    with _answer(_answer.value or "advances"):
        yield


@dataclasses.dataclass(frozen=True)
class Watch:
    """How a framework's layers read their quant state.

    Attributes:
      train: how to take a gradient after which the state advances, for errors.
      by_hand: the error where the state's gradient is taken outside of ``by_hand``; "" where anyone may take it.
    """

    train: str
    by_hand: str = ""

    def __call__(self, path: str, operands: Sequence[Array], state: Any) -> Any:
        """Return quant state as it is, and raise where a gradient is taken after which it would not advance.

        Args:
          path: of the layer, for the error.
          operands: of its contraction, the activation and the weight; or the weight alone.
          state: pytree of its quant state.

        Raises:
          ValueError: while differentiating with respect to an operand or the state, outside ``frozen``, the state is
            left out, or its gradient is to be taken in another way.
        """
        answer: Answer = _answer.value
        if answer == "stands still":
            return jax.tree.map(lambda leaf: checkpoint_name(leaf, FROZEN_MARK), state)
        return _watched(self, path, answer, tuple(operands), state)


FUNCTION = Watch(
    "differentiate with respect to the quant state too, as jax.grad(loss, argnums=(0, 1)) of (params, quant_state) "
    "does, and hand what it observed to jaxquant.state.update"
)
LINEN = Watch(
    "take it of all that model.init returned and hand it to jaxquant.state.TrainState or Optimizer, or of both parts "
    "of jaxquant.state.split and hand that of the state to jaxquant.state.update"
)
STATELESS = (
    "in a loop that differentiates the parameters alone, as MaxText's SFT, GRPO, distillation and training engine do, "
    "use a string without state, such as 'int8', or 'fp8_current' (to MaxText: 'te_fp8_currentscaling')"
)
NNX = Watch(
    f"take it with jaxquant.state.value_and_grad and hand it to jaxquant.state.apply_gradients; {STATELESS}",
    "its gradient is taken outside jaxquant.state.value_and_grad, where an optimizer would drop it without a word; use "
    "that and jaxquant.state.apply_gradients, or hold jaxquant.state.by_hand() and hand the gradient of the "
    "state to jaxquant.state.update or advance (MaxText's pre-training advances it itself from version 0.2.5 on)",
)


def _is_overwritten() -> bool:
    """Return whether the gradient is being taken by a train step of MaxText's that overwrites the state with it.

    From version 0.2.5 on the step's loss function, ``diff_wrapper``, leaves the state out of what it returns by the
    filter ``custom_param_filter``; before, the old state came back in it and went over the new one.
    """
    frame: Any = sys._getframe()
    step = ("maxtext.trainers.pre_train.train", "diff_wrapper")
    while frame and (frame.f_globals.get("__name__"), frame.f_code.co_name) != step:
        frame = frame.f_back
    return frame is not None and "custom_param_filter" in frame.f_code.co_freevars


# Of jvp, not of vjp: after an error in a rule of the latter, jax (0.10) has lost what its jitted callers rely on.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _watched(watch: Watch, path: str, answer: Answer, operands: tuple[Array, ...], state: Any) -> Any:
    return state


def _watched_jvp(watch: Watch, path: str, answer: Answer, primals: Any, tangents: Any) -> tuple[Any, Any]:
    *through, weight = map(_is_perturbed, tangents[0])
    taken = list(map(_is_perturbed, jax.tree.leaves(tangents[1])))
    if (any(through) or weight) and not all(taken):
        if weight:
            which, fix = "its gradient is taken without that of the state", f"{watch.train}; where it is to stand "
            fix += "still, call under jaxquant.state.frozen()"
        else:
            # A teacher, or the gradient of an input; but the base layers of LoRA look the same from here.
            which, fix = "a gradient passes through it that is of neither its kernel nor the state", "where the model "
            fix += f"is not being trained, call it under jaxquant.state.frozen(); where it is, {watch.train}"
        raise ValueError(f"{layer_name(path)} has quant state and {which}, which would never advance; {fix}")
    if watch.by_hand and any(taken) and answer is None and not _is_overwritten():
        raise ValueError(f"{layer_name(path)} has quant state and {watch.by_hand}")
    return primals[1], tangents[1]


def _is_perturbed(tangent: Any) -> bool:
    return not isinstance(tangent, SymbolicZero)


_watched.defjvp(_watched_jvp, symbolic_zeros=True)


NOT_TRAINED = (
    "which does not train; differentiate with respect to other parameters, or train the model that was converted"
)


def require_manual(message: str, x: Any) -> Any:
    """Return arrays as they are, and raise if one is differentiated outside ``by_hand``, ``frozen`` and MaxText's step.

    Args:
      message: of the error.
      x: the operands of a layer whose state is out of this module's sight.

    Raises:
      ValueError: with the message.
    """
    return x if _answer.value is not None else refuse_gradient(message, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def refuse_gradient(message: str, x: Any) -> Any:
    """Return arrays as they are, and raise ValueError with the message where one is differentiated."""
    return x


@refuse_gradient.defjvp
def _refused_jvp(message: str, primals: Any, tangents: Any) -> tuple[Any, Any]:
    if not _is_overwritten():
        raise ValueError(message)
    return primals[0], tangents[0]
