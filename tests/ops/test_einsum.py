"""einsum equations as one contraction, compared with jnp.einsum on values that int8 represents exactly."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.core.calibration import Calibration
from jaxquant.core.recipe import FORWARD, MatmulSpec, Recipe, TensorSpec
from jaxquant.ops import einsum

OPTIMIZED = False

# fixed,127.5 sets the scale to 1: small integers do not change, so results are exact.
SPEC = TensorSpec("int8", "per_tensor", Calibration("fixed", 1.0, -127.5, 127.5))
EXACT = Recipe(
    "exact", MatmulSpec(SPEC, SPEC, "int32"), MatmulSpec(SPEC, FORWARD, "int32"), MatmulSpec(FORWARD, SPEC, "int32")
)
SIZES = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 2, "f": 3}


def integers(labels, seed, dots=()):
    shape = [*dots, *(SIZES[label] for label in labels)]
    return jax.random.randint(jax.random.key(seed), shape, -4, 5).astype(jnp.float32)


EQUATIONS = ["abc,cd->abd", "abc,dcb->da", "abc,bcd->bad", "ab,cb->ca", "abf,bc->ac", "ba,cb"]
EQUATIONS += ["aab,bc->ac", "aab,bc->c", "bc,aab"]
DOTTED = [("...ab,bc->...ac", (2, 3), ()), ("...a,...ab->...b", (2, 3), (3,)), ("...a,ab->b...", (2, 3), ())]


@pytest.mark.parametrize(("equation", "left", "right"), [*((each, (), ()) for each in EQUATIONS), *DOTTED])
def test_equations(equation, left, right):
    inputs = equation.replace("...", "").partition("->")[0].split(",")
    lhs, rhs = integers(inputs[0], 0, left), integers(inputs[1], 1, right)

    def three(fn, lhs, rhs):
        out, pull = jax.vjp(lambda a, b: fn(equation, a, b), lhs, rhs)
        return out, *pull(jnp.round(jnp.linspace(-3, 3, out.size)).reshape(out.shape))

    ours = functools.partial(einsum, recipe=EXACT)
    jax.tree.map(
        np.testing.assert_array_equal, *(jax.jit(three, static_argnums=0)(fn, lhs, rhs) for fn in (ours, jnp.einsum))
    )


def test_weight_first_quantizes_the_first_operand_as_the_weight():
    weight_only = Recipe("weight", MatmulSpec(None, TensorSpec("int4")), MatmulSpec(None, FORWARD))
    x, w = jax.random.normal(jax.random.key(0), (6, 8)), jax.random.normal(jax.random.key(1), (8, 4))
    first = einsum("kn,mk->mn", w, x, recipe=weight_only, weight=0)
    np.testing.assert_array_equal(first, einsum("mk,kn->mn", x, w, recipe=weight_only))
    assert (first != einsum("kn,mk->mn", w, x, recipe=weight_only, weight=1)).any()
