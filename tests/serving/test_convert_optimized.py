"""With default compilation, converted models compute the bits of trained models: one recipe of each kind, in bfloat16.

float32 is also tested, with a float sum after a layer, if LLVM keeps the order of the sum.

The gallery tests all recipes on all backends, compiled with little optimization.
"""

from __future__ import annotations

import flax.linen as nn
import pytest

from jaxquant.config.recipes import RECIPES
from jaxquant.core.qtensor import is_tensor
from tests.serving.models import convert_linen
from tests.serving.test_convert import KERNELS, X, at, check_linen

OPTIMIZED = True
PAIRS = [("fp8", "native"), ("ggml_q4_0", "native"), ("int8", "qwix"), ("aqt_fp8_full", "aqt")]


@pytest.mark.parametrize(("string", "backend"), PAIRS)
def test_linen_serves_what_it_trained(string, backend):
    variables, converted = check_linen(string, backend, "bfloat16", 1)
    assert set(converted) == {"params"}
    spec = RECIPES[string].recipe.fwd.rhs
    for path in KERNELS:
        layer, before = at(converted["params"], path), at(variables["params"], path)
        assert layer["kernel"].qvalue.dtype == ("uint8" if spec.codec else spec.dtype)
        assert layer["kernel"].codec == spec.codec
        assert layer["kernel"].shape == before["kernel"].shape
        assert set(layer) == set(before)
        assert spec.codec or layer["kernel"].scale.size < before["kernel"].size
    assert not is_tensor(converted["params"]["logits"]["kernel"])


def test_a_mean_that_keeps_its_order_serves_its_bits():
    # By default, LLVM vectorizes the mean differently in the two programs, because XLA marks its adds "reassoc".
    model, options = nn.Sequential([nn.Dense(32), nn.LayerNorm()]), {"xla_backend_optimization_level": 0}
    convert_linen(model, {"quantization": "int8"}, X, compiler_options=options)
