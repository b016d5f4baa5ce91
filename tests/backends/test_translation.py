"""AQT and Qwix follow the recipe: reuse of forward tensors, shards, bounds, noise streams, errors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant.backends import aqt_config, load, qwix
from jaxquant.backends._versions import require
from jaxquant.backends.base import Setup
from jaxquant.compat import maxtext
from jaxquant.config.backends import BACKENDS
from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.rules import Rule
from jaxquant.core.recipe import FORWARD, MatmulSpec, Recipe, SparsitySpec, TensorSpec
from tests.numerics import INTEGER_MATMUL_NULP, SMALL_SUM_ATOL, SMALL_SUM_RTOL

X = jax.random.normal(jax.random.key(0), (4, 7, 32))


# -- AQT ---------------------------------------------------------------------------------------------------------------

INT8 = TensorSpec("int8", reciprocal=True)


def reusing(shards=1, grad=INT8):
    return Recipe(
        "int8",
        MatmulSpec(INT8, INT8, "int32"),
        MatmulSpec(grad, FORWARD, "int32"),
        MatmulSpec(FORWARD, grad, "int32", shards),
    )


def aqt_dot(recipe, x, w, **product):
    """Multiply two matrices with AQT."""
    return load("aqt").contract(x, w, Setup(recipe, (((1,), (0,)), ((), ())), **product))


def quantize(x, axis):
    """Quantize to int8 per channel like AQT: multiply by 1/scale, round half to even, clip at 127."""
    scale = np.max(np.abs(x), axis=axis, keepdims=True) / np.float32(127.5)
    return np.clip(np.round(x * (1 / scale)), -127, 127), scale


def test_aqt_reuses_the_forward_qvalues():
    rows, depth, columns, shards = 8, 16, 6, 2
    x, w, g = (
        np.asarray(jax.random.normal(jax.random.key(i), shape), np.float32)
        for i, shape in enumerate([(rows, depth), (depth, columns), (rows, columns)])
    )

    @jax.jit
    def run(x, w, g):
        y, vjp = jax.vjp(functools.partial(aqt_dot, reusing(shards)), x, w)
        return y, *vjp(g)

    y, dx, dw = run(x, w, g)

    qx, sx = quantize(x, 1)
    qw, sw = quantize(w, 0)
    np.testing.assert_array_almost_equal_nulp(np.asarray(y), (qx @ qw) * sx * sw, INTEGER_MATMUL_NULP)
    qg, sg = quantize(g * sw, 1)
    np.testing.assert_array_almost_equal_nulp(np.asarray(dx), (qg @ qw.T) * sg, INTEGER_MATMUL_NULP)
    block = rows // shards
    total = np.zeros_like(w)
    for start in range(0, rows, block):
        piece = slice(start, start + block)
        qg, sg = quantize(g[piece] * sx[piece], 0)
        total += (qx[piece].T @ qg) * sg
    np.testing.assert_allclose(np.asarray(dw), total, SMALL_SUM_RTOL, SMALL_SUM_ATOL)


def test_each_constant_bound_reaches_its_operand():
    """A small bound clips its operand; a bound of a forward operand also zeroes the gradient of clipped elements."""
    x = jax.random.normal(jax.random.key(0), (8, 16))
    w = jax.random.normal(jax.random.key(1), (16, 6))

    def run_with(bounds):
        recipe = QuantConfig(quantization="aqt_fp8_full", constant_bound_config=tuple(bounds)).recipe()

        @jax.jit
        def outputs(x, w):
            y, vjp = jax.vjp(functools.partial(aqt_dot, recipe), x, w)
            return y, *vjp(jnp.ones_like(y))

        return dict(zip(("y", "dx", "dw"), outputs(x, w), strict=True))

    wide = run_with([8.0] * 6)
    for index, changed in ((0, {"y", "dx"}), (3, {"dx"}), (4, {"dw"})):
        tight = run_with([0.01 if i == index else 8.0 for i in range(6)])
        assert {name for name in wide if not np.array_equal(wide[name], tight[name])} == changed


class Einsum(nn.Module):
    """An einsum of a model that passes AQT's op by hand."""

    recipe: Recipe
    equation: str

    @nn.compact
    def __call__(self, x, w):
        quant = maxtext.configure_quantization(QuantConfig(quant_backend="aqt", rules=(Rule(".*", self.recipe),)))
        return quant.einsum()(self.equation, x, w)


def test_aqt_einsum_gives_each_operand_its_own_spec():
    """An int4 weight and an int8 activation, for both operand orders of the einsum."""
    equation = "bsd,fd->fbs"
    x, w = (np.asarray(jax.random.normal(jax.random.key(i), shape)) for i, shape in enumerate([(3, 5, 8), (4, 8)]))
    recipe = Recipe("intmp", MatmulSpec(TensorSpec("int8"), TensorSpec("int4")))
    y = jax.jit(lambda x, w: Einsum(recipe, equation).apply({}, x, w))(x, w)

    qx, sx = quantize(x, 2)
    sw = np.max(np.abs(w), axis=1, keepdims=True) / np.float32(7.5)
    qw = np.clip(np.round(w * (1 / sw)), -7, 7)
    np.testing.assert_allclose(y, np.einsum(equation, qx * sx, qw * sw), SMALL_SUM_RTOL, SMALL_SUM_ATOL)


def test_aqt_einsum_contracts_the_diagonal_of_a_repeated_label():
    x, w = jnp.ones((2, 3)), jnp.ones((3, 3, 4))
    y = jax.jit(lambda x, w: Einsum(reusing(), "bd,ddf->bf").apply({}, x, w))(x, w)
    np.testing.assert_allclose(y, jnp.einsum("bd,ddf->bf", x, w), rtol=2**-6)


def test_aqt_refuses_what_it_would_ignore():
    x, w = jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 3), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="precision HIGHEST"):
        aqt_dot(reusing(), x, w, precision=jax.lax.Precision.HIGHEST)
    with pytest.raises(NotImplementedError, match="type float32 of this matmul"):
        aqt_dot(reusing(), x, w, dtype=jnp.float32)


# -- stochastic rounding -----------------------------------------------------------------------------------------------


class Scanned(nn.Module):
    """Two equal layers under scan and remat, with the same input."""

    @nn.compact
    def __call__(self, x):
        def body(_, x, __):
            return x, nn.Dense(8, use_bias=False, kernel_init=nn.initializers.ones, name="dense")(x)

        rngs = {"params": True, "quant": True}
        return nn.scan(nn.remat(body), variable_axes={"params": 0}, split_rngs=rngs, length=2)(self, x, None)[1].sum(0)


@pytest.mark.parametrize("backend", ["aqt", "qwix"])
def test_stochastic_rounding_follows_the_stream(backend):
    """Gradients depend on the key and the scanned layer, the forward pass does not; elements have independent noise."""
    model = jaxquant.maybe_quantize_model(Scanned(), {"quantization": "int8", "quant_backend": backend}, X[0])
    params = Scanned().init(jax.random.key(1), X[0])
    cotangent = jnp.tile(jax.random.normal(jax.random.key(2), (7, 1)), 8)

    @jax.jit
    def run(seed):
        y, vjp = jax.vjp(lambda params: model.apply(params, X[0], rngs={"quant": jax.random.key(seed)}), params)
        return y, vjp(cotangent)[0]["params"]["dense"]["kernel"]

    (y0, g0), (y1, g1), (_, g2) = run(0), run(1), run(0)
    np.testing.assert_array_equal(y0, y1)
    np.testing.assert_array_equal(g0, g2)
    assert not np.array_equal(g0, g1)
    assert not np.array_equal(g0[0], g0[1])
    # The columns of the gradient are equal. Noise shared along a row would keep them equal.
    assert not np.array_equal(g0[0, :, :1], g0[0, :, 1:2])


# -- Qwix: the layers that it quantizes --------------------------------------------------------------------------------


def test_qwix_refuses_options_that_it_drops():
    class Model(nn.Module):
        last: str

        @nn.compact
        def __call__(self, x):
            return nn.Dense(5, precision="highest", name=self.last)(nn.Dense(32, name="first")(x))

    config = {"quantization": "fp8_e4m3", "quant_backend": "qwix"}
    native = config | {"quant_backend": "native"}
    for last, asked in (("wo", config), ("wo", native), ("logits", config)):  # a float layer keeps its kernel
        model = jaxquant.maybe_quantize_model(Model(last), asked, X)
        is_refused = (last, asked) == ("wo", config)
        refused = pytest.raises(NotImplementedError, match=r"Qwix ignores precision.*; use quant_backend 'native'")
        with refused if is_refused else contextlib.nullcontext():
            jax.eval_shape(model.init_with_output, jax.random.key(0), X)


# -- errors ------------------------------------------------------------------------------------------------------------

E4M3, FP4 = TensorSpec("float8_e4m3fn"), TensorSpec("float4_e2m1fn")
NOISY_FP8 = TensorSpec("float8_e5m2", rounding="stochastic")
DELAYED = TensorSpec("float8_e4m3fn", "per_tensor", scaling="delayed")
TILED = TensorSpec("int8", "per_tile", tile_size=4, tiling="each_axis")
SPARSE = SparsitySpec(2, 4, 0, 1)
BOTH = functools.partial(Recipe, "mine")
REFUSED = [
    ("aqt", BOTH(MatmulSpec(FP4, FP4)), "dtype float4_e2m1fn", "fwd_lhs"),
    ("aqt", BOTH(MatmulSpec(DELAYED, DELAYED)), "delayed scaling", "fwd_lhs"),
    ("aqt", BOTH(MatmulSpec(E4M3, E4M3), sparsity=SPARSE), "N:M sparsity", "fwd_rhs"),
    ("aqt", BOTH(MatmulSpec(E4M3, E4M3), MatmulSpec(NOISY_FP8, E4M3)), "stochastic rounding of .* fp8", "dlhs_lhs"),
    ("qwix", BOTH(MatmulSpec(E4M3, E4M3), sparsity=SPARSE), "scheduled N:M sparsity along the contraction", "fwd_rhs"),
    ("qwix", BOTH(MatmulSpec(TILED, TILED)), "tiles along every contraction axis", "fwd_lhs"),
    ("qwix", BOTH(MatmulSpec(E4M3, E4M3), MatmulSpec(NOISY_FP8, FORWARD)), "stochastic rounding to f.*2", "dlhs_lhs"),
]


def test_a_refusal_names_recipe_operand_and_way_out():
    for backend, recipe, missing, place in REFUSED:
        translate = aqt_config.to_aqt if backend == "aqt" else qwix.to_qwix
        with pytest.raises(NotImplementedError, match=f"support {missing}.*, which recipe 'mine' has in {place}; use "):
            translate(recipe)


@pytest.mark.parametrize(
    ("found", "kind", "message"),
    [
        (None, ImportError, r"quant_backend Qwix needs qwix, which is not installed; run pip install 'qwix>=0\.1\.8'"),
        ("0.1.2", ImportError, r"needs qwix 0\.1\.8 or newer, got 0\.1\.2; .*set quant_backend: native"),
        ("0.1.8", None, ""),
        ("0.1.10.dev3", UserWarning, r"is tested with qwix up to 0\.1\.8, got 0\.1\.10\.dev3; if results differ, run"),
    ],
)
def test_versions_of_a_library(monkeypatch, recwarn, found, kind, message):
    def version(package):
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    row = dataclasses.replace(BACKENDS["qwix"], tested=("0.1.8", "0.1.8"))
    with pytest.raises(kind, match=message) if kind is ImportError else contextlib.nullcontext():
        require(row)
    assert [type(each.message) for each in recwarn] == [UserWarning] * (kind is UserWarning)
    assert all(re.search(message, str(each.message)) for each in recwarn)
