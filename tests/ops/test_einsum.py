"""einsum equations as one contraction, against jnp.einsum on values that int8 holds exactly."""

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

# fixed,127.5 makes the scale 1: small integers pass unchanged, so results are exact.
SPEC = TensorSpec("int8", "per_tensor", Calibration("fixed", 1.0, -127.5, 127.5))
EXACT = Recipe(
    "exact", MatmulSpec(SPEC, SPEC, "int32"), MatmulSpec(SPEC, FORWARD, "int32"), MatmulSpec(FORWARD, SPEC, "int32")
)
SIZES = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 2, "f": 3}


def integers(labels, seed, dots=()):
    shape = [*dots, *(SIZES[label] for label in labels)]
    return jax.random.randint(jax.random.key(seed), shape, -4, 5).astype(jnp.float32)


EQUATIONS = "abc,cd->abd abc,dcb->da abc,bcd->bad abc,cd->dab ab,cb->ca abf,bc->ac ab,bcf->ac ba,cb"


@pytest.mark.parametrize("equation", EQUATIONS.split())
def test_equations(equation):
    inputs = equation.partition("->")[0].split(",")
    lhs, rhs = integers(inputs[0], 0), integers(inputs[1], 1)

    def three(fn, lhs, rhs):
        out, pull = jax.vjp(lambda a, b: fn(equation, a, b), lhs, rhs)
        return out, *pull(jnp.round(jnp.linspace(-3, 3, out.size)).reshape(out.shape))

    ours = functools.partial(einsum, recipe=EXACT)
    jax.tree.map(
        np.testing.assert_array_equal, *(jax.jit(three, static_argnums=0)(fn, lhs, rhs) for fn in (ours, jnp.einsum))
    )


@pytest.mark.parametrize(
    ("equation", "lhs_dots", "rhs_dots"),
    [("...ab,bc->...ac", (2, 3), ()), ("...a,...ab->...b", (2, 3), (3,)), ("...a,ab->b...", (2, 3), ())],
)
def test_ellipsis(equation, lhs_dots, rhs_dots):
    names = equation.replace("...", "").partition("->")[0].split(",")
    lhs, rhs = integers(names[0], 0, lhs_dots), integers(names[1], 1, rhs_dots)
    np.testing.assert_array_equal(einsum(equation, lhs, rhs, recipe=EXACT), jnp.einsum(equation, lhs, rhs))


def test_weight_first_quantizes_the_first_operand_as_the_weight():
    weight_only = Recipe("weight", MatmulSpec(None, TensorSpec("int4")), MatmulSpec(None, FORWARD))
    x, w = jax.random.normal(jax.random.key(0), (6, 8)), jax.random.normal(jax.random.key(1), (8, 4))
    first = einsum("kn,mk->mn", w, x, recipe=weight_only, weight=0)
    np.testing.assert_array_equal(first, einsum("mk,kn->mn", x, w, recipe=weight_only))
    assert (first != einsum("kn,mk->mn", w, x, recipe=weight_only, weight=1)).any()


@pytest.mark.parametrize("weight", [0, 1])
@pytest.mark.parametrize("equation", ["aab,bc->ac", "aab,bc->c", "bc,aab", "bc,aab->ca"])
def test_repeated_labels(equation, weight):
    lhs, rhs = (integers(labels, 0) for labels in equation.partition("->")[0].split(","))
    out = einsum(equation, lhs, rhs, recipe=EXACT, weight=weight)
    np.testing.assert_array_equal(out, jnp.einsum(equation, lhs, rhs))


def test_a_wrong_equation_has_the_error_of_jnp():
    with pytest.raises(ValueError, match="correct number of indices for operand 0"):
        einsum("abc,bc->a", integers("ab", 0), integers("bc", 1), recipe=EXACT)
    with pytest.raises(ValueError, match="weight must be 0 or 1"):
        einsum("ab,bc->ac", integers("ab", 0), integers("bc", 1), recipe=EXACT, weight=2)
