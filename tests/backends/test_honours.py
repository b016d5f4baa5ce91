"""What a backend does not say it honours is refused by its name, fields that are added later among it."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxquant
from jaxquant.backends import load
from jaxquant.backends.honours import check_honoured
from jaxquant.compat import maxtext
from jaxquant.config.backends import BACKENDS
from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.calibration import Calibration
from jaxquant.core.recipe import DelayedSpec, MatmulSpec, Recipe, TensorSpec

INT8 = TensorSpec("int8")
LIBRARIES = ("aqt", "qwix")
X = jnp.ones((8, 16))


def with_new_field(kind):
    """The class as it would be with one more field."""
    return dataclasses.make_dataclass(kind.__name__, [("added", int, 0)], bases=(kind,), frozen=True)


def recipe_with(kind, **fields):
    """A recipe of int8 whose activation is quantized by, or holds, a value of a class with one more field."""
    newer = with_new_field(kind)
    if kind is Recipe:
        return newer("mine", MatmulSpec(INT8, INT8), **fields), newer
    if kind is MatmulSpec:
        return Recipe("mine", newer(INT8, INT8, **fields)), newer
    if kind is Calibration:
        return Recipe("mine", MatmulSpec(dataclasses.replace(INT8, calibration=newer(**fields)), INT8)), newer
    return Recipe("mine", MatmulSpec(newer("int8", **fields), INT8)), newer


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (Recipe, "'mine': {} has no added 3"),
        (MatmulSpec, "'mine' matmul fwd: {} has no added 3"),
        (TensorSpec, "'mine' operand fwd_lhs: {} has no added 3"),
        (Calibration, "'mine' operand fwd_lhs: {} has no calibration.added 3"),
    ],
)
def test_a_field_that_nobody_has_heard_of(name, kind, place):
    backend = load(name)
    for value in (0, 3):
        recipe, newer = recipe_with(kind, added=value)
        honours = {**backend.honours, newer: backend.honours[kind]}
        if value == 0:
            check_honoured(backend.row.title, honours, recipe)
            continue
        with pytest.raises(
            NotImplementedError, match=f"recipe {place.format(backend.row.title)}; use quant_backend 'na"
        ):
            check_honoured(backend.row.title, honours, recipe)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_class_of_spec_that_nobody_has_heard_of(name):
    """A spec of another class is no spec that a backend knows, whatever its fields."""
    recipe, _ = recipe_with(TensorSpec)
    with pytest.raises(NotImplementedError, match=r"recipe 'mine' matmul fwd: .* has no lhs TensorSpec"):
        load(name).check(recipe)


@pytest.mark.parametrize("name", LIBRARIES)
def test_delayed_scaling_that_no_operand_asks_for(name):
    with pytest.raises(NotImplementedError, match=r"recipe 'mine'.* has no delayed"):
        load(name).check(Recipe("mine", MatmulSpec(INT8, INT8), delayed=DelayedSpec()))


def test_a_model_is_refused_before_it_runs():
    """The check comes with the quantization, also where a layer's op is only made at its first call."""
    recipe = Recipe("mine", MatmulSpec(TensorSpec("float4_e2m1fn"), INT8))
    config = QuantConfig(quant_backend="aqt", rules=(jaxquant.config.rules.Rule(".*", recipe),))
    for refuse in (
        lambda: jaxquant.maybe_quantize_model(nn.Dense(4), config),
        lambda: maxtext.configure_quantization(config),
    ):
        with pytest.raises(NotImplementedError, match="'mine' operand fwd_lhs: AQT has no element type float4_e2m1fn"):
            refuse()


@pytest.mark.parametrize("case", ["int8 native", "int8 auto", "int8 aqt", "int8 qwix", "aqt_fp8 auto"])
def test_float16_is_right_or_refused(case):
    """Sums of 960 products of int8 are above 65504; the scales of weights are below the root of its smallest number."""
    x = jax.random.normal(jax.random.key(0), (4, 960), jnp.float16)
    layer, (string, backend) = nn.Dense(8, dtype=jnp.float16), case.split()
    model = jaxquant.maybe_quantize_model(layer, {"quantization": string, "quant_backend": backend})
    variables = layer.init(jax.random.key(0), x)
    if backend in ("aqt", "qwix"):
        with pytest.raises(ValueError, match=f"would quantize no layer .*: {BACKENDS[backend].title} .* 'native', or"):
            model.apply(variables, x)
        return
    out, wanted = model.apply(variables, x), layer.apply(variables, x)
    assert jnp.linalg.norm(out - wanted) < {"int8": 0.02, "aqt_fp8": 0.05}[string] * jnp.linalg.norm(wanted)


def test_what_a_backend_has_not_is_said():
    assert set(BACKENDS) == {"aqt", "qwix", "native"}
    for name, row in BACKENDS.items():
        backend = load(name)
        assert (backend.name, backend.row) == (name, row)


# -- shards of Qwix ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "fits"), [(1, True), (4, True), (8, True), (5, False), (3, False), (16, False)])
def test_qwix_shards_that_do_not_divide(count, fits):
    """Of 5 shards over 8 rows Qwix made 4 blocks, and 16 failed in words of its own."""
    config = {"quantization": "fp8_e4m3", "quant_backend": "qwix", "quantization_local_shard_count": count}
    model = jaxquant.maybe_quantize_model(nn.Dense(4), config, X)
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    trace = jax.make_jaxpr(jax.grad(lambda params: model.apply(params, X).sum()))
    if fits:
        text = str(trace(params))
        assert f"{count},{8 // count},4" in text.replace(" ", "") or count == 1
        return
    with pytest.raises(
        ValueError, match=rf"quantization_local_shard_count {count} of 'fp8_e4m3' .* which has size 8; use a divisor"
    ):
        trace(params)
