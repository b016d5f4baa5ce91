"""Native contractions on a mesh of eight simulated devices, compared with one device, for ``test_sharding.py``.

    python -m tests.ops.sharding_cases FILE.json

runs every case and writes the error of each, "" if there is no error.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxquant
from jaxquant import ops
from jaxquant.core.dtypes import element
from jaxquant.core.qtensor import dequantize
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import Recipe, SparsitySpec, TensorSpec
from jaxquant.core.rounding import stochastic_cast
from jaxquant.ops import dot_general, initial_state, ragged, sparsity
from tests import numerics
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
"""Shardings of activation and weight: data parallel, tensor parallel by columns and by rows, and FSDP."""


def operands() -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (M, K)) * jnp.logspace(-1, 1, M)[:, None]
    w = jax.random.normal(keys[1], (K, N)) * jnp.logspace(-1, 1, N)
    return x, w, jax.random.normal(keys[2], (M, N))


def _both(x: Any, w: Any, g: Any, state: Any, op: Callable[..., Any]) -> dict[str, Any]:
    """Return output and gradients of op(x, w, state), with g as the output's gradient."""
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
    """Run a contraction inside ``jax.shard_map`` with the default ``check_vma``."""
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
    """Run a contraction under a mesh with explicit axes."""
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


def masks() -> tuple[dict[str, Any], dict[str, Any]]:
    """Compute a 2:4 mask along a sharded axis, in a step that updates the mask."""
    spec, (_, w, _) = SparsitySpec(2, 4, 1, 1), operands()

    def run(w: Any, state: Any) -> dict[str, Any]:
        out, pull = jax.vjp(lambda w, s: sparsity.sparsify(spec, (0,), w, s), w, state)
        dw, seen = pull(w)
        return {"out": out, "dw": dw, "mask": seen["mask"].astype(jnp.float32)}

    one = jax.jit(run)(w, sparsity.initial_state(w, spec, (0,)))
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        placed = jax.device_put(w, P("data"))
        return jax.jit(run)(placed, sparsity.initial_state(placed, spec, (0,))), one


class Heads(nnx.Module):
    """Two NNX layers, each called with the sharding of its output."""

    def __init__(self, rngs: nnx.Rngs):
        self.split = nnx.Einsum("md,dhk->hmk", (K, 6, 4), (6, 4), rngs=rngs)
        self.up = nnx.Linear(4, N, rngs=rngs)

    def __call__(self, x: jax.Array, by_head: Any, by_column: Any) -> jax.Array:
        return self.up(self.split(x, out_sharding=by_head), out_sharding=by_column)


def nnx_layers() -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the NNX layers of a quantized model with ``out_sharding``."""
    shape = jax.ShapeDtypeStruct((M, K), jnp.float32)
    model = jaxquant.maybe_quantize_model(Heads(nnx.Rngs(0)), FP8, shape, None, None)

    def run(x: Any, *places: Any) -> dict[str, Any]:
        own = nnx.clone(model)
        loss = lambda own, x: (((out := own(x, *places)) ** 2).mean(), out)  # noqa: E731
        (_, out), grads = jaxquant.state.value_and_grad(loss, has_aux=True)(own, x)
        jaxquant.state.advance(own, grads)
        state = nnx.to_pure_dict(nnx.state(own, jaxquant.state.QuantState))
        return {"out": out, "grads": nnx.to_pure_dict(grads.params), "state": state}

    x, places = operands()[0], (P("tensor", "data", None), P(None, "data", "tensor"))
    one = jax.jit(lambda x: run(x, None, None))(x)
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        found = jax.jit(lambda x: run(x, *places))(jax.device_put(x, P("data")))
        assert jax.typeof(found["out"]).sharding.spec == places[1], jax.typeof(found["out"])
        return found, one


def noises() -> tuple[dict[str, Any], dict[str, Any]]:
    """Check that stochastic rounding under automatic sharding has the bits of one device."""
    recipe, key = jaxquant.RECIPES["int8_delayed"].recipe, jax.random.key(7)
    assert recipe is not None
    given: Any = {"recipe": recipe, "state": initial_state(recipe), "key": key}

    def run(x: Any, w: Any, g: Any) -> dict[str, Any]:
        out, pull = jax.vjp(lambda x, w: dot_general(x, w, NUMBERS, **given), x, w)
        dlhs, drhs = pull(g)
        return {"out": out, "dlhs": dlhs, "drhs": drhs, "noise": stochastic_cast(g * 30, element("int8"), key)}

    mesh, places = mesh_of(AxisType.Auto), (P("data", None), P(None, "tensor"), P("data", "tensor"))
    placed = [jax.device_put(a, NamedSharding(mesh, place)) for a, place in zip(operands(), places, strict=True)]
    return jax.jit(run)(*placed), jax.jit(run)(*operands())


EXPERTS, TO_EACH = 8, 4
"""Number of experts, and of rows that each device has for each expert."""


def experts(way: str, is_checked: bool = True, **config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run experts, two per device of an axis, with rows exchanged or weights gathered, and all on one device."""
    keys = jax.random.split(jax.random.key(0), 2)
    w = {"w": jax.random.normal(keys[0], (EXPERTS, K, K)) * jnp.logspace(-1, 1, EXPERTS)[:, None, None]}
    x = jax.random.normal(keys[1], (8, EXPERTS, TO_EACH, K)) * jnp.logspace(-1, 1, 8)[:, None, None, None]

    def multiply(w: Any, x: Any) -> Any:
        """Multiply rows [experts, rows of each, K]."""
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


def exchanged() -> tuple[dict[str, Any], dict[str, Any]]:
    """Exchange activations in 8 bits, or quantize them before the exchange; the matmul reads the same values."""
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


def convolutions(recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a convolution of each device's examples inside ``jax.shard_map``, and of all examples on one device."""
    keys, state = jax.random.split(jax.random.key(0), 3), initial_state(recipe)
    x = jax.random.normal(keys[0], (8, 10, 6)) * jnp.logspace(-1, 1, 8)[:, None, None]
    w, g = jax.random.normal(keys[1], (3, 6, 8)), jax.random.normal(keys[2], (8, 10, 8))

    def op(x: Any, w: Any, s: Any) -> Any:
        numbers = ("NWC", "WIO", "NWC")
        return ops.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=numbers, recipe=recipe, state=s)

    def run(x: Any, w: Any, g: Any, s: Any) -> dict[str, Any]:
        found = _both(x, w, g, s, op)
        return {what: found[what] for what in ("out", "dx", "dw")}

    specs = (P("data"), P(), P("data"), P()), {"out": P("data"), "dx": P("data"), "dw": P()}
    mapped = jax.shard_map(run, mesh=mesh_of(AxisType.Auto), in_specs=specs[0], out_specs=specs[1])
    return jax.jit(mapped)(x, w, g, state), run(x, w, g, state)


def groups() -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a ragged matmul of each device's rows, with a replicated weight, and a ragged matmul of all rows."""
    recipe, sizes = RECIPES["fp8"], np.array([[5, 0, 9], [0, 0, 3], [7, 0, 0], [1, 0, 2]])  # [device, group] of 16 rows
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (64, K)) * jnp.logspace(-1, 1, 64)[:, None]
    w, g = jax.random.normal(keys[1], (3, K, N)), jax.random.normal(keys[2], (64, N))
    ids = np.concatenate([np.repeat(np.arange(4), [*each, 16 - each.sum()]) for each in sizes])
    order, state = np.argsort(ids, stable=True), ragged.initial_state(recipe, 3)

    def run(x: Any, w: Any, g: Any, s: Any, sizes: Any) -> dict[str, Any]:
        return _both(x, w, g, s, lambda x, w, s: ops.ragged_dot(x, w, sizes.reshape(-1), recipe=recipe, state=s))

    rows, specs = P("data"), {"out": P("data"), "dx": P("data"), "dw": P(), "state": P()}
    mesh = mesh_of(AxisType.Auto)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(rows, P(), rows, P(), rows), out_specs=specs)
    one = jax.jit(run)(x[order], w, g[order], state, sizes.sum(0))
    one |= {what: one[what][np.argsort(order)] for what in ("out", "dx")}
    return jax.jit(mapped)(x, w, g, state, sizes), one


def residuals() -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a gate with arguments saved in FP8: rows and columns sharded over two mesh axes, and one device."""
    x, w = (jax.random.normal(jax.random.key(n), (8, 256)) for n in range(2))
    gate = jaxquant.compress_residuals(lambda x, w: nn.silu(x) * w, (0, 1))
    run = jax.jit(lambda x, w: _both(x, w, x, {}, lambda x, w, _: gate(x, w)))
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        placed = [jax.device_put(each, P("data", "tensor")) for each in (x, w)]
        return run(*placed), run(x, w)


def idle(backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run an odd batch, and the gradient of each example, on one of eight devices: by default, and with one block."""
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
"""Shardings of activations and a weight: data parallel, FSDP, tensor parallel, FSDP with tensor parallel."""
SENT = [f"int8 native auto {place}" for place in PLACED]
SENT += ["int8 native explicit both", "int8 native manual fsdp", "int4 qwix auto both", "int8_delayed native auto both"]
SENT += [f"{name} native auto both" for name in ("fp8", "fp8_block", "nvfp4")] + ["aqt_fp8_full aqt auto both"]
"""Integer recipes under every kind of mesh, and one recipe of each other kind under FSDP with tensor parallel."""


def check_sent(name: str) -> None:
    """Check in the program of a layer's gradient that devices send 8-bit elements, or the gradient's dtype."""
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
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # the program does not run
    text = gradient.lower(*placed, state).compile(quick).as_text()
    calls = re.findall(r"= (\S+|\([^)]*\)) (?:all-|reduce-sc|collective-p|ragged-all)\S*\(", text)
    found = [each for types in calls for each in re.findall(r"([a-z]+)(\d+)\w*\[([\d,]*)\]", types)]
    assert found
    for numeric, bits, shape in found:
        is_small = math.prod(int(n) for n in shape.split(",") if n) <= 8  # digests of random keys
        is_partial = numeric == "s" and place in ("tensor", "both") and shape.endswith("8,128")  # docs: meshes
        assert int(bits) <= (32 if numeric == "f" or is_small or is_partial else 8), (numeric, bits, shape)


def cases() -> dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]]:
    found: dict[str, Any] = {}
    alone = [(kind, name, place) for kind, name in (("manual", "fp8"), ("explicit", "int8")) for place in PLACES]
    alone += [("manual", name, "columns") for name in ("fp8 as flax", "int8 shards")]
    alone += [("explicit", name, "columns") for name in ("fp8", "int8 tiles", "fp8_full clipping", "nvfp4")]
    for kind, name, place in alone:
        run = manual if kind == "manual" else explicit
        found[f"{kind} {name} {place}"] = lambda r=run, n=name, p=place: (r(RECIPES[n], p), one_device(RECIPES[n]))
    found["automatic noise"] = noises
    found["explicit fp8 residuals"] = residuals
    found["manual fp8 convolutions"] = functools.partial(convolutions, RECIPES["fp8"])
    for name in ("fp8", "fp8_block"):
        found[f"manual {name} experts"] = functools.partial(experts, "served", quantization=name)
    int8 = {"quantization": "int8", "quantization_local_shard_count": 1}
    found["manual int8 gathered"] = functools.partial(experts, "gathered", **int8)
    found["manual fp8 unchecked"] = functools.partial(experts, "exchanged", False, quantization="fp8")
    shared = {"quantization": "fp8", "quantization_share_expert_scales": True}
    found["manual fp8 of one scale"] = functools.partial(experts, "exchanged", **shared)
    found["manual fp8 all_to_all"] = exchanged
    for backend in ("native", "aqt", "qwix"):
        found[f"idle {backend} devices"] = functools.partial(idle, backend)
    found["explicit fp8 nnx layers"] = nnx_layers
    found["manual fp8 groups"] = groups
    found["explicit mask fsdp"] = masks
    return found


def check(name: str) -> None:
    """Check that a mesh and one device compute the same, and that the state is the same on every device."""
    mesh, one = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in cases()[name]()
    )
    assert mesh.keys() == one.keys()
    for what, value in mesh.items():
        if what.startswith("['state']"):
            for part in value.addressable_shards if isinstance(value, jax.Array) else ():
                np.testing.assert_array_equal(part.data, one[what], err_msg=what)
            np.testing.assert_array_equal(value, one[what], err_msg=what)
        else:
            bound = numerics.sharded_contraction_bound(name, what[2:-2]) * np.linalg.norm(one[what])
            assert np.linalg.norm(np.asarray(value) - np.asarray(one[what])) <= bound, what


def main(path: str) -> None:
    found = {}
    for name in (*cases(), *SENT):
        try:
            (check_sent if name in SENT else check)(name)
            found[name] = ""
        except Exception:  # an exception fails only its own test; error classes of explicit sharding vary
            found[name] = traceback.format_exc()[-2000:]
    Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
