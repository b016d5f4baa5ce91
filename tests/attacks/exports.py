"""Mutated checkpoints of others: refused in words, or read, and then an independent reader finds the same bytes."""

from __future__ import annotations

import json
import math
import random
import struct
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxquant.export import HfFolder, LlamaShape, Source, export, open_gguf
from jaxquant.export.gguf_file import GgufFile
from jaxquant.export.safetensors import DTYPES
from jaxquant.export.vocabulary import byte_vocabulary
from tests.attacks.tally import DOCUMENTED, Tally
from tests.mutate import mutate_bytes, mutate_json

SHAPE = LlamaShape(320, 32, 32, 1, 2, 1, 16, max_length=16)
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 31, 33, 2**31, 2**40, 2**63, 2**64, -(2**63), 1.5, -0.0, 1e300, "", "a", "F8_E4M3",
    "BF16", "fp8", "../x", "\0", "\ud800", [], [0], [128, 128], [-1, 1], {}, {"a": 1}, [[]], "re:(", "re:(a+)+$",
)  # fmt: skip


_KEYS = ("a", "__metadata__", "lm_head.weight")


def seeds(folder: Path) -> tuple[Path, bytes]:
    """Write a folder in fp8 blocks, with an index, and a GGUF file; give both."""
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPE.tensors().items()}
    source = Source(SHAPE, tensors.__getitem__, byte_vocabulary(320))
    export(source, folder / "hf", "fp8_block", shard_bytes=30_000)
    export(source, folder / "m.gguf", "gguf_q8_0")
    return folder / "hf", (folder / "m.gguf").read_bytes()


def header_of(data: bytes) -> tuple[Any, bytes]:
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(header: Any, rest: bytes) -> bytes:
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + rest


def check_folder(folder: Path) -> None:
    """Read a folder, and compare every tensor with what a plain reader finds at the place that the header says."""
    read = HfFolder(folder)
    for name in read.shape.tensors():
        assert read.read(name).shape == read.shape.tensors()[name]
    for path in folder.glob("*.safetensors"):
        header, data = header_of(path.read_bytes())
        for name, row in header.items():
            if name == "__metadata__" or name not in read._where:
                continue
            start, stop = row["data_offsets"]
            array = read._where[name][name]
            assert math.prod(row["shape"]) * DTYPES[row["dtype"]].itemsize == stop - start == array.nbytes
            assert array.tobytes() == data[start:stop]


def check_gguf(path: Path) -> None:
    """Read a file, and compare every tensor with what llama.cpp's own reader finds."""
    read = open_gguf(path)
    for name in read.shape.tensors():
        assert read.read(name).shape == read.shape.tensors()[name]
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    assert {tensor.name for tensor in theirs.tensors} == set(ours.tensors)
    for tensor in theirs.tensors:
        assert tensor.data.tobytes() == ours.raw(tensor.name).tobytes()


def case(rng: random.Random, folder: Path, files: dict[str, bytes], seed: bytes, target: Path) -> None:
    """Make one mutated checkpoint and try it."""
    kind = rng.random()
    if kind < 0.4:
        head = seed.index(b"output_norm") + 600  # metadata and the places of tensors
        target.write_bytes(mutate_bytes(rng, seed, head if rng.random() < 0.9 else len(seed)))
        check_gguf(target)
        return
    name = rng.choice(list(files))
    data = files[name]
    if name.endswith(".safetensors"):
        if kind < 0.7:
            header, rest = header_of(data)
            new = with_header(mutate_json(rng, header, _VALUES, _KEYS), rest)
        else:
            new = mutate_bytes(rng, data, 8 + struct.unpack("<Q", data[:8])[0])
    elif kind < 0.85 and name.endswith(".json"):
        new = json.dumps(mutate_json(rng, json.loads(data), _VALUES, _KEYS)).encode("utf-8", "surrogatepass")
    else:
        new = mutate_bytes(rng, data, len(data))
    (folder / name).write_bytes(new)
    try:
        check_folder(folder)
    finally:
        (folder / name).write_bytes(data)


def attack_exports(count: int, seed: int) -> Tally:
    """Read ``count`` mutated folders and GGUF files."""
    rng, tally = random.Random(seed), Tally()
    with tempfile.TemporaryDirectory() as name:
        folder, file = seeds(Path(name))
        check_folder(folder)  # so that what is compiled once is no case's time
        files = {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith("token")}
        for other in ("generation_config.json", "SHA256SUMS"):  # nothing here reads them
            files.pop(other)
        for number in range(count):
            tally.attempt(
                f"{number} of seed {seed}",
                lambda: case(rng, folder, files, file, Path(name) / "try.gguf"),
                (*DOCUMENTED, FileNotFoundError),
            )
    return tally
