"""Calibration: the statistic from which a tensor's scale is computed, and the syntax of calibrations in configs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxquant.core.dtypes import element
from jaxquant.core.typed import Typed, nearest

Method = Literal["absmax", "minmax", "rms", "fixed"]

Average = tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]
"""Transform of each value, and inverse transform of their mean. The result must scale linearly with the values."""


class Statistic(NamedTuple):
    """Statistic of the values that share a scale.

    Attributes:
      description: name of the statistic in messages.
      is_symmetric: whether the range extends equally far below and above zero.
      average: transform and inverse of a method that averages magnitudes, otherwise None.
    """

    description: str
    is_symmetric: bool = True
    average: Average | None = None


METHODS: dict[Method, Statistic] = {
    "absmax": Statistic("largest magnitude"),
    "minmax": Statistic("smallest and largest value", is_symmetric=False),
    "rms": Statistic("root mean square", average=(jnp.square, jnp.sqrt)),
    "fixed": Statistic("fixed range", is_symmetric=False),
}
"""All calibration methods; a fixed range can also be symmetric."""


@dataclasses.dataclass(frozen=True, slots=True)
class Calibration(Typed):
    """One statistic, written as ``absmax[,s]``, ``minmax[,s]``, ``rms,s``, ``fixed,max`` or ``fixed,min,max``.

    Attributes:
      method: ``absmax`` (largest magnitude), ``minmax`` (asymmetric range, integers only), ``rms`` (root mean square
        times ``factor``) or ``fixed`` (a constant range, always per tensor).
      factor: factor that multiplies the statistic; a factor below 1 clips the largest values.
      minimum, maximum: range of ``fixed``.
    """

    method: Method = "absmax"
    factor: float = 1.0
    minimum: float = 0.0
    maximum: float = 0.0

    @property
    def is_symmetric(self) -> bool:
        return METHODS[self.method].is_symmetric or (self.method == "fixed" and self.minimum == -self.maximum)

    @property
    def average(self) -> Average | None:
        """Transform and inverse for averaging magnitudes, or None if the method does not average."""
        return METHODS[self.method].average

    @property
    def clips(self) -> bool:
        """Whether the forward pass can clip values, which zeroes their gradient."""
        return self.method == "fixed" or self.average is not None or self.factor < 1.0

    def check_dtype(self, dtype: str) -> None:
        """Raise if the range is asymmetric and the element type is a float, which has no zero point.

        Raises:
          ValueError: the dtype does not support the range; names the calibration and the dtype.
        """
        if not self.is_symmetric and element(dtype).kind == "float":
            raise ValueError(f"calibration {self} is asymmetric, but {dtype} has no zero point; use 'absmax'")

    def __str__(self) -> str:
        if self.method == "fixed":
            if self.is_symmetric:
                return f"fixed,{self.maximum:g}"
            return f"fixed,{self.minimum:g},{self.maximum:g}"
        return f"{self.method},{self.factor:g}" if self.clips or self.factor != 1.0 else self.method


def parse_calibration(text: str) -> Calibration:
    """Parse a calibration string.

    Args:
      text: string of the form ``absmax[,s]``, ``minmax[,s]``, ``rms,s``, ``fixed,max`` or ``fixed,min,max``, in any
        case, with s > 0.

    Raises:
      ValueError: the method is unknown, the number of arguments is wrong, or the range is empty or does not contain 0.
      TypeError: the argument is not a string.

    Source: Qwix's calibration grammar; ``fixed`` with one number is symmetric.
    """
    if not isinstance(text, str):
        raise TypeError(f"calibration {text!r} must be a string such as 'absmax', got {type(text).__name__}")
    method, *words = [part.strip() for part in text.lower().split(",")]
    if method not in METHODS:
        raise ValueError(f"calibration {text!r} has the unknown method {method!r}; {nearest(method, METHODS)}")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        raise ValueError(f"calibration {text!r} must end in a number, such as 'absmax,0.9'") from None
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"calibration {text!r} has a number that is not finite; use a finite number")
    if method == "fixed":
        if len(numbers) not in (1, 2):
            raise ValueError(f"calibration {text!r} needs a range; write for example 'fixed,8' or 'fixed,-2,8'")
        low, high = numbers if len(numbers) == 2 else (-numbers[0], numbers[0])
        if not low <= 0 <= high or low >= high:
            raise ValueError(f"calibration {text!r} needs min <= 0 <= max and min < max, got {low:g} and {high:g}")
        return Calibration("fixed", 1.0, low, high)
    if METHODS[method].average is not None and not numbers:
        raise ValueError(f"calibration {text!r} needs a factor; write for example '{method},4'")
    if len(numbers) > 1:
        raise ValueError(f"calibration {text!r} accepts one factor, got {len(numbers)}; write '{method},0.9'")
    if numbers and numbers[0] <= 0:
        raise ValueError(f"calibration {text!r} needs a factor above 0, got {numbers[0]:g}")
    return Calibration(method, *numbers)  # pyright: ignore[reportArgumentType]
