"""Timing of functions in turns, so that a slow period of the machine affects all functions equally."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxquant.aot.program import read_program
from jaxquant.bench.schemes import Row

FAILURES = (ImportError, NotImplementedError, ValueError, jax.errors.JaxRuntimeError)
"""Errors of programs that cannot run here."""


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable Python's garbage collection in a context."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def seconds(run: Callable[[], Any], calls: int = 1) -> float:
    """Return the time of a call until its arrays are ready.

    Args:
      run: function to call.
      calls: number of consecutive calls, so that the device works while the host dispatches the next call. The result
        is the time per call.
    """
    began = time.perf_counter()
    for _ in range(calls - 1):
        run()
    jax.block_until_ready(run())
    return (time.perf_counter() - began) / calls


def median_ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over rounds of a time divided by another time in the same round."""
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


@dataclasses.dataclass
class CompiledRow:
    """A compiled row that is ready to be timed.

    Attributes:
      calls: compiled programs by name, each with its arguments.
      facts: figures other than times; a rate is computed from ``flops`` or ``bytes`` of all calls together.
    """

    calls: dict[str, Callable[[], Any]]
    facts: Row = dataclasses.field(default_factory=dict)


def prepare(function: Callable[..., Any], shapes: Sequence[Any], options: dict[str, Any] | None = None) -> CompiledRow:
    """Compile a function, with values for its arguments.

    Args:
      function: function to compile.
      shapes: shapes of its arguments, see ``random_arrays``.
      options: compiler options.
    """
    args = random_arrays(shapes)
    program, facts = compile_program(function, *args, options=options)
    return CompiledRow({"step": lambda: program(*args)}, facts)


def random_arrays(shapes: Any) -> Any:
    """Return a tree of values for a tree of shapes: random matrices, and amax histories that are not empty.

    All random keys are equal. Binned observations, and integers of more than one byte, are zeros; vectors are ones.
    """

    def value(path: Any, x: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        size = x.dtype.itemsize
        if "bins" in jax.tree_util.keystr(path) or (size > 1 and jnp.issubdtype(x.dtype, jnp.integer)):
            return jnp.zeros(x.shape, x.dtype)
        if x.ndim < 2:
            return jnp.ones(x.shape, x.dtype)
        drawn = jax.random.normal(jax.random.key(x.size, impl="rbg"), x.shape)  # fast to compile
        return ((32 if size == 1 else 0.02) * drawn).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(value, shapes)


def compile_program(function: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None) -> tuple[Any, Row]:
    """Compile a function for its arguments; return the program, and facts about it.

    Args:
      function: function to compile.
      args: arguments of the function.
      options: compiler options.

    Returns:
      The program, and facts about it: seconds for tracing and lowering, seconds for compilation, number of matmuls by
        operand dtypes, their library calls or opcodes, and megabytes that all other operations move.
    """
    began = time.perf_counter()
    lowered = jax.jit(function).lower(*args)
    between = time.perf_counter()
    program = lowered.compile(compiler_options=options)
    ended = time.perf_counter()
    read = read_program(program.as_text() or "")
    calls = [matmul.kind for matmul in read.matmuls] + [kernel.name for kernel in read.kernels if kernel.flops]
    facts: Row = {"lower s": round(between - began, 2), "compile s": round(ended - between, 2)}
    facts |= {"matmuls": read.count(), "calls": collections.Counter(calls), "moved MB": round(read.moved / 1e6)}
    return program, facts
