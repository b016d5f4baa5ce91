"""``jaxquant.exact``: a row has the same bits in every batch, padding, chunk and fusion, and the error is bounded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant import exact
from jaxquant.exact import arithmetic, layers

F32 = np.float32


def draw(seed: int, *shape: int, spread: float = 2.0) -> np.ndarray:
    """Return numbers whose magnitudes span several powers of two."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 2.0 ** rng.uniform(-spread, spread, shape)).astype(F32)


def bits(x) -> np.ndarray:
    return np.asarray(x, F32).view(np.int32)


def count_differences(function, rows: np.ndarray, *others: np.ndarray, zeros: int = 0) -> int:
    """Return the number of different result elements between all rows together and rows in smaller programs."""
    compiled = jax.jit(function)
    whole = bits(compiled(rows, *others))
    found = 0
    for part in (slice(0, 1), slice(3, 4), slice(1, 4), slice(0, 7)):
        some = np.pad(rows[part], [(0, 0)] * (rows.ndim - 1) + [(0, zeros)]) if zeros else rows[part]
        found += int((bits(compiled(some, *others)) != whole[part]).sum())
    return found


# -- sums --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 37, 64, 2049, 4096, 4097, 20000])
@pytest.mark.parametrize("seed", range(3))
def test_sums_depend_on_neither_batch_nor_appended_zeros(size, seed):
    x = draw(seed, 9, size)
    for zeros in (0, 3, 70, 4096):
        assert count_differences(exact.sum, x, zeros=zeros) == 0
    true = np.sum(x.astype(np.float64), -1)
    bound = size * np.abs(x).max(-1) * 2.0**-35 + np.abs(true) * 2.0**-23  # two roundings of the total
    assert (np.abs(np.asarray(exact.sum(x)) - true) <= bound).all()


def test_sums_do_not_depend_on_order():
    x = draw(0, 4, 5000)
    order = np.random.default_rng(1).permutation(5000)
    np.testing.assert_array_equal(bits(exact.sum(x)), bits(exact.sum(x[:, order])))


def test_a_sum_of_a_sharded_axis_has_the_same_bits():
    x, mesh = draw(0, 8, 4096), jax.make_mesh((len(jax.devices()),), ("data",))
    for spec in (jax.P("data"), jax.P(None, "data")):
        sharded = jax.device_put(x, jax.NamedSharding(mesh, spec))
        np.testing.assert_array_equal(bits(jax.jit(exact.sum)(sharded)), bits(exact.sum(x)))


def test_a_grid_that_depends_on_the_axis_is_found(monkeypatch):
    """Limbs as wide as an int32 sum of the axis allows would be finer for short axes: padding changes the grid."""
    original = exact.sum

    def by_size(x):
        monkeypatch.setattr(arithmetic, "_LIMB_BITS", 6 + (x.shape[-1] <= 64))
        return original(x)

    x = draw(0, 9, 64)
    assert count_differences(by_size, x, zeros=3) > 0
    assert count_differences(lambda x: jnp.sum(x, -1), x, zeros=3) > 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_shows(bad):
    x = draw(0, 3, 64)
    x[1, 5] = bad
    found = np.asarray(jax.jit(exact.sum)(x))
    assert np.isnan(found[1])
    assert np.isfinite(found[[0, 2]]).all()
    assert np.isnan(np.asarray(exact.dot("ij,jk->ik", x, x.T))[1]).all()


def test_magnitudes_whose_unit_has_no_reciprocal_show():
    large = np.full((2, 16), [[2.0**123], [1.001 * 2.0**123]], F32)
    assert np.isfinite(exact.sum(large)[0])
    assert np.isnan(exact.sum(large)[1])
    assert np.isnan(exact.dot("ij,kj->ik", large, np.ones((1, 16), F32))[1])


def test_an_axis_that_int32_cannot_add_is_refused():
    with pytest.raises(ValueError, match="longer than 134217728"):
        jax.eval_shape(exact.sum, jax.ShapeDtypeStruct((2, 2**28), F32))
    many = jax.ShapeDtypeStruct((2, 300000), F32)
    with pytest.raises(ValueError, match="contracts 300000 elements"):
        jax.eval_shape(functools.partial(exact.dot, "ij,kj->ik"), many, many)


def test_sums_of_no_elements_are_zero_and_a_scalar_is_refused():
    np.testing.assert_array_equal(exact.sum(jnp.zeros((3, 0))), np.zeros(3, F32))
    with pytest.raises(ValueError, match="shape \\(\\) has no last axis"):
        exact.sum(jnp.zeros(()))


def attend_itself(x):
    x = x.reshape(1, 3, 2, -1)
    return exact.attend(x, x, x, jnp.ones((1, 1, 3, 3), bool))


FUNCTIONS = [exact.sum, exact.softmax, attend_itself, lambda x: exact.rms_norm(x, x[0])]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_and_gradients_are_float32_with_64_bits_enabled(function):
    x, loss = draw(0, 3, 48), lambda x: (function(x) ** 2).sum()
    want = function(x), jax.grad(loss)(x)
    with jax.enable_x64(True):
        found = function(x), jax.grad(loss)(x)
    for each, other in zip(found, want, strict=True):
        assert each.dtype == F32
        np.testing.assert_allclose(each, other, rtol=1e-5, atol=1e-6)


# -- holds and elementary functions ------------------------------------------------------------------------------------


def test_hold_keeps_a_product_apart_and_changes_no_number():
    a, b, c = draw(0, 3, 64, 96)
    np.testing.assert_array_equal(bits(jax.jit(lambda a, b, c: exact.hold(a * b) + c)(a, b, c)), bits(a * b + c))
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 3.4028235e38, -3.4028235e38, 1e-45], F32)
    np.testing.assert_array_equal(bits(jax.jit(exact.hold)(special)), bits(special))
    assert (jax.jit(lambda a, b, c: a * b + c)(a, b, c) != a * b + c).any(), "this CPU joins no products and sums"


@pytest.mark.parametrize(
    ("name", "low", "high", "error"),
    [
        ("exp", -87.0, 88.0, 1e-7),
        ("log", 1e-30, 1e30, 1e-6),
        ("rsqrt", 1e-30, 1e30, 2e-7),
        ("sigmoid", -80.0, 80.0, 3e-7),
    ],
)
def test_elementary_functions(name, low, high, error):
    rng = np.random.default_rng(0)
    x = rng.uniform(low, high, 20000) if low < 0 else np.exp(rng.uniform(np.log(low), np.log(high), 20000))
    x = x.astype(F32)
    wide = x.astype(np.float64)
    true = {"exp": np.exp, "log": np.log, "rsqrt": lambda x: x**-0.5, "sigmoid": lambda x: 1 / (1 + np.exp(-x))}[name](
        wide
    )
    function = getattr(exact, name)
    found = np.asarray(jax.jit(function)(x), np.float64)
    size = np.maximum(np.abs(true), 1e-37) if name != "log" else np.maximum(1, np.abs(true))
    assert np.max(np.abs(found - true) / size) < error
    for shape in ((20000,), (20, 1000), (100, 200)):  # vector loops and their scalar ends
        shifted = jax.jit(lambda x: function(x) + 0.3)(x.reshape(shape)[:, :7] if len(shape) > 1 else x)
        alone = jax.jit(function)(x.reshape(shape)[:, :7] if len(shape) > 1 else x)
        np.testing.assert_array_equal(bits(shifted), bits(np.asarray(alone) + F32(0.3)))
        np.testing.assert_array_equal(
            bits(alone), bits(found.astype(F32).reshape(shape)[:, :7] if len(shape) > 1 else found)
        )
    near = np.linspace(0.1, 3, 50, dtype=F32)
    true = {
        "exp": np.exp(near),
        "log": 1 / near,
        "rsqrt": -0.5 * near**-1.5,
        "sigmoid": np.exp(-near) / (1 + np.exp(-near)) ** 2,
    }
    np.testing.assert_allclose(jax.vmap(jax.grad(function))(near), true[name], rtol=1e-5)


def test_elementary_functions_at_their_limits():
    assert jax.vmap(jax.grad(exact.sigmoid))(jnp.array([-1e4, -100.0, 0.0, 100.0])).tolist() == [0, 0, 0.25, 0]
    tiny = np.array([1.2e-38, 2e-38], F32)
    np.testing.assert_allclose(exact.rsqrt(tiny), tiny.astype(np.float64) ** -0.5, rtol=2e-7)
    assert exact.exp(jnp.array([-np.inf, -200.0, 200.0, np.inf])).tolist() == [0, 0, np.inf, np.inf]
    assert exact.log(jnp.array([0.0, np.inf, 1.0])).tolist() == [-np.inf, np.inf, 0]
    assert exact.rsqrt(jnp.array([0.0, np.inf])).tolist() == [np.inf, 0]
    for name, bad in (("exp", [np.nan]), ("log", [np.nan, -1.0]), ("rsqrt", [np.nan, -1.0]), ("sigmoid", [np.nan])):
        assert np.isnan(getattr(exact, name)(jnp.array(bad))).all()


def test_rounding_to_bfloat16_survives_every_program():
    a, b, c = draw(0, 3, 64, 96)
    want = np.asarray(jnp.asarray(a * b).astype(jnp.bfloat16), F32)
    found = jax.jit(lambda a, b, c: exact.round_to(a * b, "bfloat16").astype(jnp.float32) + c)(a, b, c)
    np.testing.assert_array_equal(bits(found), bits(want + c))
    special = np.array([np.inf, -np.inf, np.nan, 3.4e38, 0.0], F32)
    rounded = np.asarray(exact.round_to(special, "bfloat16"), F32)
    np.testing.assert_array_equal(rounded, special.astype(jnp.bfloat16).astype(F32))
    assert exact.round_to(a, "float32").dtype == F32
    assert jax.grad(lambda x: exact.round_to(x, "bfloat16").astype(jnp.float32) * 3)(1.7) == 3
    with pytest.raises(ValueError, match="float16"):
        exact.round_to(a, "float16")


# -- products and layers -----------------------------------------------------------------------------------------------


def test_products_by_digits():
    a, b = draw(0, 9, 5, 130), draw(1, 130, 6)
    dot = functools.partial(exact.dot, "bij,jk->bik")
    assert count_differences(dot, a, b) == 0
    true = np.einsum("bij,jk->bik", a.astype(np.float64), b)
    bound = (
        130 * 1.1 * 2.0**-13 * np.abs(a).max(-1, keepdims=True) * np.abs(b).max(0)
    )  # half a low digit of each operand
    assert (np.abs(np.asarray(dot(a, b)) - true) <= bound).all()
    weight = draw(2, 9, 5, 6)
    gradients = [
        jax.grad(lambda a, b, f=f: (f("bij,jk->bik", a, b) * weight).sum(), (0, 1))(a, b)
        for f in (exact.dot, jnp.einsum)
    ]
    for found, want in zip(*gradients, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-4)
    with pytest.raises(ValueError, match="two operands"):
        exact.dot("ij->i", a, b)
    with pytest.raises(ValueError, match="2 letters for an operand of shape"):
        exact.dot("ij,jk->ik", a, b)
    with pytest.raises(ValueError, match="contracted"):
        exact.contract("bij,jk->bik", exact.split(a, 0), exact.split(b, 0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norm_and_log_probs_depend_on_the_row_only(dtype):
    x, scale = draw(0, 9, 130).astype(dtype), draw(1, 130)
    residual = draw(2, 130)
    assert count_differences(lambda x, s, r: exact.rms_norm(x, s).astype(jnp.float32) + r, x, scale, residual) == 0
    wide = np.asarray(x, np.float64)
    true = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(
        np.asarray(exact.rms_norm(x, scale), F32), true, rtol=1e-6 if dtype == "float32" else 2.0**-8
    )
    tokens = np.arange(9)
    together = bits(jax.jit(exact.token_log_probs)(x, tokens))
    for i in range(9):
        assert bits(jax.jit(exact.token_log_probs)(x[i : i + 1], tokens[i : i + 1])) == together[i]
    want = jax.nn.log_softmax(np.asarray(x, F32))[np.arange(9), tokens]
    np.testing.assert_allclose(exact.token_log_probs(x, tokens), want, rtol=1e-5, atol=2e-6)
    found, want = (
        jax.grad(lambda x: (f(x) ** 2).sum())(np.asarray(x, F32))  # noqa: B023
        for f in (
            lambda x: exact.token_log_probs(exact.rms_norm(x, scale), tokens),
            lambda x: jnp.take_along_axis(
                jax.nn.log_softmax(x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale),
                tokens[:, None],
                -1,
            ),
        )
    )
    np.testing.assert_allclose(found, want, rtol=2e-3, atol=1e-4)


def test_a_softmax_depends_on_no_neighbouring_product_and_on_no_masked_element():
    a, b = draw(0, 2, 8, 100)
    softmax = lambda x: exact.softmax(x, jnp.arange(100) < 99)  # noqa: E731
    np.testing.assert_array_equal(bits(jax.jit(lambda a, b: softmax(a * b))(a, b)), bits(jax.jit(softmax)(a * b)))
    found = exact.softmax(jnp.array([-2e30, -2e30, 5.0]), jnp.array([True, True, False]))
    np.testing.assert_array_equal(found, [0.5, 0.5, 0])


def float_attention(query, key, value, mask, soft_cap=0.0, sinks=None):
    groups = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[-1])
    scores = np.einsum("bskgd,btkd->bkgst", groups, key) * query.shape[-1] ** -0.5
    scores = soft_cap * np.tanh(scores / soft_cap) if soft_cap else scores
    powers = np.where(mask[:, :, None], np.exp(scores), 0)
    total = powers.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks.reshape(1, key.shape[2], -1, 1, 1))
    return np.einsum("bkgst,btkd->bskgd", powers / total, value).reshape(query.shape)


@pytest.mark.parametrize("options", [{}, {"soft_cap": 5.0, "sinks": draw(9, 4)}], ids=["plain", "capped with sinks"])
def test_attention_depends_on_visible_keys_only(options):
    rows, length = 8, 32
    rng = np.random.default_rng(0)
    query = rng.standard_normal((rows, length, 4, 16)).astype(F32)
    key, value = rng.standard_normal((2, rows, length, 2, 16)).astype(F32)
    attend = jax.jit(
        lambda q, k, v, at: exact.attend(q, k, v, at[:, None, :, None] >= jnp.arange(_length(k)), **options)
    )
    at = np.broadcast_to(np.arange(length), (rows, length))
    whole = np.asarray(attend(query, key, value, at))
    pad = lambda x, n: np.pad(x, [(0, 0), (0, n - length), (0, 0), (0, 0)], constant_values=3.0)  # noqa: E731
    for some, size, places in (
        (3, length, length),
        (8, length, 37),
        (1, length, 64),
        (3, 5, 40),
        (8, 1, 40),
        (1, 1, 48),
    ):
        for start in range(0, length - size + 1, max(size, 7)):
            part = slice(start, start + size)
            inputs = query[:some, part], pad(key[:some], places), pad(value[:some], places), at[:some, part]
            np.testing.assert_array_equal(bits(attend(*inputs)), bits(whole[:some, part]))
            stored = inputs[0], *(exact.split(x, -1) for x in inputs[1:3]), inputs[3]
            if size == 1 and start == 0:
                np.testing.assert_array_equal(bits(attend(*stored)), bits(whole[:some, part]))
    mask = at[:, None, :, None] >= np.arange(length)
    true = float_attention(query.astype(np.float64), key, value, mask, **options)
    assert np.max(np.abs(whole - true)) < 4e-3  # a rounding to bfloat16 is up to 2**-8 of a value of about 1
    loss = lambda q, k, v: (attend(q, k, v, at) ** 2).sum()  # noqa: E731
    for found, want in zip(
        jax.grad(loss, (0, 1, 2))(query, key, value), _numeric_gradient(query, key, value, mask, options), strict=True
    ):
        np.testing.assert_allclose(found, want, atol=0.02)


@pytest.mark.parametrize("stored", [(1,), (2,), (1, 2)])
def test_a_gradient_reaches_no_digits_and_is_not_zero(stored):
    arrays = np.random.default_rng(0).standard_normal((3, 1, 4, 2, 8)).astype(F32)
    loss = lambda *x: (exact.attend(*x, np.tril(np.ones((4, 4), bool))[None, None]) ** 2).sum()  # noqa: E731
    split = [exact.split(x, -1) if i in stored else x for i, x in enumerate(arrays)]
    np.testing.assert_allclose(jax.grad(loss)(*split), jax.grad(loss)(*arrays), atol=1e-3)
    with pytest.raises(TypeError, match=r"exact\.split has no gradient"):
        jax.grad(lambda x: loss(arrays[0], *(exact.split(x, -1) if i in stored else x for i in (1, 2))))(arrays[1])


def _length(key) -> int:
    return (key.high if isinstance(key, exact.Digits) else key).shape[1]


def _numeric_gradient(query, key, value, mask, options):
    def loss(query, key, value):
        groups = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[-1])
        scores = jnp.einsum("bskgd,btkd->bkgst", groups, key) * query.shape[-1] ** -0.5
        cap = options.get("soft_cap")
        scores = jnp.where(mask[:, :, None], cap * jnp.tanh(scores / cap) if cap else scores, -1e30)
        if cap:
            sinks = jnp.broadcast_to(options["sinks"].reshape(1, 2, -1, 1, 1), (*scores.shape[:-1], 1))
            scores = jnp.concatenate([scores, sinks], -1)
        share = jax.nn.softmax(scores)[..., : key.shape[1]]
        return (jnp.einsum("bkgst,btkd->bskgd", share, value) ** 2).sum()

    return jax.grad(loss, (0, 1, 2))(query, key, value)


@pytest.mark.parametrize("broken", ["hold", "exp", "sum"])
def test_a_layer_without_one_part_is_found(broken, monkeypatch):
    """The comparisons above fail for products that join sums, for XLA's exp and for float sums in halves."""
    x, scale, residual = draw(0, 64, 64), draw(1, 64), draw(2, 64)
    if broken == "hold":
        monkeypatch.setattr(layers, "hold", lambda x: x)
        joined = jax.jit(lambda x, s, r: exact.rms_norm(x, s) + r)(x, scale, residual)
        assert (joined != np.asarray(jax.jit(lambda x, s: exact.rms_norm(x, s))(x, scale)) + residual).any()
    if broken == "exp":
        monkeypatch.setattr(layers, "exp", jnp.exp)
        assert count_differences(lambda x: exact.softmax(x), x) > 0
    if broken == "sum":
        monkeypatch.setattr(layers, "sum", _halves)
        longer = np.pad(x, [(0, 0), (0, 3)], constant_values=-1e9)
        found = jax.jit(lambda x: exact.softmax(x))(longer)[:, :64]
        assert (np.asarray(found) != jax.jit(lambda x: exact.softmax(x) + 0)(x)).any()


def _halves(x):
    while (n := x.shape[-1]) > 1:
        if n % 2:
            x, n = jnp.concatenate([x, jnp.zeros_like(x[..., :1])], -1), n + 1
        x = x[..., : n // 2] + x[..., n // 2 :]
    return x[..., 0]
