"""QuantConfig: MaxText's names and defaults, the inputs of from_any, and the message of every error."""

import dataclasses
import enum
import itertools
import re
import types
import warnings

import jax
import pytest

from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.recipes import RECIPES

MAXTEXT_DEFAULTS = {
    "quantization": "", "use_qwix_quantization": False, "quantization_local_shard_count": -1,
    "constant_bound_config": (), "weight_quantization_calibration_method": "absmax",
    "act_quantization_calibration_method": "absmax", "bwd_quantization_calibration_method": "absmax",
    "quant_cfg_path": "", "replicate_quant_scale": False, "quantize_kvcache": False,
    "kv_quant_axis": "heads_and_dkv", "kv_quant_dtype": "int8", "checkpoint_is_quantized": False,
    "save_quantized_params_path": "", "weight_sparsity_n": None, "weight_sparsity_m": None,
    "weight_sparsity_update_step": 10, "weight_sparsity_start_step": 50, "quantize_logits_proj": False,
    "quantize_mtp": False,
}  # fmt: skip


class QuantizationType(enum.StrEnum):
    INT8 = "int8"


def test_fields_and_defaults():
    defaults = {f.name: f.default for f in dataclasses.fields(QuantConfig)}
    assert {name: defaults[name] for name in MAXTEXT_DEFAULTS} == MAXTEXT_DEFAULTS
    config = QuantConfig.from_any("")
    assert config == QuantConfig()
    assert (config.resolved_backend, config.recipe(), config.resolver()) == (None, None, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.quantization = "int8"


def maxtext(**fields):
    """Return an attribute object like MaxText's config: many other names, enums, None for no quantization."""
    rest = {"base_emb_dim": 64, "steps": 10, "use_manual_quantization": False, "te_comm_gemm_overlap": "disabled"}
    return types.SimpleNamespace(**{**MAXTEXT_DEFAULTS, **rest, "quantization": None, **fields})


def test_attribute_objects():
    assert QuantConfig.from_any(maxtext()) == QuantConfig()
    config = QuantConfig.from_any(maxtext(quantization=QuantizationType.INT8, replicate_quant_scale=True))
    assert config == QuantConfig(quantization="int8", replicate_quant_scale=True)
    assert (type(config.quantization), config.resolved_backend) == (str, "native")
    assert QuantConfig.from_any(maxtext(quantization="fp8_full", use_qwix_quantization=True)).resolved_backend == "qwix"
    for bounds in ("1,2,3,4,5,6", [1, 2, 3, 4, 5, 6]):
        config = QuantConfig.from_any(maxtext(quantization="aqt_fp8_full", constant_bound_config=bounds))
        assert config.constant_bound_config == (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)


def test_a_shard_count_that_maxtext_has_resolved():
    count = jax.local_device_count()
    assert QuantConfig.from_any(maxtext(quantization="fp8", quantization_local_shard_count=count)).recipe() is not None
    read = QuantConfig.from_any(maxtext(quantization="int8", quantization_local_shard_count=count))
    assert read.quantization_local_shard_count == count
    with pytest.raises(ValueError, match="quantization_local_shard_count 77 is not read by quantization 'fp8'"):
        QuantConfig.from_any(maxtext(quantization="fp8", quantization_local_shard_count=77))


def test_maxtext_features_that_are_not_here():
    off = {"use_manual_quantization": True, "te_comm_gemm_overlap": "mlp"}
    for name, value in off.items():
        with pytest.raises(NotImplementedError, match=f"{name} {value!r} is not implemented"):
            QuantConfig.from_any(maxtext(quantization="int8", **{name: value}))


ASKING = {
    "te_check_every": 3, "token_quantization": "fixed,1", "lora": {"lora_weight_qtype": "nf4"},
    "weight_dtype": "float8_e4m3fn",
}  # fmt: skip


@dataclasses.dataclass
class Program:
    """A program's config with defaults, a section, and quantization fields that jaxquant does not know."""

    quantization: str = "int8"
    te_check_every: int = 20
    token_quantization: str = "rowwise"
    lora: dict = dataclasses.field(default_factory=dict)
    weight_dtype: str = "bfloat16"


@pytest.mark.parametrize("kind", [Program, maxtext])
def test_a_field_about_quantization_that_is_not_read_is_named(kind):
    for name, value in ASKING.items():
        ((told, of),) = (value if name == "lora" else {name: value}).items()
        with pytest.warns(UserWarning, match=f"sets {told} .?{of}.?, which jaxquant does not read"):
            QuantConfig.from_any(kind(quantization="int8", **{name: value}))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            QuantConfig.from_any(Program())  # the default of the config's class quantizes nothing
            QuantConfig.from_any(kind(quantization="", **{name: value}))  # a field of the program
            for inert in (False, None, 0, -1, "", [], "disabled", "te_no_quant"):
                QuantConfig.from_any(kind(quantization="int8", **{name: inert}))


def test_switches_of_maxtext_quantize_what_is_float_by_default():
    layers = {"quantize_router_proj": "a/gate", "quantize_logits_proj": "logits_dense", "quantize_mtp": "mtp_block/wi"}
    for name, layer in layers.items():
        for is_on in (False, True):
            resolver = QuantConfig.from_any(maxtext(quantization="fp8_full", **{name: is_on})).resolver()
            assert [path for path in layers.values() if resolver(path, 4).recipe] == [layer] * is_on
        assert QuantConfig.from_any(maxtext(**{name: True})) == QuantConfig()
        with pytest.raises(ValueError, match=f"{name} True has no effect, because quantization and rules are empty"):
            QuantConfig(**{name: True})


def test_maxtexts_calibrations_of_one_operand():
    methods = {"drhs_grad_quantization": "fixed,1", "logits_proj_quant": "fixed,2"}
    methods = {f"{name}_calibration_method": method for name, method in methods.items()}
    config = QuantConfig.from_any(maxtext(quantization="fp8_full", quantize_logits_proj=True, **methods))
    body, head = (config.resolver()(path, 99).recipe for path in ("decoder/wi", "decoder/logits_dense"))
    for recipe, activation in ((body, "absmax"), (head, "fixed,2")):
        specs = (recipe.fwd.lhs, recipe.fwd.rhs, recipe.dlhs.lhs, recipe.drhs.rhs)
        assert [str(spec.calibration) for spec in specs] == [activation, activation, "absmax", "fixed,1"]


def test_from_any_refuses():
    for thing in (None, 3, ["int8"], QuantConfig):
        with pytest.raises(TypeError, match=r"must be a QuantConfig, a mapping, a config string, .*, got \w+$"):
            QuantConfig.from_any(thing)


def test_a_path_is_read_as_a_file(tmp_path):
    path = tmp_path / "c.yml"
    path.write_text('{"quantization": "fp8", "amax_margin": 1}')
    wanted = QuantConfig(quantization="fp8", amax_margin=1)
    assert QuantConfig.from_any(str(path)) == QuantConfig.from_any(path) == wanted
    path.write_text('{"quantization": "fp8", "steps": 10}')
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} has no field 'steps'"):
        QuantConfig.from_any(path)
    path.write_text("- fp8")
    with pytest.raises(TypeError, match=f"{re.escape(str(path))} must be a mapping of names to values, got list"):
        QuantConfig.from_any(str(path))


BOUNDED = {"quantization": "aqt_fp8_full", "constant_bound_config": [1] * 6}
ACT = "act_quantization_calibration_method"
REFUSED = [
    ({"quantisation": "int8"}, "QuantConfig has no field 'quantisation'; did you mean 'quantization'?"),
    ({"quant_backend": "qwixx"}, "got 'qwixx'; did you mean 'qwix'?"),
    ({"use_qwix_quantization": True, "quant_backend": "aqt"}, "true contradicts quant_backend 'aqt'; remove one of"),
    ({"quantization": "int8", ACT: "banana"}, f"{ACT}: calibration 'banana' has the unknown method"),
    ({"quantization": "fp8_full", ACT: "minmax"}, f"{ACT}: calibration minmax is asymmetric, but float8_e4m3fn has no"),
    (BOUNDED | {"constant_bound_config": "1,2,3,4,5"}, "constant_bound_config must have 6 bounds (fwd_lhs, fwd_rhs, "),
    (BOUNDED | {"constant_bound_config": [1, 1, 0.0, 1, 1, 1]}, "constant_bound_config: bound dlhs_lhs must be betw"),
    (BOUNDED | {"per_tensor_scales": [False] * 5 + [True]}, "per_tensor_scales has no effect with constant_bound_conf"),
    ({"quantize_kvcache": True, "kv_quant_axis": ""}, "quantize_kvcache needs an axis; set kv_quant_axis to 'dkv' or"),
    ({"weight_sparsity_n": 2}, "weight_sparsity_n and weight_sparsity_m must be set together, got 2 and None"),
    ({"weight_sparsity_n": 4, "weight_sparsity_m": 2}, "must be above 0 and below weight_sparsity_m, got 4 and 2"),
    ({"quantization": "fp8_full", "weight_sparsity_start_step": 5}, "start_step 5 has no effect; set weight_sparsity"),
    ({"quantization": "aqt_fp8", "implementation": "xla"}, "'xla' does not apply to quant_backend 'aqt', because AQT"),
    ({"quantization": "fp8_full", "quant_backend": "qwix", "implementation": "xla"}, "'xla' does not apply to quant_"),
    ({"quantization": "fp8", "implementation": "palas"}, "implementation must be "),
]


def test_refusals():
    for fields, message in REFUSED:
        with pytest.raises(ValueError, match=re.escape(message)):
            QuantConfig.from_any(fields)


OPTION_VALUES = {
    "quantization_local_shard_count": 0, "replicate_quant_scale": True, "constant_bound_config": "1,1,1,1,1,1",
    "per_tensor_scales": [True] * 6, "weight_quantization_calibration_method": "absmax,0.9",
    "act_quantization_calibration_method": "fixed,3", "bwd_quantization_calibration_method": "rms,4",
    "drhs_grad_quantization_calibration_method": "rms,4",
    "amax_history_length": 8, "amax_margin": 1, "amax_init": "flax", "quantization_share_expert_scales": True,
    "four_over_six": True, "scale_fmt": "ue8m0", "activation_scale_ub": 4.0, "square_weight_blocks": True,
}  # fmt: skip


def test_an_option_is_read_or_refused():
    for name, (option, value) in itertools.product(RECIPES, OPTION_VALUES.items()):
        if name == "intmp":
            continue
        fields = {"quantization": name, option: value}
        if option in RECIPES[name].fields:
            config = QuantConfig(**fields)
            # The placement of stored scales and a flag with its default do not change numbers.
            if option not in ("replicate_quant_scale", "per_tensor_scales"):
                assert config.recipe() != QuantConfig(quantization=name).recipe(), name
        else:
            with pytest.raises(ValueError, match=f"{option} .* is not read by quantization '{name}'"):
                QuantConfig(**fields)
