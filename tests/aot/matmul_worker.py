"""Compile an MLP and its gradients under config strings for H200s that are not here; print its matmuls as JSON."""

import collections
import json
import re
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxquant
from jaxquant import state
from jaxquant.aot.chips import chip
from jaxquant.aot.program import read_program
from jaxquant.aot.topology import devices
from jaxquant.core.sharding import on_device_of

ROWS, HIDDEN, WIDE = 4096, 512, 1024


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.silu(nn.Dense(WIDE, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)(x))
        return nn.Dense(HIDDEN, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)(x)


def compiled(string, count):
    """Return the optimized program of a step of ``count`` devices, with parameters and rows divided among them."""
    mesh = Mesh(np.array(devices(chip("h200"), str(count) if count > 1 else "")), ("data",))
    whole, cut = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("data", None)))
    x = jax.ShapeDtypeStruct((ROWS, HIDDEN), jnp.bfloat16, sharding=cut)
    with on_device_of(x):
        name, _, implementation = string.partition("/")
        config = {"quantization": name, "implementation": implementation or None}
        model = Mlp() if name == "bf16" else jaxquant.maybe_quantize_model(Mlp(), config, x)
        rngs = {"params": jax.random.key(0), "quant": jax.random.key(1)}
        params, kept = state.split(jax.eval_shape(model.init, rngs, x))
        place = lambda v: cut if v.ndim == 2 and v.shape[0] % count == 0 else whole  # noqa: E731
        variables = jax.tree.map(
            lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=place(v)),
            state.merge(params, state.warm(kept)),  # as after the first step
        )

        def step(variables, x):
            y, pull = jax.vjp(lambda v, x: model.apply(v, x, rngs={"quant": jax.random.key(2)}), variables, x)
            return pull(jnp.sin(y))

        places = jax.tree.map(lambda v: v.sharding, (variables, x))
        return jax.jit(step, out_shardings=places).lower(variables, x).compile().as_text() or ""


def matmuls(text):
    """Return operand dtypes, the call and whether both operands have their contraction last, of each matmul."""
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


def sent(text):
    """Return how many elements of whole tensors each kind of collective sends; those of scales and amaxes are few."""
    counts = collections.Counter()
    for each in read_program(text).collectives:
        counts[each.kind] += round(each.bytes * 8 / {"s8": 8, "f8e4m3fn": 8, "bf16": 16, "f32": 32}[each.dtype])
    return {kind: count for kind, count in counts.items() if count >= HIDDEN * WIDE}


def calls(text):
    """Return how often each kind of product and each kernel of ours runs."""
    program = read_program(text)
    return collections.Counter([each.kind for each in program.matmuls] + [each.name for each in program.kernels])


if __name__ == "__main__":
    count, *strings = sys.argv[1:]
    made = {string: compiled(string, int(count)) for string in strings}
    print(json.dumps({string: [matmuls(text), sent(text), calls(text)] for string, text in made.items()}))
