"""The rewritten program: each construct is checked in the trace, and by numbers if the trace does not show it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxquant
from tests.lowering import equations
from tests.states import recorded
from tests.trace.functions import CURRENT, FP8, float8_dots, normal, primitives, shape

X = shape(6, 8)
STACK = {"w": {"kernel": shape(3, 8, 8)}, "v": {"kernel": shape(8, 8)}}


def trace(fn, params, *args, config=CURRENT):
    """Return the forward jaxpr of a quantized function, from shapes, and its number of float8 matmuls."""
    q = jaxquant.quantize(fn, config)
    state = jax.eval_shape(q.init, params, *args)
    jaxpr = jax.make_jaxpr(q)(params, state, *args)
    return jaxpr, float8_dots(q, params, state, *args)


def gradients(fn, params, *args, config=FP8):
    """Return the number of float8 matmuls in the gradients with respect to parameters and state."""
    q = jaxquant.quantize(fn, config)
    state = jax.eval_shape(q.init, params, *args)
    loss = lambda p, s: jnp.sum(q(p, s, *args_of(args)))  # noqa: E731
    args_of = lambda args: [jnp.zeros(x.shape, x.dtype) for x in args]  # noqa: E731
    return float8_dots(jax.grad(loss, argnums=(0, 1)), params, state)


def scanned(p, x):
    body = lambda h, w: (jnp.tanh(h @ w) @ p["v"]["kernel"], h[0])  # noqa: E731
    return jax.lax.scan(body, x, p["w"]["kernel"], reverse=True, unroll=3)


def test_scan_stays_one_scan():
    jaxpr, dots = trace(scanned, STACK, X, config=FP8)
    assert dots == 2
    (scan,) = [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "scan"]
    assert (scan.params["length"], scan.params["reverse"], scan.params["unroll"]) == (3, True, 3)
    assert [(x.shape, x.dtype) for x in jaxpr.out_avals] == [((6, 8), np.float32), ((3, 8), np.float32)]
    assert gradients(lambda p, x: scanned(p, x)[0], STACK, X) == 6


def test_remat_keeps_its_policy():
    policy = jax.checkpoint_policies.save_only_these_names("here")

    def fn(p, x):
        return jax.checkpoint(lambda x: jnp.tanh(x @ p["v"]["kernel"]), policy=policy, prevent_cse=False)(x)

    jaxpr, dots = trace(fn, STACK, X)
    assert dots == 1
    (remat,) = [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name in ("checkpoint", "remat2")]
    assert remat.params["policy"] is policy
    assert remat.params["prevent_cse"] is False


def test_cond_while_and_fori():
    def fn(p, x):
        kernel = p["v"]["kernel"]
        x = jax.lax.cond(x[0, 0] > 0, lambda x: x @ kernel, lambda x: 2 * (x @ p["w"]["kernel"][0]), x)
        x = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ kernel)), (0, x))[1]
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ kernel), x)

    jaxpr, dots = trace(fn, STACK, X, config=FP8)
    assert dots == 4
    assert {"cond", "while", "scan"} <= set(primitives(jaxpr.jaxpr))


def test_on_tpus_a_scan_rounds_a_float32_weight_before_its_cast():
    fn = jaxquant.quantize(lambda p, x: jax.lax.scan(lambda h, w: (h @ w.astype(h.dtype), None), x, p)[0], CURRENT)

    def rounded(platform):
        device = AbstractDevice(device_kind=platform, num_cores=1, platform=platform)
        place = NamedSharding(AbstractMesh((2,), ("x",), abstract_device=device), P())
        w = jax.ShapeDtypeStruct((3, 8, 8), "float32", sharding=place)
        x = jax.ShapeDtypeStruct((4, 8), "bfloat16", sharding=place)
        return primitives(jax.make_jaxpr(fn)(w, {}, x).jaxpr).count("reduce_precision")

    assert rounded("tpu") == rounded("gpu") + 1


def test_equations_that_differ_in_a_sign_an_order_or_a_repeat_stay_apart():
    def parts(x, y):
        return x * 0.0, x * -0.0, x - y, y - x, x - x, x**2, x**3, x.astype(jnp.float16), x.astype(jnp.bfloat16)

    def loss(fn, p, x):
        return sum(jnp.sum(each.astype(jnp.float32) * n) for n, each in enumerate(fn(p, x), 1))

    p, x = {"v": {"kernel": jnp.ones((8, 8))}}, normal(0, 6, 8)
    q = jaxquant.quantize(lambda p, x: (*parts(x, x + 1), x @ p["v"]["kernel"]), CURRENT)
    for given, wanted in zip(jax.jit(lambda p, x: q(p, {}, x))(p, x)[:-1], jax.jit(parts)(x, x + 1), strict=True):
        assert given.tobytes() == wanted.tobytes()
    slope = jax.jit(jax.grad(lambda x: loss(lambda p, x: q(p, {}, x)[:-1], p, x)))(x)
    plain = jax.jit(jax.grad(lambda x: loss(lambda p, x: parts(x, x + 1), p, x)))(x)
    np.testing.assert_allclose(slope, plain, rtol=1e-6)  # rounding of sums whose order XLA selects


def test_a_jitted_function_shared_with_a_float_caller_stays_apart():
    inner = jax.jit(lambda x, w: x @ w)
    q = jaxquant.quantize(lambda p, x: inner(x, p["w"]), CURRENT)
    p = {"w": shape(8, 8)}
    before = jax.make_jaxpr(inner)(X, p["w"])
    assert float8_dots(q, p, {}, X) == 1
    assert str(jax.make_jaxpr(inner)(X, p["w"])) == str(before)


def test_shard_map_inside_and_around():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    params, x, specs = {"w": {"kernel": normal(0, 8, 8)}}, normal(1, 6, 8), (P("d"), P(None, "d"))
    layer = lambda p, x: jax.lax.psum(x @ p["w"]["kernel"], "d")  # noqa: E731
    inside = jaxquant.quantize(jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P()), FP8)
    q = jaxquant.quantize(layer, FP8)
    state = jax.shard_map(q.init, mesh=mesh, in_specs=specs, out_specs=P())(params, x)
    around = jax.shard_map(q, mesh=mesh, in_specs=(P("d"), P(), P(None, "d")), out_specs=P())
    plain, *others = (
        jax.jit(jax.value_and_grad(lambda p, s, fn=fn: jnp.sum(fn(p, s, x) ** 2), argnums=(0, 1)))(params, state)
        for fn in (jaxquant.quantize(lambda p, x: x @ p["w"]["kernel"], FP8), inside, around)
    )
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(plain), jax.tree.leaves(other))


def test_experts_record_their_own_amax():
    p = {"experts": normal(0, 3, 8, 5) * jnp.array([1.0, 2.0, 5.0])[:, None, None]}
    x = normal(1, 3, 6, 8)
    q = jaxquant.quantize(lambda p, x: jax.vmap(jnp.matmul)(x, p["experts"]), FP8)
    state = q.init(p, x)
    new = jaxquant.state.update(state, jax.jit(jax.grad(lambda s: jnp.sum(q(p, s, x) ** 2)))(state))
    for tensor, operand in (("kernel", p["experts"]), ("input", x)):
        history = jaxquant.state.rows_of(new)[f"experts/{tensor}"]["amax_history"]
        np.testing.assert_array_equal(history[:, 0], recorded(jnp.max(jnp.abs(operand), (1, 2))))


def test_an_axis_that_is_split_has_experts_alone():
    """If an expert were split, its parts would need separate scales."""

    def reason(of_experts, *size):
        sharded = jax.shard_map(
            lambda w, x: jnp.einsum("etk,ekn->etn", x, of_experts(w)),
            mesh=AbstractMesh((2,), ("b",), (AxisType.Auto,)),
            in_specs=(P("b"), P("b") if len(size) == 3 else P(None, None, "b")),
            out_specs=P("b"),
            check_vma=False,
        )
        (row,) = jaxquant.quantize(lambda p, x: sharded(p["w"], x), FP8).report({"w": shape(*size)}, shape(4, 3, 32))
        return row.recipe or row.reason

    assert reason(lambda w: w, 4, 32, 16) == "fp8"
    parts = lambda w: w.reshape(-1, 4, 16).swapaxes(0, 1)  # noqa: E731
    assert reason(parts, 128, 16) == "its weight has batch axes and is split over devices by a shard_map"
