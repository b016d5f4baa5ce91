"""A small Llama with random weights, and the checks of its export formats."""

import functools

import numpy as np

from jaxquant.export import DecoderShape, Source, layout_of
from jaxquant.export.vocabulary import byte_vocabulary


def shape_of(*sizes, **options):
    """Return a small shape from its sizes: vocabulary, model, MLP, layers, heads, heads of keys, features of a head."""
    return DecoderShape(*sizes, **{"logits_via_embedding": False, "max_position_embeddings": 64, **options})


SHAPE = shape_of(320, 256, 512, 2, 4, 2, 64)
LAYOUT = layout_of(SHAPE)


@functools.cache
def tensors():
    rng = np.random.default_rng(0)
    found = {}
    for name, shape in LAYOUT.tensors.items():
        scale = 0.05 * 10 ** rng.uniform(-1, 1)  # so that the scales of fused layers differ before they are shared
        norm = rng.uniform(0.5, 1.5, shape)
        found[name] = (norm if len(shape) == 1 else rng.normal(size=shape) * scale).astype(np.float32)
    return found


def source(**changes):
    amax = {module: 1.0 + index for index, module in enumerate(LAYOUT.linears)}
    fields = {"layout": LAYOUT, "read": tensors().__getitem__, "vocabulary": byte_vocabulary(320), "input_amax": amax}
    return Source(**(fields | changes))
