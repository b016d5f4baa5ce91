"""Quantized checkpoints: no bit is lost, what does not fit is refused, and every device reads its own part."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jaxquant.core.paths import tree_bytes
from jaxquant.core.qtensor import QTensor
from jaxquant.formats.packing import PACKED_DTYPES
from jaxquant.serving import placement
from jaxquant.serving.checkpoint import load, read_manifest, save
from jaxquant.serving.leaves import flatten
from tests import numerics
from tests.lowering import equations
from tests.serving.trees import abstract, assert_same, every_kind, quantized, raw_bytes

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {"rules": [{"path": ".*/wo", "recipe": "int8w"}]}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of every kind of leaf; not to be changed."""
    directory = tmp_path_factory.mktemp("written") / "checkpoint"
    save(directory, every_kind(), CONFIG, extra={"model": {"emb_dim": 64}})
    return directory


def test_every_kind_of_leaf_comes_back_bit_for_bit(written: Path):
    found = load(written, like=abstract(every_kind()))
    assert_same(found.params, every_kind())
    assert (found.config, found.extra, found.version) == (CONFIG, {"model": {"emb_dim": 64}}, 2)
    assert_same(load(written, verify=False).params, every_kind())


def test_any_tool_opens_the_arrays(written: Path):
    """The reader of the safetensors package knows every name; four-bit elements are bytes of two."""
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


# What cannot be saved.

ONE = jnp.ones((2,))
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no tree": ([ONE], TypeError, "params are list"),
    "nothing": ({}, ValueError, "empty dict"),
    "an empty part": ({"a": {"b": {}}}, ValueError, "a/b is an empty dict"),
    "a key with a slash": ({"a": {"b/c": ONE}}, ValueError, "a has the key 'b/c'"),
    "an empty key": ({"": ONE}, ValueError, "key ''"),
    "a key that is a number": ({"a": {3: ONE}}, TypeError, "a has the key 3, a int"),
    "a number": ({"a": {"b": 2.0}}, TypeError, "a/b is float"),
    "a list": ({"a": [ONE]}, TypeError, "a is list"),
    "a shape": ({"a": jax.ShapeDtypeStruct((2,), "float32")}, TypeError, "a is ShapeDtypeStruct"),
    "no elements": ({"a": jnp.ones((0, 3))}, ValueError, r"a has shape \(0, 3\)"),
    "64 bits": ({"a": np.ones(3)}, ValueError, "a is float64"),
    "text": ({"a": np.array(["x"], object)}, ValueError, "a is of dtype object"),
    "a random key": ({"a": jax.random.key(0)}, ValueError, "a is of dtype key<fry>"),
    "the name of the header's own row": ({"__metadata__": ONE}, ValueError, "tensor '__metadata__' of float32 cannot"),
    "two bits": ({"a": jnp.ones((4,), jnp.int2)}, ValueError, "a is of dtype int2"),
    "four bits without an axis": ({"a": jnp.int4(1)}, ValueError, "a is a single int4"),
    "another zero point": (
        {"a": QTensor(jnp.ones((2, 3), jnp.int8), jnp.ones((1, 3)), jnp.ones((1, 1), jnp.int8))},
        ValueError,
        r"a has a zero_point of int8\(1, 1\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_checkpoint_does_not_keep_is_refused_by_name(case: str, tmp_path: Path):
    params, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        save(tmp_path / "made", params, CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_is_not_json_is_refused(tmp_path: Path):
    with pytest.raises(TypeError, match="config cannot be written as JSON"):
        save(tmp_path / "made", {"a": ONE}, {"dtype": jnp.float32})
    with pytest.raises(ValueError, match="extra cannot be written as JSON"):
        save(tmp_path / "made", {"a": ONE}, CONFIG, extra={"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_left_alone(tmp_path: Path):
    (tmp_path / "made").mkdir()
    with pytest.raises(FileExistsError, match=r"made exists; give a folder that does not"):
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
    with pytest.raises(FileNotFoundError, match="made does not exist"):
        load(tmp_path / "made")
    save(tmp_path / "made", {"a": ONE}, CONFIG)
    assert_same(load(tmp_path / "made").params, {"a": ONE})
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_users_own_partial_folder_is_left_alone(tmp_path: Path):
    (tmp_path / "made.partial").mkdir()
    (tmp_path / "made.partial/thesis.txt").write_text("mine")
    save(tmp_path / "made", {"a": ONE}, CONFIG)
    assert (tmp_path / "made.partial/thesis.txt").read_text() == "mine"


# What does not fit the model.


def _replaced(path: str, leaf: Any) -> dict[str, Any]:
    tree = abstract(every_kind())
    *parents, last = path.split("/")
    node = tree
    for key in parents:
        node = node.setdefault(key, {})
    if leaf is None:
        del node[last]
    else:
        node[last] = leaf
    return tree


WO = "layers/mlp/wo/kernel"
NOT_LIKE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a leaf more": (
        _replaced("layers/mlp/wi_1", {"kernel": jax.ShapeDtypeStruct((2,), "int8")}),
        ["missing in the checkpoint: layers/mlp/wi_1/kernel", "not in the model: none"],
    ),
    "a leaf less": (_replaced(WO, None), ["missing in the checkpoint: none", f"not in the model: {WO}"]),
    "another name": (
        _replaced("norm", {"weight": jax.ShapeDtypeStruct((5,), "bfloat16"), "on": jax.ShapeDtypeStruct((2,), bool)}),
        ["missing in the checkpoint: norm/weight", "not in the model: norm/scale"],
    ),
    "another shape": (
        _replaced("norm/scale", jax.ShapeDtypeStruct((6,), "bfloat16")),
        ["norm/scale: shape (5,) in the checkpoint, (6,) in the model"],
    ),
    "another dtype": (
        _replaced("norm/scale", jax.ShapeDtypeStruct((5,), "float32")),
        ["norm/scale: dtype bfloat16 in the checkpoint, float32 in the model"],
    ),
    "another element type and another scale": (
        _replaced(WO, abstract(quantized("int4", (4, 6, 8), (4, 2, 8), zero_point=True))),
        [
            f"{WO}: dtype int8 in the checkpoint, int4 in the model; "
            "scale_shape (4, 1, 8) in the checkpoint, (4, 2, 8) in the model"
        ],
    ),
    "no zero point": (
        _replaced(WO, abstract(quantized("int8", (4, 6, 8), (4, 1, 8)))),
        [f"{WO}: zero_point True in the checkpoint, False in the model"],
    ),
    "a float kernel": (
        _replaced(WO, jax.ShapeDtypeStruct((4, 6, 8), "float32")),
        [
            f"{WO}: role quantized in the checkpoint, array in the model; "
            "dtype int8 in the checkpoint, float32 in the model"
        ],
    ),
}


@pytest.mark.parametrize("case", NOT_LIKE)
def test_a_checkpoint_that_does_not_fit_is_an_error_with_both_sides(case: str, written: Path):
    like, lines = NOT_LIKE[case]
    with pytest.raises(ValueError, match="does not fit the model") as caught:
        load(written, like=like)
    assert str(written) in str(caught.value)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == lines


# No floats, and every device its part.


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_unpacking_makes_no_float(dtype: str):
    unpacker = placement._unpacker(dtype, 63, jnp.zeros(()).sharding)
    jaxpr = unpacker.trace(jax.ShapeDtypeStruct((8, 32), "uint8")).jaxpr.jaxpr
    made = {variable.aval.dtype for eqn in equations(jaxpr) for variable in eqn.outvars}
    assert jnp.dtype(dtype) in made
    assert all(jax.dtypes.itemsize_bits(kind) <= 8 for kind in made), made


def test_loading_makes_no_float_of_a_kernels_size(tmp_path: Path, monkeypatch):
    """Everything that loading puts on a device passes ``device_put`` or a jitted function whose outputs are counted."""
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


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process with eight simulated devices found, see ``sharded_worker``."""
    folder = tmp_path_factory.mktemp("sharded")
    words = [sys.executable, "-m", "tests.serving.sharded_worker", str(folder)]
    # What is freed is given back at once, so that resident memory is memory in use.
    options = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | options
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_each_array_lies_as_its_sharding_says(eight: dict[str, Any]):
    assert eight["same"] == {"from one": True, "from eight": True, "explicit": True, "replicated": True, "back": True}
    assert eight["asked"]["layers/mlp/kernel/qvalue"] == [[4, 16, 32], "int4"]
    assert eight["asked"]["layers/mlp/kernel/scale"] == [[4, 1, 32], "float32"]
    assert eight["shards"] == {"int4": [4, 16, 4], "float8": [2, 64], "odd": [1, 7], "tiles": [16, 3]}
    assert eight["kinds"] == {"from one": True, "explicit": True}


def test_a_sharding_that_does_not_fit_is_an_error(eight: dict[str, Any]):
    assert eight["errors"]["half a byte"].startswith(
        "ValueError: odd/qvalue: its sharding cuts axis 1 of size 24 in parts of 3 elements of int4"
    )
    assert "ValueError: odd/qvalue of shape (8, 7) does not take its sharding" in eight["errors"]["does not divide"]
    assert eight["errors"]["no sharding"].startswith("TypeError: sharding gave str for")


def test_a_device_reads_its_part_and_not_the_whole(eight: dict[str, Any]):
    """An array of 64 MiB in parts of 8 MiB: beside the parts on the devices, the host holds few, never all of them."""
    host = eight["host"]
    assert host["grown"] < host["array"] + numerics.reading_bytes(host["part"], host["chunk"])


def test_two_processes_save_one_checkpoint_together(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    logs = [tmp_path / f"{index}.log" for index in range(2)]
    started = []
    try:
        for index, log in enumerate(logs):
            words = [sys.executable, "-m", "tests.serving.processes_worker", str(tmp_path / "made"), port, str(index)]
            with log.open("w") as out:
                started.append(subprocess.Popen(words, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT))
        codes = [process.wait(timeout=180) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0, 0], [log.read_text()[-2000:] for log in logs]
    assert_same(load(tmp_path / "made").params["rows"], quantized("int4", (8, 6), (1, 6)))
