"""Compile every case of the kernels for TPUs that are not attached, in a separate process; print the failures."""

import sys

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import jaxquant
from jaxquant.aot.chips import chip
from jaxquant.aot.topology import devices
from jaxquant.kernels.block_quantize import cases as block_cases
from jaxquant.kernels.block_quantize import tpu as blocks
from jaxquant.kernels.fp8_einsum import cases as einsum_cases
from jaxquant.kernels.fp8_einsum import tpu as einsum
from jaxquant.kernels.quantize import cases as quantize_cases
from jaxquant.kernels.quantize import tpu as quantize

LARGE = einsum_cases.Case((1, 2048, 2048, 2048), out_dtype="float32", accumulator="float32", rhs_major="n")


def quantize_program(case, shape):
    options = {"dtype": case.dtype, "compute_dtype": case.compute_dtype}
    given = shape(case.shape, case.x_dtype), shape((1, 1), jnp.float32)
    return lambda x, scale: quantize.quantize(x, scale, **options), given


def block_program(case, shape):
    return lambda x: blocks.block_quantize(x, case.casts), (shape(case.shape, case.x_dtype),)


def einsum_program(case, shape):
    B, M, N, K = case.sizes
    lhs = shape((B, M, K) if case.lhs_major == "k" else (B, K, M), case.lhs_dtype)
    rhs = shape((B, N, K) if case.rhs_major == "k" else (B, K, N), case.rhs_dtype)
    scales = {"left": (B, M, 1), "right": (B, 1, N)} if case.per_channel else {"scale": (1,)}
    names = ("out_dtype", "accumulator", "lhs_major", "rhs_major")
    options = {name: getattr(case, name) for name in names}
    given = lhs, rhs, {name: shape(sizes, jnp.float32) for name, sizes in scales.items()}
    return lambda lhs, rhs, scales: einsum.matmul(lhs, rhs, **scales, **options), given


def ragged_program(string, shape):
    """Return the gradients of a grouped matmul, for each element type that the chip's instructions support."""
    quantized = jaxquant.quantize(lambda w, x, sizes: jax.lax.ragged_dot(x, w.astype(x.dtype), sizes), string)
    w, x, sizes = shape((4, 256, 256), "float32"), shape((512, 256), "bfloat16"), shape((4,), "int32")
    state = jax.tree.map(lambda leaf: shape(leaf.shape, leaf.dtype), jax.eval_shape(quantized.init, w, x, sizes))
    loss = lambda w, state, x, sizes: jnp.square(quantized(w, state, x, sizes).astype("float32")).sum()  # noqa: E731
    return jax.grad(loss, argnums=(0, 1, 2)), (w, state, x, sizes)


def main(*targets):
    for target in targets:
        place = SingleDeviceSharding(devices(chip(target))[0])

        def shape(sizes, dtype, place=place):
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

        cases = [(quantize_program, case) for case in quantize_cases.CASES]
        cases += [(block_program, case) for case in block_cases.CASES]
        cases += [(einsum_program, case) for case in (*einsum_cases.CASES, LARGE)]
        for make, case in [*cases, (ragged_program, "fp8" if target == "v7x" else "int8")]:
            program, given = make(case, shape)
            try:
                text = jax.jit(program).lower(*given).compile().as_text() or ""
                print(target, case, "compiled" if "tpu_custom_call" in text else "has no kernel")
            except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
                print(target, case, "failed:", str(error)[:300].replace("\n", " "))


if __name__ == "__main__":
    main(*sys.argv[1:])
