"""Sums of exports: an import sees any flipped bit of any file, in the words of ``sha256sum``."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from jaxquant.export import check_sums, export
from tests.export.models import source
from train.importing import open_checkpoint


@pytest.mark.parametrize(("name", "format"), [("folder", "ct_int8"), ("model.gguf", "gguf_q8_0")])
def test_no_flipped_bit_of_an_export_is_silent(name: str, format: str, tmp_path: Path):
    out = tmp_path / name
    export(source(), out, format, shard_bytes=3 * 10**5)
    open_checkpoint(out)
    rng = random.Random(0)
    for path in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        whole = path.read_bytes()
        for bit in (*rng.sample(range(8 * len(whole)), 6), 8 * len(whole) - 6):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match="export the model again, or delete"):
                open_checkpoint(out)
        path.write_bytes(whole)
    sums = out / "SHA256SUMS" if out.is_dir() else tmp_path / "model.gguf.sha256"
    subprocess.run(["sha256sum", "--check", "--strict", sums.name], cwd=sums.parent, check=True, capture_output=True)


def test_a_file_that_is_gone_is_named_and_one_that_was_added_is_the_users(tmp_path: Path):
    out = tmp_path / "folder"
    export(source(), out, "hf")
    (out / "README.md").write_text("mine")
    check_sums(out)
    (out / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json is gone; export the model again"):
        check_sums(out)
    (out / "SHA256SUMS").unlink()
    check_sums(out)
