"""Cost of tracing and lowering a quantized training step, compared with float and with another commit of jaxquant."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
STRINGS = ("fp8", "int8", "fp8_current", "fp8_full")
MODELS: dict[str, dict[str, Any]] = {
    "quickstart": {"num_layers": 2, "scan_layers": True},
    "12 layers, unscanned": {"num_layers": 12, "scan_layers": False},
}
"""Decoders of the quickstart's widths."""
BATCH, SEQUENCE = 16, 128


def measure_lowering(other: Path | None = None, rounds: int = 3) -> list[Row]:
    """Trace and lower a step's loss and gradients: quickstart's decoder, one of 12 unscanned layers, a scanned block.

    `seconds`: of the processor, the least of some rounds, each with empty caches and of all programs in turn; `trace`
    makes the jaxpr, `lower` its StableHLO, of which lines and characters are counted. `over float`: trace and lower
    together, and lines. `itself`: Qwix or AQT without jaxquant, int8 in all three matmuls. `calls traced`: how often
    the model's own code was run in three calls of the jitted step, whose parameters and state are what the call before
    returned (of the quickstart's). The scanned block has five projections of different shapes. Native backend; nothing
    is compiled. Each checkout is measured in a process of its own.

    Args:
      other: a checkout that is measured, too, on its own decoder: its float rows say how far that differs.
      rounds: of each.
    """
    rows = []
    for library in (ROOT, *([other.resolve()] if other else [])):
        command = [sys.executable, __file__, str(library), str(rounds)]
        told = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
        if told.returncode:
            raise ValueError(f"jaxquant of {library} cannot be measured: {told.stderr.strip().splitlines()[-1]}")
        name = "this commit" if library == ROOT else commit_of(library)
        rows += [{"commit": name, **json.loads(line)} for line in told.stdout.splitlines() if line.startswith("{")]
    return rows


def commit_of(folder: Path) -> str:
    """Return the short name of the commit that a checkout is at."""
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _measure(library: str, rounds: int) -> None:
    """Measure the checkout in a folder; print a JSON line for each step."""
    sys.path.insert(0, library)
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    import jaxquant
    from train.model import Decoder, DecoderConfig

    tokens = jax.ShapeDtypeStruct((BATCH, SEQUENCE), jnp.int32)
    calls = [0]

    def steps(shape: dict[str, Any]) -> list[tuple[str, str, Callable[[], tuple[Callable[..., Any], Any, Any]]]]:
        decoder = Decoder(DecoderConfig(256, 128, 384, num_query_heads=8, num_kv_heads=4, head_dim=32, **shape))

        def of_variables(model: Any, variables: Any, tokens: Any) -> Any:
            calls[0] += 1
            return model.apply(variables, tokens, targets=tokens).mean()

        def plain() -> Any:
            params = jax.eval_shape(decoder.init, jax.random.key(0), tokens)["params"]
            return lambda p, s, x: of_variables(decoder, {"params": p}, x), params, {}

        def of_model(string: str) -> Any:
            config = {"quantization": string, "quant_backend": "native"}
            model = jaxquant.maybe_quantize_model(decoder, config, tokens)
            params, state = jaxquant.state.split(jax.eval_shape(model.init, jax.random.key(0), tokens))
            return lambda p, s, x: of_variables(model, jaxquant.state.merge(p, s), x), params, state

        def of_function(string: str) -> Any:
            _, params, _ = plain()
            config = {"quantization": string, "quant_backend": "native"}
            fn = jaxquant.quantize(lambda p, x: of_variables(decoder, {"params": p}, x), config)
            return fn, params, jax.eval_shape(fn.init, params, tokens)

        found = [("none", "-", plain)]
        for string in STRINGS:
            found.append((string, "maybe_quantize_model", lambda string=string: of_model(string)))
            if hasattr(jaxquant, "quantize"):
                found.append((string, "jaxquant.quantize", lambda string=string: of_function(string)))

        if not shape["scan_layers"] and Path(library) == ROOT:
            from benchmarks.compare_libraries import by_qwix, int8_of_aqt

            class AqtConfig(DecoderConfig):
                def dense(self, features: Any, axis: Any = -1) -> nn.DenseGeneral:
                    kept = {"use_bias": False, "dtype": jnp.dtype(self.dtype), "param_dtype": jnp.float32}
                    return nn.DenseGeneral(features, axis, **kept, dot_general_cls=int8_of_aqt)

            def of_peer(model: Any) -> Any:
                keys = dict.fromkeys(("params", "stochastic_rounding"), jax.random.key(0))
                call = lambda p, s, x: model.apply({"params": p}, x, targets=x, rngs=keys).mean()  # noqa: E731
                return call, plain()[1], {}

            by_aqt = Decoder(AqtConfig(**dataclasses.asdict(decoder.config)))
            found += [
                ("int8", "Qwix itself", lambda: of_peer(by_qwix(decoder))),
                ("int8", "AQT itself", lambda: of_peer(by_aqt)),
            ]
        return found

    def of_block(string: str, remat: bool) -> Any:
        from benchmarks.scanned import Scanned

        x = jax.ShapeDtypeStruct((2, 16, 64), jnp.bfloat16)
        config = {"quantization": string, "quant_backend": "native"} if string != "none" else {}
        model: Any = jaxquant.maybe_quantize_model(Scanned(remat), config, x)
        params, state = jaxquant.state.split(jax.eval_shape(model.init, jax.random.key(0), x))
        return (
            lambda p, s, x: (model.apply(jaxquant.state.merge(p, s), x).astype(jnp.float32) ** 2).mean(),
            params,
            state,
        )

    programs = [(name, tokens, *each, shape["scan_layers"]) for name, shape in MODELS.items() for each in steps(shape)]
    if Path(library) == ROOT:
        x = jax.ShapeDtypeStruct((2, 16, 64), jnp.bfloat16)
        programs += [
            (
                f"scanned block{', rematerialized' * remat}",
                x,
                string,
                "maybe_quantize_model",
                lambda string=string, remat=remat: of_block(string, remat),
                False,
            )
            for remat in (False, True)
            for string in ("none", *STRINGS)
        ]
    made = [make() for *_, make, _ in programs]
    best: list[tuple[float, float, str]] = [(math.inf, 0, "")] * len(made)

    def jitted(fn: Any) -> Any:
        def step(params: Any, state: Any, x: Any) -> Any:
            loss, (grads, seen) = jax.value_and_grad(fn, argnums=(0, 1))(params, state, x)
            params = jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)
            return loss, params, jaxquant.state.update(state, seen) if state else state

        return jax.jit(step)

    for _ in range(rounds):
        for index, ((_, x, *_), (fn, params, state)) in enumerate(zip(programs, made, strict=True)):
            jax.clear_caches()
            begin = time.process_time()
            traced = jitted(fn).trace(params, state, x)
            middle = time.process_time()
            text = traced.lower().as_text()
            best[index] = min(
                best[index], (middle - begin, time.process_time() - middle, text), key=lambda t: t[0] + t[1]
            )
    plain: dict[str, Any] = {}
    for (name, x, string, face, _, is_counted), (fn, params, state), (trace, lower, text) in zip(
        programs, made, best, strict=True
    ):
        lines = len(text.splitlines())
        first = plain.setdefault(name, (trace + lower, lines))
        row = {"model": name, "quantization": string, "through": face}
        row |= {"trace seconds": round(trace, 2), "lower seconds": round(lower, 2)}
        row |= {"over float": round((trace + lower) / first[0], 2), "lines": lines}
        row |= {"lines over float": round(lines / first[1], 2), "characters": len(text)}
        row["calls traced"] = _calls(jitted(fn), params, state, x, calls) if is_counted else "-"
        print(json.dumps(row), flush=True)


def _calls(jitted: Callable[..., Any], params: Any, state: Any, tokens: Any, calls: list[int]) -> str:
    """Count how often a model's own code is run in each of three steps."""
    import jax

    jax.clear_caches()
    counts = []
    for _ in range(3):
        before = calls[0]
        _, params, state = jax.eval_shape(jitted, params, state, tokens)
        counts.append(calls[0] - before)
    return ", ".join(map(str, counts))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one library, for ``measure_lowering``."""
    parser = argparse.ArgumentParser(description="measure the checkout in a folder")
    parser.add_argument("library")
    parser.add_argument("rounds", type=int)
    words = parser.parse_args(arguments)
    _measure(words.library, words.rounds)


if __name__ == "__main__":
    main()
