"""The wheel contains only jaxquant, and no command of it imports a ``train.py`` of the user."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the checkout without a network; return the folder with its contents."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    for folder in ("jaxquant", "train", "scripts", "tests", "examples", "configs"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (made,) = out.glob("*.whl")
    zipfile.ZipFile(made).extractall(out / "site")
    return out / "site"


def test_it_has_no_package_but_jaxquant_and_needs_the_libraries_of_every_backend(site: Path):
    names = [path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()]
    assert {name.partition("/")[0] for name in names} == {"jaxquant", "jaxquant-0.1.0.dist-info"}
    here = {path.relative_to(ROOT).as_posix() for path in (ROOT / "jaxquant").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == here
    assert "jaxquant/py.typed" in names
    metadata = (site / "jaxquant-0.1.0.dist-info/METADATA").read_text()
    assert {"aqtp", "qwix"} <= set(re.findall(r"^Requires-Dist: (\w+)[^;\n]*$", metadata, re.M))


def test_commands_run_beside_a_train_of_the_users_own(site: Path, tmp_path: Path):
    """The wheel's training program and a step function of the user are both found."""
    (tmp_path / "train.py").write_text("open('executed', 'w').close()\n")
    (tmp_path / "own.yml").write_text((ROOT / "configs/models/ci.yml").read_text())
    (tmp_path / "mine.py").write_text(
        "import jax\n"
        "def program(config, overrides, devices):\n"
        "    x = jax.ShapeDtypeStruct((4, 4), 'float32')\n"
        "    return jax.jit(lambda x: x @ x), (x,)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(site)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "jaxquant", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert not (tmp_path / "executed").exists(), words
        return done

    done = run("coverage", "own.yml")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("0 of 57 matmuls")
    done = run("coverage", "own.yml", "--program", "mine:program")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("0 of 1 matmuls")
