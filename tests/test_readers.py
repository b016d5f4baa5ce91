"""Hypothesis tests: each reader of files or configs reads a mutated file, or raises a documented error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxquant.compat.max import parse_quant_config
from jaxquant.compat.mlc_presets import read_mlc_quantization
from jaxquant.config.loader import load_yaml
from jaxquant.config.mixed_precision import load_mixed_precision
from jaxquant.core.typed import build
from jaxquant.export import DecoderShape, HfFolder, Source, export, layout_of, open_gguf
from jaxquant.export.hf import read_quantization
from jaxquant.export.vocabulary import byte_vocabulary
from jaxquant.training.config import TrainConfig
from tests.export import hf_published as hf

ROOT = Path(__file__).parents[1]
DOCUMENTED = (ValueError, TypeError, NotImplementedError, FileNotFoundError)
QUICK = hypothesis.settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
PLACES, BYTES = st.floats(0, 1, exclude_max=True), st.binary(max_size=8)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["", "block", "group", "FP8", "re:(", "["]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def is_read(call: Callable[[], Any]) -> bool:
    """Return whether an input is read; fail if the error is undocumented or has no message."""
    try:
        call()
    except DOCUMENTED as refused:
        error = refused
    else:
        return True
    assert type(error) in DOCUMENTED, repr(error)
    assert str(error)
    return False


def mutate(data: bytes, edits: list[tuple[float, int, bytes]], upto: float = 1.0) -> bytes:
    """Replace bytes at positions, which are fractions of the data's length."""
    for where, count, new in edits:
        place = int(where * upto * len(data))
        data = data[:place] + new + data[place + count :]
    return data


def mutate_value(value: Any, where: float, new: Any) -> Any:
    """Replace one leaf or one mapping inside a JSON value."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not keys:
        return new
    place, rest = divmod(where * len(keys), 1)
    key = keys[int(place)]
    copy = value.copy()
    copy[key] = new if rest < 0.3 else mutate_value(value[key], rest, new)
    return copy


EDITS = st.lists(st.tuples(PLACES, st.integers(0, 8), BYTES), min_size=1, max_size=4)


@QUICK
@hypothesis.given(st.sampled_from(sorted(ROOT.glob("configs/**/*.yml")) + sorted(ROOT.glob("configs/intmp/*"))), EDITS)
def test_configs(tmp_path: Path, seed: Path, edits: list[Any]):
    path = tmp_path / f"mutated{seed.suffix}"
    path.write_bytes(mutate(seed.read_bytes(), edits))
    is_read(lambda: load_mixed_precision(path) if seed.suffix == ".json" else build(TrainConfig, load_yaml(path)))


PUBLISHED = [hf.CT_DYNAMIC, hf.KIMI_K3, hf.FBGEMM, hf.KIMI_NVFP4, hf.GPT_OSS, hf.MXFP8, hf.QUARK, hf.DEEPSEEK]
WEIGHTS: dict[str, Any] = {
    "layers.0.mlp.down_proj.weight_scale": ((8, 1), "float32"),
    "embed_tokens.weight": ((8, 8), "bfloat16"),
}


@QUICK
@hypothesis.given(st.sampled_from(PUBLISHED), PLACES, VALUES)
def test_quantizations_of_checkpoints(published: Any, where: float, new: Any):
    config = {"num_hidden_layers": 2, "quantization_config": mutate_value(published, where, new)}
    is_read(lambda: read_quantization(config, WEIGHTS))
    is_read(lambda: parse_quant_config(config, WEIGHTS, "float8_e4m3fn"))
    is_read(lambda: read_mlc_quantization("fp8_e4m3fn_bf16_block_scale", config))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one small model as a folder with fp8 blocks and as a GGUF file."""
    shape, rng = DecoderShape(320, 32, 32, 1, 2, 1, 16, max_position_embeddings=16), np.random.default_rng(0)
    tensors = {name: rng.normal(size=size).astype(np.float32) for name, size in layout_of(shape).tensors.items()}
    folder = tmp_path_factory.mktemp("checkpoints")
    for target, kind in (("hf", "fp8_block"), ("m.gguf", "gguf_q8_0")):
        export(Source(layout_of(shape), tensors.__getitem__, byte_vocabulary(320)), folder / target, kind)
    return folder


def read_all(opened: Any) -> None:
    for name, size in opened.layout.tensors.items():
        assert opened.read(name).shape == size


@QUICK
@hypothesis.given(st.sampled_from(["model.safetensors", "config.json"]), EDITS)
def test_safetensors_folders(checkpoints: Path, name: str, edits: list[Any]):
    path = checkpoints / "hf" / name
    seed = path.read_bytes()
    upto = (8 + int.from_bytes(seed[:8], "little")) / len(seed) if name.endswith("safetensors") else 1.0
    try:
        path.write_bytes(mutate(seed, edits, upto))
        is_read(lambda: read_all(HfFolder(checkpoints / "hf")))
    finally:
        path.write_bytes(seed)


@QUICK
@hypothesis.given(EDITS)
def test_gguf_files(checkpoints: Path, edits: list[Any]):
    seed, path = (checkpoints / "m.gguf").read_bytes(), checkpoints / "mutated.gguf"
    path.write_bytes(mutate(seed, edits, (seed.index(b"output_norm") + 600) / len(seed)))
    is_read(lambda: read_all(open_gguf(path)))


def test_what_is_not_mutated_is_read(checkpoints: Path):
    read_all(HfFolder(checkpoints / "hf"))
    read_all(open_gguf(checkpoints / "m.gguf"))
    assert all(
        is_read(lambda each=each: read_quantization({"quantization_config": each}, WEIGHTS)) for each in PUBLISHED
    )
    with pytest.raises(AssertionError):
        is_read(lambda: (_ for _ in ()).throw(UnicodeDecodeError("utf-8", b"x", 0, 1, "no")))
