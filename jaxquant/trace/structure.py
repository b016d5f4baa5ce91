"""Structure: the steps between a parameter and its contraction, which move elements but do not change them.

Arrays and converted kernels have the same methods, so a step applies to both, and it can be undone on the converted
kernel. This returns a weight that was quantized in the layout of its op to the layout of its leaf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant.core.blocks import BlocksError, Shape, axis_groups
from jaxquant.core.qtensor import QTensor, mark_stacked_axes
from jaxquant.ops.gradients import REVERSE_ONLY


class Step(NamedTuple):
    """Step from one array to another: a method call, or a map over the first axis (``MAP``).

    Attributes:
      method: "astype", "transpose", "reshape" or "map".
      argument: argument of the method.
      old: shape before a reshape.
    """

    method: str
    argument: Any = None
    old: Shape = ()

    def __call__(self, x: Any) -> Any:
        return getattr(x, self.method)(self.argument)

    def undo(self, kernel: QTensor) -> QTensor:
        """Undo the step on a kernel, except casts."""
        if self.method == "transpose":
            return kernel.transpose(tuple(map(int, np.argsort(self.argument))))
        return kernel.reshape(self.old) if self.method == "reshape" else kernel

    def sources(self, axis: int) -> tuple[int, ...]:
        """Return the axes that become an axis of the result."""
        if self.method == "map":
            return (axis + 1,)
        if self.method == "transpose":
            return (self.argument[axis],)
        if self.method == "astype" or self.old[: axis + 1] == self.argument[: axis + 1]:
            return (axis,)
        old = next(old for old, new in axis_groups(self.old, self.argument) if axis in new)
        return tuple(each for each in old if self.old[each] != 1)

    def without(self, axis: int) -> tuple[Step, int]:
        """Return the step for an array without the single source axis of ``axis``, and that source axis.

        Raises:
          BlocksError: several axes become ``axis``.
        """
        source, *others = self.sources(axis) or (-1, -1)
        if others:
            raise BlocksError(f"axis {axis} of shape {self.argument} was merged from several axes by a reshape")
        if self.method == "transpose":
            order = tuple(each - (each > source) for each in self.argument if each != source)
            return Step("transpose", order), source
        if self.method == "reshape":
            return Step("reshape", without_axes(self.argument, [axis]), without_axes(self.old, [source])), source
        return self, source


MAP = Step("map")
_IDENTITIES = frozenset(
    {"copy", "copy_p", "name", "optimization_barrier", "sharding_constraint", "reshard", "mesh_cast", "pvary", "pcast"}
    | {REVERSE_ONLY}
)
"""Primitives with one operand that change neither elements nor axes."""


def steps_of(eqn: Any) -> tuple[Step, ...] | None:
    """Return the steps of a structural equation with one operand, or None if the equation is not structural."""
    name, params = eqn.primitive.name, eqn.params
    if len(eqn.invars) != 1 or len(eqn.outvars) != 1 or not hasattr(eqn.invars[0].aval, "shape"):
        return None
    old, out = tuple(eqn.invars[0].aval.shape), eqn.outvars[0].aval
    if name in _IDENTITIES:
        return ()
    if name == "convert_element_type" and jnp.issubdtype(out.dtype, jnp.floating):
        return (Step("astype", jnp.dtype(out.dtype).name),)
    if name == "transpose":
        return (Step("transpose", tuple(params["permutation"])),)
    is_spread = name == "broadcast_in_dim" and math.prod(old) == math.prod(out.shape)
    if name in ("squeeze", "expand_dims") or is_spread or (name == "reshape" and params.get("dimensions") is None):
        return (Step("reshape", tuple(out.shape), old),)
    return None


def run_steps(steps: Sequence[Step], compute: Callable[..., Any], leaf: Any, *rest: Any) -> Any:
    """Compute ``compute(weight, *rest)`` for the weight that steps produce from a leaf, mapped over its scans.

    Args:
      steps: steps from the leaf to the weight.
      compute: function of the weight. If it returns a kernel, the steps are undone on it.
      leaf: parameter.
      rest: further arguments, mapped over their first axes like the leaf.
    """
    if not steps:
        return compute(leaf, *rest)
    step, later = steps[0], steps[1:]
    if step != MAP:
        made = run_steps(later, compute, step(leaf), *rest)
        return step.undo(made) if isinstance(made, QTensor) else made
    made = jax.vmap(lambda *each: run_steps(later, compute, *each))(leaf, *rest)
    return mark_stacked_axes(made, [0]) if isinstance(made, QTensor) else made


def dtype_read(steps: Sequence[Step], dtype: str) -> str:
    """Return the dtype name of the result of steps on a leaf with the given dtype."""
    return [dtype, *(step.argument for step in steps if step.method == "astype")][-1]


def sources_of(steps: Sequence[Step], axis: int) -> set[int]:
    """Return the axes of a leaf that become an axis of the result of steps."""
    axes = {axis}
    for step in reversed(steps):
        axes = {source for each in axes for source in step.sources(each)}
    return axes


def sliced(steps: Sequence[Step], count: int) -> tuple[tuple[Step, ...], list[int]]:
    """Return the steps for one slice of a leaf along the axes of the first maps, and these axes.

    Args:
      steps: steps on the whole leaf.
      count: number of maps.

    Raises:
      BlocksError: a step merges such an axis with others.
    """
    found, axes = list(steps), []
    for end in [index for index, step in enumerate(steps) if step == MAP][:count][::-1]:
        axis = 0
        for index in reversed(range(end)):
            found[index], axis = found[index].without(axis)
        axes[:0] = sources_of(steps[:end], 0)
        del found[end]
    return tuple(found), axes


def without_axes(sizes: Shape, axes: Collection[int]) -> Shape:
    """Return sizes without the given axes."""
    return tuple(size for axis, size in enumerate(sizes) if axis not in axes)
