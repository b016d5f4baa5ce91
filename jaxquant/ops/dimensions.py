"""Dimension numbers of a contraction and of its two gradients, as data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

Axes = tuple[int, ...]
DotDimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


@dataclasses.dataclass(frozen=True)  # without slots: a property is computed once
class Dimensions:
    """Contracting and batch axes of two operands of ``lax.dot_general``, hashable.

    The result has the axes (batch, free axes of lhs, free axes of rhs).
    """

    lhs_contract: Axes
    rhs_contract: Axes
    lhs_batch: Axes
    rhs_batch: Axes
    lhs_ndim: int
    rhs_ndim: int

    @classmethod
    def of(cls, numbers: DotDimensionNumbers, lhs_ndim: int, rhs_ndim: int) -> Dimensions:
        """Normalize ``lax.dot_general`` dimension numbers; negative axes count from the end."""
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
        return cls(
            tuple(int(axis) % lhs_ndim for axis in lhs_contract),
            tuple(int(axis) % rhs_ndim for axis in rhs_contract),
            tuple(int(axis) % lhs_ndim for axis in lhs_batch),
            tuple(int(axis) % rhs_ndim for axis in rhs_batch),
            lhs_ndim,
            rhs_ndim,
        )

    @functools.cached_property
    def numbers(self) -> DotDimensionNumbers:
        return ((self.lhs_contract, self.rhs_contract), (self.lhs_batch, self.rhs_batch))

    @functools.cached_property
    def lhs_free(self) -> tuple[int, ...]:
        return _other_axes(self.lhs_ndim, self.lhs_contract, self.lhs_batch)

    @functools.cached_property
    def rhs_free(self) -> tuple[int, ...]:
        return _other_axes(self.rhs_ndim, self.rhs_contract, self.rhs_batch)

    def swap(self) -> Dimensions:
        """Return the contraction with lhs and rhs swapped."""
        return Dimensions(
            self.rhs_contract, self.lhs_contract, self.rhs_batch, self.lhs_batch, self.rhs_ndim, self.lhs_ndim
        )

    @functools.cached_property
    def order_of_swapped(self) -> tuple[int, ...]:
        """Transposition from the result of the swapped operands to the result of this contraction."""
        batch, last = len(self.lhs_batch), len(self.lhs_batch) + len(self.rhs_free)
        return (*range(batch), *range(last, self.out_ndim), *range(batch, last))

    def without_batch(self) -> Dimensions:
        """Return the contraction of one batch element."""
        lhs, rhs = (
            tuple(axis - sum(other < axis for other in batch) for axis in contracted)
            for contracted, batch in zip(*self.numbers, strict=True)
        )
        count = len(self.lhs_batch)
        return Dimensions(lhs, rhs, (), (), self.lhs_ndim - count, self.rhs_ndim - count)

    @functools.cached_property
    def out_ndim(self) -> int:
        return len(self.lhs_batch) + len(self.lhs_free) + len(self.rhs_free)

    def for_dlhs(self) -> tuple[Dimensions, tuple[int, ...]]:
        """Return the contraction ``grad · rhs`` and the transposition that puts its result in lhs's layout."""
        return self._backward(first_free=len(self.lhs_free), skip=len(self.lhs_batch))

    def for_drhs(self) -> tuple[Dimensions, tuple[int, ...]]:
        """Return the contraction ``grad · lhs`` and the transposition that puts its result in rhs's layout."""
        return self.swap()._backward(first_free=0, skip=len(self.lhs_batch))

    def _backward(self, first_free: int, skip: int) -> tuple[Dimensions, tuple[int, ...]]:
        """Contract the gradient with rhs over rhs's free axes, which start at ``skip + first_free`` in the gradient."""
        start = skip + first_free
        contract = tuple(range(start, start + len(self.rhs_free)))
        dims = Dimensions(contract, self.rhs_free, tuple(range(skip)), self.rhs_batch, self.out_ndim, self.rhs_ndim)
        # The last axes of the result are rhs's contracted axes, in rhs's order.
        order = np.argsort(self.rhs_contract)
        contracted = [self.lhs_contract[i] for i in order]
        permutation = np.argsort([*self.lhs_batch, *self.lhs_free, *contracted])
        return dims, tuple(int(axis) for axis in permutation)


def _other_axes(ndim: int, *taken: Axes) -> tuple[int, ...]:
    used = {axis for axes in taken for axis in axes}
    return tuple(axis for axis in range(ndim) if axis not in used)
