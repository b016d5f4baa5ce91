"""Conversion: the served model computes bit for bit what the trained one does, and keeps no float kernel.

Every string on every backend: the gallery; as users compile: ``test_convert_optimized.py``.
"""

from __future__ import annotations

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
    """Quantize a Linen model and give variables with a history."""
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

    def skeleton():
        return convert(maybe_quantize_model(Nnx(), config, X), config, X)

    loaded = nnx.eval_shape(skeleton)
    serving.update_nnx(loaded, serving.load(tmp_path / "served").params)
    np.testing.assert_array_equal(served(X), loaded(X))


class Stateful(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.wi, self.norm = nnx.Linear(D, D, rngs=rngs), nnx.BatchNorm(D, use_running_average=True, rngs=rngs)
        self.input_scale = nnx.Param(jnp.ones(D))

    def __call__(self, x):
        return self.norm(self.wi(x)) * self.input_scale


def test_what_an_nnx_model_keeps_beside_its_kernels_comes_back_too():
    config = {"quantization": "int8w"}
    model = Stateful()
    model.norm.mean[...], model.norm.var[...], model.input_scale[...] = jnp.full(D, 3), jnp.full(D, 9), jnp.full(D, 2)
    served, fresh = convert(model, config, X), convert(Stateful(), config, X)
    params = serving.nnx_params(served)
    serving.update_nnx(fresh, params)
    np.testing.assert_array_equal(served(X), fresh(X))
    with pytest.raises(ValueError, match="the model has norm/var that the parameters do not, and they have norm/varia"):
        serving.update_nnx(
            fresh, params | {"norm": {"varia" if k == "var" else k: v for k, v in params["norm"].items()}}
        )


def test_kernels_that_are_not_read_as_they_are_stored_stay_in_float():
    config = {"quantization": "int8w"}
    mapped = nn.map_variables(nn.Dense, "params", lambda tree: jax.tree.map(lambda x: 2 * x, tree), init=True)
    for model in (mapped(D, name="wi"), nn.WeightNorm(nn.Dense(D))):
        variables = jax.jit(model.init)(RNGS, X)
        with pytest.warns(UserWarning, match=r"the weights of 1 layers stay in float .*its weight is .*: mul"):
            convert_linen(model, config, X, variables)
        with pytest.raises(NotImplementedError, match=r"strict true, and the weights of 1 layers stay in float"):
            convert(variables, config | {"strict": True}, X, model=model)
    rngs = nnx.Rngs(0)
    model = nnx.WeightNorm(nnx.Linear(D, D, rngs=rngs), rngs=rngs)
    with pytest.warns(UserWarning, match="the weights of 1 layers stay in float"):
        convert_nnx(maybe_quantize_model(model, config, X), config, X, call=lambda model: model(X))


def test_a_path_to_write_to_is_not_ignored():
    config = {"quantization": "int8w", "save_quantized_params_path": "somewhere"}
    with pytest.raises(ValueError, match="save_quantized_params_path 'somewhere' is not written by convert; leave it "):
        convert(jax.jit(dense().init)(RNGS, X), config, X, model=dense())


MIXED = {
    "__default__": {"w_bits": 8, "a_bits": 8},
    ".*query": {"w_bits": 4, "a_bits": 8, "tile_size": 4},
    ".*wo": {"w_bits": 8, "a_bits": None, "w_scale": 0.9},
    "twice": {"w_bits": None, "a_bits": 8},
    "logits": {"w_bits": None, "a_bits": None},
}


@pytest.mark.parametrize("backend", ["aqt", "native"])
def test_mixed_precision_and_tiles(tmp_path, backend):
    path = tmp_path / "mixed.json"
    path.write_text(json.dumps(MIXED))
    _, converted = check_linen("intmp", backend, "bfloat16", 0, quant_cfg_path=str(path))
    layers = converted["params"]["layers"]
    assert layers["query"]["kernel"].qvalue.dtype == jnp.int4
    assert layers["query"]["kernel"].scale.shape == (3, D // 4, 2, 8)
    assert layers["wo"]["kernel"].qvalue.dtype == jnp.int8
    assert not is_tensor(converted["params"]["twice"]["kernel"])  # weights in float, activations in int8


@pytest.mark.parametrize(
    "options",
    [
        {
            "weight_quantization_calibration_method": "fixed,-0.5,0.5",
            "act_quantization_calibration_method": "fixed,-3,3",
        },
        {"weight_quantization_calibration_method": "absmax,0.8", "act_quantization_calibration_method": "rms,3"},
        {"weight_sparsity_n": 2, "weight_sparsity_m": 4, "weight_sparsity_start_step": 0},
    ],
    ids=["fixed", "clipped", "sparsity"],
)
def test_options_of_a_recipe(options):
    _, converted = check_linen("fp8_full", "native", "float32", 0, **options)
    if "weight_sparsity_n" in options:
        kept = np.asarray(converted["params"]["twice"]["kernel"].qvalue.astype(jnp.float32) != 0)
        assert (kept.reshape(-1, 4, D).sum(1) <= 2).all()


def test_flax_numerics():
    check_linen("fp8", "native", "bfloat16", 0, amax_init="flax")


def test_layer_by_layer_is_the_same_and_reads_one_layer_at_a_time():
    config = {"quantization": "fp8"}
    for axis in (0, 1):
        model = Linen(axis=axis)
        _, variables = trained(model, config, X)
        whole = convert(variables, config, X, model=model)["params"]
        # Parameters are read when their turn comes; quant state is there.
        shapes = jax.eval_shape(lambda v=variables: v) | {
            state.OVERWRITE_WITH_GRADIENT: variables[state.OVERWRITE_WITH_GRADIENT]
        }
        sites = find_kernels(model, config, shapes, X)
        sizes = []

        def read(path, index, variables=variables, sizes=sizes):
            found = np.asarray(at(variables, path))[index]
            if path[-1] == "kernel":
                sizes.append(found.size)
            return found

        tree, done = {}, []
        for path, leaf in convert_each(sites, read, variables, done.append):
            inner = tree
            for name in path[:-1]:
                inner = inner.setdefault(name, {})
            inner[path[-1]] = leaf
        jax.tree.map(np.testing.assert_array_equal, tree, whole)
        assert jax.tree.structure(tree) == jax.tree.structure(whole)
        assert max(sizes) == D * D
        assert "layers/wo/kernel" in done


def test_calibration_gives_the_scales_of_what_was_seen():
    config = {"quantization": "fp8"}
    model = Linen()
    variables = filled(jax.eval_shape(model.init, RNGS, X))
    found = calibrate(variables, config, [X, 3 * X, X], model=model)
    twice = convert(found, config, X, model=model)["params"]["layers"]
    inputs = recorded(jnp.abs(3 * X).max())
    np.testing.assert_allclose(twice["query"]["kernel"].input_scale[0].ravel(), inputs / 448, rtol=1e-6)
    kernels = variables["params"]["layers"]["query"]["kernel"]
    for layer in range(3):
        expected = recorded(jnp.abs(kernels[layer]).max()) / 448
        np.testing.assert_allclose(twice["query"]["kernel"].scale[layer].ravel(), expected, rtol=1e-6)
    plain = Nnx()
    served = convert(calibrate(plain, config, [X, 3 * X, X]), config, X)
    np.testing.assert_allclose(served.layers.query.kernel.input_scale[0].ravel(), inputs / 448, rtol=1e-6)
    assert calibrate(variables, {"quantization": "int8w"}, [X], model=model) is variables
    with pytest.raises(ValueError, match="calibrate got no batch"):
        calibrate(variables, config, [], model=model)
    with pytest.raises(ValueError, match="amax_history_length 2 remembers no more"):
        calibrate(variables, config | {"amax_history_length": 2}, [X] * 3, model=model)


def test_errors_name_the_layer():
    config = {"quantization": "int8w"}
    _, variables = trained(Linen(), config, X)
    converted = convert(variables, config, X, model=Linen())
    with pytest.raises(ValueError, match=r"parameter 'layers/mix/kernel' is converted already \(int8\)"):
        convert(converted, config, X, model=Linen())
    with pytest.raises(ValueError, match=r"layer 'layers/mix' has a converted kernel \(int8\) and checkpoint_is_qua"):
        maybe_quantize_model(Linen(), config, X).apply(converted, X)
    with pytest.raises(ValueError, match=r"layer 'layers/query' has a float kernel and checkpoint_is_quantized true"):
        maybe_quantize_model(Linen(), config | SERVES, X).apply(variables, X)
    with pytest.raises(TypeError, match="needs the float model too"):
        convert(variables, config, X)
    with pytest.raises(TypeError, match="takes an NNX model or the variables of a Linen one, got int"):
        convert(3, config, X)
    rules = {"rules": [{"path": "twice", "recipe": None}]}
    with pytest.raises(ValueError, match=r"layer 'twice' has a converted kernel \(int8\) and it stays in float \(left"):
        maybe_quantize_model(Linen(), config | SERVES | rules, X).apply(converted, X)
    other = convert(variables, {"quantization": "fp8_e4m3", "quant_backend": "native"}, X, model=Linen())
    with pytest.raises(ValueError, match=r"layer 'layers/query' has a converted kernel of float8_e4m3fn .*, and 'int8"):
        maybe_quantize_model(Linen(), config | SERVES, X).apply(other, X)


@pytest.mark.parametrize(("string", "options"), [("quartet2", {"four_over_six": True}), ("nvfp4w", {})])
def test_stacked_layers_with_outer_scales_go_through_the_disk(tmp_path, string, options):
    """Each layer of the scan has an outer scale of its own, which is stored beside the scales of its blocks."""
    _, converted = check_linen(string, "native", "bfloat16", 1, **options)
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
    with pytest.raises(ValueError, match=r"the root layer has a kernel of bfloat16, param_dtype float32 and no dtype"):
        convert(variables, config, X.astype(jnp.bfloat16), model=model)
    for model, x in ((dense(param_dtype=jnp.bfloat16), X), (dense(dtype=jnp.bfloat16), X), (dense(), X)):
        convert_linen(model, config, x, variables)


def test_an_nnx_kernel_is_converted_in_the_dtype_that_a_call_reads_it_in():
    model = nnx.Linear(D, D, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    config = {"quantization": "fp8_current"}
    expected = nnx.jit(lambda model: model(X))(maybe_quantize_model(model, config, X))
    np.testing.assert_array_equal(expected, nnx.jit(lambda model: model(X))(convert(model, config, X)))
    with pytest.raises(ValueError, match=r"the root layer was converted for a kernel read in bfloat16, and this call"):
        convert(model, config, X.astype(jnp.bfloat16))(X)


def test_nnx_layers_with_float_kernels_quantize_their_activations(tmp_path):
    path = tmp_path / "mixed.json"
    path.write_text(json.dumps({"__default__": {"w_bits": None, "a_bits": 4}}))
    config = {"quantization": "intmp", "quant_backend": "native", "quant_cfg_path": str(path)}
    model = nnx.Linear(D, D, rngs=nnx.Rngs(0))
    expected = maybe_quantize_model(model, config, X)(X)
    np.testing.assert_array_equal(expected, convert(model, config, X)(X))
    assert (np.asarray(expected) != np.asarray(model(X))).any()
    with pytest.raises(ValueError, match=r"put the saved parameters in: served = nnx\.eval_shape"):
        maybe_quantize_model(model, config | SERVES, X)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=True)(nn.Dense(D, name="wi")(x))


def test_other_collections_stay():
    config = {"quantization": "fp8"}
    variables = jax.jit(Normed().init)(RNGS, X)
    served = convert(calibrate(variables, config, [X], model=Normed()), config, X, model=Normed())
    assert set(served) == {"params", "batch_stats"}
    assert jnp.isfinite(maybe_quantize_model(Normed(), config | SERVES, X).apply(served, X)).all()


def test_what_does_not_fit_a_recipe_is_refused():
    config = {"quantization": "fp8"}
    _, variables = trained(dense(), config, X)
    served = convert(variables, config, X, model=dense())
    current = {"quantization": "fp8_current"}
    with pytest.raises(ValueError, match=r"root layer has a converted kernel of .* with an input_scale, and 'fp8_cur"):
        maybe_quantize_model(dense(), current | SERVES, X).apply(served, X)
    exact = nnx.Linear(D, D, precision="highest", rngs=nnx.Rngs(0))
    served = convert(exact, {"quantization": "int8", "quant_backend": "qwix"}, X)
    with pytest.raises(NotImplementedError, match=r"precision .*HIGHEST of a contraction is dropped by Qwix; "):
        served(X)
