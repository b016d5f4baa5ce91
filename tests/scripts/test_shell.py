"""The shell scripts exit with a message before they install anything, if they cannot run here."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

from jaxquant.config.backends import BACKENDS

ROOT = Path(__file__).parents[2]


def run(*words, **environment):
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=os.environ | environment, timeout=60)


def test_scripts_are_executable_and_parse():
    for script in ("scripts/test.sh", "scripts/demo.sh", "scripts/docs.sh", ".ci/run"):
        assert (os.access(ROOT / script, os.X_OK), run("bash", "-n", script).returncode) == (True, 0), script


def test_a_python_that_is_not_there_is_an_error():
    done = run("scripts/test.sh", PYTHON="python-of-nowhere")
    assert (done.returncode, "error: PYTHON=python-of-nowhere is not an executable" in done.stderr) == (1, True)


def test_pins_are_exact_cover_what_is_declared_and_have_the_oldest_and_the_newest_tested_versions():
    """Python 3.11 has the oldest declared versions; libraries of backends have the oldest and the newest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    del extras["exchange"]  # The packages of validation/exchange.py need a separate environment, which no test creates.
    wanted = [*project["dependencies"], *(each for extra in extras.values() for each in extra)]
    names = {re.split(r"[>=[]", name)[0].lower() for name in wanted}
    pins = []
    for name in ("py311", "py312"):
        lines = (ROOT / f"constraints/{name}.txt").read_text().splitlines()
        pins.append(dict(line.split("==") for line in lines if not line.startswith("#")))
        assert names <= {each.lower() for each in pins[-1]}
    oldest, newest = pins
    declared = dict(each.split(">=") for each in project["dependencies"] + extras["train"])
    least = {name: version for name, version in declared.items() if version.count(".") == 2 and name != "qwix"}
    assert {"jax", "flax", "safetensors", "tokenizers"} <= least.keys()
    assert {name: oldest[name] for name in least} == least
    for row in filter(lambda row: row.package, BACKENDS.values()):
        assert (oldest[row.package], newest[row.package]) == row.tested
