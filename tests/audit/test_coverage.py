"""Coverage of every contraction, compared with recipes, an independent count, and loops counted by hand."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

import jaxquant
from jaxquant import QuantConfig
from jaxquant.audit.coverage import MATMULS, of_trace
from jaxquant.core.recipe import FORWARD, TensorSpec
from tests.lowering import dot_operand_types
from tests.models import Block, Scanned

LINEAR = ("mix/query", "mix/out", "mix/down")
X = jax.ShapeDtypeStruct((4, 7, 32), jnp.float32)
WIDE = 32  # factor of the width, for tiles and blocks of up to 128


class Mix(nn.Module):
    """Three kinds of linear layers, and attention scores."""

    width: int = 1

    @nn.compact
    def __call__(self, x):
        n = self.width
        x = nn.DenseGeneral((3, 16 * n), name="query")(x)
        scores = nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", x, 2 * x))
        x = nn.DenseGeneral(32 * n, axis=(-2, -1), name="out")(jnp.einsum("bhqk,bkhd->bqhd", scores, x))
        return nn.Einsum((32 * n, 8 * n), "bsd,df->bsf", name="down")(x)


class Model(nn.Module):
    width: int = 1

    @nn.compact
    def __call__(self, x):
        return nn.Dense(5, name="head")(Mix(self.width, name="mix")(x))


def gradient(model, config, x=X):
    """Return a function for a quantized model's loss and gradients, and its arguments."""
    quantized = jaxquant.maybe_quantize_model(model, config, x)
    keys = {"params": jax.random.key(0), "quant": jax.random.key(0)}
    params, state = jaxquant.state.split(jax.eval_shape(quantized.init, keys, x))

    def loss(params, state, x):
        variables = jaxquant.state.merge(params, state)
        return jnp.mean(jnp.square(quantized.apply(variables, x, rngs={"quant": jax.random.key(1)})))

    step = jax.value_and_grad(loss, argnums=(0, 1, 2))
    return step, (params, state, x)


def rows_of(found, path):
    return {row.matmul: row for row in found.rows if row.path == path}


def specs_of(recipe, matmul):
    """Return the specs of both operands; a reused forward tensor has its forward spec."""
    found = []
    for side in ("lhs", "rhs"):
        spec = getattr(getattr(recipe, matmul), side)
        found.append(getattr(recipe.fwd, "rhs" if matmul == "dlhs" else "lhs") if spec == FORWARD else spec)
    return found


def scale_of(spec):
    if spec is None:
        return ""
    if spec.codec is not None:
        return f"per block of {spec.codec}, {spec.scaling}"
    # In a program, blocks appear as tiles of the contraction axis.
    return f"{spec.granularity.replace('_', ' ').replace('block', 'tile')}, {spec.scaling}"


PAIRS = [
    *(("aqt_fp8", "aqt"), ("int8", "qwix"), ("int8", "native"), ("fp8", "native"), ("fp4", "native")),
    *(("int8w", "native"), ("mxfp8", "native"), ("quartet2", "native"), ("ggml_q8_0", "native")),
]
"""Pairs of different kinds; tests/gallery checks the coverage of every string."""


@pytest.mark.parametrize(("string", "backend"), PAIRS)
def test_every_matmul_has_the_dtypes_and_scales_of_its_recipe(string, backend):
    config = {"quantization": string, "quant_backend": backend}
    recipe = QuantConfig(**config).recipe()
    is_tiled = any(isinstance(spec, TensorSpec) and spec.tile_size for spec in recipe.specs.values())
    wide = jax.ShapeDtypeStruct((4, 7 * WIDE * 3, 32 * WIDE), jnp.float32)
    step, args = gradient(Model(WIDE), config, wide) if is_tiled else gradient(Model(), config)
    traced = jax.jit(step).trace(*args)
    found = of_trace(traced)
    found.check()
    for path in LINEAR:
        rows = rows_of(found, path)
        assert set(rows) == set(MATMULS)
        for matmul, row in rows.items():
            specs = specs_of(recipe, matmul)
            assert (row.lhs_scale, row.rhs_scale) == tuple(map(scale_of, specs)), matmul
            dtypes = [spec and (spec.codec or spec.dtype) for spec in specs]
            # No matmul supports scales of tiles.
            assert row.is_low == (all(dtypes) and not is_tiled)
            assert row.reason.startswith("tiles of") == (all(dtypes) and is_tiled)
            shown = [
                dtype if row.is_low else f"float32 ({dtype} dequantized)" if dtype else "float32" for dtype in dtypes
            ]
            assert [str(row.dtypes.lhs), str(row.dtypes.rhs)] == shown
    counted = Counter(tuple(sorted(types[:2])) for types in dot_operand_types(traced.lower().as_text()))
    counted[("f32", "f32")] -= rotations(recipe) * len(LINEAR)
    rows = Counter(
        tuple(sorted(mlir(each, backend) for each in (str(row.dtypes.lhs), str(row.dtypes.rhs)))) for row in found.rows
    )
    assert rows == counted


def rotations(recipe):
    """Return the number of products with a Hadamard matrix: one for each operand of a rotated matmul."""
    return 2 * sum(matmul.rotation is not None for matmul in (recipe.dlhs, recipe.drhs))


def mlir(dtype, backend):
    # CPUs have no int4 matmul, and GPUs have no e2m1 matmul without block scales.
    integer, held = ("i8", "f8E4M3FN") if backend == "native" else ("i4", "f4E2M1FN")
    names = {"float32": "f32", "int8": "i8", "int4": integer, "float4_e2m1fn": held}
    return names.get(dtype.split(" ")[0]) or dtype.replace("float8_", "f8").replace("e", "E").replace("m", "M").replace(
        "fn", "FN"
    ).replace("uz", "UZ")


def test_shapes_result_and_cost_of_one_layer():
    step, args = gradient(nn.Dense(8, use_bias=False, name="dense"), {"quantization": "fp8_current"})
    found = jaxquant.coverage(step, *args)
    rows = rows_of(found, "")
    assert {name: (row.lhs_shape, row.rhs_shape) for name, row in rows.items()} == {
        "fwd": ((4, 7, 32), (32, 8)),
        "dlhs": ((4, 7, 8), (32, 8)),
        "drhs": ((4, 7, 32), (4, 7, 8)),
    }
    assert {(row.flops, row.times, row.result_dtype) for row in rows.values()} == {(2 * 4 * 7 * 32 * 8, 1, "float32")}
    assert found.share() == found.share("fwd") == 1


def test_float_matmuls_have_a_reason():
    config = {"quantization": "int8", "rules": [{"path": "mix/out", "recipe": None}]}
    step, args = gradient(Model(), config)
    reasons = {
        "mix": "no parameter: activation × activation",
        "head": "output head ('head'), left in float by default",
        "mix/out": "left in float by rules[0].path 'mix/out'",
        "mix/query": "quantization 'int8'",
    }
    for found in (jaxquant.coverage(step, *args), jaxquant.coverage(step, *args, config=config)):
        said = {path: {row.reason for row in found.rows if row.path == path} for path in reasons}
        assert said == {path: {reason} for path, reason in reasons.items()}
    variables = jaxquant.state.merge(*args[:2])
    bare = rows_of(jaxquant.coverage(jax.grad(lambda v, x: Model().apply(v, x).sum()), variables, X), "head")
    assert {row.reason for row in bare.values()} == {"float operands: quantization did not reach this matmul"}
    off = rows_of(jaxquant.coverage(step, *args, config={}), "head")
    assert {row.reason for row in off.values()} == {"quantization is off"}


def test_layers_of_a_rematerialized_scan_are_counted():
    config = {"quantization": "fp8", "quant_backend": "native"}
    step, args = gradient(Scanned(64, length=3, remat=True), config)

    def two_micro_batches(params, state, x):
        return jax.lax.scan(lambda carry, x: (carry, step(params, state, x)), 0, jnp.stack([x, x]))[1]

    found = jaxquant.coverage(two_micro_batches, *args)
    found.check()
    times = Counter()
    for row in found.rows:
        times[row.path, row.matmul, row.is_recomputed] += row.times
        assert row.is_low
    expected = {(f"layers/{name}", matmul, False): 6 for name in ("wi", "wo") for matmul in MATMULS}
    times.pop(("layers/wo", "fwd", True), None)  # the result of the last matmul is not recomputed
    assert times == expected | {("layers/wi", "fwd", True): 6}


class Lifted(nn.Module):
    """A scan over a rematerialized method of a block; the backward scopes repeat the method's name."""

    def setup(self):
        self.layers = Block(16)

    def __call__(self, x):
        block = nn.remat(lambda m, x, _: m(x)[0], prevent_cse=False)
        axes = {"params": 0, "_overwrite_with_gradient": 0}
        scan = nn.scan(lambda *args: (block(*args), None), length=2, variable_axes=axes, split_rngs={"params": True})
        return scan(self.layers, x, jnp.arange(2))[0].sum()


def test_a_gradient_of_a_lifted_rematerialization_has_its_layer_and_its_order():
    step, args = gradient(Lifted(), {"quantization": "fp8", "quant_backend": "native"})
    found = jaxquant.coverage(step, *args)
    found.check()
    drhs = {row.path: str(row.dtypes) for row in found.rows if row.matmul == "drhs"}
    assert drhs == dict.fromkeys(("layers/wi", "layers/wo"), "float8_e4m3fn × float8_e5m2")


def test_what_an_optimizer_multiplies_of_a_model_that_is_a_layer_itself_is_its_own():
    step, args = gradient(nn.Dense(32), {"quantization": "int8", "quant_backend": "native"}, SQUARE)

    def train(params, state, x):
        _, (grads, *_) = step(params, state, x)
        return jax.tree.map(lambda p, g: p - g @ g.T @ g if g.ndim > 1 else p, params, grads)

    found = jaxquant.coverage(train, *args)
    assert [row.matmul for row in found.rows if not row.is_low] == ["update", "update"]
    assert not [row for row in found.rows if row.fault]


SQUARE = jax.ShapeDtypeStruct((32, 32), jnp.float32)


# -- strict ------------------------------------------------------------------------------------------------------------


def test_check_names_path_matmul_wanted_and_found():
    step, args = gradient(Model(), {"quantization": "aqt_fp8", "quant_backend": "native"})
    other = {"quantization": "aqt_fp8_full", "quant_backend": "native"}
    blocks = {"quantization": "int8", "quant_backend": "qwix", "quantization_local_shard_count": 2}
    shards = gradient(nn.Dense(8, name="dense"), blocks, jax.ShapeDtypeStruct((16, 32), jnp.float32))
    for found, message in (
        (
            jaxquant.coverage(step, *args, config=other),
            r"mix/down dlhs: float8_e5m2 × float8_e5m2 is expected .* but floa"
            r"t32 × float32 was found \(and 5 more",
        ),
        (jaxquant.coverage(step, *args, config={}), r"strict: mix/query fwd: float is expected .* but .* was found"),
        # Qwix multiplies blocks in float.
        (jaxquant.coverage(shards[0], *shards[1]), r"drhs: int8 × int8 is expected .* float32 \(int8 dequantized\)"),
    ):
        with pytest.raises(ValueError, match=message):
            found.check()


def test_operands_of_two_widths_are_lowered_as_int8(tmp_path):
    """There is no mixed integer matmul."""
    path = tmp_path / "mixed.json"
    path.write_text(json.dumps({"__default__": {"w_bits": 4, "a_bits": 8, "tile_size": -1}}))
    model = jaxquant.maybe_quantize_model(Model(), {"quantization": "intmp", "quant_cfg_path": str(path)}, X)
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    low = [pair for *pair, _ in dot_operand_types(jax.jit(model.apply).lower(params, X).as_text()) if "f32" not in pair]
    assert low == [["i8", "i8"]] * len(LINEAR)


def test_a_fixed_range_is_static():
    ranges = {f"{tensor}_quantization_calibration_method": "fixed,4" for tensor in ("weight", "act")}
    step, args = gradient(Model(), {"quantization": "fp8_full", "quant_backend": "native"} | ranges)
    rows = rows_of(jaxquant.coverage(step, *args), "mix/query")
    assert {rows["fwd"].lhs_scale, rows["fwd"].rhs_scale, rows["dlhs"].rhs_scale} == {"per tensor, static"}
    assert rows["dlhs"].lhs_scale == "per channel, dynamic"


# -- other programs ----------------------------------------------------------------------------------------------------

A, B = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 4), jnp.float32)


def only(found):
    [row] = found.rows
    return row


def test_branches_loops_and_jit_are_opened():
    def function(a, b):
        inner = jax.jit(lambda a, b: jax.lax.cond(a[0, 0] > 0, lambda: a @ b, lambda: a @ (2 * b)))
        return jax.lax.fori_loop(0, 5, lambda _, total: total + inner(a, b), jnp.zeros((8, 4)))

    found = jaxquant.coverage(function, A, B)
    assert [(row.times, row.matmul) for row in found.rows] == [(5, "fwd"), (5, "fwd")]
    loop = jaxquant.coverage(lambda a: jax.lax.while_loop(lambda a: a[0, 0] > 0, lambda a: a @ a, a), SQUARE)
    assert only(loop).times == 1


def test_a_convolution_and_a_ragged_matmul_are_listed():
    conv = functools.partial(jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME")
    row = only(jaxquant.coverage(conv, jnp.zeros((2, 3, 8, 8)), jnp.zeros((5, 3, 3, 3))))
    assert (row.operation, row.flops) == ("conv_general_dilated", 2 * 2 * 8 * 8 * 5 * 27)
    sizes = jnp.array([3, 5], jnp.int32)
    row = only(jaxquant.coverage(jax.lax.ragged_dot, A, jnp.zeros((2, 16, 4)), sizes))
    assert (row.operation, row.flops) == ("ragged_dot_general", 2 * 8 * 16 * 4)


def test_shards_are_counted_together():
    mesh = jax.sharding.AbstractMesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("x")
    function = jax.shard_map(lambda a, b: a @ b, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)
    row = only(jaxquant.coverage(jax.jit(function), A, B))
    assert (row.times, row.lhs_shape, row.flops) == (4, (2, 16), 2 * 2 * 16 * 4)


def test_a_kernel_is_listed_with_the_dtypes_that_it_multiplies():
    def kernel(a, b, out):
        out[...] = jnp.dot(a[...].astype(jnp.bfloat16), b[...].astype(jnp.bfloat16)).astype(jnp.float32)

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 4), jnp.float32),
        grid=(2,),
        in_specs=[pl.BlockSpec((4, 16), lambda i: (i, 0)), pl.BlockSpec((16, 4), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((4, 4), lambda i: (i, 0)),
        interpret=True,
    )
    row = only(jaxquant.coverage(call, A, B))
    assert (row.operation, row.lhs_shape, str(row.dtypes.lhs), row.times) == ("pallas_call", (4, 16), "bfloat16", 2)


def test_a_jitted_function_with_keywords_and_static_arguments():
    function = jax.jit(lambda a, *, b, twice: a @ b @ b.T @ b if twice else a @ b, static_argnames="twice")
    assert len(jaxquant.coverage(function, A, b=B, twice=True).rows) == 3


def test_what_is_printed_and_stored(monkeypatch):
    step, args = gradient(Model(), {"quantization": "fp8", "quant_backend": "native"})
    found = jaxquant.coverage(step, *args)
    row = r"mix/query  4x7x32 · (32x3x16|3x16x32) +e4m3 × e4m3  e5m2 × e4m3  e4m3 × e5m2  per tensor, delayed +3"
    assert re.search(row, str(found))
    assert (str(found).splitlines()[-1], repr(found)) == (found.summary(), f"<Coverage: {found.summary()}>")
    assert "<td style='text-align:left'>mix/query</td>" in found._repr_html_()
    monkeypatch.setenv("COLUMNS", "90")
    assert max(map(len, str(found).splitlines())) <= 90
    stored = json.loads(found.to_json())
    assert stored["low_precision_share"]["forward"] == pytest.approx(found.share("fwd"))
    assert len(stored["rows"]) == len(found.rows) == 18
    linear = 2 * 4 * 7 * (32 * 48 + 48 * 32 + 32 * 8)
    scores = 2 * 2 * 4 * 3 * 7 * 7 * 16
    np.testing.assert_allclose(found.share("fwd"), linear / (linear + scores + 2 * 4 * 7 * 8 * 5))
