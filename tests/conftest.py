"""Compiler options of the tests, functions that are compiled once for all tests, and skips for this environment."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src import compiler
from jax.experimental.compilation_cache.compilation_cache import reset_cache

ROOT = Path(__file__).parent
COMPILERS = ("jax_cuda12_plugin", "libtpu", "flatbuffers")
UNCACHED = ("audit", "aot")
"""Folders whose programs do not use the compilation cache: they are for chips that are not attached, and do not run."""
LITTLE = ("audit", "backends", "docs", "inject", "must_hold", "serving", "state", "trace", "train")
"""Folders that compile with little optimization: their tests do not depend on the compiled program."""
FLAGS = os.environ.get("XLA_FLAGS", "")
_FAST = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
FAST_TO_COMPILE: dict[str, Any] = _FAST if jax.__version_info__ < (0, 11) else {}
"""XLA options that halve the compile time; they change last bits. Newer versions of XLA do not have the first one."""
LONGEST = (
    *("train/test_processes.py", "aot/test_compile.py", "test_gallery.py", "ops/test_sharding.py"),
    *("train/test_mesh.py", "aot/test_h200.py", "train/test_conversion.py", "inject/test_linen.py"),
    *("serving/test_convert.py", "train/test_run.py", "train/test_generate.py", "must_hold/test_state.py"),
    *("inject/test_reach.py", "train/test_health.py", "backends/test_bands.py", "backends/test_handle.py"),
    *("audit/test_coverage.py", "audit/test_health.py", "train/test_step.py", "inject/test_nnx.py"),
)
"""Slow files, slowest first. Workers take whole files in this order, so that they end at about the same time."""

# xdist passes the terminal's width to its workers. Without it, tables always look as in a pipe.
os.environ.pop("COLUMNS", None)

# Tracing makes millions of objects and few cycles. With Python's thresholds, garbage collection takes a tenth of the
# time.
gc.set_threshold(200_000, 20, 100)


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Share compiled programs among all tests, workers and subprocesses of a session, because compilation is slow."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    options = {
        "jax_compilation_cache_dir": str(folder / "compiled"),
        "jax_persistent_cache_min_compile_time_secs": 0.02,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            patch.setenv(name.upper(), str(value))
            jax.config.update(name, value)
        reset_cache()
        yield


@pytest.fixture(scope="module", autouse=True)
def optimization(request: pytest.FixtureRequest, compilation_cache: None) -> None:
    """Compile with little optimization if a module does not test the bits of optimized programs.

    This applies to the folders of ``LITTLE`` and to modules with ``OPTIMIZED = False``, also in their subprocesses.
    ``OPTIMIZED = None`` does not use ``FAST_TO_COMPILE``. All other tests compile as users do.
    """
    folder = request.path.relative_to(ROOT).parts[0]
    is_cached = folder not in UNCACHED
    if jax.config.values["jax_enable_compilation_cache"] != is_cached:
        jax.config.update("jax_enable_compilation_cache", is_cached)
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = str(int(is_cached))
        reset_cache()  # the cache remembers whether it is enabled
    is_optimized = getattr(request.module, "OPTIMIZED", folder not in LITTLE)
    compile_options.added = {} if is_optimized is None else FAST_TO_COMPILE
    optimize_little(not is_optimized)


def optimize_little(is_little: bool) -> bool:
    """Set the optimization of programs that are compiled later, also in subprocesses; return the previous setting."""
    before = jax.config.values["jax_disable_most_optimizations"]
    if before != is_little:
        jax.devices()  # this process has already read XLA_FLAGS
        flags = " ".join(f"--{name}={str(value).lower()}" for name, value in FAST_TO_COMPILE.items())
        os.environ["XLA_FLAGS"] = f"{FLAGS} {flags}" if is_little else FLAGS
        jax.config.update("jax_disable_most_optimizations", is_little)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(is_little))
        jax.clear_caches()
    return before


@functools.wraps(compiler.get_compile_options)
def compile_options(*args: Any, **kwargs: Any) -> Any:
    """Add ``FAST_TO_COMPILE`` to the options of programs that are compiled with little optimization."""
    options = compile_options.__wrapped__(*args, **kwargs)
    if jax.config.values["jax_disable_most_optimizations"]:
        options.env_option_overrides = [*options.env_option_overrides, *compile_options.added.items()]
    return options


compile_options.added = FAST_TO_COMPILE
compiler.get_compile_options = compile_options


def reason_against_aot() -> str:
    missing = [name for name in COMPILERS if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed; pip install '.[audit-gpu,audit-tpu]'" if missing else ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out slow tests, and two of every three cases of one")


@pytest.hookimpl(trylast=True)  # -k and -m have already removed cases
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("quick"):
        kept = quick(items)
        config.hook.pytest_deselected(items=list(set(items) - set(kept)))
        items[:] = kept
    reason = reason_against_aot()
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.relative_to(ROOT).as_posix(), len(order)))
    for item in items:
        if reason and item.get_closest_marker("aot"):
            item.add_marker(pytest.mark.skip(reason=reason))


def quick(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return every third case of each test that is not slow, beginning with the first case."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("slow") and not item.get_closest_marker("aot"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [case for each in cases.values() for place, case in enumerate(each) if place % 3 == place // 3 % 3]
