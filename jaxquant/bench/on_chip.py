"""Predictions for the device of this machine, and comparison of a layer's results with the results of a CPU."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import multiprocessing
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxquant import state as quant_state
from jaxquant.aot.chips import CHIPS
from jaxquant.aot.program import read_program
from jaxquant.bench.compare_libraries import matmuls
from jaxquant.bench.schemes import RESULTS, UNQUANTIZED, Row, Scheme, print_progress
from jaxquant.bench.timing import FAILURES
from jaxquant.inject.model import maybe_quantize_model

FAR = 0.01
"""Relative difference that the order of sums cannot explain if operands are rounded equally."""


def read_predictions(kind: str) -> dict[str, Row]:
    """Return the predictions of the MLP step for a device kind, by config string; {} if there are none."""
    rows = read_results(f"audit-yardstick-{chip_name(kind)}.json")
    return {row["step"].removeprefix("jaxquant "): {"us": row["us"], "× bf16": float(row["× bf16"])} for row in rows}


def read_results(name: str) -> Any:
    """Return the contents of a JSON file of the results, or [] if the file does not exist."""
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else []


def chip_name(kind: str) -> str:
    """Return the name of the chip of a device kind, or "" if the chip is not in the table."""
    names = [name for name, chip in CHIPS.items() if f"{kind} ".startswith(f"{chip.name} ")]
    return max(names, key=lambda name: len(CHIPS[name].name), default="")


def layer_outputs(scheme: Scheme, forms: Sequence[bool] = (False,)) -> tuple[list[list[np.ndarray]] | str, str]:
    """Compute a dense layer with 512 input and 256 output features for 256 rows, and its gradients.

    Args:
      scheme: quantization of the layer.
      forms: whether the compiler may leave out roundings ("excess precision"), for each program.

    Returns:
      Results and gradients in float32, one list per form, or the error message; and a text with the compiled matmuls.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    x, grad = (jax.random.normal(key, (256, size), jnp.bfloat16) for key, size in ((keys[0], 512), (keys[1], 256)))
    dense = nn.Dense(256, use_bias=False, dtype=jnp.bfloat16)
    rngs = {"params": keys[2], "quant": keys[2]}

    def run(variables: Any, x: jax.Array, grad: jax.Array) -> Any:
        y, pull = jax.vjp(lambda variables, x: model.apply(variables, x, rngs={"quant": keys[2]}), variables, x)
        given, dx = pull(grad)
        return y, quant_state.split(given)[0], dx

    try:
        model = maybe_quantize_model(dense, scheme.config, x) if scheme.string else dense
        variables = jax.jit(model.init)(rngs, x)
        lowered = jax.jit(run).lower(variables, x, grad)
        programs = [lowered.compile(compiler_options={"xla_allow_excess_precision": form}) for form in forms]
        results = [jax.tree.leaves(program(variables, x, grad)) for program in programs]
    except FAILURES as refused:
        return str(refused).splitlines()[0], "–"
    leaves = [[np.asarray(leaf.astype(jnp.float32)) for leaf in result] for result in results]
    return leaves, matmuls(read_program(str(programs[0].as_text())))


def difference(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Return the largest ‖a - b‖ / ‖b‖ of pairs of arrays; a NaN counts as infinite."""
    norms = [(np.linalg.norm(a - b), np.linalg.norm(b)) for a, b in zip(found, expected, strict=True)]
    ratios = [float(off / size) if size else float(off) for off, size in norms]
    return max(float("inf") if np.isnan(ratio) else ratio for ratio in ratios)


def _pool(platform: str, workers: int) -> concurrent.futures.ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(workers, context, _set_platform, (platform,))


def _set_platform(platform: str) -> None:
    jax.config.update("jax_platforms", platform)


def measure_strings(chosen: Sequence[Scheme], workers: int = 5) -> list[Row]:
    """Compare a dense layer and its gradients on this device and on a CPU, for every config string.

    `difference` is the largest ‖a - b‖ / ‖b‖ of the layer's result and gradients. Compilers may leave out roundings to
    bfloat16, and elements that are computed from unrounded values can differ. `as written` is the difference if all
    roundings are computed (`xla_allow_excess_precision=false`, always on CPUs). Devices then differ only in the
    order of additions, and GPUs divide with an error of up to two units in the last place. `matmuls` are the matmuls
    of the program that ran.

    Args:
      chosen: schemes to compare.
      workers: number of processes for each device.
    """
    all_schemes = [UNQUANTIZED, *chosen]
    with _pool(jax.default_backend().replace("gpu", "cuda"), workers) as here, _pool("cpu", workers) as cpu:
        pairs = zip(
            all_schemes,
            here.map(functools.partial(layer_outputs, forms=(True, False)), all_schemes),
            cpu.map(layer_outputs, all_schemes),
            strict=True,
        )
        rows = []
        for scheme, (found, program), (expected, _) in pairs:
            row = scheme.cells | {"matmuls": program}
            if isinstance(found, str) or isinstance(expected, str):
                texts = dict.fromkeys(each for each in (found, expected) if isinstance(each, str))
                row |= {"difference": "–", "as written": "–", "note": f"did not run: {' / '.join(texts)}"}
            else:
                free, held = (difference(each, expected[0]) for each in found)
                note = "" if held < FAR else "WRONG: not what a CPU computes"
                row |= {"difference": float(f"{free:.2g}"), "as written": float(f"{held:.2g}"), "note": note}
            print_progress(f"{' '.join(scheme.cells.values())}: {row['difference']} {row['as written']} {row['note']}")
            rows.append(row)
    return rows
