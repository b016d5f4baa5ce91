"""Paths and bytes of trees, told by hand."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxquant.core.paths import array_bytes, leaves_by_path, tree_bytes
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import TensorSpec


class Pair(NamedTuple):
    first: object
    second: object


TREE = {"layers": [{"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}, Pair(jnp.zeros(1), {"x": jnp.zeros(2)})]}


def test_dict_keys_attributes_and_indices_are_names():
    assert list(leaves_by_path(TREE)) == ["layers/0/bias", "layers/0/kernel", "layers/1/first", "layers/1/second/x"]
    assert leaves_by_path(TREE)["layers/0/kernel"].shape == (2, 3)
    assert leaves_by_path(jnp.ones(2)).keys() == {""}


def test_elements_of_less_than_a_byte_are_counted_packed():
    assert array_bytes(jax.ShapeDtypeStruct((3, 5), jnp.int4)) == 8
    assert array_bytes(jax.ShapeDtypeStruct((3, 5), jnp.float4_e2m1fn)) == 8
    assert array_bytes(jax.ShapeDtypeStruct((3, 5), jnp.bfloat16)) == 30
    assert tree_bytes(TREE) == 4 * (6 + 3 + 1 + 2)
    tensor = quantize(jnp.ones((4, 8)), TensorSpec("int4"), (1,))
    assert tree_bytes({"kernel": tensor}) == 16 + 16
