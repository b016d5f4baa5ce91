"""Speed of the tensor formats against the gguf package and ggml's C, and cost of exporting and importing a model."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.schemes import ROOT, Row, tell
from jaxquant.export import HfFolder, LlamaShape, Source, export, open_gguf
from jaxquant.export.gguf_file import TYPES
from jaxquant.formats import codec
from train.memory import peak_resident_bytes, return_large_blocks

ENCODINGS = ("q8_0", "q4_0", "q4_k", "q5_k", "q6_k")
OTHERS = ("mxfp4", "mxfp8", "nvfp4")
BILLION = LlamaShape(128256, 2048, 8192, 16, 32, 8, 64, tied=True)
TRANSFERS = ("fp8_block", "gguf_q8_0", "hf")
_SHAPE = (2048, 2048)


def measure_formats(rounds: int) -> list[Row]:
    """Encode and decode 4 million normal float32 by each format, in GB/s of float32; the best of several rounds.

    In every round each contender goes once, so that a slow moment of the machine hits all alike. gguf is the package of
    llama.cpp (numpy; it cannot encode the K formats), ggml its C code, one thread, where llama-cpp-python is installed.
    copy is a compiled x + 1 of the same float32, which writes as much as decoding does: what memory allows.

    Args:
      rounds: how many.
    """
    import gguf  # of the extra dev

    x = np.random.default_rng(0).normal(size=_SHAPE).astype(np.float32)
    device, library, copy = jnp.asarray(x), _library(), jax.jit(lambda x: x + 1)
    jax.block_until_ready(copy(device))
    rows = []
    for name in (*ENCODINGS, *OTHERS):
        row = codec(name)
        parts = jax.block_until_ready(row.encode(device))
        runs: dict[str, Callable[[], object]] = {
            "encode": lambda row=row: jax.block_until_ready(row.encode(device)),
            "decode": lambda row=row, parts=parts: jax.block_until_ready(row.decode(parts)),
            "copy": lambda: jax.block_until_ready(copy(device)),
        }
        if name in ENCODINGS:
            kind, blocks = gguf.GGMLQuantizationType[name.upper()], np.asarray(parts["blocks"])
            runs["decode, gguf"] = lambda kind=kind, blocks=blocks: gguf.quants.dequantize(blocks, kind)
            if name in ("q8_0", "q4_0"):
                runs["encode, gguf"] = lambda kind=kind: gguf.quants.quantize(x, kind)
            if library is not None:
                runs["encode, ggml"] = lambda name=name: _encode_in_c(library, name, x)
        best = dict.fromkeys(runs, float("inf"))
        for _ in range(rounds):
            for what, run in runs.items():
                began = time.perf_counter()
                run()
                best[what] = min(best[what], time.perf_counter() - began)
        speeds = {what: x.nbytes / 1e9 / seconds for what, seconds in best.items()}
        columns = ("encode", "encode, gguf", "encode, ggml", "decode", "decode, gguf", "copy")
        rows.append({"format": name, **{what: f"{speeds[what]:.3f}" if what in speeds else "" for what in columns}})
        rows[-1]["encode / ggml"] = (
            f"{speeds['encode'] / speeds['encode, ggml']:.2f}" if "encode, ggml" in speeds else ""
        )
        rows[-1]["decode / gguf"] = f"{speeds['decode'] / speeds['decode, gguf']:.1f}" if name in ENCODINGS else ""
        rows[-1]["decode / copy"] = f"{speeds['decode'] / speeds['copy']:.2f}"
        tell(" ".join(map(str, rows[-1].values())))
    return rows


def _library() -> ctypes.CDLL | None:
    """Open ggml's C code, where llama-cpp-python is installed."""
    found = importlib.util.find_spec("llama_cpp")
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0]) / "lib"
    library = ctypes.CDLL(str(folder / "libggml-base.so"))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    return library


def _encode_in_c(library: ctypes.CDLL, name: str, x: np.ndarray) -> None:
    out = np.empty(codec(name).nbytes(x.shape), np.uint8)
    library.ggml_quantize_chunk(TYPES[name.upper()], x.ctypes.data, out.ctypes.data, 0, *x.shape, None)


def measure_transfer() -> list[Row]:
    """Export a Llama of 1.2 billion random parameters, read it back tensor by tensor; each in a process of its own.

    Peak memory against the largest file that was written. Making the random numbers is in the time.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in TRANSFERS:
            path = Path(folder) / name
            for what in ("export", "import"):
                command = [sys.executable, "-m", "benchmarks.formats", what, name, str(path)]
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"{what} of {name} failed:\n{done.stderr[-4000:]}")
                seconds, peak = json.loads(done.stdout.splitlines()[-1])
                files = [path] if path.is_file() else list(path.iterdir())
                largest = max(file.stat().st_size for file in files)
                rows.append(
                    {
                        "format": name,
                        "what": what,
                        "s": round(seconds, 1),
                        "peak MB": round(peak / 1e6),
                        "largest file MB": round(largest / 1e6),
                        "peak / largest": f"{peak / largest:.2f}",
                    }
                )
                tell(" ".join(map(str, rows[-1].values())))
    return rows


def _transfer(what: str, name: str, path: Path) -> None:
    return_large_blocks()
    began, shapes = time.perf_counter(), BILLION.tensors()
    if what == "export":

        def read(tensor: str) -> np.ndarray:
            array = np.random.default_rng(sum(map(ord, tensor))).standard_normal(shapes[tensor], np.float32)
            array *= np.float32(0.02)
            return array

        export(Source(BILLION, read), path, name)
    else:
        source = open_gguf(path) if path.is_file() else HfFolder(path).source()
        for tensor, shape in shapes.items():
            assert source.read(tensor).shape == shape
    print(json.dumps([time.perf_counter() - began, peak_resident_bytes()]))


if __name__ == "__main__":
    _transfer(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
