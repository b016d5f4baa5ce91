"""Checksums of exports: an import detects a flipped bit in any file, and ``sha256sum`` can read the sums."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from jaxquant.export import check_export, export
from jaxquant.export.sums import NAME, write_sums
from jaxquant.training.importing import open_checkpoint
from tests.export.models import source


@pytest.mark.parametrize(("name", "format"), [("folder", "ct_int8"), ("model.gguf", "gguf_q8_0")])
def test_no_flipped_bit_of_an_export_is_silent(name: str, format: str, tmp_path: Path):
    """A flip in the name of a GGUF file removes its checksum; the file itself is intact."""
    out = tmp_path / name
    export(source(), out, format, shard_bytes=3 * 10**5)
    open_checkpoint(out)
    rng = random.Random(0)
    for path in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        whole = path.read_bytes()
        end = 8 * 64 if path.name == NAME and out.is_file() else 8 * len(whole)
        for bit in (*rng.sample(range(end), 6), end - 6):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=r"copy the folder again, or .*delete"):
                open_checkpoint(out)
        path.write_bytes(whole)
    folder = out if out.is_dir() else tmp_path
    subprocess.run(["sha256sum", "--check", "--strict", NAME], cwd=folder, check=True, capture_output=True)


def test_a_file_that_is_gone_is_named_and_one_that_was_added_is_the_users(tmp_path: Path):
    out = tmp_path / "folder"
    export(source(), out, "hf")
    (out / "README.md").write_text("mine")
    check_export(out)
    (out / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json is missing; copy the folder again"):
        check_export(out)
    (out / NAME).unlink()
    check_export(out)
    for name in ("a.gguf", "b.gguf"):  # two files share one list
        (tmp_path / name).write_text(name)
        write_sums(tmp_path, [name])
    (tmp_path / "a.gguf").unlink()
    check_export(tmp_path / "b.gguf")
