"""The wheel holds jaxquant alone, and no command of it runs a ``train.py`` of the user's."""

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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the checkout, without a network."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    for folder in ("jaxquant", "train", "scripts", "tests", "examples", "configs"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    folder = wheel.parent / "site"
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A folder of a user's own, with a ``train.py`` that leaves a file when it is executed."""
    (tmp_path / "train.py").write_text("open('executed', 'w').close()\n")
    (tmp_path / "own.yml").write_text((ROOT / "configs/models/ci.yml").read_text())
    return tmp_path


def command(folder: Path, path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
    )
    assert not (folder / "executed").exists(), words
    return done


def test_it_has_no_package_but_jaxquant(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"jaxquant", "jaxquant-0.1.0.dist-info"}
    here = {path.relative_to(ROOT).as_posix() for path in (ROOT / "jaxquant").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == here
    assert "jaxquant/py.typed" in names


def test_it_needs_the_libraries_of_every_backend(site: Path):
    (metadata,) = site.glob("*.dist-info/METADATA")
    assert {"aqtp", "qwix"} <= set(re.findall(r"^Requires-Dist: (\w+)[^;\n]*$", metadata.read_text(), re.M))


@pytest.mark.parametrize("words", [["strings"], ["explain", "fp8"], ["audit", "--help"]], ids=" ".join)
def test_commands_without_the_trainer_run(site: Path, beside: Path, words: list[str]):
    assert command(beside, site, "jaxquant", *words).returncode == 0


MISSING = "error: the training program 'train.audit:program' is in a checkout of jaxquant and not in the installed"


@pytest.mark.parametrize(
    "words", [["jaxquant", "coverage"], pytest.param(["jaxquant", "audit"], marks=pytest.mark.aot)], ids=" ".join
)
def test_what_reads_a_config_asks_for_a_checkout(site: Path, beside: Path, words: list[str]):
    done = command(beside, site, *words, "own.yml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(MISSING)
    assert done.stderr.count("\n") == 1


def test_in_a_checkout_the_trainer_is_its_own(beside: Path):
    done = command(beside, ROOT, "jaxquant", "coverage", "own.yml", "quantization=fp8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("42 of 57 matmuls in at most 8 bits")


def test_a_step_of_the_users_own_is_found_beside_them(site: Path, beside: Path):
    (beside / "mine.py").write_text(
        "import jax\n"
        "def program(config, overrides, devices):\n"
        "    x = jax.ShapeDtypeStruct((4, 4), 'float32')\n"
        "    return jax.jit(lambda x: x @ x), (x,)\n"
    )
    done = command(beside, site, "jaxquant", "coverage", "own.yml", "--program", "mine:program")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("0 of 1 matmuls")
