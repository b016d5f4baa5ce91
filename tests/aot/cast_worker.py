"""Compile a layer and its gradients under config strings for an H200 that is not here; print its casts as JSON."""

import collections
import functools
import json
import re
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import SingleDeviceSharding

import jaxquant
from jaxquant.aot.chips import chip
from jaxquant.aot.topology import devices
from jaxquant.optim import quantize_state

NARROW = r"f(?:8E\d?M\d?\w*|4E2M1FN)"


@functools.cache
def place():
    return SingleDeviceSharding(devices(chip("h200"))[0])


def encoded_again():
    """Count the casts to e4m3 of two updates in one program, the second of which takes the codes of the first."""
    tx = quantize_state(optax.sgd(0.1, momentum=0.9), "fp8_coat")
    params = jax.ShapeDtypeStruct((256, 4096), jnp.float32, sharding=place())
    state = jax.tree.map(
        lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=place()), jax.eval_shape(tx.init, params)
    )

    def twice(params, state, gradient):
        for _ in range(2):
            updates, state = tx.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    text = jax.jit(twice).lower(params, state, params).compile().as_text() or ""
    return len(re.findall(r"= f8e4m3fn\[[\d,]*\]\S* convert\(", text))


def casts(string):
    """Count the casts to narrow floats of the traced layer, and those of the compiled one."""
    x = jax.ShapeDtypeStruct((128, 256), jnp.bfloat16, sharding=place())
    layer = nn.Dense(128, use_bias=False, dtype=jnp.bfloat16)
    model = jaxquant.maybe_quantize_model(layer, {"quantization": string, "quant_backend": "native"}, x)
    rngs = {"params": jax.random.key(0), "quant": jax.random.key(1)}
    variables = jax.eval_shape(model.init, rngs, x)

    def step(variables, x):
        y, pull = jax.vjp(lambda v, x: model.apply(v, x, rngs={"quant": jax.random.key(2)}), variables, x)
        return y, pull(y)

    lowered = jax.jit(step).lower(
        jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=place()), variables), x
    )
    asked = re.findall(rf"stablehlo\.convert .*-> tensor<[\dx]*({NARROW})>", lowered.as_text())
    compiled = lowered.compile().as_text() or ""
    found = re.findall(r"= (f[84]e\w+)\[[\d,]*\]\S* convert\(", compiled)
    return collections.Counter(name.lower() for name in asked), collections.Counter(found)


if __name__ == "__main__":
    print(json.dumps([encoded_again(), {string: casts(string) for string in sys.argv[1:]}]))
