"""Skips what this environment cannot run, with the reason."""

import importlib.util
import os

import jax
import pytest

COMPILERS = ("jax_cuda12_plugin", "libtpu", "flatbuffers")


def reason_against_aot():
    if os.environ.get("JAXQUANT_SKIP_AOT"):
        return "compiles for an absent chip; scripts/test.sh --all runs it"
    missing = [name for name in COMPILERS if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed; pip install '.[audit-gpu,audit-tpu]'" if missing else ""


@pytest.fixture(scope="module", autouse=True)
def optimization(request):
    """Compile the programs of ``tests/train`` with little optimization, as compiling is most of their time.

    Programs and subprocesses alike. A module whose tests are about the bits of optimized programs says
    ``OPTIMIZED = True``, and all other tests compile as users do.
    """
    is_little = "/tests/train/" in str(request.path) and not getattr(request.module, "OPTIMIZED", False)
    if jax.config.values["jax_disable_most_optimizations"] != is_little:
        jax.config.update("jax_disable_most_optimizations", is_little)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(is_little))
        jax.clear_caches()


def pytest_collection_modifyitems(items):
    reason = reason_against_aot()
    for item in items:
        if reason and item.get_closest_marker("aot"):
            item.add_marker(pytest.mark.skip(reason=reason))
