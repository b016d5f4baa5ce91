"""Counted lines of programs, against functions whose lines can be told by hand."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.layers import inlined_lines
from jaxquant.audit.cost import program_lines

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


def test_inlined_lines_count_a_helper_once_a_call():
    helper = jax.jit(lambda x: jnp.exp(x) * x + x)

    def text(calls):
        def function(x):
            for _ in range(calls):
                x = helper(x)
            return x

        return jax.jit(function).lower(X).as_text()

    two, four = text(2), text(4)
    assert program_lines(four) - program_lines(two) == 2  # a call each
    assert inlined_lines(four) - inlined_lines(two) == 2 * 3  # exp, multiply, add


def test_a_text_without_main_is_an_error():
    with pytest.raises(ValueError, match="has no function @main"):
        inlined_lines("module {\n}")
