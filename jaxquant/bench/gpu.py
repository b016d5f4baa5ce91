"""All measurements on a GPU in one run of at most 330 seconds, for ``jaxquant bench gpu``.

All parts run in one process. Each figure is appended to the file as a line of JSON as soon as it is measured, so a
killed run keeps its figures. The rows of a part are compiled one after the other, because XLA times its choices on the
device, and are then timed in turns. Each part has a time limit; unused time is added to the following parts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jaxquant.bench import gemms, layer_audits, published
from jaxquant.bench.compare_libraries import ENTRIES, Setup, step
from jaxquant.bench.gpu_kernels import compare_kernels
from jaxquant.bench.layer_audits import LLAMA
from jaxquant.bench.on_chip import chip_name, read_predictions, read_results
from jaxquant.bench.schemes import Row
from jaxquant.bench.timing import CompiledRow, gc_disabled, median_ratio, prepare, seconds
from jaxquant.terminal import INTERRUPTED

LIMIT = 320
"""Time limit of a run in seconds, counted after its imports."""
NO_TRITON = {"xla_gpu_enable_triton_gemm": False}
TINY = dataclasses.replace(LLAMA, emb_dim=64, mlp_dim=64, num_query_heads=1, num_kv_heads=1, head_dim=32)
"""Small decoder layer, for a CPU."""
COMPILE_SHARE = 0.75
"""Share of a part's time after which no further row is compiled."""


@dataclasses.dataclass
class Part:
    """One part of a run, with functions that write its figures.

    Attributes:
      name: name of the part.
      file: file of JSON lines.
      until: time at which the part has to end, in seconds of ``time.perf_counter``.
      is_small: whether sizes are for a CPU.
      kind: kind of the device.
    """

    name: str
    file: TextIO
    until: float
    is_small: bool
    kind: str

    def write(self, row: str, figures: Row, is_shown: bool = True) -> None:
        """Write a line of JSON, and print it unless ``is_shown`` is False."""
        line = json.dumps({"part": self.name, "row": row} | figures, ensure_ascii=False)
        self.file.write(line + "\n")
        self.file.flush()
        if is_shown:
            print(line, flush=True)

    def time_in_turns(
        self,
        rows: Mapping[str, Callable[[], CompiledRow]],
        calls: int = 1,
        base: str = "",
        predicted: Mapping[str, Row] | None = None,
    ) -> None:
        """Compile rows and time each row once per round; write every measured time, and the medians at the end.

        ``us`` are medians by call and ``sum us`` is the median of their sum. ``× base`` is the median over rounds of
        the base's sum divided by the row's sum in the same round. A row that does not compile is written with its
        error.

        Args:
          rows: functions that compile each row, by name.
          calls: number of consecutive calls per measurement.
          base: row that ratios refer to; "" for no ratios.
          predicted: figures of the audit by row, written next to the measured figures.
        """
        ready: dict[str, CompiledRow] = {}
        last = time.perf_counter() + COMPILE_SHARE * (self.until - time.perf_counter())
        for name, made in rows.items():
            began = time.perf_counter()
            try:
                if ready and began > last:
                    raise TimeoutError("not compiled within the time limit")
                ready[name] = made()
                for call in ready[name].calls.values():
                    seconds(call)
            except Exception as error:
                ready.pop(name, None)
                self.write(name, {"error": _error_text(error)})
            else:
                self.write(name, {"first step s": round(time.perf_counter() - began, 2)} | ready[name].facts)
        times: dict[str, list[dict[str, float]]] = {name: [] for name in ready}
        with gc_disabled():
            for number in range(2 if self.is_small else 10):
                for name, one in ready.items():
                    times[name].append({call: seconds(run, calls) for call, run in one.calls.items()})
                    self.write(name, {"round": number, "us": _microseconds(times[name][-1])}, is_shown=False)
                if time.perf_counter() > self.until:
                    break
        sums = {name: [sum(each.values()) for each in rounds] for name, rounds in times.items()}
        for name, rounds in times.items():
            took = statistics.median(sums[name])
            medians = {call: statistics.median(each[call] for each in rounds) for call in rounds[0]}
            figures: Row = {"us": _microseconds(medians), "sum us": round(1e6 * took, 1), "rounds": len(rounds)}
            for fact, unit, scale in (("flops", "TFLOP/s", 1e12), ("bytes", "GB/s", 1e9)):
                if fact in ready[name].facts:
                    figures[unit] = round(ready[name].facts[fact] / took / scale, 2)
            if base in sums:
                figures[f"× {base}"] = round(median_ratio(sums[base], sums[name]), 3)
            self.write(name, figures | {f"predicted {k}": v for k, v in (predicted or {}).get(name, {}).items()})


def _microseconds(times: Mapping[str, float]) -> dict[str, float]:
    return {name: round(1e6 * value, 1) for name, value in times.items()}


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def dots(part: Part) -> None:
    """Time a copy, and single matmuls by the layout of their operands, by algorithm, and without Triton.

    Each operand is computed in the program, because XLA chooses layouts only for computed values. TN contracts the last
    axis of both operands, NN the last axis of the first and the first axis of the second operand, NT the first axis of
    both. "Pinned" operands are row-major; a pinned operand that is contracted along its first axis is transposed and
    pinned again before an optimization barrier.
    """
    m, k, n, cube, copied = (256, 128, 128, 128, 2**16) if part.is_small else (15872, 4096, 4096, 8192, 2**30)

    def pinned(x: jax.Array, axis: int) -> jax.Array:
        keep = lambda x: with_layout_constraint(x, Layout(major_to_minor=(0, 1)))  # noqa: E731
        return keep(x) if axis else jax.lax.optimization_barrier(keep(keep(x).T))

    def dot(dtype: Any, lhs: Any, rhs: Any, is_pinned: bool = False, precision: Any = None, **how: Any) -> CompiledRow:
        (left, own), (right, other) = lhs, rhs

        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            x, w, axes = -x, -w, ((own,), (other,))
            if is_pinned:
                x, w, axes = pinned(x, own), pinned(w, other), ((1,), (1,))
            out = jnp.int32 if dtype == jnp.int8 else jnp.bfloat16
            return jax.lax.dot_general(x, w, (axes, ((), ())), precision=precision, preferred_element_type=out)

        made = prepare(product, [jax.ShapeDtypeStruct(shape, dtype) for shape in (left, right)], **how)
        made.facts["flops"] = 2 * left[0] * left[1] * right[1 - other]
        return made

    def copy() -> CompiledRow:
        made = prepare(lambda x: -x, [jax.ShapeDtypeStruct((copied,), jnp.bfloat16)])
        made.facts["bytes"] = 4 * copied
        return made

    forms = {"TN": (((m, k), 1), ((n, k), 1)), "NN": (((m, k), 1), ((k, n), 0)), "NT": (((k, m), 0), ((k, n), 0))}
    square = ((cube, cube), 1)
    rows = {f"copy of {4 * copied / 1e9:.2g} GB": copy, f"bf16 {cube}³": lambda: dot(jnp.bfloat16, square, square)}
    algorithms = {"default": None, "preset": jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_ANY_FAST_ACCUM}
    for more, options in (("", None), (", no Triton", NO_TRITON)):
        for form, sides in forms.items():
            for words, is_pinned in (("", False), (" pinned", True)):
                call = functools.partial(dot, jnp.int8, *sides, is_pinned=is_pinned, options=options)
                rows[f"s8 {form}{words}{more}"] = call
        for words, precision in algorithms.items():
            call = functools.partial(dot, jnp.float8_e4m3fn, *forms["TN"], precision=precision, options=options)
            rows[f"e4m3 {words}{more}"] = call
    part.time_in_turns(rows, calls=10)


def mlp(part: Part) -> None:
    """Time the audit's MLP step by config string, with XLA's defaults, without Triton, and with XLA for all casts."""
    sizes = (64, 64, 128) if part.is_small else (4096, 4096, 8192)
    entries = [entry for entry in ENTRIES if entry.name in ("bf16", "flax fp8")]
    entries += [Setup(string, {"quantization": string}) for string in published.STRINGS[: 1 if part.is_small else None]]

    def made(entry: Setup, options: Any = None) -> CompiledRow:
        return prepare(*step(entry, *sizes), options)

    rows = {entry.name: functools.partial(made, entry) for entry in entries}
    for entry in entries[: 1 if part.is_small else None]:
        rows[f"{entry.name}, no Triton"] = functools.partial(made, entry, NO_TRITON)
    for name in () if part.is_small else ("fp8", "int8", "fp8_current", "fp8_block"):
        entry = Setup(name, {"quantization": name, "quant_backend": "native", "implementation": "xla"})
        rows[f"{name}, implementation: xla"] = functools.partial(made, entry)
    known = read_predictions(part.kind)
    predicted = {name: known.get(name.removesuffix(", no Triton"), {}) for name in rows}
    part.time_in_turns(rows, calls=10, base="bf16", predicted=predicted)


def predictions_by_name(contenders: Sequence[gemms.Contender], audits: Sequence[Row]) -> dict[str, Row]:
    """Return predictions by contender, from audit rows with a config string, milliseconds and the ratio to bf16."""
    known = {each["string"]: {"us": 1000 * each["ms"], "× jax": each["× bf16"]} for each in audits}
    ours = [one for one in contenders if one.library in ("jax", "native") and not one.implementation]
    return {one.name: known.get(one.recipe or "bf16", {}) for one in ours}


def gemm_set(part: Part) -> None:
    """Time the GEMMs of a layer, including quantization of operands, by jaxquant, flax, torch, Qwix and AQT."""
    tokens, shapes = (64, [(64, 32)]) if part.is_small else (published.TOKENS, [*published.GEMMS.values()])
    contenders = gemms.CONTENDERS[: 3 if part.is_small else None]
    made = functools.partial(gemms.prepare_gemms, shapes=shapes)
    inputs, grads = gemms.draw(tokens, shapes)
    rows = {one.name: functools.partial(made, one, inputs=inputs, grads=grads) for one in contenders}
    audits = read_results(f"audit-gemm-set-{chip_name(part.kind)}.json")
    part.time_in_turns(rows, base="jax", predicted=predictions_by_name(contenders, audits))


def layer_step(part: Part) -> None:
    """Time the forward and backward pass of a Llama 3 8B layer with two sequences of 8192 tokens."""
    config, tokens = (TINY, 64) if part.is_small else (LLAMA, 16384)
    here, mine = jax.default_backend(), ("Llama 3 8B", chip_name(part.kind), tokens)
    audits = [r for r in read_results("layer-audits.json") if (r["layer"], r["chip"], r["tokens"]) == mine]

    def made(contender: gemms.Contender) -> CompiledRow:
        return prepare(*layer_audits.step(config, contender.config(), here, tokens))

    contenders = [one for one in gemms.CONTENDERS if one.library not in ("torch", "flax", "aqt")]
    rows = {one.name: functools.partial(made, one) for one in contenders[: 2 if part.is_small else None]}
    part.time_in_turns(rows, base="jax", predicted=predictions_by_name(contenders, audits))


def kernels(part: Part) -> None:
    """Compare every kernel with its reference bit for bit, and time it next to XLA's program."""
    wrong = 0
    for row in compare_kernels():
        wrong += str(row["note"]).startswith("WRONG")
        part.write(f"{row.pop('kernel')} {row.pop('case')}", row)
        if time.perf_counter() > part.until:
            part.write("rest", {"error": "not reached within the time limit"})
            break
    if wrong:
        raise ValueError(f"{wrong} kernel cases differ from their references; see the rows with the note WRONG")


PARTS: dict[str, tuple[Callable[[Part], None], int]] = {
    "dots": (dots, 35),
    "mlp": (mlp, 105),
    "gemm-set": (gemm_set, 70),
    "layer": (layer_step, 45),
    "kernels": (kernels, 30),
}
"""Function and seconds of each part, in order. The sum is 285 seconds, 35 less than the limit of a run."""


def measure_gpu(folder: Path, limit: float, is_small: bool, describe: Callable[[], Row]) -> int:
    """Run all parts; append their figures to ``gpu-DEVICE.jsonl``.

    Args:
      folder: folder of the file.
      limit: seconds after which the process exits unconditionally.
      is_small: whether to use sizes for a CPU.
      describe: function that returns date, machine and versions.

    Returns:
      Exit code: 1 if a part failed or a kernel is wrong, 130 after Ctrl-C.

    Raises:
      ValueError: there is no GPU, and ``is_small`` is False.
    """
    began = time.perf_counter()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory for torch
    if jax.default_backend() != "gpu" and not is_small:
        raise ValueError(f"bench gpu requires a GPU, but JAX finds only {jax.default_backend()}; add --small")
    kind = jax.devices()[0].device_kind
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu-{'small-' if is_small else ''}{kind.lower().replace(' ', '-')}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        part = Part("run", file, began + limit, is_small, kind)

        def stop() -> None:
            part.write("limit", {"error": f"stopped after {limit:g} s"})
            os._exit(1)

        watch = threading.Timer(limit, stop)
        watch.start()
        failed, due = 0, began
        try:
            part.write("machine", describe() | {"limit s": limit})
            for name, (measure, share) in PARTS.items():
                due += share * limit / LIMIT
                part = Part(name, file, due, is_small, kind)
                try:
                    measure(part)
                except Exception as error:
                    part.write("part", {"error": _error_text(error)})
                    failed += 1
            part.write("end", {"s": round(time.perf_counter() - began, 1)})
        except KeyboardInterrupt:
            part.write("interrupted", {"s": round(time.perf_counter() - began, 1)})
            return INTERRUPTED
        finally:
            watch.cancel()
            print(path, file=sys.stderr)
    return int(failed > 0)
