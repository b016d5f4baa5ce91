"""Served folders that are damaged or malicious: each is an error that names the file, and no folder is loaded."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxquant.export.sums import NAME as SUMS
from jaxquant.export.sums import write_sums
from jaxquant.serving.checkpoint import ARRAYS, NAME, load, read_manifest, save
from tests.serving.trees import quantized

TREE = {"mlp": {"kernel": quantized("int4", (4, 6), (1, 6))}, "norm": {"scale": jnp.ones(5)}}
FILES = (NAME, ARRAYS, SUMS, "tokenizer.json")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hostile") / "checkpoint"
    save(directory, TREE, {"quantization": "int4w"}, files={"tokenizer.json": "{}"})
    return directory


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copy"))


def refused(directory: Path, *words: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        load(directory, **options)
    assert len(str(caught.value)) < 1500
    for word in (str(directory), *words):
        assert word in str(caught.value)


def test_no_flipped_bit_is_silent(copy: Path):
    assert sorted(path.name for path in copy.iterdir()) == sorted(FILES)
    for name in FILES:
        whole = (copy / name).read_bytes()
        for bit in range(0, 8 * len(whole), 1 if name == NAME else 37):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            (copy / name).write_bytes(damaged)
            with pytest.raises(ValueError, match=r"copy (the|it)|install a newer|again"):
                (read_manifest if name == NAME else load)(copy)
        (copy / name).write_bytes(whole)
    load(copy)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", [NAME, ARRAYS, SUMS])
def test_a_file_cut_short_longer_or_gone_is_named(name: str, verify: bool, copy: Path):
    whole = (copy / name).read_bytes()
    for data in (whole[: len(whole) // 2], b"", whole + b"\0"):
        (copy / name).write_bytes(data)
        refused(copy, name if len(data) else "", verify=verify)
    (copy / name).unlink()
    refused(copy, name, verify=verify)
    os.mkfifo(copy / name)
    refused(copy, name, verify=verify)


def test_a_link_is_followed_and_files_and_sums_that_miss_each_other_are_refused(copy: Path, tmp_path: Path):
    """The Hugging Face cache stores its files as links."""
    (copy / ARRAYS).rename(tmp_path / "blob")
    (copy / ARRAYS).symlink_to(tmp_path / "blob")
    load(copy)
    (copy / "notes.txt").write_text("mine")
    refused(copy, "notes.txt has no checksum in SHA256SUMS; move it elsewhere")
    (copy / "notes.txt").unlink()
    with (copy / SUMS).open("a") as file:
        file.write(f"{'0' * 64}  ../../etc/passwd\n")
    refused(copy, "SHA256SUMS is not a list of checksums")


def test_what_is_no_checkpoint_or_of_another_version(copy: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "is not a quantized checkpoint")
    for version, words in ((1, "which only commit a87bb9a of jaxquant reads"), (3, "install a newer jaxquant")):
        (copy / NAME).write_text(json.dumps({"format": "jaxquant-quantized", "version": version, "tables": "x.bin"}))
        refused(copy, f"checkpoint {copy} has format version {version}", words)


# Correct checksums, as a faulty or malicious writer would write them.

KERNEL, NORM = 0, 1
ROWS: list[tuple[int | None, dict[str, Any], str]] = [
    (None, {"leaves": {}}, "leaves must be"),
    (NORM, {"shape": [10**12, 10**12], "bytes": 4 * 10**24}, "lists 'norm/scale' as"),
    (NORM, {"role": "code"}, "leaf 'norm/scale'.role must be one of"),
    (NORM, {"dtype": "object"}, "norm/scale has dtype object"),
    (KERNEL, {"codec": "q9"}, "q9"),
    (NORM, {"path": "mlp/kernel"}, "leaves must be sorted by path, each path once"),
    (NORM, {"path": "mlp/kernel/more"}, "jaxquant.json"),
    (NORM, {"path": "x/../../../etc"}, "model.safetensors has"),
    (NORM, {"run": "rm"}, "leaf 'norm/scale' has no field 'run'"),
    (KERNEL, {"scale_shape": [3, 6]}, "mlp/kernel"),
]


def test_a_leaf_or_manifest_that_is_none_is_refused_by_name(copy: Path):
    whole = (copy / NAME).read_text()
    for index, fields, message in ROWS:
        contents = json.loads(whole)
        (contents if index is None else contents["leaves"][index]).update(fields)
        (copy / NAME).write_text(json.dumps(contents))
        write_sums(copy)
        refused(copy, message)
    for text in ("[1]", "[" * 60_000, '{"version": ' + "9" * 5000 + "}"):
        (copy / NAME).write_text(text)
        refused(copy, f"{NAME} is not a valid JSON object")
