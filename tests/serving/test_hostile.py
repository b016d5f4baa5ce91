"""Folders that were made to harm: every sum fits, and nothing is followed or allocated that is not theirs."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxquant.serving import manifest as manifests
from jaxquant.serving.checkpoint import load, save
from tests.serving.trees import contents_of, quantized, sign

LIMIT_S = 2.0
TREE = {"mlp": {"kernel": quantized("int8", (4, 6), (1, 6))}, "norm": {"scale": jnp.ones(5)}}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hostile") / "checkpoint"
    save(directory, TREE, {"quantization": "int8w"})
    return directory


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copy"))


def refused(call: Callable[[], Any], *names: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match=r".") as caught:
        call()
    assert time.process_time() - began < LIMIT_S
    assert len(str(caught.value)) < 1500
    for name in names:
        assert name in str(caught.value)


KERNEL, NORM = 0, 1
ROWS: dict[str, tuple[int, dict[str, Any], str]] = {
    "negative shape": (NORM, {"shape": [-5]}, "leaf 'norm/scale'.shape [-5] is no shape"),
    "huge shape": (NORM, {"shape": [10**12, 10**12]}, "leaf 'norm/scale'.shape"),
    "endless shape": (NORM, {"shape": [10**5000]}, "jaxquant.json is not JSON"),
    "empty axis": (NORM, {"shape": [0, 5]}, "is no shape of an array"),
    "a thousand axes": (NORM, {"shape": [1] * 1000}, "is no shape of an array"),
    "an odd role": (NORM, {"role": "code"}, "leaf 'norm/scale'.role must be one of"),
    "quantized without a scale": (NORM, {"role": "quantized"}, "leaf 'norm/scale' is of role 'quantized'"),
    "an array with a scale": (KERNEL, {"role": "array"}, "leaf 'mlp/kernel' is of role 'array'"),
    "an object": (NORM, {"dtype": "object"}, "leaf 'norm/scale'.dtype 'object' is no dtype of numbers"),
    "an empty path": (NORM, {"path": ""}, "has an empty key"),
    "a path to elsewhere": (NORM, {"path": "../../etc/passwd"}, "is no leaf of the checkpoint"),
    "one leaf twice": (NORM, {"path": "mlp/kernel"}, "leaf 'mlp/kernel' is there twice"),
    "a leaf in a leaf": (NORM, {"path": "mlp/kernel/more"}, "leaf 'mlp/kernel' holds leaf 'mlp/kernel/more'"),
    "negative bytes": (NORM, {"bytes": -1}, "says that it has -1 bytes"),
    "a field too many": (NORM, {"run": "rm"}, "leaf 'norm/scale' has no field 'run'"),
    "a scale of a negative shape": (KERNEL, {"scale_shape": [-1, 6]}, "leaf 'mlp/kernel'.scale_shape [-1, 6] is no"),
}


@pytest.mark.parametrize("case", ROWS)
def test_a_leaf_that_is_none_is_refused_by_name(case: str, copy: Path):
    index, change, message = ROWS[case]
    contents = contents_of(copy)
    contents["leaves"][index] |= change
    if case == "endless shape":
        text = manifests._dump(contents_of(copy)).replace('"shape": [\n    5\n   ]', f'"shape": [{"9" * 5000}]')
        (copy / manifests.NAME).write_text(text)
    else:
        sign(copy, contents)
    refused(lambda: load(copy), message, str(copy))


WHOLE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "leaves that are a mapping": (lambda c: c.update(leaves={}), "leaves must be"),
    "a config that is a list": (lambda c: c.update(config=[]), "config must be a mapping"),
    "files that are a list": (lambda c: c.update(files=[]), "files must be a mapping"),
    "a file of a negative size": (
        lambda c: c["files"].update(a={"bytes": -1, "sha256": "0" * 64}),
        "files['a'] has no",
    ),
    "a file elsewhere": (lambda c: c["files"].update({"../../x": {"bytes": 1, "sha256": "0" * 64}}), "is missing"),
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_manifest_that_is_none_is_refused_by_name(case: str, copy: Path):
    change, message = WHOLE[case]
    contents = contents_of(copy)
    change(contents)
    sign(copy, contents, sum_files=False)
    refused(lambda: load(copy), message, str(copy))


def _store(copy: Path, **fields: Any) -> None:
    path = copy / "params/norm.scale/.zarray"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


STORES: dict[str, Callable[[Path], Any]] = {
    "chunks of 10^12": lambda copy: _store(copy, chunks=[10**12]),
    "chunks of nothing": lambda copy: _store(copy, chunks=[0]),
    "chunks of another rank": lambda copy: _store(copy, chunks=[5, 1]),
    "a compressor": lambda copy: _store(copy, compressor={"id": "zlib", "level": 1}),
    "megabytes of spaces": lambda copy: (copy / "params/norm.scale/.zarray").write_text(" " * 2**20),
    "a list": lambda copy: (copy / "params/norm.scale/.zarray").write_text("[1]"),
    "deep": lambda copy: (copy / "params/norm.scale/.zarray").write_text("[" * 60_000),
    "a chunk cut short": lambda copy: (copy / "params/norm.scale/0").write_bytes(b"1234"),
    "a chunk too many": lambda copy: (copy / "params/norm.scale/1").write_bytes(b"1" * 20),
}


@pytest.mark.parametrize("case", STORES)
def test_an_array_that_is_stored_otherwise_is_refused_by_name(case: str, copy: Path):
    STORES[case](copy)
    sign(copy, contents_of(copy))
    refused(lambda: load(copy), "leaf norm/scale", str(copy))


def _replace(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


SPECIAL: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a link to a file": ("params/norm.scale/0", lambda path: path.symlink_to("/etc/passwd"), "is a link"),
    "a pipe": ("params/norm.scale/0", os.mkfifo, "is a device or pipe"),
    "a pipe for the array's table": ("params/norm.scale/.zarray", os.mkfifo, "is a device or pipe"),
}


@pytest.mark.parametrize("case", SPECIAL)
@pytest.mark.parametrize("verify", [True, False])
def test_what_is_no_file_is_not_followed(case: str, verify: bool, copy: Path):
    name, make, message = SPECIAL[case]
    _replace(copy / name, make)
    refused(lambda: load(copy, verify=verify), f"{copy / name} {message}")


def test_a_manifest_that_is_a_pipe_or_too_large_is_not_read(copy: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(manifests, "MAX_MANIFEST_BYTES", 100)
        refused(lambda: load(copy), "more than any checkpoint's")
    _replace(copy / manifests.NAME, os.mkfifo)
    refused(lambda: load(copy), "has no jaxquant.json")


ODD = [None, True, -1, 0, 10**12, 1e308, "", "x", "object", [], [[]], [-1], {}, {"a": 1}, "\0", "../x", ["x"] * 50]
