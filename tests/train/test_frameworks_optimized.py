"""The decoder in NNX and in Linen to the same bits as users compile them; ``test_frameworks.py`` optimizes little."""

from __future__ import annotations

from tests.train.test_frameworks import SHAPE, assert_same, gradients, made

OPTIMIZED = True


def test_same_parameters_state_and_gradients_of_optimized_programs():
    assert_same(gradients(made(SHAPE, "nnx")), gradients(made(SHAPE, "linen")))
