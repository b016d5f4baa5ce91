"""``compare_libraries``'s MLP step on the device here: its time beside its price, its numbers beside CPUs'."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.compare_libraries import ENTRIES, Entry, matmuls, step
from benchmarks.gemms import FAILURES
from benchmarks.schemes import ROOT, UNQUANTIZED, Row, Scheme, tell
from benchmarks.timing import measure_in_turns, median_ratio, seconds
from jaxquant import state as quant_state
from jaxquant.aot.chips import CHIPS
from jaxquant.aot.program import read_program
from jaxquant.inject.model import maybe_quantize_model

CALLS = 10
"""Of a step for one time."""
FAR = 0.01
"""A relative difference that the order of sums does not explain, of operands that are rounded alike."""


def made(function: Callable[..., Any], *args: Any) -> Any:
    """Make values as ``jax.eval_shape`` makes their shapes."""
    return jax.jit(function)(*args)


def begun(entry: Entry, sizes: Sequence[int]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the step of an entry and its arguments after one step, that is with histories that have entries."""
    function, (params, state, x, key) = step(entry, *sizes, make=made)
    if jax.tree.leaves(state):
        state = quant_state.warm(jax.jit(function)(params, state, x, key)[1])
    return function, (params, state, x, key)


class _Timed:
    """A compiled step and its times by round."""

    def __init__(self, entry: Entry, sizes: Sequence[int]):
        function, args = begun(entry, sizes)
        self.entry, self._args, self.times = entry, args, []
        self._compiled = jax.jit(function).lower(*args).compile()
        self.matmuls = matmuls(read_program(str(self._compiled.as_text())))
        seconds(self._run)

    def _run(self) -> Any:
        return self._compiled(*self._args)

    def measure(self) -> None:
        self.times.append(seconds(self._run, CALLS))


def priced(kind: str) -> dict[str, dict[str, Any]]:
    """Return the rows of the yardstick that was compiled for a kind of device, by step; nothing where it was not."""
    targets = [name for name, chip in CHIPS.items() if chip.name == kind or kind.startswith(f"{chip.name} ")]
    path = ROOT / "benchmarks" / f"audit-yardstick-{targets[0] if targets else ''}.json"
    return {row["step"]: row for row in json.loads(path.read_text())} if path.exists() else {}


def measure_yardstick(
    rounds: int = 20, sizes: Sequence[int] = (4096, 4096, 8192), entries: Sequence[Entry] = ENTRIES
) -> list[Row]:
    """Time the yardstick's MLP step, quantized by everybody, beside what was predicted of it without the chip.

    `us` is the median over rounds of ten calls in a row; `× bf16` the median over rounds of the time of bf16 over the
    step's in that round. `predicted` columns are of the committed yardstick of the same chip (audit-yardstick-*.json),
    and `matmuls` is read off the program that ran.

    Args:
      rounds: of each.
      sizes: tokens, width, hidden width.
      entries: what is compared, with the first one; one that cannot run here has no row.
    """
    timed: list[_Timed] = []
    for entry in entries:
        try:
            timed.append(_Timed(entry, sizes))
            tell(f"compiled {entry.name}: {timed[-1].matmuls}")
        except FAILURES as error:
            tell(f"{entry.name} did not run: {str(error).splitlines()[0]}")
    measure_in_turns(timed, rounds)
    known = priced(jax.devices()[0].device_kind)
    rows = []
    for one in timed:
        price = known.get(one.entry.name, {})
        rows.append(
            {
                "step": one.entry.name,
                "matmuls": one.matmuls,
                "predicted matmuls": price.get("matmuls", "–"),
                "us": round(1e6 * statistics.median(one.times)),
                "predicted us": price.get("us", "–"),
                "× bf16": round(median_ratio(timed[0].times, one.times), 2),
                "predicted × bf16": price.get("× bf16", "–"),
            }
        )
    return rows


def outputs(scheme: Scheme, forms: Sequence[bool] = (False,)) -> tuple[list[list[np.ndarray]] | str, str]:
    """Compute a dense layer of 512 to 256 features for 256 rows, and its gradients for a given one of the result.

    Args:
      scheme: what quantizes it.
      forms: whether the compiler may leave out roundings ("excess precision"), for each result.

    Returns:
      All of them as float32, a list a form, or the sentence that refuses them; and the matmuls as compiled.
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
        variables = made(model.init, rngs, x)
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
    return concurrent.futures.ProcessPoolExecutor(workers, context, _compute_on, (platform,))


def _compute_on(platform: str) -> None:
    jax.config.update("jax_platforms", platform)


def measure_strings(chosen: Sequence[Scheme], workers: int = 5) -> list[Row]:
    """Compare a dense layer and its gradients under every config string here with the same on a CPU.

    `difference` is the largest ‖a - b‖ / ‖b‖ among them. Compilers may leave out roundings to bfloat16, and codes of
    what was not rounded are others here and there; `as written` is the difference without that
    (`xla_allow_excess_precision=false`, on CPUs always), where devices add in other orders, and GPUs divide to two
    units in the last place. `matmuls` are those of the program that ran.

    Args:
      chosen: schemes.
      workers: processes of each device.
    """
    all_schemes = [UNQUANTIZED, *chosen]
    with _pool(jax.default_backend().replace("gpu", "cuda"), workers) as here, _pool("cpu", workers) as cpu:
        pairs = zip(
            all_schemes,
            here.map(functools.partial(outputs, forms=(True, False)), all_schemes),
            cpu.map(outputs, all_schemes),
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
            tell(f"{' '.join(scheme.cells.values())}: {row['difference']} {row['as written']} {row['note']}")
            rows.append(row)
    return rows
