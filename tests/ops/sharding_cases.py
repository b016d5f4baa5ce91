"""Native contractions on a mesh of eight simulated devices and on one, for ``test_sharding.py`` to compare.

    python -m tests.ops.sharding_cases FILE.npz

runs every case and writes "CASE|what|mesh" and "CASE|what|one" arrays, "CASE|error" where one raised, and
"CASE|sent", the collectives of a compiled gradient.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxquant
from jaxquant import ops
from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.dtypes import element
from jaxquant.core.hadamard import draw_signs, rotate
from jaxquant.core.qtensor import dequantize
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import Recipe, Rotation, SparsitySpec, TensorSpec
from jaxquant.core.rounding import stochastic_cast
from jaxquant.ops import dot_general, initial_state, ragged, sparsity
from jaxquant.state.table import is_tables, make_state
from tests.ops.recipes import RECIPES

M, K, N = 16, 32, 24
FP8 = {"quantization": "fp8", "quant_backend": "native"}
NUMBERS = (((1,), (0,)), ((), ()))
PLACES = {
    "replicated": (P("data"), P()),
    "columns": (P("data"), P(None, "tensor")),
    "fsdp": (P("data"), P("data")),
    "rows": (P("data", "tensor"), P("tensor")),
}
"""Where activation and weight lie: data parallel, tensor parallel by columns and by rows, and FSDP."""


def operands() -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (M, K)) * jnp.logspace(-1, 1, M)[:, None]
    w = jax.random.normal(keys[1], (K, N)) * jnp.logspace(-1, 1, N)
    return x, w, jax.random.normal(keys[2], (M, N))


def _both(x: Any, w: Any, g: Any, state: Any, op: Callable[..., Any]) -> dict[str, Any]:
    """Output and gradients of op(x, w, state), with g as the output's gradient."""
    out, pull = jax.vjp(op, x, w, state)
    dx, dw, new = pull(g)
    return {"out": out, "dx": dx, "dw": dw, "state": new}


@functools.cache
def one_device(recipe: Recipe) -> dict[str, Any]:
    op = lambda x, w, s: dot_general(x, w, NUMBERS, recipe=recipe, state=s)  # noqa: E731
    return jax.jit(lambda x, w, g, s: _both(x, w, g, s, op))(*operands(), initial_state(recipe))


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(kind, kind))


def manual(recipe: Recipe, place: str) -> dict[str, Any]:
    """Run inside ``jax.shard_map`` with its default ``check_vma``."""
    left, right = PLACES[place]

    def op(x: Any, w: Any, state: Any) -> Any:
        if place == "fsdp":
            w = jax.lax.all_gather(w, "data", tiled=True)
        out = dot_general(x, w, NUMBERS, recipe=recipe, state=state)
        return jax.lax.psum(out, "tensor") if place == "rows" else out

    out = P("data", "tensor") if place == "columns" else P("data")
    mapped = jax.shard_map(
        lambda x, w, g, s: _both(x, w, g, s, op),
        mesh=mesh_of(AxisType.Auto),
        in_specs=(left, right, out, P()),
        out_specs={"out": out, "dx": left, "dw": right, "state": P()},
    )
    return jax.jit(mapped)(*operands(), initial_state(recipe))


def explicit(recipe: Recipe, place: str) -> dict[str, Any]:
    """Run under a mesh whose axes are explicit."""
    left, right = PLACES[place]
    out = P("data", "tensor") if place == "columns" else P("data", None)
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        x, w, g = operands()
        x, w, g = (jax.device_put(a, s) for a, s in ((x, left), (w, right), (g, out)))
        op = lambda x, w, s: dot_general(x, w, NUMBERS, recipe=recipe, state=s, out_sharding=out)  # noqa: E731
        found = jax.jit(lambda *args: _both(*args, op))(x, w, g, initial_state(recipe))
        for name, like in (("dx", x), ("dw", w)):
            assert jax.typeof(found[name]).sharding == jax.typeof(like).sharding, (name, jax.typeof(found[name]))
        return found


def masks(place: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A 2:4 mask made of a kernel that lies so, at the step that makes one: explicit mesh and one device."""
    spec = SparsitySpec(2, 4, 1, 1)
    _, w, _ = operands()

    def run(w: Any, state: Any) -> dict[str, Any]:
        out, pull = jax.vjp(lambda w, s: sparsity.sparsify(spec, (0,), w, s), w, state)
        dw, seen = pull(w)
        return {"out": out, "dw": dw, "state": seen["mask"].astype(jnp.float32)}

    one = jax.jit(run)(w, sparsity.initial_state(w, spec, (0,)))
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        placed = jax.device_put(w, PLACES[place][1])
        found = jax.jit(run)(placed, sparsity.initial_state(placed, spec, (0,)))
        assert jax.typeof(found["state"]).sharding == jax.typeof(placed).sharding
        return found | {"state": jax.sharding.reshard(found["state"], P())}, one


class Heads(nnx.Module):
    """Two NNX layers, each called with the sharding of its output."""

    def __init__(self, rngs: nnx.Rngs):
        self.split = nnx.Einsum("md,dhk->hmk", (K, 6, 4), (6, 4), rngs=rngs)
        self.up = nnx.Linear(4, N, rngs=rngs)

    def __call__(self, x: jax.Array, by_head: Any, by_column: Any) -> jax.Array:
        return self.up(self.split(x, out_sharding=by_head), out_sharding=by_column)


def nnx_layers() -> tuple[dict[str, Any], dict[str, Any]]:
    """NNX layers of a quantized model that pass ``out_sharding`` on: mesh and one device."""
    shape = jax.ShapeDtypeStruct((M, K), jnp.float32)
    model = jaxquant.maybe_quantize_model(Heads(nnx.Rngs(0)), FP8, shape, None, None)

    def run(model: Any, x: Any, *places: Any) -> dict[str, Any]:
        def loss(model: Any, x: Any) -> Any:
            out = model(x, *places)
            return (out**2).mean(), out

        (_, out), grads = jaxquant.state.value_and_grad(loss, has_aux=True)(model, x)
        jaxquant.state.advance(model, grads)
        state = nnx.to_pure_dict(nnx.state(model, jaxquant.state.QuantState))
        return {"out": out, "grads": nnx.to_pure_dict(grads.params), "state": state}

    x = jax.random.normal(jax.random.key(0), (M, K))
    one = jax.jit(lambda x: run(nnx.clone(model), x, None, None))(x)
    places = P("tensor", "data", None), P(None, "data", "tensor")
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("data")))
        found = jax.jit(lambda x: run(nnx.clone(model), x, *places))(placed)
        assert jax.typeof(found["out"]).sharding.spec == places[1], jax.typeof(found["out"])
        return found, one


def noises() -> tuple[dict[str, Any], dict[str, Any]]:
    """Round at random under automatic sharding: the bits of one device."""
    recipe, key = jaxquant.RECIPES["int8_delayed"].recipe, jax.random.key(7)
    assert recipe is not None
    x, w, g = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(((16, 8), (8, 12), (16, 12))))
    given: Any = {"recipe": recipe, "state": initial_state(recipe), "key": key}

    def run(x: Any, w: Any, g: Any) -> dict[str, Any]:
        out, pull = jax.vjp(lambda x, w: dot_general(x, w, NUMBERS, **given), x, w)
        dlhs, drhs = pull(g)
        return {"out": out, "dlhs": dlhs, "drhs": drhs, "noise": stochastic_cast(g * 30, element("int8"), key)}

    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    places = (x, P("a", None)), (w, P(None, "b")), (g, P("a", "b"))
    placed = [jax.device_put(a, NamedSharding(mesh, place)) for a, place in places]
    return jax.jit(run)(*placed), jax.jit(run)(x, w, g)


def rotations() -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotate along axes that the mesh cuts, where it would cut a run too."""
    x, signs = operands()[0], draw_signs(Rotation(128, "fresh"), jax.random.key(0))
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("data", "tensor")))
        found = {what: jax.jit(lambda x, n=n: rotate(x, n, signs))(placed) for n, what in enumerate(("dlhs", "out"))}
    return found, {"dlhs": rotate(x, 0, signs), "out": rotate(x, 1, signs)}


SIZES = np.array([5, 0, 9])
"""Rows of each group on one device, of 16."""


def _updated(found: dict[str, Any], state: Any) -> dict[str, Any]:
    """Put the state of the next step in the place of what was seen of this one."""
    before, seen = (each if is_tables(each) else make_state(each) for each in (state, found["state"]))
    new = jaxquant.state.update(before, seen) if state else {}
    return found | {"state": jaxquant.state.rows_of(new)}


def _by_parts(op: Callable[..., Any], operands: Sequence[Any], state: Any) -> dict[str, Any]:
    """Run with rows split over "data" and the weight on every device, inside ``jax.shard_map`` with its default."""
    mapped = jax.shard_map(
        lambda x, w, g, s: _both(x, w, g, s, op),
        mesh=mesh_of(AxisType.Auto),
        in_specs=(P("data"), P(), P("data"), P()),
        out_specs={"out": P("data"), "dx": P("data"), "dw": P(), "state": P()},
    )
    return _updated(jax.jit(mapped)(*operands, state), state)


def groups(recipe: Recipe, sizes: np.ndarray) -> tuple[dict[str, Any], dict[str, Any]]:
    """A ragged matmul, of each device's rows in groups of the sizes [device, group], and of all rows on one device."""
    rows, count = 4 * 16, sizes.shape[1]
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, K)) * jnp.logspace(-1, 1, rows)[:, None]
    w, g = jax.random.normal(keys[1], (count, K, N)), jax.random.normal(keys[2], (rows, N))
    state = ragged.initial_state(recipe, count)
    ids = np.stack([np.repeat(np.arange(count + 1), [*each, 16 - each.sum()]) for each in sizes])
    order = np.argsort(ids.ravel(), stable=True)

    def op(sizes: Callable[[], Any]) -> Callable[..., Any]:
        return lambda x, w, s: ops.ragged_dot(x, w, sizes(), recipe=recipe, state=s)

    one = _updated(_both(x[order], w, g[order], state, op(lambda: jnp.asarray(sizes.sum(0)))), state)
    one |= {what: one[what][np.argsort(order)] for what in ("out", "dx")}
    return _by_parts(op(lambda: jnp.asarray(sizes)[jax.lax.axis_index("data")]), (x, w, g), state), one


EXPERTS, TO_EACH = 8, 4
"""Experts, and rows that each device has for each of them."""


def experts(way: str, is_checked: bool = True, **config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Experts of which each device of an axis has two: rows exchanged, or weights gathered; and all on one device."""
    keys = jax.random.split(jax.random.key(0), 2)
    w = {"w": jax.random.normal(keys[0], (EXPERTS, K, K)) * jnp.logspace(-1, 1, EXPERTS)[:, None, None]}
    x = jax.random.normal(keys[1], (8, EXPERTS, TO_EACH, K)) * jnp.logspace(-1, 1, 8)[:, None, None, None]

    def multiply(w: Any, x: Any) -> Any:
        """Of rows [experts, rows of each, K]."""
        return jax.lax.ragged_dot(x.reshape(-1, K), w, jnp.full(x.shape[0], x.shape[1])).reshape(x.shape)

    def local(w: Any, x: Any) -> Any:
        if way == "gathered":
            return multiply(jax.lax.all_gather(w["w"], "b", tiled=True), x[0])[None]
        rows = multiply(w["w"], jax.lax.all_to_all(x[0], "b", 0, 1, tiled=True))
        return jax.lax.all_to_all(rows, "b", 1, 0, tiled=True)[None]

    def run(fn: Any) -> dict[str, Any]:
        q = jaxquant.quantize(fn, {"quant_backend": "native", **config})
        state = q.init(w, x)
        loss = lambda w, s, x: (jnp.sum(jnp.sin(out := q(w, s, x))), out)  # noqa: E731
        (dw, seen, dx), out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(w, state, x)
        new = jaxquant.state.update(state, seen) if state else {}
        if way == "served":
            np.testing.assert_array_equal(jax.jit(q)(q.convert(w, new, x), new, x), jax.jit(q)(w, new, x))
        whole = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), new)  # each device has its experts' state
        return {"out": out, "dx": dx, "dw": dw["w"], "state": whole}

    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    rows, by_expert = P(("a", "b")), lambda x: x.swapaxes(0, 1).reshape(EXPERTS, -1, K)
    sharded = jax.shard_map(local, mesh=mesh, in_specs=({"w": P("b")}, rows), out_specs=rows, check_vma=is_checked)
    return run(sharded), run(lambda w, x: multiply(w["w"], by_expert(x)).reshape(EXPERTS, 8, -1, K).swapaxes(0, 1))


def by_axis() -> tuple[dict[str, Any], dict[str, Any]]:
    """Experts by an axis of an einsum: explicit mesh, where jax 0.10 wants the activation alone cut, and one device."""
    w, x = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(((EXPERTS, K, N), (EXPERTS, M, K))))
    q = jaxquant.quantize(lambda w, x: jnp.einsum("ecd,edf->ecf", x, w["w"]), FP8)
    state = q.init({"w": w}, x)

    def run(w: Any, s: Any, x: Any) -> dict[str, Any]:
        out, pull = jax.vjp(lambda w, s, x: q({"w": w}, s, x), w, s, x)
        dw, seen, dx = pull(jnp.sin(out))
        return _updated({"out": out, "dw": dw, "dx": dx, "state": seen}, s)

    one = jax.jit(run)(w, state, x)
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        cut = w if jax.__version_info__ < (0, 11) else jax.device_put(w, P("data"))
        return jax.jit(run)(cut, state, jax.device_put(x, P("data"))), one


def exchanged() -> tuple[dict[str, Any], dict[str, Any]]:
    """Exchange activations in 8 bits, and quantize them first and exchange what that gives; a matmul reads the same."""
    x = jax.random.normal(jax.random.key(0), (64, 4, 200)) * jnp.logspace(-2, 2, 200)
    x, spec = x.astype(jnp.bfloat16), TensorSpec("float8_e4m3fn", "per_tile", tile_size=128)
    mesh = jax.make_mesh((8,), ("e",), axis_types=(AxisType.Auto,))

    def sharded(one: Any) -> Any:
        return jax.jit(jax.shard_map(lambda x: one(x, "e", 0, 1), mesh=mesh, in_specs=P("e"), out_specs=P("e")))

    low, plain = sharded(ops.all_to_all), sharded(functools.partial(jax.lax.all_to_all, tiled=True))
    sent = re.findall(r"stablehlo.all_to_all.*?: \(tensor<(.*?)>\)", low.lower(x).as_text())
    assert sent == ["8x4x200xui8", "8x4x2xf32"], sent
    codes = lambda x: quantize(x, spec, (2,))  # noqa: E731
    first, again = codes(plain(x)), codes(low(x))

    def values(out: Any, fn: Any, read: Any) -> dict[str, Any]:
        dx = jax.jit(lambda x: jax.vjp(jax.checkpoint(fn), x)[1](plain(x))[0])(x)
        found = {"out": out, "dx": dx, "codes": read.qvalue, "scale": read.scale}
        return {name: value.astype(jnp.float32) for name, value in found.items()}

    return values(low(x), low, again), values(plain(dequantize(codes(x), "bfloat16")), plain, first)


def convolutions(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A convolution of each device's examples, and of all on one device."""
    recipe = RECIPES[name]
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (8, 10, 6)) * jnp.logspace(-1, 1, 8)[:, None, None]
    w, g = jax.random.normal(keys[1], (3, 6, 8)), jax.random.normal(keys[2], (8, 10, 8))
    numbers = ("NWC", "WIO", "NWC")

    def op(x: Any, w: Any, s: Any) -> Any:
        options: dict[str, Any] = {"dimension_numbers": numbers, "recipe": recipe, "state": s}
        return ops.conv_general_dilated(x, w, (1,), "SAME", **options)

    one = _updated(_both(x, w, g, initial_state(recipe), op), initial_state(recipe))
    return _by_parts(op, (x, w, g), initial_state(recipe)), one


def residuals(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A gate whose arguments are kept in FP8: rows over one axis of a mesh and columns over another, and one device."""
    x, w = (jax.random.normal(jax.random.key(n), (8, 256)) for n in range(2))
    gate = jaxquant.compress_residuals(lambda x, w: nn.silu(x) * w, (0, 1))
    run = jax.jit(lambda x, w: _both(x, w, x, {}, lambda x, w, _: gate(x, w)))
    mesh = mesh_of(AxisType.Explicit if kind == "explicit" else AxisType.Auto)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(each, NamedSharding(mesh, P("data", "tensor"))) for each in (x, w)]
        return run(*placed), run(x, w)


def idle(backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """An odd batch, and the gradient of each example, on one of eight devices: by default, and with one block."""
    x, w = jax.random.normal(jax.random.key(0), (133, K)), operands()[1]

    def run(**count: int) -> dict[str, Any]:
        config = {"quantization": "int8", "quant_backend": backend, **count}
        layer = jaxquant.quantize(lambda w, x: x @ w, config)
        gradient = jax.grad(lambda w, x: (layer(w, {}, x) ** 2).sum())
        return {"out": jax.jit(gradient)(w, x), "each": jax.jit(jax.vmap(gradient, (None, 0)))(w, x[:3, None])}

    return run(), run(quantization_local_shard_count=1)


PLACED = {
    "data": (P(("data", "tensor")), P()),
    "fsdp": (P("data"), P("data")),
    "tensor": (P(), P(None, "tensor")),
    "both": (P("data"), P("data", "tensor")),
}
"""Where activations and a weight lie: data parallel, FSDP, tensor parallel, FSDP with tensor parallel."""
SENT = [f"int8 native auto {place}" for place in PLACED]
SENT += ["int8 native explicit both", "int8 native manual data", "int8 native manual fsdp", "int4 qwix auto both"]
SENT += [
    "int8_delayed native auto fsdp",
    "int8_delayed native auto both",
    "int8 aqt auto both",
    "int8 qwix manual fsdp",
]
SENT += [f"{name} native auto both" for name in ("fp8", "fp8_current", "fp8_block", "mxfp8", "nvfp4")]
SENT += ["aqt_fp8_full aqt auto both", "fp8_full qwix auto both"]
"""Integers under every kind of mesh; of the others a recipe of each kind, under FSDP with tensor parallel."""


def sent(name: str) -> list[str]:
    """Return what devices send each other in the gradient of a layer: the types in the compiled program."""
    quantization, backend, kind, place = name.split()
    left, right = PLACED[place]
    mesh = mesh_of(AxisType.Explicit if kind == "explicit" else AxisType.Auto)
    x, w = (jnp.zeros(shape, jnp.float32) for shape in ((16, 8, 128), (128, 256)))
    columns = NamedSharding(mesh, P(*left, *[None] * (2 - len(left)), *right[1:]))
    out = {"out_sharding": columns} if kind == "explicit" else {}

    def layer(w: Any, x: Any) -> Any:
        full = jax.lax.all_gather(w, "data", tiled=True) if (kind, place) == ("manual", "fsdp") else w
        return jnp.einsum("bsd,df->bsf", x, full, **out)

    if kind == "manual":
        layer = jax.shard_map(layer, mesh=mesh, in_specs=(right, left), out_specs=left)
    run = jaxquant.quantize(layer, {"quantization": quantization, "quant_backend": backend})
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in ((w, right), (x, left))]
    state = jax.device_put(run.init(*placed), NamedSharding(mesh, P()))
    loss = lambda w, x, s: (run(w, s, x) ** 2).sum()  # noqa: E731
    gradient = jax.jit(jax.grad(loss, (0, 1, 2)), out_shardings=(placed[0].sharding, None, None))
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # the program is read only
    text = gradient.lower(*placed, state).compile(quick).as_text()
    calls = r"= (\S+|\([^)]*\)) (?:all-|reduce-sc|collective-p|ragged-all)\S*\("
    return [each for types in re.findall(calls, text) for each in re.findall(r"\w+\[[\d,]*\]", types)]


REFUSALS = (AssertionError, NotImplementedError, TypeError, ValueError, jax.errors.JaxRuntimeError)
"""How a contraction fails on a mesh; jax has no public name for the error of explicit sharding, which ends the run."""


def cases() -> dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]]:
    found: dict[str, Any] = {}
    alone = [
        ("manual", name, "columns")
        for name in ("fp8 as flax", "fp8_current clipping", "int8 stochastic", "int8 shards")
    ]
    alone += [("explicit", name, "columns") for name in ("fp8", "int8 tiles", "int8 shards", "int8 asymmetric")]
    alone += [("explicit", name, "columns") for name in ("fp8_full clipping", "nvfp4")]
    alone += [(kind, name, place) for kind, name in (("manual", "fp8"), ("explicit", "int8")) for place in PLACES]
    for kind, name, place in alone:
        run = manual if kind == "manual" else explicit
        found[f"{kind} {name} {place}"] = lambda r=run, n=name, p=place: (r(RECIPES[n], p), one_device(RECIPES[n]))
    found["automatic noise"] = noises
    found["explicit rotations"] = rotations
    for place in ("rows", "fsdp"):
        found[f"explicit mask {place}"] = functools.partial(masks, place)
    for kind in ("manual", "explicit"):
        found[f"{kind} fp8 residuals"] = functools.partial(residuals, kind)
    for name in ("fp8", "int8"):
        found[f"manual {name} groups"] = functools.partial(groups, RECIPES[name], np.tile(SIZES, (4, 1)))
        found[f"manual {name} convolutions"] = functools.partial(convolutions, name)
    flax = QuantConfig(quantization="fp8", amax_init="flax").recipe()
    uneven = np.array([[5, 0, 9], [0, 0, 3], [7, 0, 0], [1, 0, 2]])
    found["manual fp8 flax groups"] = functools.partial(groups, flax, uneven)
    for name, way in (("fp8", "served"), ("fp8_block", "served"), ("fp8", "gathered")):
        place = "gathered" if way == "gathered" else "experts"
        found[f"manual {name} {place}"] = functools.partial(experts, way, quantization=name)
    int8 = {"quantization": "int8", "quantization_local_shard_count": 1}
    found["manual int8 gathered"] = functools.partial(experts, "gathered", **int8)
    found["manual fp8 unchecked"] = functools.partial(experts, "exchanged", False, quantization="fp8")
    shared = {"quantization": "fp8", "quantization_share_expert_scales": True}
    found["manual fp8 of one scale"] = functools.partial(experts, "exchanged", **shared)
    found["manual fp8 all_to_all"] = exchanged
    for backend in ("native", "aqt", "qwix"):
        found[f"idle {backend} devices"] = functools.partial(idle, backend)
    found["explicit fp8 nnx layers"] = nnx_layers
    found["explicit fp8 axis"] = by_axis
    return found


def flat(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def main(path: str) -> None:
    arrays: dict[str, np.ndarray] = {}
    for name, case in cases().items():
        try:
            mesh, one = map(flat, case())
            assert mesh.keys() == one.keys()
        except REFUSALS as error:  # one case that raises is one test that fails
            arrays[f"{name}|error"] = np.array(f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}")
            continue
        for what, value in mesh.items():
            parts = [np.asarray(part.data) for part in value.addressable_shards] if what.startswith("state") else []
            arrays[f"{name}|{what}|same"] = np.array(all(np.array_equal(part, parts[0]) for part in parts))
            arrays[f"{name}|{what}|mesh"], arrays[f"{name}|{what}|one"] = np.asarray(value), np.asarray(one[what])
    arrays |= {f"{name}|sent": np.array(sent(name), dtype=str) for name in SENT}
    np.savez(path, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
