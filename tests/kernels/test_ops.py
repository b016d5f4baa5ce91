"""``implementation="pallas"`` in the ops, without a TPU: XLA's numbers, and a reason wherever XLA runs instead."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, PartitionSpec

import jaxquant
from jaxquant.config.recipes import RECIPES
from jaxquant.core import delayed
from jaxquant.kernels import mosaic_gpu
from jaxquant.ops import dot_general, implementation, initial_state
from jaxquant.ops.implementation import choices_made
from tests.ops.test_block_scaled import on

NUMBERS = (((1,), (0,)), ((), ()))


def recipe(name):
    found = RECIPES[name].recipe
    assert found is not None
    return found


def warm(state, amax):
    """Return a state whose histories hold an amax, and whose shapes say so."""

    def one(tensor):
        bins = delayed.widen_bins(delayed.empty_bins())
        return tensor | {"amax_history": tensor["amax_history"].at[0].set(amax), "amax_bins": bins}

    return {name: one(tensor) for name, tensor in state.items()}


def inputs(dtype="bfloat16"):
    """Make small integers, which every format here represents with the scales of the states."""
    generator = np.random.default_rng(0)
    x, w, g = (jnp.asarray(generator.integers(-3, 4, shape), dtype) for shape in ((32, 256), (256, 64), (32, 64)))
    return x, w, g


def gradients(spec, implementation, x, w, g, state):
    def loss(x, w, state):
        out = dot_general(x, w, NUMBERS, recipe=spec, state=state, key=jax.random.key(0), implementation=implementation)
        return jnp.sum((out * g).astype(jnp.float32)), out

    return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, w, state)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("name", ["fp8", "int8_delayed"])
def test_a_step_has_the_bits_of_xlas(name, monkeypatch):
    jax.clear_caches()  # what was traced before notes no choice
    monkeypatch.setattr(implementation, "_made", {})
    spec, (x, w, g) = recipe(name), inputs()
    state = warm(initial_state(spec), 448.0 if name == "fp8" else 127.5)
    got, wanted = (jax.jit(functools.partial(gradients, spec, each))(x, w, g, state) for each in ("pallas", "xla"))
    equal(got, wanted)
    assert all(np.asarray(each, np.float32).any() for each in jax.tree.leaves(got[0][:2]))
    ran = {piece for piece, choice in choices_made() if choice.name == "pallas"}
    assert ran == {"dot_general", "quantize"}, choices_made()


def step(form, implementation, x, w, state):
    """Return the gradients of a use of the op in one of the forms in which programs use it."""
    spec = recipe("fp8")

    def use(x, w):
        return dot_general(x, w, NUMBERS, recipe=spec, state=state, implementation=implementation)

    def loss(x, w):
        if form == "vmap":
            out = jax.vmap(use)(jnp.stack([x, -x]), jnp.stack([w, w * 2]))
        else:
            mesh = Mesh(np.array(jax.devices()[:1]), ("batch",))
            specs = (PartitionSpec("batch"), PartitionSpec())
            out = jax.shard_map(use, mesh=mesh, in_specs=specs, out_specs=specs[0])(x, w)
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    return jax.value_and_grad(loss, argnums=(0, 1))(x, w)


def blocks(form, dtype, recipe, implementation, x, w, g):
    """Return output and gradients of a matmul in blocks, in one of the forms in which programs use it."""

    def use(x, w):
        return dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), recipe=recipe, implementation=implementation)

    def loss(x, w):
        out = jax.vmap(use, (0, None))(jnp.stack([x, -2 * x]), w)[1] if form == "vmap" else use(x, w)
        return jnp.sum((out.reshape(g.shape) * g).astype(jnp.float32)), out

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(x.astype(dtype), w.astype(dtype))


@pytest.mark.parametrize(
    ("name", "form", "dtype"),
    [
        ("fp8_block", "vmap", "bfloat16"),
        ("mxfp8", "", "float32"),
    ],
)
def test_a_matmul_in_blocks_has_the_bits_of_xlas(name, form, dtype):
    x, w, g = (jax.random.normal(jax.random.key(n), (256, 256)) for n in range(3))
    run = {each: jax.jit(functools.partial(blocks, form, dtype, recipe(name), each)) for each in ("pallas", "xla")}
    assert str(jax.make_jaxpr(run["pallas"])(x, w, g)).count("name=jaxquant_block_quantize") >= 3
    equal(*(each(x, w, g) for each in run.values()))


@pytest.mark.parametrize("form", ["vmap", "shard_map"])
def test_a_use_in_any_form_has_the_bits_of_xlas(form):
    generator = np.random.default_rng(0)
    x, w = (jnp.asarray(generator.integers(-3, 4, shape), "bfloat16") for shape in ((32, 32), (32, 32)))
    state = warm(initial_state(recipe("fp8")), 448.0)
    programs = {each: jax.jit(functools.partial(step, form, each)) for each in ("pallas", "xla")}
    assert "pallas_call" in str(jax.make_jaxpr(programs["pallas"])(x, w, state))
    equal(*(program(x, w, state) for program in programs.values()))


@pytest.mark.parametrize(
    ("name", "sizes", "why"),
    [
        ("fp8_full", {}, "a dynamic scale waits for the amax"),
        ("int4", {}, "multiplies two int8 or two fp8 operands, not int4 and int4"),
        ("fp8_block", {}, "for each of its channels, not for tiles or blocks"),
        ("fp8", {"cold": True}, "a scale without history waits for the amax"),
    ],
)
def test_what_a_kernel_does_not_do_is_named_and_xlas(name, sizes, why):
    spec = recipe(name)
    x, w, g = inputs(sizes.get("dtype", "float32"))
    state = initial_state(spec)
    state = state if sizes.get("cold") or not state else warm(state, 448.0)
    got, wanted = (jax.jit(functools.partial(gradients, spec, each))(x, w, g, state) for each in ("pallas", "xla"))
    equal(got, wanted)
    reasons = [choice.reason for _, choice in choices_made() if choice.name == "xla"]
    assert any(why in reason and reason.startswith("pallas was asked for; ") for reason in reasons), reasons


def test_a_mesh_that_a_compiler_may_cut_along_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    x = inputs()[0][:16]
    w, g = (
        jnp.ones((256, 72), x.dtype),
        jnp.ones((16, 72), x.dtype),
    )  # no cast that another test traced has a shape of these
    spec = recipe("int8_delayed")
    program = functools.partial(gradients, spec, "pallas")
    assert "pallas_call" not in str(jax.make_jaxpr(program)(x, w, g, warm(initial_state(spec), 100.0)))
    assert any("may be sharded automatically" in choice.reason for _, choice in choices_made())


def test_coverage_on_a_gpu_reads_its_kernels_as_their_references():
    def step(x, w, g):
        run = functools.partial(dot_general, dimension_numbers=NUMBERS, recipe=recipe("int8"), implementation="pallas")
        y, pull = jax.vjp(run, x, w)
        return y, pull(g)

    shapes = [on("NVIDIA H200", 256, 256) for _ in range(3)]
    assert "mpmd_map" in str(jax.make_jaxpr(step)(*shapes))
    found = jaxquant.coverage(step, *shapes)
    assert [row.matmul for row in found.rows] == ["fwd", "dlhs", "drhs"]
    assert found.share() == 1


def scaled_kernel(x, name):
    """Call a kernel of Mosaic GPU that multiplies by the tensor cores, as a library's."""

    def body(x_ref, out_ref):
        def product(sums):
            plgpu.wgmma(sums, x_ref, x_ref)
            return sums[...]

        out_ref[...] = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((64, 64), jnp.float32)).astype(out_ref.dtype)

    return mosaic_gpu.call(body, [x], [(x.shape, x.dtype)], interpret=False, kernel_name=name)[0]


def test_a_weight_in_a_kernel_of_mosaic_gpu_is_reported():
    def loss(params, x):
        return jnp.sum(x @ params["first"] + scaled_kernel(params["second"], "a_librarys")).astype(jnp.float32)

    shape = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    run = jaxquant.quantize(loss, {"quantization": "int8", "quant_backend": "native"})
    text = str(run.report({"first": shape, "second": shape}, shape))
    assert "inside the kernel 'a_librarys' of Mosaic GPU" in text


def test_coverage_reads_a_kernel_as_its_reference():
    def step(params, x, quant_state, implementation):
        config = {"quantization": "fp8", "implementation": implementation}
        run = jaxquant.quantize(lambda params, x: jnp.square(x @ params["first"] @ params["last"]).sum(), config)
        state = run.init(params, x) if quant_state is None else quant_state
        with jaxquant.state.frozen():  # its matmuls are counted, nothing advances
            return jax.grad(lambda params: run(params, state, x))(params), state

    shapes = {"first": (64, 300), "last": (300, 16)}
    params = {name: jnp.ones(shape, jnp.bfloat16) for name, shape in shapes.items()}
    x = jnp.ones((40, 64), jnp.bfloat16)
    state = jaxquant.state.warm(step(params, x, None, "xla")[1])

    def rows(implementation):
        found = jaxquant.coverage(
            functools.partial(step, implementation=implementation),
            params,
            x,
            state,
            config={"quantization": "fp8", "implementation": implementation},
        )
        found.check()
        return [(r.path, r.matmul, r.dtypes.elements, r.lhs_scale, r.rhs_scale, r.flops, r.fault) for r in found.rows]

    assert rows("pallas") == rows("xla")
