"""Products of a 4096 × 14336 weight in every format with a few rows, for the part "few rows" of ``gpu``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jaxquant
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import MatmulSpec, Recipe, TensorSpec
from jaxquant.formats.packed_array import pack_array
from jaxquant.formats.packed_matmul import matmul
from jaxquant.ops.dot_general import dot_general

K, N = 4096, 14336
"""Contraction and columns of the weight."""
ROWS = (1, 4, 8)
STRINGS = ("int8w", "int4w", "ggml_q4_0", "ggml_q8_0")
_IN_TILES: dict[str, Any] = {"granularity": "per_tile"}
_MX: dict[str, Any] = {"tile_size": 32, "scale_dtype": "float8_e8m0fnu", "scale_rounding": "up"}
_NV: dict[str, Any] = {"tile_size": 16, "scale_dtype": "float8_e4m3fn", "scale_rounding": "nearest"}
SPECS = {
    "int4 tiles": TensorSpec("int4", tile_size=128, **_IN_TILES),
    "fp8 channels": TensorSpec("float8_e4m3fn"),
    "mxfp4 tiles": TensorSpec("float4_e2m1fn", **_IN_TILES, **_MX),
    "nvfp4 tiles": TensorSpec("float4_e2m1fn", outer_scale=True, **_IN_TILES, **_NV),
}
"""Weight formats without a config string."""
PACKED = ("mxfp4", "nvfp4")
"""Formats of ``formats.packed_matmul``."""


def products(k: int = K, n: int = N) -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """Yield the name of each format, its function of (weight, x), and the shapes of the weight.

    Args:
      k, n: contraction and columns of the weight.
    """
    kernel, x = jax.ShapeDtypeStruct((k, n), jnp.bfloat16), jax.ShapeDtypeStruct((1, k), jnp.bfloat16)

    def plain(kernel: Any, x: jax.Array) -> jax.Array:
        return x @ kernel

    yield "bf16", plain, kernel
    for string in STRINGS:
        quantized = jaxquant.quantize(plain, {"quantization": string, "quant_backend": "native"})
        converted = jax.eval_shape(lambda w, q=quantized: q.convert(w, {}, x), kernel)
        yield string, lambda weight, x, q=quantized: q(weight, {}, x), converted
    dims = (((1,), (0,)), ((), ()))
    for name, spec in SPECS.items():
        recipe = Recipe(name, fwd=MatmulSpec(None, spec))
        converted = jax.eval_shape(lambda w, s=spec: quantize(w, s, (0,)).astype("bfloat16"), kernel)
        yield name, lambda weight, x, r=recipe: dot_general(x, weight, dims, recipe=r), converted
    for name in PACKED:
        packed = jax.eval_shape(lambda w, f=name: pack_array(w, f, 1), jax.ShapeDtypeStruct((n, k), jnp.bfloat16))
        yield f"{name} packed", lambda weight, x: matmul(x, weight), packed
