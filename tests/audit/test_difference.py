"""The first value that differs between a batch and one of its rows, or between a row with and without padding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.audit import first_difference

X = np.random.default_rng(0).standard_normal((8, 4, 16)).astype(np.float32)
W = np.random.default_rng(1).integers(-4, 5, (3, 16)).astype(np.float32)


def model(x: Any, w: Any, error: Any = lambda h, index: h) -> Any:
    """Return rows after three layers with an error."""

    @jax.checkpoint
    def layer(carry: Any, weight: Any) -> Any:
        h, index = carry
        with jax.named_scope("layer"):
            h = jax.nn.relu(h) * weight  # relu has a custom derivative
            return (error(h, index), index + 1), None

    return jax.jit(jnp.square)(jax.lax.scan(layer, (x.reshape(-1, 16), 0), w)[0][0])


def test_equal_rows_have_no_difference_in_any_batch_or_padding():
    assert first_difference(model, (X, W), (X[3:4], W), 3) is None
    assert first_difference(model, (X[3:4], W), (X, W), 3) is None
    padded = np.pad(X[:1], ((0, 0), (0, 2), (0, 0)))
    assert first_difference(model, (X[:1], W), (padded, W), 0) is None
    padded = np.pad(X[3:4], ((0, 0), (0, 2), (0, 0)))
    assert first_difference(jnp.negative, (X,), (padded,), 3) is None


def test_the_first_value_that_differs_is_named_with_its_layer_and_size():
    def wrong(x: Any, w: Any) -> Any:
        return model(x, w, lambda h, _: h + (jnp.abs(h) + 1) * (len(h) == 4))

    found = first_difference(wrong, (X, W), (X[3:4], W), 3)
    assert found is not None
    assert (found.primitive, found.steps) == ("mul", (0,))
    assert found.shapes == ((32, 16), (4, 16))
    assert "layer" in found.path
    assert found.source.startswith("test_difference.py")
    assert found.count == found.size == 4 * 16
    assert found.largest >= 1

    found = first_difference(
        lambda x, w: model(x, w, lambda h, index: h * (1 + index * (len(h) == 4))), (X, W), (X[3:4], W), 3
    )
    assert found is not None
    assert (found.primitive, found.steps, found.shapes) == ("mul", (1,), ((), ()))


def test_one_bit_is_a_difference_and_the_sign_of_zero_too():
    other = X.copy()
    other[5, 2, 7] = np.nextafter(other[5, 2, 7], 9, dtype=np.float32)
    found = first_difference(jnp.negative, (X,), (other,), 0)
    assert found is not None
    assert (found.primitive, found.count, found.size) == ("argument", 1, X.size)
    assert first_difference(jnp.negative, (np.zeros(3),), (-np.zeros(3),), 0) is not None
    key = jax.random.key(0)
    assert first_difference(lambda x, key: x + jax.random.uniform(key), (X, key), (X[:1], key), 0) is None


def test_runs_that_cannot_be_compared_are_errors():
    with pytest.raises(ValueError, match=r"different equations, first mul .* and neg"):
        first_difference(lambda x: x * 2 if len(x) > 1 else -x, (X,), (X[:1],), 0)
    with pytest.raises(ValueError, match="row 8 is not in the longer run, whose axis 0 has size 8"):
        first_difference(jnp.negative, (X,), (X[:1],), 8)


def test_a_row_before_the_first_is_refused():
    with pytest.raises(ValueError, match="row -1"):
        first_difference(lambda x: x * 2, [jnp.ones((4, 2))], [jnp.ones((1, 2))], row=-1)
