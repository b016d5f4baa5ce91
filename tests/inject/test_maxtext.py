"""MaxText's conventions: a mode that is set, both calls in every model, configs of a whole program, experts."""

from __future__ import annotations

import enum
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx import bridge

import jaxquant
from jaxquant.compat import maxtext
from jaxquant.compat.maxtext.program import LAYERS
from jaxquant.state import QuantState

X = jax.random.normal(jax.random.key(0), (4, 8))
BASE = {
    "quantization": "",
    "use_qwix_quantization": False,
    "replicate_quant_scale": False,
    "quantize_kvcache": False,
    "weight_quantization_calibration_method": "absmax",
    "quantization_local_shard_count": 1,
    "micro_batch_size_to_train_on": 2,
    "max_target_length": 6,
}


def program(**fields):
    """Return a config like MaxText's: an object with every field."""
    return types.SimpleNamespace(**BASE | fields)


class Block(nn.Module):
    quant: object = None

    @nn.compact
    def __call__(self, x):
        cls = self.quant.dot_general_cls() if self.quant else None
        return nn.Dense(4, dot_general_cls=cls, name="wi")(x)


class Layer(nnx.Module):
    """An NNX layer that contains the Linen op of a handle, like MaxText's DenseGeneral."""

    def __init__(self, quant, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (8, 4)))
        self.op = bridge.ToNNX(quant.dot_general_cls()(), rngs=rngs)
        inputs = jnp.zeros_like(X)
        self.op.lazy_init(inputs, self.kernel[...], (((1,), (0,)), ((), ())))
        self(inputs)  # rules are not supported there

    def __call__(self, x):
        return self.op(x, self.kernel[...], (((1,), (0,)), ((), ())))


def test_the_mode_of_a_handle_can_be_set_and_nothing_else():
    quant = maxtext.configure_quantization({"quantization": "int8", "quant_backend": "native"})
    quant.quant_mode = maxtext.get_quant_mode("convert")
    assert maxtext.in_convert_mode(quant)
    # AQT's enum has the same names and other values.
    theirs = enum.Enum("QuantMode", {"TRAIN": 1, "CONVERT": 2, "SERVE": 3})
    quant.quant_mode = theirs.SERVE
    assert [quant.quant_mode == mode and mode == quant.quant_mode for mode in theirs] == [False, False, True]
    with pytest.raises(ValueError, match="is not a mode"):
        quant.quant_mode = "eval"


@pytest.mark.parametrize("fields", [{"replicate_quant_scale": True}, {"quantization": None, "fp": 1}])
def test_options_of_a_program_that_quantizes_nothing_are_nobodys(fields):
    assert maxtext.configure_quantization(program(**fields)) is None
    assert maxtext.maybe_quantize_model(model := Block(), program(**fields)) is model
    with pytest.raises(ValueError, match="replicate_quant_scale True is not read"):
        jaxquant.QuantConfig.from_any({"quantization": "", "replicate_quant_scale": True})


def test_maxtexts_config_goes_to_maxtexts_function():
    with pytest.raises(TypeError, match=r"call jaxquant\.compat\.maxtext\.maybe_quantize_model"):
        jaxquant.maybe_quantize_model(Block(), program(quantization="int8"), X)


@pytest.mark.parametrize(
    ("string", "meaning", "backend"),
    [("fp8", "fp8_e4m3", "qwix"), ("int8", "int8", "qwix"), ("fp8_nanoo", "fp8_nanoo", "native")],
)
def test_maxtexts_strings_on_qwix_mean_what_they_mean_there(string, meaning, backend):
    theirs = program(quantization=string, use_qwix_quantization=True)
    config = jaxquant.QuantConfig.from_any(theirs)
    assert (config.quantization, config.resolved_backend) == (meaning, backend)
    assert maxtext.configure_quantization(theirs) is None  # the model is quantized, and there is no handle


@pytest.mark.parametrize("mode", ["convert", "serve"])
def test_a_model_with_a_handle_that_does_not_train_comes_back_as_it_is(mode):
    config = program(quantization="fp8")
    model = Block(maxtext.configure_quantization(config, mode))
    assert maxtext.maybe_quantize_model(model, config) is model


class Layers(nnx.Module):
    """Two layers with ops of a handle, and an expert's einsum, as in MaxText's NNX model."""

    def __init__(self, quant, rngs):
        self.quant = quant
        self.wi, self.wo = (Layer(quant, rngs) for _ in range(2))
        self.experts = nnx.Param(jnp.ones((3, 4, 8)))

    def __call__(self, x):
        x = self.quant.einsum(mesh_axes=("exp", None, None))("bf,efd->ebd", self.wi(x), self.experts[...]).sum(0)
        return self.wo(x)


def low(model):
    """Return the paths of the forward matmuls in 8 bits."""
    return {row.path for row in jaxquant.coverage(model, X).rows if str(row.dtypes) != "float"}


@pytest.mark.parametrize("string", ["fp8", "int8"])
def test_the_trace_takes_the_place_of_the_ops_of_a_handle_and_honours_rules(string):
    rules = [{"path": "wo", "recipe": None}]
    config = program(quantization=string, quant_backend="native", rules=rules)
    plain = Layers(maxtext.configure_quantization(config), nnx.Rngs(0))
    with pytest.raises(NotImplementedError, match="rule 'wo' is not supported"):
        plain.wi(X)
    model = maxtext.maybe_quantize_model(plain, config, X)
    assert low(model) == {"wi", "experts"}
    rest = nnx.state(model, nnx.Not(nnx.Any(nnx.Param, nnx.RngState)))
    states = jax.tree.leaves(rest, is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert all(isinstance(each, QuantState) for each in states)
    assert bool(states) == (string == "fp8")


def test_rules_reach_the_layers_of_an_nnx_model_in_a_linen_one():
    config = program(quantization="fp8", rules=[{"path": "wo", "recipe": None}])
    plain = bridge.ToLinen(Layers, kwargs=nn.FrozenDict(quant=maxtext.configure_quantization(config)))
    model = maxtext.maybe_quantize_model(plain, config)
    variables = model.init(jax.random.key(0), X)
    rows = jaxquant.coverage(lambda v: model.apply(v, X), variables).rows
    assert {row.path: str(row.dtypes) != "float" for row in rows} == {"wi": True, "experts": True, "wo": False}


class Two(nn.Module):
    quant: object = None

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="own")(Block(self.quant)(x))


def test_another_models_trace_leaves_the_ops_of_a_handle_alone():
    inner = maxtext.configure_quantization({"quantization": "int8", "quant_backend": "native"})
    model = maxtext.maybe_quantize_model(Two(inner), {"quantization": "fp8_current", "quant_backend": "native"}, X)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    lines = [line for line in jax.jit(model.apply).lower(variables, X).as_text().splitlines() if "dot_general" in line]
    assert [sum(kind in line for line in lines) for kind in ("xi8>", "f8E")] == [1, 1]


def train_step(model, is_released=True):
    """Differentiate and overwrite like MaxText's train_step, of version 0.2.5 or of earlier versions."""
    kind = nnx.variablelib.variable_type_from_name("_overwrite_with_gradient", allow_register=True)
    custom_param_filter = nnx.Any(kind)
    graph, params, custom, rest = nnx.split(model, nnx.Param, custom_param_filter, ...)
    if is_released:

        def diff_wrapper(params, custom, rest):
            local = nnx.merge(graph, params, custom, rest, copy=True)
            return (local(X) ** 2).sum(), nnx.state(local, nnx.Not(nnx.Any(nnx.Param, custom_param_filter)))
    else:

        def diff_wrapper(params, custom, rest):
            local = nnx.merge(graph, params, custom, rest, copy=True)
            return (local(X) ** 2).sum(), nnx.state(local, nnx.Not(nnx.Param))

    grad = jax.value_and_grad(diff_wrapper, argnums=(0, 1), has_aux=True)
    (_, non_param_rest), (_, custom_grads) = grad(params, custom, rest)
    nnx.update(model, nnx.State.merge(custom_grads, non_param_rest))


def stateful(is_traced):
    """Return a model with the ops of a handle, either traced or with state in the ops."""
    config = program(quantization="fp8")
    plain = Layers(maxtext.configure_quantization(config), nnx.Rngs(0))
    return maxtext.maybe_quantize_model(plain, config, X) if is_traced else plain.wi


@pytest.mark.parametrize("is_traced", [True, False])
def test_quant_state_advances_in_maxtexts_train_step_and_is_guarded_elsewhere(is_traced):
    theirs = types.FunctionType(train_step.__code__, globals() | {"__name__": "maxtext.trainers.pre_train.train"})
    with pytest.raises(ValueError, match=r"0\.2\.5"):
        theirs(stateful(is_traced), False)
    with pytest.raises(ValueError, match="gradient is taken without" if is_traced else "only the pre-training of"):
        train_step(stateful(is_traced))
    model = stateful(is_traced)
    theirs(model, True)
    histories = [x for path, x in jax.tree.leaves_with_path(nnx.state(model)) if "history" in str(path)]
    assert len(histories) == (3 if is_traced else 1)  # one array for the three tensors of an op
    assert all((x[..., 0] > 0).all() for x in histories)
    with pytest.raises(ValueError, match=r"MaxText's SFT, GRPO, distillation .* use a config string without quant"):
        nnx.grad(lambda model: model(X).sum())(model)


@pytest.mark.parametrize("do", [maxtext.configure_quantization, lambda c: maxtext.maybe_quantize_model(Block(), c)])
def test_quant_state_under_maxtexts_accumulation_is_refused(do):
    with pytest.raises(ValueError, match="gradient_accumulation_steps 2 with recipe 'nanoo_fp8'"):
        do(program(quantization="fp8_nanoo", gradient_accumulation_steps=2))
    assert do(program(quantization="int8", gradient_accumulation_steps=2)) is not None


def test_experts_read_the_dtypes_of_a_grouped_matmul():
    quant = maxtext.configure_quantization({"quantization": "fp8"})
    sides = quant.quant_dg.fwd.dg_quantizer
    assert sides.lhs.numerics.get_dtype() == sides.rhs.numerics.get_dtype() == jnp.float8_e4m3fn


def test_switches_and_calibrations_of_maxtexts_qwix_rules():
    fields = {"quantize_router_proj": False, "quantize_logits_proj": True, "quantize_mtp": True}
    methods = {"drhs_grad_quantization": "fixed,1", "logits_proj_quant": "fixed,2"}
    fields |= {f"{name}_calibration_method": method for name, method in methods.items()}
    rules = maxtext.get_quantization_rule(program(quantization="fp8_full", use_qwix_quantization=True, **fields))
    assert [rule.module_path for rule in rules] == ["decoder/logits_dense", ".*/gate", f"{LAYERS}|mtp_block/.*"]
    assert rules[1].weight_qtype is None
    assert [rule.weight_calibration_method for rule in rules[::2]] == ["fixed,2", "absmax"]
    assert rules[2].additional_qt_config["drhs_grad_calibration_method"] == "fixed,1"


def test_qwix_rules_under_maxtexts_names():
    rules = maxtext.get_quantization_rule({"quantization": "fp8_full", "rules": [{"path": ".*gate", "recipe": None}]})
    assert [rule.module_path for rule in rules] == [".*gate", ".*/gate", LAYERS]
    assert [rule.weight_qtype for rule in rules] == [None, None, jnp.float8_e4m3fn]


@pytest.mark.parametrize(
    ("dtype", "method", "scale"),
    [(jnp.int8, "fixed,224", 224 / 127.5), (jnp.float8_e4m3fn, "FIXED,-0.6,0.6", 0.6 / 448)],
)
def test_static_scales(dtype, method, scale):
    assert maxtext.get_static_scale(dtype, method) == pytest.approx(scale)
    x = jnp.asarray([[0.1, -0.55], [1000.0, 0.0]])
    quantized = maxtext.manual_quantize(x, dtype, method)
    assert quantized.qvalue.dtype == dtype
    assert quantized.scale.shape == (1, 1)
    np.testing.assert_allclose(quantized.scale, scale, rtol=1e-6)


@pytest.mark.parametrize("method", ["fixed,0", "fixed,-1,2", "absmax"])
def test_other_calibrations_have_no_static_scale(method):
    with pytest.raises(ValueError, match="calibration"):
        maxtext.get_static_scale(jnp.int8, method)
