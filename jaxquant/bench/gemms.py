"""GEMM set of one transformer layer with its quantization, forward and both gradients, for timing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import fp8_ops

from jaxquant import state as quantization_state
from jaxquant.bench.timing import CompiledRow, compile_program, random_arrays
from jaxquant.bench.torch_gemms import prepare_torch
from jaxquant.inject.model import maybe_quantize_model

Shapes = Sequence[tuple[int, int]]
"""Contraction size and number of output features of each matmul."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """One library and recipe.

    Attributes:
      library: "jax" (no quantization), "flax" (Flax's fp8 ops), "torch" (``_scaled_mm``), "jaxquant" (the config
        string with default settings) or another quant_backend.
      recipe: config string; "" for none, "fp8" for flax, "fast" or "split" (accumulation) for torch.
      implementation: "pallas" or "xla" for the native backend's casts and matmuls; "" is the default.
    """

    library: str
    recipe: str = ""
    implementation: str = ""

    def dense(self, features: int, x: Any) -> nn.Module:
        """Return a bf16 dense layer without bias, quantized by this library and recipe."""
        op = fp8_ops.Fp8DirectDotGeneralOp if self.library == "flax" else None
        layer = nn.Dense(features, False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, dot_general_cls=op)
        if self.library in ("jax", "flax"):
            return layer
        return maybe_quantize_model(layer, self.config(), x)

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.library, self.recipe, self.implementation)))

    def config(self) -> dict[str, Any]:
        """Return the config for ``maybe_quantize_model``."""
        if self.library == "jax":
            return {}
        chosen = {"implementation": self.implementation} if self.implementation else {}
        backend = {} if self.library == "jaxquant" else {"quant_backend": self.library}
        return {"quantization": self.recipe} | backend | chosen


CONTENDERS = (
    Contender("jax"),
    Contender("jaxquant", "fp8"),
    Contender("torch", "fast"),
    Contender("torch", "split"),
    Contender("flax", "fp8"),
    *(Contender("jaxquant", recipe) for recipe in ("int8", "fp8_current", "fp8_block", "fp8_full", "int8_delayed")),
    *(Contender("native", recipe, "xla") for recipe in ("fp8", "int8")),
    *(Contender("native", recipe, "pallas") for recipe in ("int8", "fp8", "fp8_block")),
    Contender("qwix", "fp8_full"),
    Contender("aqt", "int8"),
)


def draw(tokens: int, shapes: Shapes) -> Any:
    """Return inputs of the matmuls with ``tokens`` rows each, and gradients of their results."""
    sides = [[jax.ShapeDtypeStruct((tokens, size), jnp.bfloat16) for size in each] for each in shapes]
    return list(zip(*random_arrays(sides), strict=True))


def prepare_gemms(
    contender: Contender, shapes: Shapes, inputs: Sequence[jax.Array], grads: Sequence[jax.Array]
) -> CompiledRow:
    """Compile the GEMMs of a transformer layer, including quantization of operands.

    The program ``fwd`` also returns the saved residuals. The program ``bwd`` computes both gradients and the new quant
    state from these residuals. Parameters are bf16, and amax histories are not empty.

    Args:
      contender: library and recipe.
      shapes: shapes of the weights.
      inputs, grads: result of ``draw``.

    Raises:
      ImportError, NotImplementedError, ValueError, jax.errors.JaxRuntimeError: the contender cannot run here.
    """
    if contender.library == "torch":
        return prepare_torch(len(inputs[0]), shapes, is_fast=contender.recipe == "fast")
    models = [contender.dense(n, x) for (_, n), x in zip(shapes, inputs, strict=True)]
    keys = {"params": jax.random.key(0), "quant": jax.random.key(1)}

    def run(variables: Any, inputs: Any) -> tuple[Any, ...]:
        rngs = {"quant": jax.random.key(2)}
        return tuple(m.apply(v, x, rngs=rngs) for m, v, x in zip(models, variables, inputs, strict=True))

    variables = []
    for model, x in zip(models, inputs, strict=True):
        variables.append(random_arrays(quantization_state.warm(jax.eval_shape(model.init, keys, x))))
    forward, facts = compile_program(lambda variables, inputs: jax.vjp(run, variables, inputs), variables, inputs)
    _, pull = forward(variables, inputs)
    backward, more = compile_program(lambda pull, grads: pull(grads), pull, grads)
    flops = 6 * len(inputs[0]) * sum(k * n for k, n in shapes)
    facts = {name: [facts[name], more[name]] for name in facts} | {"flops": flops}
    return CompiledRow({"fwd": lambda: forward(variables, inputs), "bwd": lambda: backward(pull, grads)}, facts)
