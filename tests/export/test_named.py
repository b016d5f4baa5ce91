"""Models of no known family: parameters reach each kind of format under the user's names, and read as they were."""

import re

import flax.linen as nn
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxquant
from jaxquant.core.qtensor import QTensor, dequantize
from jaxquant.export import SCHEMES, Layout, NamedFolder, Source, export, named_source
from jaxquant.export.gguf_file import GgufFile

FORMATS = ("ct_fp8_dynamic", "ct_w4a16", "fp8_block", "modelopt_fp8", "gguf_q8_0")
STRINGS = ("fp8_current", "int4w", "fp8_blockw", "fp8_current", "ggml_q8_0")
KEYS = {"general.architecture": "mine", "mine.block_count": 2}
SHAPES = {"q": (256, 4, 64), "kv": (256, 256), "out": (4, 64, 256), "gate": (256, 384), "up": (384, 256)}
RNG = np.random.default_rng(0)
PLAIN = {f"block_{n}": {name: np.float32(RNG.normal(size=size)) for name, size in SHAPES.items()} for n in (0, 1)}
PLAIN |= {"table": np.float32(RNG.normal(size=(8, 256))), "norms": np.float32(RNG.normal(size=(2, 256)))}
# There is no gate_proj, with which servers would fuse up_proj.
NAMES = {"table": "token_embd.weight", "norms": "blk.{}.norm.weight", "block_*/up": "blk.{}.up_proj.weight"}
NAMES |= {("block_*/q", "block_*/gate"): "blk.{}.q_gate.weight"}
NAMES |= {"block_*/kv": {"blk.{}.k.weight": 128, "blk.{}.v.weight": 128}, "block_*/*": "blk.{}.{}.weight"}
AXES = {"block_*/out": 2, "block_*/*": 1}


def read(path):
    """Return all tensors of a folder or GGUF file as float arrays."""
    if path.is_file():
        return {name: GgufFile(path).read(name) for name in GgufFile(path).tensors}
    return {name: np.float32(dequantize(x) if isinstance(x, QTensor) else x) for name, x in NamedFolder(path).items()}


@pytest.mark.parametrize("format", FORMATS)
def test_a_plain_dict_is_written_like_a_source_of_the_same_matrices(tmp_path, format):
    wanted = {"token_embd.weight": PLAIN["table"]}
    for n in (0, 1):
        q, kv, out, gate, up = (PLAIN[f"block_{n}"][name] for name in SHAPES)
        parts = {"q_gate": np.hstack([q.reshape(256, 256), gate]), "k": kv[:, :128], "v": kv[:, 128:], "up_proj": up}
        parts |= {"out": out.reshape(256, 256), "norm": PLAIN["norms"][n]}
        wanted |= {f"blk.{n}.{name}.weight": np.ascontiguousarray(x.T) for name, x in parts.items()}
    shapes = {name: x.shape for name, x in wanted.items()}
    linears = {name.removesuffix(".weight"): size for name, size in shapes.items() if len(size) == 2 and "blk" in name}
    source = named_source(PLAIN, NAMES, {}, input_axes=AXES, input_amax={"block_*/*": 3.0}, metadata=KEYS)
    assert (source.layout.tensors, source.layout.linears) == (shapes, linears)
    export(source, tmp_path / "a", format)
    layout = Layout(shapes, linears, {}, gguf=source.layout.gguf)
    export(Source(layout, wanted.__getitem__, None, dict.fromkeys(linears, 3.0)), tmp_path / "b", format)
    found, other = read(tmp_path / "a"), read(tmp_path / "b")
    assert found.keys() == shapes.keys()
    for name, x in wanted.items():
        np.testing.assert_array_equal(found[name], other[name])
        most = 0.12 if name.removesuffix(".weight") in linears else 2**-8  # int4 with 128 neighbours; bfloat16
        assert np.linalg.norm(found[name] - x) < most * np.linalg.norm(x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        q, k = nn.DenseGeneral((4, 64), name="q")(x), nn.DenseGeneral((2, 64), name="k")(x)
        gate, up = jnp.split(nn.Dense(512, use_bias=False, name="gate_up")(x), 2, -1)
        return nn.DenseGeneral(256, axis=(-2, -1), name="out")(q * jnp.repeat(k, 2, -2)) + gate * up, None


@pytest.mark.parametrize(("format", "string"), [*zip(FORMATS, STRINGS, strict=True)])
def test_converted_stacked_layers_read_as_they_were_converted(tmp_path, format, string):
    layers = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)(parent=None)
    x = jnp.ones((2, 256))
    shapes = jax.eval_shape(layers.init, jax.random.key(0), x, None)
    variables = jax.tree.map(lambda leaf: jnp.asarray(RNG.normal(size=leaf.shape), jnp.float32), shapes)
    params = jaxquant.convert(layers, variables, {"quantization": string}, x, None)["params"]
    names = {("q/kernel", "k/kernel"): "blk.{}.qk.weight", ("q/bias", "k/bias"): "blk.{}.qk.bias"}
    names |= {"gate_up/kernel": {"blk.{}.gate_proj.weight": 256, "blk.{}.up_proj.weight": 256}}
    names |= {"out/kernel": "blk.{}.out.weight", "*/bias": "blk.{1}.{0}.bias"}
    axes = {"q/kernel": 1, "k/kernel": 1, "out/kernel": 2, "*/bias": 0}
    source = named_source(params, names, {}, input_axes=axes, input_amax={"*/kernel": [2.0, 3.0]}, metadata=KEYS)
    assert source.input_amax["blk.1.qk"] == 3.0
    spec, joined = SCHEMES[format].spec if format in SCHEMES else None, source.quantized("blk.1.qk")
    is_kept = source.scaled_elements("blk.1.qk", spec.weight) is not None if spec else joined.codec == "q8_0"
    assert is_kept == (format != "modelopt_fp8")  # which has one scale for q and k
    export(source, tmp_path / "m", format)
    found = read(tmp_path / "m")
    for n in (0, 1):
        get = lambda name: np.asarray(dequantize(params[name]["kernel"]))[n]  # noqa: B023, E731
        parts = get("gate_up")[:, :256], get("gate_up")[:, 256:], get("out").reshape(256, 256)
        for name, array in zip(("gate_proj", "up_proj", "out"), parts, strict=True):
            np.testing.assert_array_equal(found[f"blk.{n}.{name}.weight"], array.T)
        fused = np.hstack([get(name).reshape(256, -1) for name in "qk"]).T
        error = np.linalg.norm(found[f"blk.{n}.qk.weight"] - fused) / np.linalg.norm(fused)
        assert error < 0.04 if format == "modelopt_fp8" else error == 0
        biases = np.hstack([params[name]["bias"][n].reshape(-1) for name in "qk"])
        np.testing.assert_allclose(found[f"blk.{n}.qk.bias"], biases, rtol=2**-8)


ONLY = {"table": "t", "norms": "n", "block_*/*": "{}.{}.weight"}
WRONG = [
    ({"names": {"table": "t"}}, "block_0/gate has no name; add it to names, or remove it from the parameters"),
    ({"names": {**ONLY, "z": "t"}}, "names has z, which matches no parameter; the nearest are none, because earlier"),
    ({"names": {**ONLY, "norms": "t"}}, "norms and table have the same name t; change one, or add {} for layers"),
    ({"names": {**ONLY, "table": "{}{}{}"}}, "{}{}{} has 3 indices of stacked axes, but these axes are {'table': (8, "),
    ({"names": {"block_*/kv": {"k": 1, "v": 8}}}, "block_0/kv of shape (256, 256) cannot be split into [1, 8] outp"),
    ({"names": {("norms", "block_1/*"): "t"}}, "names joins norms + block_1/*, but only some match with () as *"),
    ({"names": {("block_0/q", "block_0/up"): "t"}}, "block_0/q + block_0/up have the shapes [(256, 256), (256, "),
    ({"names": {**ONLY, "block_*/*": "{}.{}"}}, "block_0/gate has the name 0.gate, which must end in .weight; rename"),
    ({"input_axes": {**AXES, "norms": 1}}, "norms of shape (256,) is not a kernel with 1 input axes; set its number"),
    ({"floats": ["block_*/z"]}, "floats has block_*/z, which matches no parameter; the nearest are block_1/"),
]


def test_mistakes_in_names_are_errors_with_the_path_of_the_user():
    for arguments, message in WRONG:
        with pytest.raises(ValueError, match=re.escape(message)):
            named_source(PLAIN, **{"names": NAMES, "config": {}, "input_axes": AXES} | arguments)
    with pytest.raises(ValueError, match=r"^kernel of shape \(2, 3, 4\) is not a kernel with 1 input axes; set its n"):
        named_source({"kernel": np.ones((2, 3, 4))}, {"kernel": "x.weight"}, {})
    with pytest.raises(NotImplementedError, match=r"Q4_K_M requires a model of a known family; use Q4_K$"):
        export(named_source({"w": np.ones((8, 8))}, {"w": "w"}, {}, metadata=KEYS), "m", "gguf_q4_k_m")


def test_experts_are_one_tensor_of_a_gguf_file_and_matrices_in_the_layout_of_the_file_stay(tmp_path):
    experts = np.float32(RNG.normal(size=(2, 12, 64, 32)))
    source = named_source({"w": experts}, {"w": "blk.{}.up_exps.{}.weight"}, {}, input_axes={"w": -1}, metadata=KEYS)
    export(source, tmp_path / "m", "gguf_q8_0")
    assert GgufFile(tmp_path / "m").metadata.items() >= KEYS.items()
    assert gguf.GGUFReader(tmp_path / "m").fields["mine.block_count"].types == [gguf.GGUFValueType.UINT32]
    for n, x in enumerate(experts):
        np.testing.assert_allclose(GgufFile(tmp_path / "m").read(f"blk.{n}.up_exps.weight"), x, atol=0.02)


def test_a_folder_of_no_known_family_has_recipes_and_static_scales_and_refuses_integers(tmp_path):
    source = named_source(PLAIN, NAMES, {}, input_axes=AXES, input_amax={"block_*/*": 224.0}, floats=["block_*/up"])
    export(source, tmp_path / "m", "modelopt_fp8")
    folder = NamedFolder(tmp_path / "m")
    recipe, weight = folder.recipe("blk.0.out.weight"), folder["blk.0.out.weight"]
    assert (recipe.fwd.lhs.scaling, recipe.fwd.rhs.dtype) == ("static", weight.qvalue.dtype.name)
    assert (weight.input_scale, folder.recipe("blk.0.up_proj.weight")) == (0.5, None)
    assert folder["blk.0.up_proj.weight"].dtype == "bfloat16"
    (tmp_path / "n").mkdir()
    (tmp_path / "n/config.json").write_text("{}")
    save_file({"x.weight": np.arange(3), "table": np.ones(2, np.float16)}, tmp_path / "n/model.safetensors")
    folder = NamedFolder(tmp_path / "n")
    assert (set(folder), folder["table"].tolist()) == ({"table", "x.weight"}, [1, 1])
    with pytest.raises(ValueError, match=r"x\.weight is int64\(3,\), but must be a float array of shape \(3,\)"):
        folder["x.weight"]
