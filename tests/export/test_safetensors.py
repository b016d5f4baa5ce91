"""The safetensors container, compared with its own library, and damaged headers."""

import importlib.metadata
import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxquant.export.safetensors import DTYPES, SafetensorsFile, SafetensorsWriter

ARRAYS = {
    name: (np.arange(24) % 7).astype(np.uint8).view(np.uint8)[: 24 // dtype.itemsize * dtype.itemsize].view(dtype)
    for name, dtype in DTYPES.items()
    if name != "BOOL" and ("FNUZ" not in name or importlib.metadata.version("safetensors") >= "0.8")
}


def write(path, data=b"\0" * 8, header=None, length=None):
    text = (header if isinstance(header, bytes) else json.dumps(header).encode()) if header is not None else b"{}"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="U8", shape=(8,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_every_type_comes_back_and_the_library_reads_it(tmp_path):
    writer = SafetensorsWriter(tmp_path / "a", len(ARRAYS) + 1, {"format": "pt"})
    for name, array in ARRAYS.items():
        writer.add(name, array)
    writer.add("empty", np.empty((0, 3), np.float32))
    writer.close()
    file = SafetensorsFile(tmp_path / "a")
    assert file.metadata == {"format": "pt"}
    for name, array in ARRAYS.items():
        assert file[name].dtype == array.dtype
        np.testing.assert_array_equal(file[name].view(np.uint8), array.view(np.uint8))
    assert file["empty"].shape == (0, 3)
    with safe_open(tmp_path / "a", "numpy") as theirs:
        for name in ("F32", "I64", "U8", "F16"):
            np.testing.assert_array_equal(theirs.get_tensor(name), ARRAYS[name])
    save_file({"x": ARRAYS["F32"], "y": ARRAYS["BF16"]}, tmp_path / "b")
    file = SafetensorsFile(tmp_path / "b")
    np.testing.assert_array_equal(file["x"], ARRAYS["F32"])
    assert file["y"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[" * 100_000, "invalid JSON"),
        (b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), "has 'a' twice in its header"),
        ({"a": entry() | {"scale": 2.0}}, "tensor 'a' must have dtype, shape and data_offsets, got .*scale"),
        ({"a": entry("Q9")}, "unknown variant `Q9`"),
        ({"a": entry(shape=(2**40, 2**40))}, "overflow"),
        (
            {"a": entry(shape=(2**60, 0), offsets=(0, 0)), "b": entry()},
            "tensor 'a' of type U8 and shape .* is not supported",
        ),
        ({"a": entry(shape=(1,) * 40 + (8,))}, "tensor 'a' of type U8 and shape"),
        ({"a": entry(offsets=(0, 9))}, "invalid shape, data type, or offset"),
        ({"a": entry("F4", (1,), (0, 8))}, "not .* at a byte boundary"),
        ({"a": entry(), "b": entry()}, "invalid offset for tensor"),
        ({"a": entry(shape=(4,), offsets=(0, 4))}, "not fully covered"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, message):
    with pytest.raises(ValueError, match=message):
        SafetensorsFile(write(tmp_path / "a", header=header))


def test_a_length_that_lies_is_refused(tmp_path):
    (tmp_path / "b").write_bytes(b"\1\0")
    lying = [write(tmp_path / str(length), header={}, length=length) for length in (0, 2**40)]
    for path in (*lying, tmp_path / "b"):
        with pytest.raises(ValueError, match="not a safetensors file"):
            SafetensorsFile(path)
