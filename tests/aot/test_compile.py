"""Compilation for chips that are not attached."""

import json
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jaxquant
from jaxquant.aot import topology, worker
from jaxquant.aot.chips import chip
from jaxquant.cli import main

ROOT = Path(__file__).parents[2]
STRINGS = ("fp8", "int8")
WIDTH = 256


class Net(nn.Module):
    """Layers, one of which has two contracting axes, like the output projection of attention."""

    @nn.compact
    def __call__(self, x):
        heads = nn.DenseGeneral((4, 64), use_bias=False, dtype=jnp.bfloat16, name="query")(x)
        x = nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False, dtype=jnp.bfloat16, name="out")(heads)
        return nn.Dense(WIDTH, use_bias=False, dtype=jnp.bfloat16, name="wo")(nn.silu(x))


def gradients(string, sharding=None):
    """Return a step of (parameters, quant state, inputs), and the shapes of its arguments."""
    config = {"quantization": string, "quant_backend": "native"}
    x = jax.ShapeDtypeStruct((8, 64, WIDTH), jnp.bfloat16, sharding=sharding)
    model = jaxquant.maybe_quantize_model(Net(), config, x)
    keys = {"params": jax.random.key(0), "quant": jax.random.key(1)}
    params, state = jaxquant.state.split(jax.eval_shape(model.init, keys, x))

    def step(params, state, x):
        def loss(params, state, x):
            y = model.apply(jaxquant.state.merge(params, state), x, rngs={"quant": jax.random.key(2)})
            return jnp.mean(jnp.square(y.astype(jnp.float32)))

        return jax.grad(loss, argnums=(0, 1, 2))(params, state, x)

    return step, (params, state, x)


@pytest.mark.aot
@pytest.mark.parametrize("target", ["h200", "v6e"])
def test_every_matmul_of_every_layer_is_in_8_bits(target):
    # One step contains all strings, because starting the process takes half of an audit's time.
    steps, shapes = zip(*(gradients(string) for string in STRINGS), strict=True)

    def step(shapes):
        found = []
        for string, each, args in zip(STRINGS, steps, shapes, strict=True):
            with jax.named_scope(f"string_{string}"):
                found.append(each(*args))
        return found

    found = jaxquant.aot.audit(step, shapes, target=target)
    assert found.fits
    assert found.outcome.fell_back == found.outcome.merged == found.outcome.removed == []
    assert sum(found.outcome.asked.values()) == sum(found.counts.values()) == 9 * len(STRINGS)
    assert f"All {9 * len(STRINGS)} matmuls" in str(found)
    for string in STRINGS:
        rows = [row for row in found.matmuls if f"string_{string}/" in row["layer"]]
        assert len(rows) == 9
        assert {row["layer"].rsplit("/", 1)[-1] for row in rows} == {"query", "out", "wo"}
        kinds = {"s8"} if string == "int8" else {"f8e4m3fn", "f8e5m2"}
        assert {part for row in rows for part in row["dtypes"].split("×")} == kinds


@pytest.mark.aot
def test_a_mesh_of_absent_chips_shows_what_is_sent():
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    step, shapes = gradients("int8_delayed", NamedSharding(mesh, PartitionSpec("data")))
    found = jaxquant.aot.audit(jax.jit(step, donate_argnums=0), *shapes, target="h200", topology="8")
    assert found.devices == 8
    assert {row["kind"] for row in found.collectives} == {"all-reduce"}
    assert {row["dtype"] for row in found.collectives} <= {"bf16", "f32", "s8"}
    assert found.outcome.removed == found.outcome.fell_back == []
    assert found.memory["peak"] < found.memory["capacity"]


@pytest.mark.aot
def test_the_command_audits_a_training_step_and_writes_it_down(tmp_path, capsys):
    config = tmp_path / "tiny.yml"
    config.write_text("emb_dim: 128\nmlp_dim: 256\nnum_layers: 2\nnum_query_heads: 2\nnum_kv_heads: 2\nhead_dim: 64\n")
    words = [str(config), "quantization=fp8", "batch_size=8", "sequence_length=64", "--target", "h200"]
    assert main(["audit", *words, "--topology", "8", "--out", str(tmp_path / "out")]) == 0
    assert "All 21 matmuls requested in 8 bits run in 8 bits" in capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "audit-tiny-fp8-h200-8.json").read_text())
    # Layers in a scan count once per iteration. The compiler merges matmuls that share an operand, quantized once.
    assert written["counts"]["f8e4m3fn"] == 2 * len(("query, key and value", "out", "wi_0 and wi_1", "wo"))
    assert written["unquantized"]["outcome"]["asked"] == {}
    assert (tmp_path / "out" / "audit-tiny-unquantized-h200-8.json").is_file()
    gathered = [row["dtype"] for row in written["collectives"] if row["kind"] == "all-gather"]
    assert "f8e4m3fn" in gathered
    assert "## Assumptions" in (tmp_path / "out" / "audit-tiny-fp8-h200-8.md").read_text()


def test_a_program_of_another_libtpu_is_an_error_that_names_the_right_one(monkeypatch):
    class Step:
        def lower(self):
            return self

        def compiler_ir(self, dialect):
            return jax.jit(jnp.negative).lower(1.0).compiler_ir(dialect)

        def compile(self):
            raise jax.errors.JaxRuntimeError(
                "INTERNAL: RET_CHECK failure (external/xla/xla/hlo/ir/hlo_instruction.cc:390) proto.operand_ids_size() "
                "== *arity async-update instruction should have 1 operands but sees 2"
            )

    monkeypatch.setattr(worker.importlib.metadata, "version", {"jax": "0.10.2", "libtpu": "0.0.52"}.__getitem__)
    monkeypatch.setattr(worker.importlib.metadata, "requires", lambda _: ["numpy", 'libtpu==0.0.42.*; extra == "tpu"'])
    message = (
        r"'v7x': jax 0.10.2 cannot read .* libtpu 0.0.52 .*libtpu==0.0.42.\*; run pip install 'jax\[tpu\]==0.10.2'"
    )
    with pytest.raises(NotImplementedError, match=message):
        worker.compile_step(Step(), (), chip("v7x"), 1, {"target": "v7x"})
    with pytest.raises(jax.errors.JaxRuntimeError):
        worker.compile_step(Step(), (), chip("h200"), 1, {"target": "h200"})


@pytest.mark.parametrize(("target", "extra"), [("h200", "audit-gpu"), ("v6e", "audit-tpu")])
def test_without_its_compiler_a_target_is_an_error_that_says_what_to_install(monkeypatch, capsys, target, extra):
    monkeypatch.setitem(topology.NEEDED, chip(target).platform, (extra, "a_compiler_of_nowhere"))
    with pytest.raises(ModuleNotFoundError, match=rf"{target}.* a_compiler_of_nowhere.*pip install -e '\.\[{extra}\]'"):
        jaxquant.aot.audit(lambda x: x, jnp.zeros(3), target=target)
    assert main(["audit", "configs/quickstart.yml", "--target", target]) == 2
    told = capsys.readouterr().err
    assert f"pip install -e '.[{extra}]'" in told
    assert ".[audit-gpu]" in told
    assert ".[audit-tpu]" in told


def test_a_gpu_compiler_of_another_version_than_jaxlib_is_refused(monkeypatch, capsys):
    monkeypatch.setitem(topology.NEEDED, "cuda", ("audit-gpu", "jax"))
    monkeypatch.setattr(topology, "TIED_TO_JAXLIB", ("flax",))
    has, wanted = metadata.version("flax"), metadata.version("jaxlib")
    with pytest.raises(RuntimeError, match=f"'h200' needs flax {wanted} for jaxlib {wanted}, but flax {has} is inst"):
        topology.require_compiler(chip("h200"))
    assert main(["audit", "configs/quickstart.yml", "--target", "h200"]) == 2
    assert f"but flax {has} is installed; run pip install flax=={wanted}" in capsys.readouterr().err
    monkeypatch.setitem(topology.NEEDED, "tpu", ("audit-tpu", "jax"))
    topology.require_compiler(chip("v6e"))  # libtpu has versions separate from jaxlib's


def test_a_topology_of_another_kind_is_refused():
    for target, text in (("h200", "2x2"), ("v6e", "64"), ("v6e", "axb")):
        with pytest.raises(ValueError, match=rf"topology '{text}' is not valid for target '{target}'; pass "):
            topology.devices(chip(target), text)
