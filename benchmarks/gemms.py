"""The GEMM set of one transformer layer, timed with its quantization, forward and both gradients."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import fp8_ops

from benchmarks.schemes import Row, tell
from benchmarks.timing import PROGRAMS, MatmulPrograms, measure_in_turns, median_ratio
from benchmarks.torch_gemms import TorchSet
from jaxquant import state as quantization_state
from jaxquant.audit.coverage import coverage
from jaxquant.inject.model import maybe_quantize_model


@dataclasses.dataclass(frozen=True)
class Layer:
    """Sizes of the layer; the default is the one that TransformerEngine published figures for on an H200.

    Attributes:
      hidden, mlp: widths of the residual stream and of the MLP.
      tokens: rows of every activation.
    """

    hidden: int = 4096
    mlp: int = 16384
    tokens: int = 15872

    @property
    def gemms(self) -> tuple[tuple[int, int], ...]:
        """(K, N) of the layer's matmuls: query, key and value in one; attention output; MLP up; MLP down."""
        hidden, mlp = self.hidden, self.mlp
        return (hidden, 3 * hidden), (hidden, hidden), (hidden, mlp), (mlp, hidden)

    @property
    def flops(self) -> int:
        """Multiplications and additions of one of the three matmuls of all of them."""
        return sum(2 * self.tokens * k * n for k, n in self.gemms)


SMALL = Layer(hidden=128, mlp=512, tokens=256)
"""A layer that a CPU runs in milliseconds."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """One library and recipe.

    Attributes:
      library: "jax" (no quantization), "flax" (its own fp8 ops), "torch" (``_scaled_mm``) or a quant_backend.
      recipe: config string; "" for none, "fp8" for flax and torch.
      implementation: of the native backend's casts and matmuls; "" picks.
    """

    library: str
    recipe: str = ""
    implementation: str = ""

    def dense(self, features: int, x: Any) -> nn.Module:
        """Make a bf16 dense layer without bias that computes in this recipe."""
        options: dict[str, Any] = {}
        if self.library == "flax":
            options["dot_general_cls"] = fp8_ops.Fp8DirectDotGeneralOp
        layer = nn.Dense(features, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, **options)
        if self.library in ("jax", "flax"):
            return layer
        return maybe_quantize_model(layer, self.config(), x)

    @property
    def cells(self) -> Row:
        recipe = " ".join(filter(None, (self.recipe or "none", self.implementation)))
        return {"library": self.library, "recipe": recipe}

    def config(self) -> dict[str, Any]:
        """Return what ``maybe_quantize_model`` takes.

        Raises:
          NotImplementedError: kernels were asked for where they are interpreted.
        """
        if self.library == "jax":
            return {}
        if self.implementation == "pallas" and jax.default_backend() == "cpu":
            raise NotImplementedError("on CPUs kernels are interpreted, which says nothing of their speed")
        chosen = {"implementation": self.implementation} if self.implementation else {}
        return {"quantization": self.recipe, "quant_backend": self.library} | chosen


CONTENDERS = (
    Contender("jax"),
    Contender("flax", "fp8"),
    Contender("qwix", "fp8_full"),
    Contender("qwix", "int8"),
    Contender("aqt", "aqt_fp8"),
    Contender("aqt", "aqt_fp8_full"),
    Contender("aqt", "int8"),
    Contender("native", "fp8"),
    Contender("native", "fp8_current"),
    Contender("native", "fp8_full"),
    Contender("native", "int8"),
    Contender("native", "int8_delayed"),
    Contender("native", "fp8_block"),
    Contender("native", "fp8", "pallas"),
    Contender("native", "fp8_current", "pallas"),
    Contender("native", "int8", "pallas"),
    Contender("native", "fp8_block", "pallas"),
    Contender("torch", "fp8"),
)
FAILURES = (ImportError, NotImplementedError, ValueError, jax.errors.JaxRuntimeError)
"""What keeps a contender from running here."""


class _Set(MatmulPrograms):
    """The compiled programs of one contender: all four GEMMs in each.

    The backward ones start from what the forward one saved, as in training. ``bwd`` makes both gradients (and the new
    quant state) and quantizes the output gradient for both; ``dlhs`` and ``drhs`` make one of them each.
    """

    def __init__(
        self, contender: Contender, layer: Layer, inputs: Sequence[Any], grads: Sequence[Any], programs: Sequence[str]
    ):
        self.contender = contender
        models = [contender.dense(n, x) for (_, n), x in zip(layer.gemms, inputs, strict=True)]
        keys = {"params": jax.random.key(0), "quant": jax.random.key(1)}
        variables = [jax.jit(model.init)(keys, x) for model, x in zip(models, inputs, strict=True)]

        def run(variables: Any, inputs: Any) -> list[Any]:
            rngs = {"quant": jax.random.key(2)}
            return [m.apply(v, x, rngs=rngs) for m, v, x in zip(models, variables, inputs, strict=True)]

        def gradients(pull: Any, grads: Any, *which: int) -> list[Any]:
            found = pull(list(grads))
            return [found[index] for index in which]

        forward = jax.jit(lambda variables, inputs: jax.vjp(run, variables, list(inputs)))
        _, pull = jax.block_until_ready(forward(variables, inputs))
        backward = {
            "dlhs": jax.jit(lambda pull, grads: gradients(pull, grads, 1)),
            "drhs": jax.jit(lambda pull, grads: [tree["params"] for tree in gradients(pull, grads, 0)[0]]),
            "bwd": jax.jit(lambda pull, grads: gradients(pull, grads, 0, 1)),
        }
        parts = [quantization_state.split(tree) for tree in variables]
        if jax.tree.leaves([state for _, state in parts]):  # a step after the first, with histories
            seen = [quantization_state.split(tree)[1] for tree in backward["bwd"](pull, grads)[0]]
            warmed = zip(parts, map(quantization_state.warm, seen), strict=True)
            variables = [quantization_state.merge(params, state) for (params, _), state in warmed]
            _, pull = jax.block_until_ready(forward(variables, inputs))
        calls: dict[str, Callable[[], Any]] = {"fwd": lambda: forward(variables, inputs)}
        for name, program in backward.items():
            calls[name] = lambda program=program: program(pull, grads)
        whole = lambda variables, inputs, grads: jax.vjp(run, variables, list(inputs))[1](list(grads))  # noqa: E731
        self.share = coverage(whole, variables, inputs, grads).share()
        super().__init__({name: calls[name] for name in programs})


def run_contenders(
    contenders: Sequence[Contender], make: Callable[[Contender], Any], rounds: int
) -> tuple[list[Any], list[tuple[Contender, str]]]:
    """Compile contenders and measure each once a round.

    Args:
      contenders: in the order of the rows.
      make: compiles one.
      rounds: measurements of each.

    Returns:
      What was made and measured, and of the contenders that cannot run here, why.

    Raises:
      ImportError, NotImplementedError, ValueError, jax.errors.JaxRuntimeError: the first one cannot run.
    """
    made: list[Any] = []
    failed: list[tuple[Contender, str]] = []
    for contender in contenders:
        began = time.perf_counter()
        try:
            made.append(make(contender))
        except FAILURES as error:
            if not made:
                raise
            failed.append((contender, f"did not run: {str(error).splitlines()[0]}"))
        tell(f"compiled {' '.join(contender.cells.values())} in {time.perf_counter() - began:.1f} s")
    measure_in_turns(made, rounds)
    return made, failed


def measure_gemm_set(
    layer: Layer = Layer(),
    rounds: int = 20,
    contenders: Sequence[Contender] = CONTENDERS,
    programs: Sequence[str] = PROGRAMS,
) -> list[Row]:
    """Time the matmuls of one transformer layer with all that quantizes their operands; parameters are bf16.

    The four GEMMs (query-key-value, attention output, MLP up, MLP down) run in one program: `fwd` with what it saves,
    `dlhs` and `drhs` alone from what it saved, and `bwd` both together as training has them. Every contender runs
    once a round; times are medians. `speedup` is the median over rounds of the time of fwd + bwd in bf16 over the
    contender's in that round; `low` is the share of the FLOPs on operands of at most 8 bits, read off the traced
    program.

    Args:
      layer: sizes.
      rounds: measurements of each.
      contenders: what is compared, with the first one. One that cannot run here says why in its row.
      programs: which of ``PROGRAMS``, `fwd` and `bwd` at least.

    Raises:
      ImportError, NotImplementedError, ValueError, jax.errors.JaxRuntimeError: the first one cannot run.
    """
    keys = jax.random.split(jax.random.key(0), 2 * len(layer.gemms))
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    inputs, grads = [], []
    for index, (k, n) in enumerate(layer.gemms):
        inputs.append(draw(keys[2 * index], (layer.tokens, k), jnp.bfloat16))
        grads.append(draw(keys[2 * index + 1], (layer.tokens, n), jnp.bfloat16))

    def make(contender: Contender) -> _Set | TorchSet:
        if contender.library == "torch":
            return TorchSet(layer.tokens, layer.gemms, programs)
        return _Set(contender, layer, inputs, grads, programs)

    sets, failed = run_contenders(contenders, make, rounds)
    rows = [_row(each, layer, sets[0].total()) for each in sets]
    measured = [name for name in rows[0] if name not in ("library", "recipe", "note")]
    return rows + [one.cells | dict.fromkeys(measured, "–") | {"note": note} for one, note in failed]


def _row(each: _Set | TorchSet, layer: Layer, base: Sequence[float]) -> Row:
    contender = Contender("torch", "fp8") if isinstance(each, TorchSet) else each.contender
    total = statistics.median(each.total())
    times = {name: statistics.median(values) for name, values in each.times.items()} | {"fwd + bwd": total}
    return (
        contender.cells
        | {f"{name} ms": round(1000 * value, 3) for name, value in times.items()}
        | {"TFLOP/s": round(3 * layer.flops / total / 1e12, 3), "speedup": round(median_ratio(base, each.total()), 3)}
        | {"low": f"{each.share:.0%}", "note": ""}
    )
