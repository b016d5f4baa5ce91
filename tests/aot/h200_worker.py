"""Compile steps for H200s that are not attached; print the matmuls, collectives and casts of each step as JSON."""

import collections
import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxquant
from jaxquant import state
from jaxquant.aot.chips import chip
from jaxquant.aot.program import read_program
from jaxquant.aot.topology import devices
from jaxquant.core.sharding import on_device_of
from jaxquant.optim import quantize_state
from tests.aot.test_h200 import CASTS, STRINGS

ROWS, HIDDEN, WIDE = 4096, 512, 1024
NARROW = r"f(?:8E\d?M\d?\w*|4E2M1FN)"
MESHES = {count: Mesh(np.array(devices(chip("h200"), str(count) if count > 1 else "")), ("data",)) for count in (1, 8)}


class Mlp(nn.Module):
    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        for place, width in enumerate(self.widths):
            x = nn.silu(x) if place else x
            x = nn.Dense(width, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)(x)
        return x


WHOLE, CUT = PartitionSpec(), PartitionSpec("data", None)


def shape_of(v, count=1, spec=WHOLE):
    return jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(MESHES[count], spec))


def lowered(string, layers, x, count=1):
    """Lower a step for ``count`` devices, with parameters and batch rows sharded over them."""
    x = shape_of(x, count, CUT)
    model = Mlp(layers)
    with on_device_of(x):
        name, _, implementation = string.partition("/")
        if name != "bf16":
            config = {"quantization": name, "implementation": implementation or None}
            model = jaxquant.maybe_quantize_model(model, config, x)
        rngs = {"params": jax.random.key(0), "quant": jax.random.key(1)}
        params, kept = state.split(jax.eval_shape(model.init, rngs, x))
        given = state.merge(params, state.warm(kept))  # as after the first step
        place = lambda v: CUT if v.ndim == 2 and v.shape[0] % count == 0 else WHOLE  # noqa: E731
        variables = jax.tree.map(lambda v: shape_of(v, count, place(v)), given)

        def step(variables, x):
            y, pull = jax.vjp(lambda v, x: model.apply(v, x, rngs={"quant": jax.random.key(2)}), variables, x)
            return pull(jnp.sin(y))

        places = jax.tree.map(lambda v: v.sharding, (variables, x))
        return jax.jit(step, out_shardings=places).lower(variables, x)


def matmuls(text):
    """Return, for each matmul, its operand dtypes, its call, and whether both operands contract their last axis."""
    types = dict(re.findall(r"%([\w.\-]+) = (\w+\[[\d,]*\]\{[\d,]*)", text))
    found = []
    for line in text.splitlines():
        call = re.search(r" (dot|custom-call)\(([^)]*)\)", line)
        target = re.search(r'custom_call_target="(__cublas[^"]*)"', line)
        if not call or (call[1] == "custom-call" and not target):
            continue
        sides = [types[name.split()[-1].lstrip("%")] for name in call[2].split(", ")[:2]]
        dims = [re.search(rf'{side}_contracting_dim\w*"?[:=][\[{{]"?([\d,]*)', line)[1] for side in ("lhs", "rhs")]
        is_last = all(re.search(r"\{(\d*)", kind)[1] == axis for kind, axis in zip(sides, dims, strict=True))
        found.append([*(kind.partition("[")[0] for kind in sides), target[1] if target else "dot", is_last])
    return sorted(found)


def sent(program):
    """Return the number of elements of large arrays that each kind of collective sends; scales and amaxes are small."""
    counts = collections.Counter()
    for each in program.collectives:
        counts[each.kind] += round(each.bytes * 8 / {"s8": 8, "f8e4m3fn": 8, "bf16": 16, "f32": 32}[each.dtype])
    return {kind: count for kind, count in counts.items() if count >= HIDDEN * WIDE}


def of_mlp(string, count):
    """Return the matmuls and collectives, and how often each kind of product and each of our kernels runs."""
    text = (
        lowered(string, (WIDE, HIDDEN), jax.ShapeDtypeStruct((ROWS, HIDDEN), jnp.bfloat16), count).compile().as_text()
    )
    program = read_program(text)
    calls = [each.kind for each in program.matmuls] + [each.name for each in program.kernels]
    return matmuls(text), sent(program), collections.Counter(calls)


def casts(string):
    """Count casts to narrow floats in a traced layer without kernels, and in the compiled layer."""
    step = lowered(f"{string}/xla", (128,), jax.ShapeDtypeStruct((128, 256), jnp.bfloat16))
    asked = re.findall(rf"stablehlo\.convert .*-> tensor<[\dx]*({NARROW})>", step.as_text())
    found = re.findall(r"= (f[84]e\w+)\[[\d,]*\]\S* convert\(", step.compile().as_text() or "")
    return collections.Counter(name.lower() for name in asked), collections.Counter(found)


def encoded_again():
    """Count casts to e4m3 in a program of two updates, in which the second update reads the codes of the first."""
    tx = quantize_state(optax.sgd(0.1, momentum=0.9), "fp8_coat")
    params = jax.ShapeDtypeStruct((256, 4096), jnp.float32)
    params, moments = jax.tree.map(shape_of, (params, jax.eval_shape(tx.init, params)))

    def twice(params, moments, gradient):
        for _ in range(2):
            updates, moments = tx.update(gradient, moments, params)
            params = optax.apply_updates(params, updates)
        return params, moments

    text = jax.jit(twice).lower(params, moments, params).compile().as_text() or ""
    return len(re.findall(r"= f8e4m3fn\[[\d,]*\]\S* convert\(", text))


if __name__ == "__main__":
    found = {count: {string: of_mlp(string, count) for string in strings} for count, strings in STRINGS.items()}
    print(json.dumps([found, {string: casts(string) for string in CASTS}, encoded_again()]))
