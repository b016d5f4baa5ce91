"""Matrix products by int8 digits: float operands, int32 sums, so that any order gives the same bits."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxquant.core.scales import largest
from jaxquant.exact.arithmetic import hold, unit_above

Array = jax.Array

_DIGIT = 64  # largest magnitude of a digit
_BASE = 128  # a digit's unit over the next digit's unit
_PAIRS = 2  # digits of an operand, and most products that one int32 sum contains


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Digits:
    """A float array in two int8 digits, ``unit · (high + low / 128)``, rounded to 14 bits below the unit.

    Attributes:
      high, low: int8 arrays of the array's shape, between -64 and 64.
      unit: float32 powers of two with size 1 along the axes that share a unit; NaN if an element is
        not finite or its magnitude is above 2**123.
    """

    high: Array
    low: Array
    unit: Array

    def with_unit(self, unit: Array) -> Array:
        """Return the float32 values of the digits with another unit."""
        return unit * (self.high + self.low * jnp.float32(1 / _BASE))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def split(x: Array, axis: int | tuple[int, ...]) -> Digits:
    """Split an array into digits.

    Args:
      x: array of any float dtype.
      axis: axes whose elements share a unit.

    Raises:
      TypeError: the function is differentiated with respect to x.
    """
    x = x.astype(jnp.float32)
    unit = unit_above(largest(x, axis=axis, keepdims=True)) * (1 / _DIGIT)
    scaled = hold(x * (1 / unit))
    high = jnp.round(scaled)
    low = jnp.round((scaled - high) * _BASE)
    return Digits(high.astype(jnp.int8), low.astype(jnp.int8), unit)


@split.defjvp
def _split_jvp(*_):
    raise TypeError("exact.split has no gradient, because digits are integers; pass arrays, or no cache to the model")


def contract(equation: str, lhs: Digits, rhs: Digits) -> Array:
    """Contract two arrays of digits as ``jnp.einsum`` does, with int32 sums; returns float32.

    Units of the operands must have size 1 along contracted axes. The product of the low digits is left out; it is below
    the rounding of the digits.

    Args:
      equation: equation of ``jnp.einsum`` with one letter for each axis, such as "bskgd,btkd->bkgst".
      lhs, rhs: operands.

    Raises:
      ValueError: a unit varies along a contracted axis, or a contraction is too long for int32.
    """
    labels, result = _parse(equation, lhs.high, rhs.high)
    sizes = dict(zip(labels[0], lhs.high.shape, strict=True)) | dict(zip(labels[1], rhs.high.shape, strict=True))
    depth = 1
    for label in set("".join(labels)) - set(result):
        depth *= sizes[label]
    if depth > (limit := (2**31 - 1) // (_PAIRS * _DIGIT**2)):
        raise ValueError(f"{equation} contracts {depth} elements, but int32 sums of digits hold {limit}; split it")
    product = functools.partial(jnp.einsum, equation, preferred_element_type=jnp.int32)
    total = (product(lhs.high, rhs.low) + product(lhs.low, rhs.high)).astype(jnp.float32) * (1 / _BASE)
    total = total + product(lhs.high, rhs.high).astype(jnp.float32)
    for operand, own in zip((lhs, rhs), labels, strict=True):
        total = total * _align(operand.unit, own, result)
    return total


def _parse(equation: str, *arrays: Array) -> tuple[list[str], str]:
    operands, _, result = equation.replace(" ", "").partition("->")
    labels = operands.split(",")
    if len(labels) != 2 or not result or not "".join([*labels, result]).isalpha():
        raise ValueError(f"equation {equation!r} must have two operands and a result of letters, such as 'ij,jk->ik'")
    for letters, array in zip(labels, arrays, strict=True):
        if len(letters) != array.ndim:
            given = f"an operand of shape {array.shape}"
            raise ValueError(f"{equation} has {len(letters)} letters for {given}; write one for each axis")
    return labels, result


def _align(unit: Array, labels: str, result: str) -> Array:
    """Return a unit with the axes of the result: size 1 for axes that the operand lacks."""
    if any(size != 1 and label not in result for label, size in zip(labels, unit.shape, strict=True)):
        raise ValueError(f"unit {unit.shape} of operand {labels!r} varies along a contracted axis")
    unit = unit.squeeze(tuple(i for i, label in enumerate(labels) if label not in result))
    kept = [label for label in labels if label in result]
    unit = unit.transpose([kept.index(label) for label in result if label in kept])
    return jnp.expand_dims(unit, tuple(i for i, label in enumerate(result) if label not in kept))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def dot(equation: str, lhs: Array, rhs: Array) -> Array:
    """Contract two float arrays by their digits, as ``jnp.einsum`` does; returns float32.

    Each operand has one unit along its contracted axes, so a result element has an error of about ``2**-14`` of its
    row's and its column's amax. The gradient is that of ``jnp.einsum``.

    Args:
      equation: equation of ``jnp.einsum`` with one letter for each axis.
      lhs, rhs: arrays of any float dtype.

    Raises:
      ValueError: the equation is invalid, or a contraction is too long for int32.
    """
    labels, result = _parse(equation, lhs, rhs)
    axes = [tuple(i for i, label in enumerate(own) if label not in result) for own in labels]
    return contract(equation, split(lhs, axes[0]), split(rhs, axes[1]))


@dot.defjvp
def _dot_jvp(equation, primals, tangents):
    return dot(equation, *primals), product_rule(equation, primals, tangents)


def product_rule(equation: str, primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> Array:
    """Return the float32 tangent of ``jnp.einsum(equation, *primals)``."""
    einsum = functools.partial(jnp.einsum, equation, preferred_element_type=jnp.float32)
    return einsum(tangents[0], primals[1]) + einsum(primals[0], tangents[1])
