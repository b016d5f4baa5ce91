"""The container against the library that owns it, and headers that lie."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxquant.export.safetensors import DTYPES, SafetensorsFile, SafetensorsWriter

ARRAYS = {
    name: (np.arange(24) % 7).astype(np.uint8).view(np.uint8)[: 24 // dtype.itemsize * dtype.itemsize].view(dtype)
    for name, dtype in DTYPES.items()
    if name != "BOOL"
}


def write(path, data=b"\0" * 8, header=None, length=None):
    text = (header if isinstance(header, bytes) else json.dumps(header).encode()) if header is not None else b"{}"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="U8", shape=(8,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_every_type_comes_back(tmp_path):
    writer = SafetensorsWriter(tmp_path / "a", len(ARRAYS) + 2, {"format": "pt"})
    for name, array in ARRAYS.items():
        writer.add(name, array)
    writer.add("F4", np.arange(6, dtype=np.uint8).reshape(2, 3), "F4")
    writer.add("empty", np.empty((0, 3), np.float32))
    writer.close()
    file = SafetensorsFile(tmp_path / "a")
    assert file.metadata == {"format": "pt"}
    for name, array in ARRAYS.items():
        assert file[name].dtype == array.dtype
        np.testing.assert_array_equal(file[name].view(np.uint8), array.view(np.uint8))
    assert (file.entries["F4"].shape, file["F4"].tolist()) == ((2, 6), [[0, 1, 2], [3, 4, 5]])
    assert file["empty"].shape == (0, 3)


def test_the_library_reads_it(tmp_path):
    writer = SafetensorsWriter(tmp_path / "a", 3, {"format": "pt"})
    arrays = {name: ARRAYS[name] for name in ("F32", "I64", "U8", "F16")}
    for name, array in arrays.items():
        writer.add(name, array)
    writer.close()
    found = load_file(tmp_path / "a")
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())
    save_file({"x": ARRAYS["F32"], "y": ARRAYS["BF16"]}, tmp_path / "b")
    file = SafetensorsFile(tmp_path / "b")
    np.testing.assert_array_equal(file["x"], ARRAYS["F32"])
    assert file["y"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[]", "a header that is list"),
        (b"{", "not JSON"),
        (b'{"a":1,"a":2}', "a name stands there twice"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ({"__metadata__": {"a": 1}}, "__metadata__ that is not"),
        ({"a": 1}, "must have dtype, shape and data_offsets"),
        ({"a": entry() | {"more": 1}}, "must have dtype, shape and data_offsets"),
        ({"a": entry("Q9")}, "is of type 'Q9'"),
        ({"a": entry(shape=(-1, -8))}, "the shape"),
        ({"a": entry(shape=(2**40, 2**40))}, "the shape"),
        ({"a": entry(shape=(1e400,))}, "the shape|not JSON"),
        ({"a": entry(shape=(True, 8))}, "the shape"),
        ({"a": entry(offsets=(0, 9))}, "outside the 8 bytes"),
        ({"a": entry(offsets=(8, 0))}, "outside the 8 bytes"),
        ({"a": entry(offsets=(-8, 0))}, "outside the 8 bytes"),
        ({"a": entry(shape=(4,))}, "takes 4 bytes"),
        ({"a": entry("F4", (1,), (0, 8))}, "does not fill whole bytes"),
        ({"a": entry("F6_E2M3", (2, 2), (0, 3))}, "does not fill whole bytes"),
        ({"a": entry(), "b": entry()}, "overlaps the one before it"),
        ({"a": entry(shape=(4,), offsets=(4, 8))}, "leaves a gap"),
        ({"a": entry(shape=(4,), offsets=(0, 4))}, "8 bytes of tensors and its header places 4"),
        ({}, "8 bytes of tensors and its header places 0"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, message):
    with pytest.raises(ValueError, match=message):
        SafetensorsFile(write(tmp_path / "a", header=header))


@pytest.mark.parametrize("length", [0, 3, 2**40, 2**64 - 1])
def test_a_length_that_lies_is_refused(tmp_path, length):
    with pytest.raises(ValueError, match=r"not a safetensors file|not JSON"):
        SafetensorsFile(write(tmp_path / "a", header={}, length=length))
    (tmp_path / "b").write_bytes(b"\1\0")
    with pytest.raises(ValueError, match="not a safetensors file"):
        SafetensorsFile(tmp_path / "b")
