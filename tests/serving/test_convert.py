"""Conversion: the converted model computes the same bits as the trained model, and has no float kernel.

The gallery tests every string on every backend; ``test_convert_optimized.py`` compiles as users do.
"""

from __future__ import annotations

import dataclasses
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxquant import calibrate, convert, maybe_quantize_model, serving, state
from jaxquant.core.qtensor import is_tensor
from jaxquant.serving import convert_each, find_kernels
from jaxquant.serving.leaves import flatten
from tests.serving.models import D, Linen, Nnx, convert_linen, convert_nnx, filled
from tests.serving.trees import abstract, assert_same
from tests.states import edited, recorded

SERVES = {"checkpoint_is_quantized": True}
X = jax.random.normal(jax.random.key(0), (2, 5, D))
RNGS = {"params": jax.random.key(1), "quant": jax.random.key(2)}
KERNELS = [("layers", "query"), ("layers", "mix"), ("layers", "wo"), ("twice",)]


def at(tree, path):
    for name in path:
        tree = tree[name]
    return tree


def trained(model, config, x):
    """Quantize a Linen model and return it, with variables that have a history."""
    quantized = maybe_quantize_model(model, config, x)
    return quantized, filled(jax.eval_shape(quantized.init, RNGS, x))


def check_linen(string, backend, dtype, axis, **options):
    model, x = Linen(jnp.dtype(dtype), axis), X.astype(dtype)
    config = {"quantization": string, "quant_backend": backend, **options}
    _, variables = trained(model, config, x)
    return variables, convert_linen(model, config, x, variables)


def test_an_nnx_model_through_the_disk(tmp_path):
    config = {"quantization": "fp8"}
    quantized = maybe_quantize_model(Nnx(), config, X)
    nnx.update(quantized, filled(nnx.to_pure_dict(nnx.state(quantized, state.QuantState))))
    served = convert_nnx(quantized, config, X, call=lambda model: model(X))
    assert not jax.tree.leaves(nnx.state(served, state.QuantState))
    assert {(D, D), (3, D, D)}.isdisjoint(leaf.shape for leaf in jax.tree.leaves(nnx.state(served, nnx.Param)))
    params = serving.nnx_params(served)
    assert is_tensor(params["layers"]["mix"]["kernel"])
    assert params["layers"]["mix"]["kernel"].input_scale.shape == (3, 1, 1, 1)
    serving.save(tmp_path / "served", params, config)

    loaded = nnx.eval_shape(lambda: convert(maybe_quantize_model(Nnx(), config, X), config, X))
    serving.update_nnx(loaded, serving.load(tmp_path / "served").params)
    np.testing.assert_array_equal(served(X), loaded(X))


class Stateful(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.wi, self.norm = nnx.Linear(D, D, rngs=rngs), nnx.BatchNorm(D, use_running_average=True, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.input_scale = nnx.Param(jnp.ones(D))

    def __call__(self, x):
        return self.drop(self.norm(self.wi(x))) * self.input_scale


def test_what_a_model_keeps_beside_its_kernels_comes_back_too():
    config = {"quantization": "int8w"}
    model = Stateful()
    model.norm.mean[...], model.norm.var[...], model.input_scale[...] = jnp.full(D, 3), jnp.full(D, 9), jnp.full(D, 2)
    served, fresh = convert(model, config, X), nnx.eval_shape(lambda: convert(Stateful(), config, X))
    params = serving.nnx_params(served)
    serving.update_nnx(fresh, params)
    assert fresh(X).shape == X.shape  # in training, by a random state that begins anew
    served.eval(), fresh.eval()
    np.testing.assert_array_equal(served(X), nnx.jit(lambda model, x: model(x))(fresh, X))
    with pytest.raises(ValueError, match="missing for the model: norm/var; parameters unknown to the model: norm/vari"):
        serving.update_nnx(
            fresh, params | {"norm": {"varia" if k == "var" else k: v for k, v in params["norm"].items()}}
        )
    linen = nn.Sequential([dense(), nn.BatchNorm(use_running_average=True)])
    converted = convert_linen(linen, config, X, jax.jit(linen.init)(RNGS, X))
    assert set(converted) == {"params", "batch_stats"}


def test_kernels_that_are_not_read_as_they_are_stored_stay_in_float():
    config = {"quantization": "int8w"}
    mapped = nn.map_variables(nn.Dense, "params", lambda tree: jax.tree.map(lambda x: 2 * x, tree), init=True)
    for model in (mapped(D, name="wi"), nn.WeightNorm(nn.Dense(D))):
        variables = jax.jit(model.init)(RNGS, X)
        with pytest.warns(UserWarning, match=r"leaves the weights of 1 layers in float .*its weight is .* by mul"):
            convert_linen(model, config, X, variables)
        with pytest.raises(NotImplementedError, match="true does not allow that convert leaves the weights of 1 lay"):
            convert(model, variables, config | {"strict": True}, X)
    rngs = nnx.Rngs(0)
    model = nnx.WeightNorm(nnx.Linear(D, D, rngs=rngs), rngs=rngs)
    with pytest.warns(UserWarning, match="convert leaves the weights of 1 layers in float"):
        convert_nnx(maybe_quantize_model(model, config, X), config, X, call=lambda model: model(X))


MIXED = {
    "__default__": {"w_bits": 8, "a_bits": 8},
    ".*query": {"w_bits": 4, "a_bits": 8, "tile_size": 4},
    ".*wo": {"w_bits": 8, "a_bits": None, "w_scale": 0.9},
    "twice": {"w_bits": None, "a_bits": 8},
    "logits": {"w_bits": None, "a_bits": None},
}


def test_mixed_precision_and_tiles(tmp_path):
    path = tmp_path / "mixed.json"
    path.write_text(json.dumps(MIXED))
    _, converted = check_linen("intmp", "native", "bfloat16", 0, quant_cfg_path=str(path))
    layers = converted["params"]["layers"]
    assert layers["query"]["kernel"].qvalue.dtype == jnp.int4
    assert layers["query"]["kernel"].scale.shape == (3, D // 4, 2, 8)
    assert layers["wo"]["kernel"].qvalue.dtype == jnp.int8
    assert not is_tensor(converted["params"]["twice"]["kernel"])  # weights in float, activations in int8


def test_options_of_a_recipe():
    fixed = "fixed,-0.5,0.5"
    sparse = {"weight_sparsity_n": 2, "weight_sparsity_m": 4, "weight_sparsity_start_step": 0}
    options = {"weight_quantization_calibration_method": fixed, "act_quantization_calibration_method": "rms,3"}
    _, converted = check_linen("fp8_full", "native", "float32", 0, **options, **sparse)
    kept = np.asarray(converted["params"]["twice"]["kernel"].qvalue.astype(jnp.float32) != 0)
    assert (kept.reshape(-1, 4, D).sum(1) <= 2).all()
    check_linen("fp8", "native", "bfloat16", 0, amax_init="flax")


def test_layer_by_layer_is_the_same_and_reads_one_layer_at_a_time():
    config = {"quantization": "fp8"}
    model = Linen(axis=1)
    _, variables = trained(model, config, X)
    whole = convert(model, variables, config, X)["params"]
    # Parameters are read one by one; quant state is already in memory.
    quant = {state.OVERWRITE_WITH_GRADIENT: variables[state.OVERWRITE_WITH_GRADIENT]}
    sites = find_kernels(model, jax.eval_shape(lambda: variables) | quant, config, X)
    sizes, done = [], []

    def read(path, index):
        found = np.asarray(at(variables, path))[index]
        sizes.append(found.size if path[-1] == "kernel" else 0)
        return found

    found = {"/".join(path): leaf for path, leaf in convert_each(sites, read, variables, done.append)}
    expected = flatten(whole)
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        jax.tree.map(np.testing.assert_array_equal, found[path], leaf)
    assert max(sizes) == D * D
    assert "layers/wo/kernel" in done


def test_calibration_gives_the_scales_of_what_was_seen():
    config, batches, model, plain = {"quantization": "fp8"}, [X, 3 * X, X], dense(), nnx.Linear(D, D, rngs=nnx.Rngs(0))
    variables = filled(jax.eval_shape(model.init, RNGS, X))
    found = convert(model, calibrate(model, variables, config, batches), config, X)["params"]["kernel"]
    inputs, kernel = (recorded(jnp.abs(each).max()) / 448 for each in (3 * X, variables["params"]["kernel"]))
    np.testing.assert_allclose(found.input_scale.ravel(), inputs, rtol=1e-6)
    np.testing.assert_allclose(found.scale.ravel(), kernel, rtol=1e-6)
    served = convert(calibrate(plain, config, batches), config, X)
    np.testing.assert_allclose(served.kernel.input_scale.ravel(), inputs, rtol=1e-6)
    assert calibrate(model, variables, {"quantization": "int8w"}, [X]) is variables


def test_errors_name_the_layer():
    config, model = {"quantization": "int8w"}, nn.Sequential([nn.Dense(D), nn.Dense(D)])
    variables = jax.jit(model.init)(RNGS, X)
    converted, fp8 = (convert(model, variables, {"quantization": string}, X) for string in ("int8w", "fp8_current"))

    def apply(variables, **options):
        return maybe_quantize_model(model, config | options, X).apply(variables, X)

    path = {"save_quantized_params_path": "somewhere"}
    rules = [{"path": "layers_1", "recipe": None}]
    for call, message in (
        (lambda: convert(model, converted, config, X), r"'layers_0/kernel' is already int8; pass the float parameters"),
        (lambda: convert(model, variables, config | path, X), "'somewhere' has no effect in convert; remove this"),
        (lambda: apply(converted), r"'layers_0' has a converted kernel \(int8\), but checkpoint_is_qua"),
        (lambda: apply(variables, **SERVES), "'layers_0' has a float kernel, but checkpoint_is_quantized is t"),
        (lambda: apply(converted, **SERVES, rules=rules), "'layers_1' has .*, but stays in float"),
        (lambda: apply(fp8, **SERVES), "has a converted kernel of float8_e4m3fn .*, but recipe 'int8"),
        (lambda: maybe_quantize_model(Stateful(), config | SERVES, X), r"add the saved .*: served = nnx\.eval_sh"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    kernel = dataclasses.replace(fp8["params"]["layers_0"]["kernel"], input_scale=jnp.ones((1, 1)))
    delayed = {"layers_0": fp8["params"]["layers_0"] | {"kernel": kernel}}
    with pytest.raises(ValueError, match=r"has a converted kernel of .* with an input_scale, but recipe 'fp8_cur"):
        apply({"params": fp8["params"] | delayed}, **SERVES, quantization="fp8_current")


def test_stacked_layers_with_outer_scales_go_through_the_disk(tmp_path):
    """Each layer of the scan has a separate outer scale, which is stored next to the scales of its blocks."""
    string = "quartet2"
    _, converted = check_linen(string, "native", "bfloat16", 1, four_over_six=True)
    kernels = converted["params"]["layers"]["wo"]["kernel"], converted["params"]["twice"]["kernel"]
    assert [kernel.outer_scale.shape for kernel in kernels] == [(1, 3, 1), (1, 1)]
    assert len(set(np.asarray(kernels[0].outer_scale).ravel())) == 3
    serving.save(tmp_path / "served", converted["params"], {"quantization": string})
    assert_same(serving.load(tmp_path / "served", like=abstract(converted["params"])).params, converted["params"])
    leaves = {leaf.path: leaf for leaf in serving.read_manifest(tmp_path / "served").leaves}
    assert leaves["layers/wo/kernel"].outer_shape == (1, 3, 1)


def dense(**options):
    return nn.Dense(D, use_bias=False, **options)


def test_a_kernel_that_was_all_zero_when_it_was_seen_has_its_own_scale():
    config = {"quantization": "fp8"}
    quantized, variables = trained(dense(), config, X)
    quant_state = edited(
        variables["_overwrite_with_gradient"],
        lambda name, row: row | ({"amax_history": 0 * row["amax_history"]} if name.endswith("kernel") else {}),
    )
    variables = {**variables, "_overwrite_with_gradient": quant_state}
    convert_linen(dense(), config, X, variables)
    assert jnp.abs(quantized.apply(variables, X)).max() > 0


def test_a_dtype_that_the_converted_kernel_would_not_tell_is_refused():
    config, model = {"quantization": "int8w"}, dense()
    variables = {"params": {"kernel": jnp.ones((D, D), jnp.bfloat16)}}
    with pytest.raises(ValueError, match=r"param_dtype float32 and no dtype, but the kernel to convert is bfloat16; s"):
        convert(model, variables, config, X.astype(jnp.bfloat16))
    for model, x in ((dense(param_dtype=jnp.bfloat16), X), (dense(dtype=jnp.bfloat16), X), (dense(), X)):
        convert_linen(model, config, x, variables)


def test_an_nnx_kernel_is_converted_in_the_dtype_that_a_call_reads_it_in():
    model = nnx.Linear(D, D, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    config = {"quantization": "fp8_current"}
    expected = nnx.jit(lambda model: model(X))(maybe_quantize_model(model, config, X))
    np.testing.assert_array_equal(expected, nnx.jit(lambda model: model(X))(convert(model, config, X)))
    with pytest.raises(ValueError, match=r"the root layer was converted with its kernel in bfloat16, but this call"):
        convert(model, config, X.astype(jnp.bfloat16))(X)
