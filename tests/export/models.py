"""A small Llama with random weights, and the checks of its export formats."""

import functools

import numpy as np

from jaxquant.export import LlamaShape, Source
from jaxquant.export.vocabulary import byte_vocabulary

SHAPE = LlamaShape(320, 256, 512, 2, 4, 2, 64, rope_theta=500000.0, tied=False, max_length=64)


@functools.cache
def tensors():
    rng = np.random.default_rng(0)
    found = {}
    for name, shape in SHAPE.tensors().items():
        scale = 0.05 * 10 ** rng.uniform(-1, 1)  # so that the scales of fused layers differ before they are shared
        norm = rng.uniform(0.5, 1.5, shape)
        found[name] = (norm if len(shape) == 1 else rng.normal(size=shape) * scale).astype(np.float32)
    return found


def source(**changes):
    amax = {module: 1.0 + index for index, module in enumerate(SHAPE.linears())}
    fields = {"shape": SHAPE, "read": tensors().__getitem__, "vocabulary": byte_vocabulary(320), "input_amax": amax}
    return Source(**(fields | changes))
