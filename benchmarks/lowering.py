"""What it costs to trace and to lower a quantized training step, beside float and beside another commit of jaxquant."""

from __future__ import annotations

import argparse
import json
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
    """Trace and lower a step's loss and gradients, of the quickstart's decoder and of one of 12 unscanned layers.

    `seconds`: of the processor, the least of some rounds, each with empty caches; `trace` makes the jaxpr, `lower` its
    StableHLO, of which lines and characters are counted. `calls traced`: how often the model's own code was run in
    three calls of the jitted step, whose parameters and state are what the call before returned (of the quickstart's).
    Native backend; nothing is compiled. Each library is measured in a process of its own.

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
        rows += [{"library": name, **json.loads(line)} for line in told.stdout.splitlines() if line.startswith("{")]
    return rows


def commit_of(folder: Path) -> str:
    """Return the short name of the commit that a checkout is at."""
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _measure(library: str, rounds: int) -> None:
    """Measure the checkout in a folder; print a JSON line for each step."""
    sys.path.insert(0, library)
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
        return found

    for name, shape in MODELS.items():
        for string, face, make in steps(shape):
            fn, params, state = make()

            def step(params: Any, state: Any, tokens: Any, fn: Any = fn) -> Any:
                loss, (grads, seen) = jax.value_and_grad(fn, argnums=(0, 1))(params, state, tokens)
                params = jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)
                return loss, params, jaxquant.state.update(state, seen) if state else state

            best: list[float] = []
            text = ""
            for _ in range(rounds):
                jax.clear_caches()
                begin = time.process_time()
                traced = jax.jit(step).trace(params, state, tokens)
                middle = time.process_time()
                text = traced.lower().as_text()
                took = [middle - begin, time.process_time() - middle]
                best = took if not best or sum(took) < sum(best) else best
            row = {"model": name, "quantization": string, "through": face}
            row |= {"trace seconds": round(best[0], 2), "lower seconds": round(best[1], 2)}
            row |= {"lines": len(text.splitlines()), "characters": len(text)}
            row["calls traced"] = _calls(jax.jit(step), params, state, tokens, calls) if shape["scan_layers"] else "-"
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
