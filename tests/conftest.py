"""Skips what this environment cannot run, with the reason."""

import importlib.util
import os

import pytest

COMPILERS = ("jax_cuda12_plugin", "libtpu", "flatbuffers")


def reason_against_aot():
    if os.environ.get("JAXQUANT_SKIP_AOT"):
        return "compiles for an absent chip; scripts/test.sh --all runs it"
    missing = [name for name in COMPILERS if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed; pip install '.[audit-gpu,audit-tpu]'" if missing else ""


def pytest_collection_modifyitems(items):
    reason = reason_against_aot()
    for item in items:
        if reason and item.get_closest_marker("aot"):
            item.add_marker(pytest.mark.skip(reason=reason))
