"""Elementwise parts of an optimizer's update: each output element depends only on inputs at the same index."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import DebugInfo, Jaxpr, Literal

Array = jax.Array

_NAMES = (
    "abs add add_any and clamp convert_element_type div eq exp exp2 ge gt integer_pow is_finite le log "
    "log1p logistic lt max min mul ne neg not or pow rsqrt select_n sign sqrt square sub tanh"
)
ELEMENTWISE = frozenset(_NAMES.split())
"""Names of the primitives that a part can contain."""
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}


@dataclasses.dataclass
class Part:
    """The elementwise computation of an update on one parameter.

    Attributes:
      inputs, outputs: indices of the part's arrays among the update's inputs and outputs, in order.
      scalars: mapping from variable to scalar, for scalars that are computed outside of the part, such as bias
        corrections and the learning rate.
      equations: equations of the part.
      refusal: reason why the part cannot be computed separately, or None.
    """

    inputs: list[int] = dataclasses.field(default_factory=list)
    outputs: list[int] = dataclasses.field(default_factory=list)
    scalars: dict[Any, Any] = dataclasses.field(default_factory=dict)
    equations: list[Any] = dataclasses.field(default_factory=list)
    refusal: str | None = None


class Update:
    """The jaxpr of an optimizer's update, divided into parts.

    Args:
      function: flat function, arrays -> arrays.
      inputs: shapes of the inputs of ``function``.
      large: indices of the inputs that can belong to parts.
    """

    def __init__(self, function: Callable[..., Sequence[Array]], inputs: Sequence[Any], large: Collection[int]) -> None:
        traced = jax.make_jaxpr(function)(*inputs)
        flat = jax.make_jaxpr(lambda *args: _eval_inlined(traced.jaxpr, traced.consts, args))(*inputs)
        self._jaxpr: Any = flat.jaxpr
        self._consts = flat.consts
        self._owner = {v: Part([i]) for i, v in enumerate(self._jaxpr.invars) if i in large}
        self._merged: dict[int, Part] = {}  # id of a part -> the part into which it was merged
        self._broadcast: dict[Any, Any] = {}  # a scalar broadcast to an array -> the scalar
        self._reasons: dict[Any, Any] = {}  # an array computed from a part -> the reason it is not in the part
        for equation in self._jaxpr.eqns:
            self._add_equation(equation)
        roots = [part for part in map(self._part, self._owner) if part is not None]
        self.parts = list({id(part): part for part in roots}.values())
        """All parts, including parts with a refusal."""
        for i, v in enumerate(self._jaxpr.outvars):
            if (part := self._part(v)) is not None:
                part.outputs.append(i)

    def run_rest(self, inputs: Sequence[Any], excluded: Sequence[Part]) -> tuple[list[Any], list[list[Array]]]:
        """Compute the update without some of its parts.

        Args:
          inputs: inputs of the update; inputs of the excluded parts are not read.
          excluded: parts that are computed elsewhere.

        Returns:
          All outputs of the update (None for outputs of the excluded parts), and the scalars of each excluded part.
        """
        excluded_outputs = {number for part in excluded for number in part.outputs}
        skipped = {id(equation) for part in excluded for equation in part.equations}
        dropped = {number for part in excluded for number in part.inputs}
        remaining = [i for i in range(len(inputs)) if i not in dropped]
        outvars = [v for i, v in enumerate(self._jaxpr.outvars) if i not in excluded_outputs]
        outvars += [v for part in excluded for v in part.scalars.values()]
        equations = [equation for equation in self._jaxpr.eqns if id(equation) not in skipped]
        invars = [self._jaxpr.invars[i] for i in remaining]
        jaxpr = _jaxpr(self._jaxpr.constvars, invars, outvars, equations)
        results = iter(eval_jaxpr(jaxpr, self._consts, *(inputs[i] for i in remaining)))
        outputs = [None if i in excluded_outputs else next(results) for i in range(len(self._jaxpr.outvars))]
        return outputs, [[next(results).astype(jnp.float32) for _ in part.scalars] for part in excluded]

    def dtype(self, output: int) -> Any:
        """Return the dtype of the output with index ``output``."""
        return self._jaxpr.outvars[output].aval.dtype

    def run_part(self, part: Part, scalars: Sequence[Array], inputs: Sequence[Array]) -> list[Array]:
        """Compute a part on arrays of any shape.

        Args:
          part: part to compute.
          scalars: scalars of the part, in float32.
          inputs: inputs of the part, all of one shape.
        """
        arrays = {self._jaxpr.invars[i]: x for i, x in zip(part.inputs, inputs, strict=True)}
        for (v, _), x in zip(part.scalars.items(), scalars, strict=True):
            value = x != 0 if v.aval.dtype == bool else x
            arrays[v] = jnp.broadcast_to(value, inputs[0].shape) if v.aval.shape else value
        for equation in part.equations:  # eval_jaxpr would use the mesh of the trace
            operands = [v.val if isinstance(v, Literal) else arrays[v] for v in equation.invars]
            arrays[equation.outvars[0]] = equation.primitive.bind(*operands, **equation.params)
        return [arrays[self._jaxpr.outvars[i]] for i in part.outputs]

    def _part(self, v: Any) -> Part | None:
        part = None if isinstance(v, Literal) else self._owner.get(v)
        while part is not None and id(part) in self._merged:
            part = self._merged[id(part)]
        return part

    def _merge(self, one: Part, two: Part) -> None:
        if one is not two:
            self._merged[id(two)] = one
            for field in ("inputs", "equations"):
                getattr(one, field).extend(getattr(two, field))
            one.inputs.sort()
            one.scalars |= two.scalars
            one.refusal = one.refusal or two.refusal

    def _add_equation(self, equation: Any) -> None:
        name, operands, out = equation.primitive.name, equation.invars, next(iter(equation.outvars), None)
        parts = [part for part in map(self._part, operands) if part is not None]
        if not parts:
            if name == "broadcast_in_dim" and not operands[0].aval.shape:
                self._broadcast[out] = operands[0]
            return
        part = parts[0]
        for other in {id(each): each for each in parts}.values():
            self._merge(part, other)
        part.refusal = part.refusal or self._refusal(equation)
        if name not in ELEMENTWISE:
            self._reasons |= dict.fromkeys(equation.outvars, part.refusal)
        else:
            part.equations.append(equation)
            self._owner[out] = part
            part.scalars |= {v: self._broadcast.get(v, v) for v in operands if self._is_scalar(v)}

    def _is_scalar(self, v: Any) -> bool:
        return not isinstance(v, Literal) and self._part(v) is None and (not v.aval.shape or v in self._broadcast)

    def _refusal(self, equation: Any) -> str | None:
        name = equation.primitive.name
        if name not in ELEMENTWISE:
            return f"{name} is not elementwise"
        if any(v.aval.dtype == jnp.float16 for v in (*equation.invars, *equation.outvars)):
            return f"{name} has float16 operands, which kernels on TPUs do not support"
        for v in equation.invars:
            if self._is_scalar(v) and v.aval.dtype not in (jnp.float32, bool):
                return f"{name} has a scalar operand in {v.aval.dtype.name}"
            if v.aval.shape and not self._is_scalar(v) and self._part(v) is None:
                return self._reasons.get(v, f"{name} has an array operand that does not belong to the parameter")
        return None


def _jaxpr(constants: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], equations: Any) -> Jaxpr:
    info = DebugInfo("jaxquant.optim", "update", ("",) * len(inputs), ("",) * len(outputs))
    return Jaxpr(constants, inputs, outputs, equations, debug_info=info)


def _eval_inlined(jaxpr: Any, constants: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr, and inline its calls of jitted functions."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arrays], strict=True))
    read = lambda v: v.val if isinstance(v, Literal) else known[v]  # noqa: E731
    for equation in jaxpr.eqns:
        if (inner := equation.params.get(_CALLS.get(equation.primitive.name, ""))) is not None:
            results = _eval_inlined(inner.jaxpr, inner.consts, [read(v) for v in equation.invars])
        else:
            operands = {v: known[v] for v in equation.invars if not isinstance(v, Literal)}
            results = eval_jaxpr(_jaxpr([], list(operands), equation.outvars, [equation]), [], *operands.values())
        known |= zip(equation.outvars, results, strict=True)
    return [read(v) for v in jaxpr.outvars]
