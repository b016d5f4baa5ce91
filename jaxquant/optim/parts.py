"""The parts of an optimizer's update that compute an element of a parameter from numbers of that element alone."""

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
"""Primitives that a part may have, by name."""
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}


@dataclasses.dataclass
class Part:
    """What an update computes of one parameter.

    Attributes:
      inputs, outputs: numbers of its arrays among the update's inputs and outputs, in order.
      scalars: variable -> the scalar that it is: what is computed outside of the part, as bias corrections and the
        learning rate.
      equations: of it.
      refusal: why no kernel computes it, in words; None where one can.
    """

    inputs: list[int] = dataclasses.field(default_factory=list)
    outputs: list[int] = dataclasses.field(default_factory=list)
    scalars: dict[Any, Any] = dataclasses.field(default_factory=dict)
    equations: list[Any] = dataclasses.field(default_factory=list)
    refusal: str | None = None


class Update:
    """An optimizer's update, traced and divided.

    Args:
      function: arrays -> arrays, flat.
      inputs: their shapes.
      large: which inputs may belong to parts.
    """

    def __init__(self, function: Callable[..., Sequence[Array]], inputs: Sequence[Any], large: Collection[int]) -> None:
        traced = jax.make_jaxpr(function)(*inputs)
        flat = jax.make_jaxpr(lambda *args: _inlined(traced.jaxpr, traced.consts, args))(*inputs)
        self._jaxpr: Any = flat.jaxpr
        self._consts = flat.consts
        self._owner = {v: Part([i]) for i, v in enumerate(self._jaxpr.invars) if i in large}
        self._joined: dict[int, Part] = {}  # the identity of a part -> that into which it went
        self._spread: dict[Any, Any] = {}  # a scalar in the shape of an array -> the scalar
        self._why: dict[Any, Any] = {}  # an array that is computed from a part otherwise -> why it is not in it
        for equation in self._jaxpr.eqns:
            self._read(equation)
        roots = [part for part in map(self._part, self._owner) if part is not None]
        self.parts = list({id(part): part for part in roots}.values())
        """All parts, also those that are refused."""
        for i, v in enumerate(self._jaxpr.outvars):
            if (part := self._part(v)) is not None:
                part.outputs.append(i)

    def rest(self, inputs: Sequence[Any], taken: Sequence[Part]) -> tuple[list[Any], list[list[Array]]]:
        """Compute all but some parts: all outputs, None for those of the parts, and the scalars of each part.

        Args:
          inputs: of the update; those of the parts are not read.
          taken: the parts.
        """
        apart = {number for part in taken for number in part.outputs}
        skipped = {id(equation) for part in taken for equation in part.equations}
        dropped = {number for part in taken for number in part.inputs}
        kept = [i for i in range(len(inputs)) if i not in dropped]
        wanted = [v for i, v in enumerate(self._jaxpr.outvars) if i not in apart]
        wanted += [v for part in taken for v in part.scalars.values()]
        equations = [equation for equation in self._jaxpr.eqns if id(equation) not in skipped]
        given = [self._jaxpr.invars[i] for i in kept]
        jaxpr = _jaxpr(self._jaxpr.constvars, given, wanted, equations)
        made = iter(eval_jaxpr(jaxpr, self._consts, *(inputs[i] for i in kept)))
        outputs = [None if i in apart else next(made) for i in range(len(self._jaxpr.outvars))]
        return outputs, [[next(made).astype(jnp.float32) for _ in part.scalars] for part in taken]

    def dtype(self, output: int) -> Any:
        """Return the dtype of an output, by its number."""
        return self._jaxpr.outvars[output].aval.dtype

    def run(self, part: Part, scalars: Sequence[Array], inputs: Sequence[Array]) -> list[Array]:
        """Compute a part of any number of elements.

        Args:
          part: which.
          scalars: its scalars, in float32.
          inputs: its inputs, alike in shape.
        """
        arrays = {self._jaxpr.invars[i]: x for i, x in zip(part.inputs, inputs, strict=True)}
        for (v, _), x in zip(part.scalars.items(), scalars, strict=True):
            value = x != 0 if v.aval.dtype == bool else x
            arrays[v] = jnp.broadcast_to(value, inputs[0].shape) if v.aval.shape else value
        for equation in part.equations:  # not by eval_jaxpr, which would compute on the mesh of the trace
            given = [v.val if isinstance(v, Literal) else arrays[v] for v in equation.invars]
            arrays[equation.outvars[0]] = equation.primitive.bind(*given, **equation.params)
        return [arrays[self._jaxpr.outvars[i]] for i in part.outputs]

    def _part(self, v: Any) -> Part | None:
        part = None if isinstance(v, Literal) else self._owner.get(v)
        while part is not None and id(part) in self._joined:
            part = self._joined[id(part)]
        return part

    def _join(self, one: Part, two: Part) -> None:
        if one is not two:
            self._joined[id(two)] = one
            for field in ("inputs", "equations"):
                getattr(one, field).extend(getattr(two, field))
            one.inputs.sort()
            one.scalars |= two.scalars
            one.refusal = one.refusal or two.refusal

    def _read(self, equation: Any) -> None:
        name, given, out = equation.primitive.name, equation.invars, next(iter(equation.outvars), None)
        met = [part for part in map(self._part, given) if part is not None]
        if not met:
            if name == "broadcast_in_dim" and not given[0].aval.shape:
                self._spread[out] = given[0]
            return
        part = met[0]
        for other in {id(each): each for each in met}.values():
            self._join(part, other)
        part.refusal = part.refusal or self._refusal(equation)
        if name not in ELEMENTWISE:
            self._why |= dict.fromkeys(equation.outvars, part.refusal)
        else:
            part.equations.append(equation)
            self._owner[out] = part
            part.scalars |= {v: self._spread.get(v, v) for v in given if self._is_scalar(v)}

    def _is_scalar(self, v: Any) -> bool:
        return not isinstance(v, Literal) and self._part(v) is None and (not v.aval.shape or v in self._spread)

    def _refusal(self, equation: Any) -> str | None:
        name = equation.primitive.name
        if name not in ELEMENTWISE:
            return f"{name} is not elementwise"
        if any(v.aval.dtype == jnp.float16 for v in (*equation.invars, *equation.outvars)):
            return f"{name} has float16, which kernels on TPUs do not read"
        for v in equation.invars:
            if self._is_scalar(v) and v.aval.dtype not in (jnp.float32, bool):
                return f"{name} takes a scalar in {v.aval.dtype.name}"
            if v.aval.shape and not self._is_scalar(v) and self._part(v) is None:
                return self._why.get(v, f"{name} takes an array of another kind")
        return None


def _jaxpr(constants: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], equations: Any) -> Jaxpr:
    info = DebugInfo("jaxquant.optim", "update", ("",) * len(inputs), ("",) * len(outputs))
    return Jaxpr(constants, inputs, outputs, equations, debug_info=info)


def _inlined(jaxpr: Any, constants: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr without calls of functions that were jitted in it."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arrays], strict=True))
    read = lambda v: v.val if isinstance(v, Literal) else known[v]  # noqa: E731
    for equation in jaxpr.eqns:
        if (inner := equation.params.get(_CALLS.get(equation.primitive.name, ""))) is not None:
            made = _inlined(inner.jaxpr, inner.consts, [read(v) for v in equation.invars])
        else:
            given = {v: known[v] for v in equation.invars if not isinstance(v, Literal)}
            made = eval_jaxpr(_jaxpr([], list(given), equation.outvars, [equation]), [], *given.values())
        known |= zip(equation.outvars, made, strict=True)
    return [read(v) for v in jaxpr.outvars]
