"""configure_quantization: modes, recipes by path, stored tensors and the names of their axes."""

from __future__ import annotations

import dataclasses
import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxquant.compat.maxtext import remove_quantized_params
from jaxquant.compat.maxtext.handle import (
    QuantMode,
    configure_quantization,
    get_quant_mode,
    in_convert_mode,
    in_serve_mode,
)
from jaxquant.core.qtensor import is_tensor
from tests.lowering import dot_operand_types
from tests.serving.models import filled
from tests.states import nested

X = jax.random.normal(jax.random.key(0), (4, 8))


class Block(nn.Module):
    """A model that passes the quantization handle to its ops by hand."""

    quant: object

    @nn.compact
    def __call__(self, x):
        def cls(*mesh_axes):
            return self.quant.dot_general_cls(mesh_axes) if self.quant else None

        x = nn.DenseGeneral((4, 6), dot_general_cls=cls("embed", "heads", "kv"), name="query")(x)
        x = nn.DenseGeneral(8, axis=(-2, -1), dot_general_cls=cls("heads", "kv", "embed"), name="out")(x)
        x = x + nn.Dense(8, dot_general_cls=cls("embed", "experts"), name="gate")(x)
        kernel = self.param("kernel", nn.initializers.normal(1.0), (8, 5))
        einsum = self.quant.einsum(("embed", "mlp")) if self.quant else jnp.einsum
        return einsum("bd,df->bf", x, kernel)


class Model(nn.Module):
    quant: object

    @nn.compact
    def __call__(self, x):
        return Block(self.quant, name="block")(x)


MODES = ("train", "convert", "serve")


def quantize(config, mode="train"):
    return Model(configure_quantization(config, mode))


def test_modes():
    assert [get_quant_mode(mode) for mode in MODES] == [QuantMode.TRAIN, QuantMode.CONVERT, QuantMode.SERVE]
    with pytest.raises(ValueError, match="quant_mode_str 'eval' is not a mode; use one of 'train', 'convert', 's"):
        get_quant_mode("eval")
    for mode in MODES:
        quant = configure_quantization({"quantization": "int8"}, mode)
        assert quant.quant_mode is get_quant_mode(mode)
        assert (in_convert_mode(quant), in_serve_mode(quant)) == (mode == "convert", mode == "serve")
        with pytest.raises(ValueError, match=r"call jaxquant\.maybe_quantize_model"):
            configure_quantization({"quantization": "fp8_full", "quant_backend": "qwix"}, mode)
    assert (in_convert_mode(None), in_serve_mode(None)) == (False, False)


SPARSE = {"weight_sparsity_n": 2, "weight_sparsity_m": 4, "weight_sparsity_start_step": 0}
CASES = {
    "fp8": ("native", "Fp8Einsum_0", "float8_e4m3fn", {}),
    "fp8_full sparse": ("native", "Einsum_0", "float8_e4m3fn", SPARSE),
    "int8": ("aqt", "AqtEinsum_0", "int8", {}),
}


def config_of(case):
    backend, _, _, options = CASES[case]
    return {"quantization": case.split()[0], "quant_backend": backend} | options


@functools.cache
def modes_of(case):
    """Run a model in train and convert mode; return its variables, both outputs and the stored tensors."""
    config = config_of(case)
    variables = filled(jax.eval_shape(quantize(config).init, jax.random.key(1), X))
    trained = jax.jit(lambda v: quantize(config).apply(v, X))(variables)
    converted, stored = jax.jit(lambda v: quantize(config, "convert").apply(v, X, mutable=["aqt"]))(variables)
    return variables, trained, converted, stored


@pytest.mark.parametrize("case", CASES)
def test_convert_and_serve_repeat_training_bit_for_bit(case):
    """Serve mode has no float kernels: matched kernels are removed, and the layers pass zeros."""
    _, einsum, dtype, _ = CASES[case]
    variables, trained, converted, stored = modes_of(case)
    assert not np.array_equal(trained, Model(None).apply({"params": variables["params"]}, X))
    before = flatten_dict(variables["params"])
    kept = flatten_dict(remove_quantized_params(variables["params"], stored["aqt"]))
    assert before.keys() - kept.keys() == {
        ("block", "query", "kernel"),
        ("block", "out", "kernel"),
        ("block", "kernel"),
    }
    jax.tree.map(np.testing.assert_array_equal, kept, {path: before[path] for path in kept})
    zeros = unflatten_dict({path: kept.get(path, jnp.zeros_like(value)) for path, value in before.items()})
    served = jax.jit(quantize(config_of(case), "serve").apply)({"params": zeros} | stored, X)
    np.testing.assert_array_equal(trained, converted)
    np.testing.assert_array_equal(converted, served)
    assert set(stored["aqt"]["block"]) == {"query", "out", einsum}
    for layer in stored["aqt"]["block"]:
        tensor = frozen(stored, layer)
        assert tensor.qvalue.dtype == dtype
        assert jax.tree.leaves(tensor.scale)[0].size < tensor.qvalue.size


def stored_tensors(stored):
    return [leaf for leaf in jax.tree.leaves(stored["aqt"], is_leaf=is_tensor) if is_tensor(leaf)]


class Handing(nn.Module):
    """A layer like MaxText's: in serve mode it has no kernel and passes zeros to the op."""

    quant: object

    @nn.compact
    def __call__(self, x, _):
        def kernel(name, *shape):
            if in_serve_mode(self.quant):
                return jnp.zeros(shape)
            return self.param(name, nn.initializers.normal(1.0), shape)

        numbers = (((x.ndim - 1,), (0,)), ((), ()))
        x = self.quant.dot_general_cls(("embed", "mlp"))()(x, kernel("wi", 8, 6), numbers)
        return self.quant.einsum(("mlp", "embed"))("bf,fd->bd", x, kernel("wo", 6, 8)), None


class Scanned(nn.Module):
    quant: object

    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, "aqt": 0, "_overwrite_with_gradient": 0}
        options = {"length": 3, "metadata_params": {nn.PARTITION_NAME: "layers"}}
        layers = nn.scan(Handing, variable_axes=axes, split_rngs={"params": True, "quant": True}, **options)
        return layers(self.quant, name="layers")(x, None)[0]


def test_native_models_that_hand_over_zeros_serve_under_a_scan():
    train, convert, serve = (Scanned(configure_quantization(config_of("fp8"), mode)) for mode in MODES)
    variables = filled(jax.eval_shape(train.init, jax.random.key(1), X))
    trained = jax.jit(train.apply)(variables, X)
    _, stored = jax.jit(lambda v: convert.apply(v, X, mutable=["aqt"]))(variables)
    made = jax.eval_shape(serve.init, jax.random.key(0), X)
    assert set(made) == {"aqt"}
    specs = stored_tensors(nn.get_partition_spec(made))
    assert [tuple(tensor.qvalue) for tensor in specs] == [("layers", "embed", "mlp"), ("layers", "mlp", "embed")]
    np.testing.assert_array_equal(trained, jax.jit(serve.apply)(stored, X))
    assert [tensor.shape for tensor in stored_tensors(stored)] == [(3, 8, 6), (3, 6, 8)]
    assert remove_quantized_params(variables["params"], stored["aqt"]) == {"layers": {"wi": {}, "wo": {}}}


def test_native_init_of_each_mode_makes_what_it_reads():
    """Convert mode creates the parameters and state of training; serve mode creates the tensors of convert mode."""
    made = {mode: jax.eval_shape(quantize(config_of("fp8"), mode).init, jax.random.key(1), X) for mode in MODES}
    assert made["convert"] == made["train"] | {"aqt": made["convert"]["aqt"]}
    assert set(made["serve"]) == {"params", "aqt"}
    assert nn.meta.unbox(made["serve"]["aqt"]) == made["convert"]["aqt"]


def test_what_convert_and_serve_lack_is_named():
    variables, _, _, stored = modes_of("fp8")
    convert, serve = (quantize(config_of("fp8"), mode) for mode in ("convert", "serve"))
    fresh = jax.jit(quantize(config_of("fp8")).init)(jax.random.key(1), X)
    int8 = modes_of("int8")[3]
    less = jax.tree.map(lambda leaf: leaf, stored)  # the cached parameters are unchanged
    kept = less["aqt"]["block"]["out"]["Fp8DirectDotGeneralOp_0"]["qrhs"]
    kept["frozen"] = dataclasses.replace(kept["frozen"], input_scale=None)
    other = quantize({"quantization": "aqt_fp8", "quant_backend": "aqt"}, "serve")
    params = {"params": variables["params"]}
    for model, given, mutable, message in (
        (serve, params, False, "layer 'block/query' is in serve mode, but the collection 'aqt' has no con"),
        (serve, variables | less, False, r"of float8_e4m3fn .*\), but recipe 'fp8' needs .*, with an input_scale; use"),
        (other, params | int8, False, r"'block/query' has a converted kernel of int8 .*, but recipe 'aqt_fp8' needs f"),
        (convert, variables, False, "layer 'block/query' is in convert mode, but the collection 'aqt' is not mut"),
        (convert, params, ["aqt"], "'fp8' at 'block/query' keeps state in the collection '_overwrite_with_grad"),
        (convert, fresh, ["aqt"], "recipe 'fp8' needs the amax history of the input of layer 'block/query' for"),
    ):
        with pytest.raises(ValueError, match=message):
            model.apply(given, X, mutable=mutable)


def test_an_einsum_that_changes_the_kernel_before_it_contracts_is_refused():
    class Summing(nn.Module):
        @nn.compact
        def __call__(self, x):
            quant = configure_quantization({"quantization": "int8", "quant_backend": "native"}, "convert")
            return quant.einsum()("bd,dfg->bf", x, self.param("kernel", nn.initializers.normal(1.0), (8, 5, 2)))

    with pytest.raises(NotImplementedError, match="einsum 'bd,dfg->bf' applies reduce_sum to its weight, but a conv"):
        jax.eval_shape(Summing().init, jax.random.key(0), X)


def frozen(variables, layer):
    tensor = variables["aqt"]["block"][layer]
    while "qrhs" not in tensor:
        (tensor,) = tensor.values()
    return tensor["qrhs"]["frozen"]


@pytest.mark.parametrize(("backend", "replicate"), [("aqt", False), ("native", True)])
def test_stored_tensors_are_named_after_the_kernels_axes(backend, replicate):
    config = {"quantization": "int8", "quant_backend": backend, "replicate_quant_scale": replicate}
    specs = nn.get_partition_spec(jax.eval_shape(quantize(config, "serve").init, jax.random.key(0), X))
    for layer, names, scale in (
        ("query", ("embed", "heads", "kv"), (None, "heads", "kv")),
        ("out", ("heads", "kv", "embed"), (None, None, "embed")),
        ("AqtEinsum_0" if backend == "aqt" else "Einsum_0", ("embed", "mlp"), (None, "mlp")),
    ):
        tensor = frozen(specs, layer)
        assert tuple(tensor.qvalue) == names
        stored = tensor.scale[0] if backend == "aqt" else tensor.scale
        assert tuple(stored) == ((None,) * len(scale) if replicate else scale)


def test_recipes_by_path(tmp_path):
    """An intmp file: the einsum's weight belongs to the block, and a tile's inner axis keeps the axis name."""
    path = tmp_path / "mixed.json"
    bits = {"__default__": {"w_bits": 8}, ".*/query": {"w_bits": 4, "tile_size": 4}, "block": {"w_bits": 4}}
    path.write_text(json.dumps(bits))
    config = {"quantization": "intmp", "quant_backend": "aqt", "quant_cfg_path": str(path)}
    variables = jax.eval_shape(quantize(config, "serve").init, jax.random.key(0), X)
    specs, values = nn.get_partition_spec(variables), nn.meta.unbox(variables)
    query, out, einsum = (frozen(values, layer) for layer in ("query", "out", "AqtEinsum_0"))
    assert [tensor.qvalue.dtype for tensor in (query, out, einsum)] == ["int4", "int8", "int4"]
    assert (query.qvalue.shape, query.scale[0].shape) == ((2, 4, 4, 6), (2, 1, 4, 6))
    assert tuple(frozen(specs, "query").qvalue) == (None, "embed", "heads", "kv")
    assert tuple(frozen(specs, "query").scale[0]) == (None, None, "heads", "kv")


def test_a_rule_that_matches_no_layer_is_found_after_init():
    rules = [{"path": ".*/query", "recipe": None}, {"path": "blok/out", "recipe": None}]
    quants = [configure_quantization({"quantization": "int8", "rules": used}) for used in (rules[:1], rules)]
    for quant in quants:
        jax.eval_shape(Model(quant).init, jax.random.key(1), X)
    quants[0].check_used()
    with pytest.raises(ValueError, match=r"rules\[1\]\.path 'blok/out' matches no layer; .* block/out, block/ga"):
        quants[1].check_used()


class Pair(nn.Module):
    """Two ops of each kind in one module, as in a gated expert layer."""

    quant: object

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(1.0), (4, 8, 8))
        for k in kernel[:2]:
            x = self.quant.dot_general_cls()()(x, k, (((1,), (0,)), ((), ())))
        for k in kernel[2:]:
            x = self.quant.einsum()("bd,df", x, k)
        return x


def test_ops_of_one_module_are_numbered():
    model = Pair(configure_quantization({"quantization": "fp8"}))
    variables = jax.eval_shape(model.init, jax.random.key(1), X)
    names = {f"{op}_{number}" for op in ("Fp8DirectDotGeneralOp", "Fp8Einsum") for number in (0, 1)}
    assert set(nested(variables["_overwrite_with_gradient"])) == names
    types = [lhs for lhs, _, _ in dot_operand_types(jax.jit(model.apply).lower(variables, X).as_text())]
    assert types == ["f8E4M3FN"] * 4
