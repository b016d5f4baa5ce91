"""Quantized checkpoints: no bit is lost, a mismatch is an error, and every device reads only its part."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jaxquant.core.paths import tree_bytes
from jaxquant.core.qtensor import QTensor
from jaxquant.serving import placement
from jaxquant.serving.checkpoint import load, read_manifest, save
from jaxquant.serving.leaves import flatten
from tests import numerics
from tests.serving.trees import abstract, assert_same, every_kind, quantized, raw_bytes

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {"rules": [{"path": ".*/wo", "recipe": "int8w"}]}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint with every kind of leaf; tests must not change it."""
    directory = tmp_path_factory.mktemp("written") / "checkpoint"
    save(directory, every_kind(), CONFIG, extra={"model": {"emb_dim": 64}})
    return directory


def test_every_kind_of_leaf_comes_back_bit_for_bit(written: Path):
    found = load(written, like=abstract(every_kind()))
    assert_same(found.params, every_kind())
    assert (found.config, found.extra, found.version) == (CONFIG, {"model": {"emb_dim": 64}}, 2)
    assert_same(load(written, verify=False).params, every_kind())


def test_any_tool_opens_the_arrays(written: Path):
    """The safetensors package reads every name; a byte has two four-bit elements."""
    tree = flatten(every_kind())
    arrays = [f"{path}/{part}" for path, leaf in tree.items() for part in getattr(leaf, "parts", [""])]
    with safe_open(written / "model.safetensors", "numpy") as file:
        assert sorted(file.keys()) == sorted(name.removesuffix("/") for name in arrays)
        scale = file.get_tensor("layers/mlp/wo/kernel/scale")
        assert scale.tobytes() == raw_bytes(tree["layers/mlp/wo/kernel"].scale)
        assert file.get_tensor("layers/mlp/wi_0/kernel/qvalue").shape == (4, 8, 3)


def test_bytes_on_disk_are_those_of_the_format(tmp_path: Path):
    params = {f"layer_{i}": {"kernel": quantized("int4", (64, 256), (1, 256), seed=i)} for i in range(3)}
    save(tmp_path / "made", params, CONFIG, files={"notes.txt": "kept"})
    found = read_manifest(tmp_path / "made")
    assert found.config == CONFIG
    assert found.bytes == tree_bytes(params) == 3 * (64 * 128 + 4 * 256)
    size = sum(path.stat().st_size for path in (tmp_path / "made").iterdir())
    assert found.bytes <= size <= found.bytes + numerics.checkpoint_overhead([*flatten(params)] * 2)
    assert (tmp_path / "made/notes.txt").read_text() == "kept"


ONE = jnp.ones((2,))
POINT = QTensor(jnp.ones((2, 3), jnp.int8), jnp.ones((1, 3)), jnp.ones((1, 1), jnp.int8))
REFUSED: list[tuple[Any, type[Exception], str]] = [
    ({}, ValueError, "empty dict"),
    ({"a": {"b/c": ONE}}, ValueError, "a has the key 'b/c'"),
    ({"a": {3: ONE}}, TypeError, "a has the key 3 of type int"),
    ({"a": [ONE]}, TypeError, "a must be an array or a QTensor, got list"),
    ({"a": jnp.ones((0, 3))}, ValueError, r"a has shape \(0, 3\)"),
    ({"a": np.ones(3)}, ValueError, "a is float64"),
    ({"a": jax.random.key(0)}, ValueError, "a has dtype key<fry>"),
    ({"__metadata__": ONE}, ValueError, "tensor '__metadata__' has the unsupported dtype"),
    ({"a": jnp.int4(1)}, ValueError, "a is a scalar int4"),
    ({"a": POINT}, ValueError, r"a has zero_point int8\(1, 1\), but needs"),
]


def test_what_a_checkpoint_does_not_keep_is_refused_by_name(tmp_path: Path):
    for params, kind, message in REFUSED:
        with pytest.raises(kind, match=message):
            save(tmp_path / "made", params, CONFIG)
    with pytest.raises(TypeError, match="config cannot be written as JSON"):
        save(tmp_path / "made", {"a": ONE}, {"dtype": jnp.float32})
    with pytest.raises(ValueError, match="extra cannot be written as JSON"):
        save(tmp_path / "made", {"a": ONE}, CONFIG, extra={"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "made").mkdir()
    with pytest.raises(FileExistsError, match=r"made already exists; choose another folder, or remove"):
        save(tmp_path / "made", {"a": ONE}, CONFIG)
    assert list((tmp_path / "made").iterdir()) == []


def test_a_save_that_fails_leaves_nothing_and_what_a_killed_one_left_is_written_over(tmp_path: Path, monkeypatch):
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("jaxquant.serving.checkpoint.write_sums", fail)
        with pytest.raises(OSError, match="disk full"):
            save(tmp_path / "made", {"a": ONE}, CONFIG)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "made.jaxquant-partial").mkdir()
    (tmp_path / "made.jaxquant-partial/left").write_text("over")
    (tmp_path / "made.partial").mkdir()  # a file of the user
    with pytest.raises(FileNotFoundError, match="made does not exist"):
        load(tmp_path / "made")
    save(tmp_path / "made", {"a": ONE}, CONFIG)
    assert_same(load(tmp_path / "made").params, {"a": ONE})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "made.partial"]


def test_a_checkpoint_that_does_not_fit_is_an_error_with_both_sides(written: Path):
    def refused(change: Callable[[Any], Any], *lines: str) -> None:
        like = abstract(every_kind())
        change(like)
        with pytest.raises(ValueError, match="does not match the model") as caught:
            load(written, like=like)
        assert str(written) in str(caught.value)
        assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [*lines]

    weight, scale = (jax.ShapeDtypeStruct((n,), dtype) for n, dtype in ((5, "bfloat16"), (6, "float32")))
    refused(
        lambda like: like["norm"].update(weight=weight) or like["norm"].pop("scale"),
        "missing in the checkpoint: norm/weight",
        "not in the model: norm/scale",
    )
    refused(
        lambda like: like["norm"].update(scale=scale),
        "norm/scale: shape (5,) in the checkpoint, (6,) in the model; dtype bfloat16 in the checkpoint, float32 in the "
        "model",
    )
    refused(
        lambda like: like["layers"]["mlp"]["wo"].update(kernel=abstract(quantized("int4", (4, 6, 8), (4, 2, 8)))),
        "layers/mlp/wo/kernel: dtype int8 in the checkpoint, int4 in the model; scale_shape (4, 1, 8) in the "
        "checkpoint, (4, 2, 8) in the model; zero_point True in the checkpoint, False in the model",
    )
    refused(
        lambda like: like["layers"]["mlp"]["wo"].update(kernel=jax.ShapeDtypeStruct((4, 6, 8), "int8")),
        "layers/mlp/wo/kernel: role quantized in the checkpoint, array in the model",
    )


def test_loading_makes_no_float_of_a_kernels_size(tmp_path: Path, monkeypatch):
    """All arrays of loading come from ``device_put`` or from a jitted function; the test counts the outputs of both."""
    params = {
        "a": {"kernel": quantized("int4", (64, 63), (1, 63))},
        "b": {"kernel": quantized("float8_e4m3fn", (64, 64), (1, 64))},
    }
    save(tmp_path / "made", params, CONFIG)
    made: list[Any] = []
    arrays_before = {id(array) for array in jax.live_arrays()}
    original = placement._unpacker

    def watched(*args: Any) -> Any:
        return lambda array: [made.append(array), made.append(original(*args)(array))] and made[-1]

    monkeypatch.setattr(placement, "_unpacker", watched)
    found = load(tmp_path / "made").params
    made += [array for array in jax.live_arrays() if id(array) not in arrays_before]
    large = {array.dtype.name for array in made if array.size >= 64 * 32}
    assert large == {"uint8", "int4", "float8_e4m3fn"}
    assert_same(found, params)


def test_every_device_reads_and_writes_its_part(tmp_path: Path):
    """Tested with eight devices, and with two processes of two devices each that save one checkpoint together."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    # Freed memory is returned at once, so resident memory equals used memory.
    options = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | options
    started = []
    try:
        for words in (["one"], ["two", port, "0"], ["two", port, "1"]):
            command = [sys.executable, "-m", "tests.serving.sharded_worker", str(tmp_path / words[0]), *words[1:]]
            out = (tmp_path / f"{len(started)}.log").open("w")
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT))
        codes = [process.wait(timeout=180) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0, 0, 0], [log.read_text()[-2000:] for log in tmp_path.glob("*.log")]
    assert (tmp_path / "two/Auto/model.safetensors").is_file()
