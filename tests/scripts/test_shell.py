"""The shell scripts refuse what they cannot do, in words, before they install anything."""

import os
import subprocess
import tomllib
from pathlib import Path

import pytest

from jaxquant.config.backends import BACKENDS

ROOT = Path(__file__).parents[2]
SCRIPTS = ("scripts/test.sh", "scripts/demo.sh")


def run(*words, **environment):
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=os.environ | environment, timeout=60)


@pytest.mark.parametrize("script", [*SCRIPTS, "scripts/docs.sh", ".ci/run"])
def test_scripts_are_executable_and_parse(script):
    assert os.access(ROOT / script, os.X_OK)
    assert run("bash", "-n", script).returncode == 0


def test_a_python_that_is_not_there_is_an_error():
    done = run("scripts/test.sh", PYTHON="python-of-nowhere")
    assert done.returncode == 1
    assert "error: PYTHON=python-of-nowhere is not an executable" in done.stderr


@pytest.mark.parametrize("pins", ["py311", "py312"])
def test_pins_are_exact_and_cover_what_is_declared(pins):
    lines = (ROOT / f"constraints/{pins}.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if not line.startswith("#")}
    assert all("==" in line for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        # What validation/exchange.py loads has an environment of its own, which no test sets up.
        *(each for name, extra in project["optional-dependencies"].items() if name != "exchange" for each in extra),
    ]
    names = {name.split(">")[0].split("=")[0].split("[")[0].lower() for name in wanted}
    assert names <= pinned


def test_the_two_environments_have_the_oldest_and_the_newest_tested_versions():
    """Python 3.11 has the oldest versions that are declared to the patch, and the libraries of backends both ends."""
    oldest, newest = (
        dict(line.split("==") for line in (ROOT / f"constraints/{name}.txt").read_text().splitlines()[1:])
        for name in ("py311", "py312")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = dict(each.split(">=") for each in project["dependencies"] + project["optional-dependencies"]["train"])
    least = {name: version for name, version in declared.items() if version.count(".") == 2 and name != "qwix"}
    assert {"jax", "flax", "safetensors", "tokenizers"} <= least.keys()
    assert {name: oldest[name] for name in least} == least
    rows = [row for row in BACKENDS.values() if row.package]
    assert [(oldest[row.package], newest[row.package]) for row in rows] == [row.tested for row in rows]
