"""Named tensors of an engine: from traced parameters, they are the tensors of the exported file, bit for bit."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant import export
from jaxquant.export import FORMATS, SCHEMES, SafetensorsFile, Source, named_source, named_tensors
from jaxquant.export.gguf_file import GgufFile
from tests.export.models import shape_of
from tests.export.test_families import FAMILY_SHAPES, source_of

K_TYPES = ("gguf_q4_k", "gguf_q4_k_m", "gguf_q5_k", "gguf_q5_k_m", "gguf_q6_k")
ON_HOST = "gguf_mxfp4"
CASES = [pytest.param(name, marks=pytest.mark.slow if name in K_TYPES else ()) for name in FORMATS if name != ON_HOST]


def small(name):
    """Return a source of one layer for a format, with an amax of each input."""
    shape = shape_of(64, 256, 256, 1, 4, 2, 64)
    if name in ("mxfp4", ON_HOST):
        shape = dataclasses.replace(FAMILY_SHAPES["GptOssForCausalLM"], num_layers=1)
    made = source_of(shape)
    amax = {module: 1.0 + index for index, module in enumerate(made.layout.linears)}
    return dataclasses.replace(made, input_amax=amax)


def check_file(found, path, is_folder):
    """Check that the tensors have the names, dtypes, shapes and bits of a file.

    Traced tensors can be int32 instead of int64, and scales float32 instead of bfloat16.
    """
    file: Any = SafetensorsFile(path / "model.safetensors") if is_folder else GgufFile(path)
    wanteds = {**file} if is_folder else {name: file.raw(name) for name in file.tensors}
    assert found.keys() == wanteds.keys()
    for name, wanted in wanteds.items():
        array = np.asarray(found[name])
        if {wanted.dtype.name, array.dtype.name} in ({"int64", "int32"}, {"bfloat16", "float32"}):
            assert name.endswith((".weight_shape", ".weight_scale"))
            np.testing.assert_array_equal(array, wanted.astype(array.dtype))
            continue
        if is_folder:
            assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape), name
        assert array.tobytes() == wanted.tobytes(), name


@pytest.mark.parametrize("name", CASES)
def test_traced_tensors_are_the_tensors_of_the_file(tmp_path, name):
    made = small(name)
    weights = {tensor: jnp.asarray(made.read(tensor)) for tensor in made.layout.tensors}

    @jax.jit
    def refit(weights, amax):
        return named_tensors(dataclasses.replace(made, read=weights.__getitem__, input_amax=amax), name)

    export.export(made, tmp_path / "out", name)
    check_file(refit(weights, made.input_amax), tmp_path / "out", name in SCHEMES)


@pytest.mark.parametrize(
    ("name", "string"),
    [
        ("ct_int8", "int8"), ("ct_fp8_static", "fp8"), ("ct_nvfp4", "nvfp4w"), ("fp8_block", "fp8_blockw"),
        ("ct_w4a16", "int4w"), ("ct_mxfp4", "mxfp4w"), ("gguf_q8_0", "ggml_q8_0"), ("ct_int8", "fp8_current"),
    ],
)  # fmt: skip
def test_converted_kernels_are_traced_as_they_are_written(tmp_path, name, string):
    model, x, config = nn.Sequential([nn.Dense(256), nn.Dense(256)]), jnp.ones((1, 256)), {"quantization": string}
    variables = jax.jit(model.init)(jax.random.key(0), x)
    if string == "fp8":
        variables = jaxquant.calibrate(model, variables, config, [x])
    names = {("layers_0/kernel", "layers_1/kernel"): {"blk.q.weight": 128, "blk.k.weight": 384}}
    names |= {"layers_*/bias": "blk.{}.bias"}

    def source(variables):
        params = jaxquant.convert(model, variables, config, x)["params"]
        amax = {"*/kernel": params["layers_0"]["bias"].max() + 2}
        return named_source(params, names, {}, input_amax=amax, metadata={})

    export.export(source(variables), tmp_path / "out", name)
    check_file(jax.jit(lambda v: named_tensors(source(v), name))(variables), tmp_path / "out", name in SCHEMES)


def test_a_source_in_host_memory_has_the_tensors_of_its_file(tmp_path):
    for name in ("ct_w4a16", "gguf_q8_0"):
        export.export(small(name), tmp_path / name, name)
        check_file(named_tensors(small(name), name), tmp_path / name, name in SCHEMES)


def test_formats_that_no_device_encodes_are_refused():
    with pytest.raises(ValueError, match="format 'q8' is not known; use one of hf, ct_fp8"):
        named_tensors(small("hf"), "q8")
    made = small(ON_HOST)
    traced = lambda weights: named_tensors(Source(made.layout, weights.__getitem__), ON_HOST)  # noqa: E731
    weights = {tensor: jax.ShapeDtypeStruct(shape, jnp.float32) for tensor, shape in made.layout.tensors.items()}
    with pytest.raises(NotImplementedError, match="is encoded in MXFP4 on the host"):
        jax.eval_shape(traced, weights)
