"""Element types: the largest value, bits and rounding grid of each quantized dtype."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, slots=True)
class Element:
    """One quantized element type.

    Attributes:
      name: dtype name, spelled as in recipes and configs.
      bits: number of bits of one element.
      kind: "int" (a uniform grid) or "float" (exponent and mantissa).
      max: largest representable magnitude.
      bound: magnitude to which absmax is mapped. Integers use ``max + 0.5``, the outer edge of the last rounding
        bucket, as in AQT and Qwix; floats use ``max``.
      mantissa_bits: number of explicit mantissa bits (0 for integers).
      min_exponent: exponent of the smallest normal number (0 for integers).
      scale_bits: number of significant bits of an integer weight's scale; see ``TensorSpec.keeps_grid``. The
        number is 8 as in bfloat16, in which checkpoints store such scales, and 0 for floats, whose scales are exact.
      held_by: 8-bit type that represents all values of the type exactly, for operations that need 8-bit operands, or
        "".
    """

    name: str
    bits: int
    kind: str
    max: float
    bound: float
    mantissa_bits: int = 0
    min_exponent: int = 0
    scale_bits: int = 0
    held_by: str = ""

    @property
    def dtype(self) -> jnp.dtype:
        """NumPy dtype object."""
        return jnp.dtype(self.name)

    @property
    def short(self) -> str:
        """Name in tables, such as "e4m3" for float8_e4m3fn."""
        return self.name if self.kind == "int" else self.name.partition("_")[2].removesuffix("fn")


def _integer(name: str, bits: int, held_by: str = "") -> Element:
    qmax = float(2 ** (bits - 1) - 1)
    return Element(name, bits, "int", qmax, qmax + 0.5, scale_bits=8, held_by=held_by)


def floating(name: str, held_by: str = "") -> Element:
    """Return a float type by the name of its dtype. The 6-bit types are not valid in recipes."""
    info = jnp.finfo(name)
    return Element(name, info.bits, "float", float(info.max), float(info.max), info.nmant, info.minexp, held_by=held_by)


ELEMENTS: dict[str, Element] = {
    element.name: element
    for element in (
        _integer("int8", 8),
        _integer("int4", 4, held_by="int8"),
        floating("float8_e4m3fn"),
        floating("float8_e5m2"),
        floating("float8_e4m3fnuz"),
        floating("float8_e5m2fnuz"),
        floating("float4_e2m1fn", held_by="float8_e4m3fn"),
    )
}


def element(name: str) -> Element:
    """Look up an element type by dtype name.

    Raises:
      ValueError: the name is not a quantized element type.
    """
    if name not in ELEMENTS:
        raise ValueError(f"{name!r} is not a quantized dtype; use one of {', '.join(ELEMENTS)}")
    return ELEMENTS[name]
