"""Quantized checkpoints: no bit is lost, nothing damaged loads, and every device reads its own part."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxquant.core.qtensor import QTensor
from jaxquant.core.trees import tree_bytes
from jaxquant.formats.packing import PACKED_DTYPES
from jaxquant.serving import manifest as manifests
from jaxquant.serving import placement
from jaxquant.serving.checkpoint import load, read_manifest, save
from jaxquant.serving.leaves import flatten
from tests import numerics
from tests.lowering import equations
from tests.serving.trees import abstract, assert_same, contents_of, every_kind, quantized, sign

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {"rules": [{"path": ".*/wo", "recipe": "int8w"}]}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of every kind of leaf; not to be changed."""
    directory = tmp_path_factory.mktemp("written") / "checkpoint"
    save(directory, every_kind(), CONFIG, extra={"model": {"emb_dim": 64}})
    return directory


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copy"))


def test_every_kind_of_leaf_comes_back_bit_for_bit(written: Path):
    found = load(written, like=abstract(every_kind()))
    assert_same(found.params, every_kind())
    assert (found.config, found.extra, found.version) == (CONFIG, {"model": {"emb_dim": 64}}, 1)
    assert_same(load(written, verify=False).params, every_kind())


def test_a_manifest_is_read_without_arrays(copy: Path):
    shutil.rmtree(copy / "params")
    found = read_manifest(copy)
    assert found.config == CONFIG
    leaves = {leaf.path: leaf for leaf in found.leaves}
    assert leaves.keys() == flatten(every_kind()).keys()
    wi = leaves["layers/mlp/wi_0/kernel"]
    assert (wi.role, wi.dtype, wi.shape, wi.scale_shape) == ("quantized", "int4", (4, 8, 6), (4, 2, 6))
    assert wi.bytes == 4 * 8 * 3 + 4 * 2 * 6 * 4
    embedding = leaves["token_embedder/embedding"]
    assert (embedding.role, embedding.dtype, embedding.shape, embedding.bytes) == ("array", "float32", (4, 3), 48)


def test_bytes_on_disk_are_those_of_the_format(tmp_path: Path):
    params = {f"layer_{i}": {"kernel": quantized("int4", (64, 256), (1, 256), seed=i)} for i in range(3)}
    save(tmp_path / "made", params, CONFIG)
    arrays = [f"{path}/{part}" for path in flatten(params) for part in ("qvalue", "scale")]
    size = sum(path.stat().st_size for path in (tmp_path / "made").rglob("*") if path.is_file())
    expected = sum(tree_bytes(leaf) for leaf in flatten(params).values())
    assert read_manifest(tmp_path / "made").bytes == expected == 3 * (64 * 128 + 4 * 256)
    assert expected <= size <= expected + numerics.checkpoint_overhead(arrays)


def test_progress_is_told(tmp_path: Path):
    told: list[tuple[int, int, str]] = []
    save(tmp_path / "made", every_kind(), CONFIG, progress=lambda *words: told.append(words))
    load(tmp_path / "made", progress=lambda *words: told.append(words))
    for what in ("writing", "summing", "verifying", "loading"):
        steps = [(done, total) for done, total, name in told if name == what]
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1] > 0, what


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
    "two bits": ({"a": jnp.ones((4,), jnp.int2)}, ValueError, "a is int2, which does not pack"),
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
        patch.setattr("jaxquant.serving.checkpoint.write_manifest", fail)
        with pytest.raises(OSError, match="disk full"):
            save(tmp_path / "made", {"a": ONE}, CONFIG)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "made.jaxquant-partial/params").mkdir(parents=True)
    (tmp_path / "made.jaxquant-partial/params/left").write_text("over")
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


# Damage. Each is an error, and none loads.


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _refused(directory: Path, **options: Any) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        load(directory, **options)
    assert str(directory) in str(caught.value)
    return str(caught.value)


def test_a_flipped_byte_in_any_file_is_found(copy: Path):
    for path in _files(copy):
        whole = path.read_bytes()
        for offset in {0, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
            path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0x01]) + whole[offset + 1 :])
            assert path.name in _refused(copy) or path.name == manifests.NAME, (path, offset)
        path.write_bytes(whole)
    load(copy)


def test_every_byte_of_the_manifest_counts(tmp_path: Path):
    save(tmp_path / "made", {"a": quantized("int4", (2, 2), (1, 1))}, {"quantization": "int4w"})
    path = tmp_path / "made" / manifests.NAME
    whole = path.read_bytes()
    for offset, flip in itertools.product(range(len(whole)), (0x01, 0x07)):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ flip]) + whole[offset + 1 :])
        with pytest.raises(ValueError, match=r"copy the checkpoint again|install a newer"):
            read_manifest(tmp_path / "made")


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("damage", ["cut", "emptied", "longer", "gone"])
def test_a_file_cut_short_or_gone_is_named(damage: str, verify: bool, copy: Path):
    for path in _files(copy):
        whole = path.read_bytes()
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes({"cut": whole[: len(whole) // 2], "emptied": b"", "longer": whole + b"\0"}[damage])
        assert path.name in _refused(copy, verify=verify)
        path.write_bytes(whole)


def test_an_extra_file_is_named(copy: Path):
    (copy / "params/notes.txt").write_text("mine")
    assert "params/notes.txt is no file of the checkpoint" in _refused(copy)


def _signed(change: Callable[[Path, dict[str, Any]], None]) -> Callable[[Path], None]:
    """Change the manifest's contents and give it sums that fit, as a faulty writer would."""

    def damage(directory: Path) -> None:
        contents = contents_of(directory)
        change(directory, contents)
        sign(directory, contents)

    return damage


def _row(path: str, **fields: Any) -> Callable[[Path], None]:
    return _signed(lambda _, contents: next(r for r in contents["leaves"] if r["path"] == path).update(fields))


def _stored_again(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Write other arrays under the same manifest."""

    def damage(directory: Path, _: Any) -> None:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
            arrays = {name: np.asarray(array) for name, array in checkpointer.restore(directory / "params").items()}
            change(arrays)
            shutil.rmtree(directory / "params")
            checkpointer.save(directory / "params", args=ocp.args.PyTreeSave(arrays))

    return _signed(damage)


def _drop(path: str) -> Callable[[Path], None]:
    return _signed(lambda _, c: c.update(leaves=[row for row in c["leaves"] if row["path"] != path]))


def _newer(directory: Path) -> None:
    """A later version, of which nothing else needs to be as it is now."""
    (directory / manifests.NAME).write_text(json.dumps({"format": manifests.FORMAT, "version": 2, "tables": "x.bin"}))
    (directory / "x.bin").write_bytes(b"\1")


def _write(text: str) -> Callable[[Path], Any]:
    return lambda directory: (directory / manifests.NAME).write_text(text)


NORM, WO_SCALE = "norm.scale", "layers.mlp.wo.kernel.scale"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "leaf gone from the arrays": (_stored_again(lambda a: a.pop(NORM)), "leaf norm/scale is missing"),
    "scale gone from the arrays": (_stored_again(lambda a: a.pop(WO_SCALE)), f"leaf {WO}/scale is missing"),
    "leaf too many": (_stored_again(lambda a: a.update(more=np.ones(2))), "params/more is no leaf of the checkpoint"),
    "another shape": (
        _stored_again(lambda a: a.update({NORM: a[NORM][:4]})),
        r"leaf norm/scale is stored as bfloat16\(4,\) .* says bfloat16\(5,\)",
    ),
    "leaf gone from the table": (_drop("norm/scale"), "params/norm.scale is no leaf"),
    "another shape in the table": (_row("norm/scale", shape=[6]), r"stored as bfloat16\(5,\) .* says bfloat16\(6,\)"),
    "zero point gone from the table": (_row(WO, zero_point=False), "layers.mlp.wo.kernel.zero_point is no leaf"),
    "no field of a leaf": (_signed(lambda _, c: c["leaves"][0].pop("dtype")), "leaf '.*' needs field 'dtype'"),
    "newer version": (_newer, "is of format version 2 and this jaxquant reads up to 1"),
    "version 0": (_signed(lambda _, c: c.update(version=0)), "has version 0, which no format has"),
    "another format": (_write('{"format": "gguf", "version": 1}'), "its format is 'gguf'"),
    "not JSON": (_write("not json"), "is not JSON"),
    "no manifest": (lambda directory: (directory / manifests.NAME).unlink(), "has no jaxquant.json"),
    "no arrays": (lambda directory: shutil.rmtree(directory / "params"), "is missing from the checkpoint"),
}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_checkpoint_is_a_clear_error(case: str, verify: bool, copy: Path):
    damage, message = DAMAGES[case]
    damage(copy)
    with pytest.raises(ValueError, match=message) as caught:
        load(copy, verify=verify)
    assert str(copy) in str(caught.value)


def test_what_is_no_checkpoint_at_all(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "is not a quantized checkpoint" in _refused(tmp_path / "empty")
    (tmp_path / "file").write_text("{}")
    assert "is not a quantized checkpoint" in _refused(tmp_path / "file")


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
    original = placement.from_stored

    def watched(*args: Any) -> Any:
        made.extend(array for array in jax.live_arrays() if id(array) not in arrays_before)
        made.append(original(*args))
        return made[-1]

    monkeypatch.setattr("jaxquant.serving.checkpoint.from_stored", watched)
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
