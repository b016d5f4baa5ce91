"""Quantized parameters of MaxText models: which float parameter each tensor replaces; no other one is removed."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.tree_util import DictKey

from jaxquant.compat.maxtext import match_aqt_and_unquantized_param, remove_quantized_params
from jaxquant.core.qtensor import QTensor, is_tensor


def tensor(*shape: int) -> QTensor:
    return QTensor(jnp.zeros(shape, jnp.int8), jnp.ones((1,) * len(shape)))


def frozen(value: Any) -> dict[str, Any]:
    return {"qrhs": {"frozen": value}}


def param(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    return unflatten_dict(flat, sep="/")


def replaced(quantized: dict[str, Any], params: dict[str, Any]) -> dict[str, str]:
    """Match two flat trees and return path of the op -> path of the parameter."""
    found = flatten_dict(match_aqt_and_unquantized_param(nested(quantized), nested(params)), sep="/")
    return {op.split("/qrhs")[0]: "/".join(key.key for key in path) for op, path in found.items()}


Shape = tuple[int, ...]


def experts(op: str, *names: str) -> list[tuple[str, str, Shape]]:
    shapes = (4, 8, 6), (4, 8, 6), (4, 6, 8)
    return [(f"moe/{op}_{i}", f"moe/{name}", shapes[i]) for i, name in enumerate(names)]


BIASES: dict[str, Shape] = {"moe/wi_0_bias": (4, 6), "moe/wi_1_bias": (4, 6), "moe/wo_bias": (4, 8)}
NATIVE = ("a", "DotGeneral"), ("b", "Fp8DirectDotGeneralOp"), ("c", "NANOOFp8DotGeneralOp"), ("d", "Fp8Einsum")
# Each op, the parameter that it replaces and its shape; then the shapes of the other parameters.
CASES: dict[str, tuple[list[tuple[str, str, Shape]], dict[str, Shape]]] = {
    "dense with a bias": ([("wi/AqtDotGeneral_0", "wi/kernel", (8, 6))], {"wi/bias": (6,)}),
    "tiled": ([("attention/query/AqtDotGeneral_0", "attention/query/kernel", (8, 4, 6))], {}),
    "experts whose gate has its own path": (
        [*experts("AqtEinsum", "wi_0", "wi_1", "wo"), ("moe/gate/AqtDotGeneral_0", "moe/gate/kernel", (8, 4))],
        BIASES | {"moe/gate/bias": (4,)},
    ),
    "einsums whose numbers have two digits": ([(f"moe/AqtEinsum_{i}", f"moe/w_{i}", (8, 6)) for i in range(12)], {}),
    "native names": (
        [
            *experts("Einsum", "wi_0", "wi_1", "wo"),
            *((f"{layer}/{op}_0", f"{layer}/kernel", (8, 2)) for layer, op in NATIVE),
        ],
        BIASES | {f"{layer}/bias": (2,) for layer, _ in NATIVE},
    ),
    "scanned layers": (
        [(f"layers/{name}/AqtDotGeneral_0", f"layers/{name}/kernel", (8, 3, 6)) for name in ("wi", "wo")],
        {"layers/norm/scale": (8, 3)},
    ),
    "a kernel at the root": ([("AqtEinsum_0", "kernel", (8, 6))], {"norm/scale": (48,)}),
}
STORED: dict[str, Shape] = {"tiled": (2, 4, 4, 6), "scanned layers": (3, 8, 6)}
"""Shapes of tensors that are not those of their parameters."""


def trees(case: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Return tensors and parameters by path, and the parameter that each op replaces."""
    pairs, others = CASES[case]
    quantized = {f"{op}/qrhs/frozen": tensor(*STORED.get(case, shape)) for op, _, shape in pairs}
    params = {path: param(*shape) for path, shape in ({path: shape for _, path, shape in pairs} | others).items()}
    return quantized, params, {op: path for op, path, _ in pairs}


@pytest.mark.parametrize("case", CASES)
def test_each_tensor_finds_its_parameter_which_goes_and_all_else_stays(case: str):
    quantized, params, expected = trees(case)
    assert replaced(quantized, params) == expected
    params |= {"decoder_norm/scale": param(8), "logits_dense/kernel": param(8, 6)}
    kept = remove_quantized_params(nested(params), nested(quantized))
    gone = set(expected.values())
    expected = {path: {} if path in gone else value for path, value in params.items()}
    assert kept == nested(expected)


def test_the_answer_has_the_form_of_the_collection():
    """The result has key paths for tensors and None for input scales; the arguments do not change."""
    collection = {"wi": {"DotGeneral_0": {"qrhs": {"frozen": tensor(8, 6), "input_scale": jnp.ones((1,))}}}}
    params = {"wi": {"kernel": jnp.ones((8, 6)), "bias": jnp.ones((6,))}}
    found = match_aqt_and_unquantized_param(collection, params)
    assert found == {
        "wi": {"DotGeneral_0": {"qrhs": {"frozen": (DictKey("wi"), DictKey("kernel")), "input_scale": None}}}
    }
    kept = remove_quantized_params(params, collection)
    assert kept["wi"]["kernel"] == {}
    np.testing.assert_array_equal(kept["wi"]["bias"], params["wi"]["bias"])
    assert isinstance(params["wi"]["kernel"], jax.Array)
    assert is_tensor(collection["wi"]["DotGeneral_0"]["qrhs"]["frozen"])


def test_parameters_in_boxes_with_names_of_axes():
    boxed = nn.LogicallyPartitioned(jnp.ones((8, 6)), ("embed", "mlp"))
    bias = nn.LogicallyPartitioned(jnp.ones(6), ("mlp",))
    quantized = nested({"wi/AqtDotGeneral_0": frozen(tensor(8, 6))})
    found = remove_quantized_params(nested({"wi/kernel": boxed, "wi/bias": bias}), quantized)
    assert found == {"wi": {"kernel": {}, "bias": bias}}


def test_trees_that_do_not_match_are_an_error_with_both_sides():
    for ops, shapes, named in (
        ({"wo/AqtDotGeneral_0": (8, 6)}, {"wi/kernel": (8, 6)}, "wo/AqtDotGeneral_0/qrhs/frozen"),
        ({"moe/AqtEinsum_0": (4, 6)}, {"moe/wi_0_bias": (4, 6)}, "moe/AqtEinsum_0/qrhs/frozen"),
        ({f"moe/AqtEinsum_{i}": (8, 6) for i in (0, 1)}, {"moe/wi": (8, 6)}, "moe/AqtEinsum_1/qrhs/frozen"),
    ):
        quantized = nested({f"{path}/qrhs/frozen": tensor(*shape) for path, shape in ops.items()})
        params = nested({path: param(*shape) for path, shape in shapes.items()})
        with pytest.raises(ValueError, match=f"^{named} has no float parameter") as caught:
            match_aqt_and_unquantized_param(quantized, params)
        left = [f"  {path}/qrhs/frozen {shape}" for path, shape in ops.items()]
        right = [f"  {path} {shape}" for path, shape in shapes.items()]
        assert str(caught.value).splitlines()[1:] == ["quantized:", *left, "parameters:", *right]
        with pytest.raises(ValueError, match=f"^{named} has no float parameter"):
            remove_quantized_params(params, quantized)
