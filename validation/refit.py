"""Time and peak memory of refit in memory, compared with ``convert`` and with an export to a folder.

    python validation/refit.py [WIDTH] [LAYERS]

The model has square kernels in bfloat16. Each row runs in its own process. Peak memory excludes the parameters.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxquant
from jaxquant import export

FORMAT, CONFIG = "ct_int8", {"quantization": "int8", "quant_backend": "native"}
ROWS = ("convert", "refit", f"refit to {FORMAT}", f"export {FORMAT}")


def resident(field: str) -> int:
    """Return bytes of memory: VmRSS is the current value, VmHWM the maximum since it was cleared."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def measure(row: str, width: int, layers: int) -> None:
    """Print the time of the first and the second run, and the peak memory of both."""
    dense = [nn.Dense(width, use_bias=False, dtype="bfloat16", param_dtype="bfloat16") for _ in range(layers)]
    model, x = nn.Sequential(dense), jax.ShapeDtypeStruct((1, width), "bfloat16")
    kernel = np.random.default_rng(0).standard_normal((width, width), np.float32).astype("bfloat16")
    variables = {"params": {f"layers_{n}": {"kernel": jnp.array(kernel)} for n in range(layers)}}
    convert = lambda variables: jaxquant.convert(model, variables, CONFIG, x)  # noqa: E731
    names: Any = {"layers_*/kernel": "layers.{}.weight"}
    source = lambda variables: export.named_source(convert(variables)["params"], names, {})  # noqa: E731
    tensors = lambda variables: export.named_tensors(source(variables), FORMAT)  # noqa: E731
    with tempfile.TemporaryDirectory() as folder:
        out = (Path(folder) / name for name in "ab")
        write = lambda variables: export.export(source(variables), next(out), FORMAT)  # noqa: E731
        run = (convert, jax.jit(convert), jax.jit(tensors), write)[ROWS.index(row)]
        Path("/proc/self/clear_refs").write_text("5")
        before, times = resident("VmRSS"), []
        for _ in range(2):
            start, used = time.perf_counter(), time.process_time()
            jax.block_until_ready(run(variables))
            times.append(f"{time.perf_counter() - start:.1f} s ({time.process_time() - used:.1f} s of CPU)")
    peak = (resident("VmHWM") - before) / 1e9
    print(f"{row}: first {times[0]}, second {times[1]}, peak {peak:.2f} GB", flush=True)


if __name__ == "__main__":
    width, layers = (int(value) for value in (*sys.argv[1:], *("12288", "8")[len(sys.argv) - 1 :]))
    print(f"{layers} kernels of {width} x {width}, {layers * width * width / 1e9:.2f} billion parameters in bfloat16")
    for row in ROWS:
        process = multiprocessing.get_context("spawn").Process(target=measure, args=(row, width, layers))
        process.start()
        process.join()
