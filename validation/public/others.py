"""Public models in NNX, Haiku and Equinox."""

from __future__ import annotations

import ast
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxquant
from validation.public.problem import Loop, Problem, classes, images, next_token, of_nnx, of_nnx_model, tokens

At = Callable[[str], str]
"""Returns the folder of a path in a checkout, such as "flax/examples/gemma"."""


def _classes(logits: Any, _: Any, labels: Any) -> Any:
    return classes(logits, labels)


def nnx_gemma(at: At) -> Problem:
    """flax/examples/gemma: Gemma in NNX."""
    sys.path.insert(0, at("flax/examples/gemma"))
    import transformer
    from transformer_cfg import AttentionType, TransformerConfig

    kinds = (AttentionType.LOCAL_SLIDING, AttentionType.GLOBAL)
    config = TransformerConfig(2, 64, 32, 64, 4, 8, 1, 30.0, True, True, kinds, use_qk_norm=True, sliding_window_size=8)
    model = transformer.Transformer(config, rngs=nnx.Rngs(0, params=0))
    positions, mask = jnp.arange(24)[None].repeat(8, 0), jnp.tril(jnp.ones((8, 24, 24), bool))
    batches = [(ids,) for ids in tokens()]
    example = (batches[0][0], positions, None, mask)
    return of_nnx(model, lambda m, ids: m(ids, positions, None, mask)[0], next_token, batches, *example)


def mnist(at: At) -> Problem:
    """flax/examples/mnist: the CNN, whose module imports TensorFlow's data sets; this builds its class alone."""
    tree = ast.parse(pathlib.Path(at("flax/examples/mnist"), "train.py").read_text())
    cnn = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "CNN")
    names: dict[str, Any] = {"nnx": nnx, "partial": functools.partial, "jnp": jnp}
    exec(compile(ast.Module([cnn], []), "train.py", "exec"), names)
    model = names["CNN"](nnx.Rngs(0))
    model.eval()
    batches = [(x.mean(-1, keepdims=True), y) for x, y in images(28)]
    return of_nnx(
        model, lambda m, x, y: m(x, None), lambda logits, x, y: classes(logits, y), batches, batches[0][0], None
    )


def bonsai_qwen3(at: At) -> Problem:
    """bonsai Qwen3: nnx.Einsum and nnx.Linear, a cache that the call writes."""
    sys.path.insert(0, at("bonsai"))
    from bonsai.models.qwen3 import modeling

    config = modeling.ModelConfig(2, 64, 32, 64, 4, 8, 2, 10000, 1, 10000.0, 1e-6, False)
    model = modeling.Qwen3(config, rngs=nnx.Rngs(0))

    def arguments(ids: Any) -> dict[str, Any]:
        cache = modeling.init_cache(config, *ids.shape, 0, jnp.float32)
        return {"cache": cache, "segment_ids": jnp.ones_like(ids)}

    batches = [(ids,) for ids in tokens()]
    first = batches[0][0]
    return of_nnx(model, lambda m, ids: m(ids, **arguments(ids)), next_token, batches, first, **arguments(first))


def bonsai_vit(at: At) -> Problem:
    """bonsai ViT: a head called "classifier", an inner layer called "linear2"."""
    sys.path.insert(0, at("bonsai"))
    from bonsai.models.vit import modeling

    model = modeling.ViTClassificationModel(
        modeling.ModelConfig((16, 16), (4, 4), 3, 32, 0.0, 0.0, 4, 64, 1e-6, 2, 10), rngs=nnx.Rngs(0)
    )
    batches = images()
    return of_nnx(model, lambda m, x, y: m(x, rngs=None), _classes, batches, batches[0][0], rngs=None)


def haiku_mlp(at: At) -> Problem:
    """A Haiku MLP."""
    import haiku

    model = haiku.transform(lambda x: haiku.nets.MLP([64, 64, 10])(x.reshape(len(x), -1)))
    batches = images()
    params = model.init(jax.random.key(0), batches[0][0])
    return Problem(params, lambda p, x, y: classes(model.apply(p, None, x), y), batches)


def equinox_mlp(at: At) -> Problem:
    """An Equinox MLP, vmapped over rows."""
    import equinox

    params, static = equinox.partition(equinox.nn.MLP(768, 10, 64, 2, key=jax.random.key(0)), equinox.is_array)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return classes(jax.vmap(equinox.combine(params, static))(x.reshape(len(x), -1)), y)

    return Problem(params, loss, images())


class _Small(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.wi, self.wo = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)
        self.lm_head = nnx.Linear(32, 64, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        x = self.embed(ids)
        return self.lm_head(x + self.wo(nnx.relu(self.wi(x))))


def qwix_lora(at: At) -> Problem:
    """Qwix's LoRA on an NNX model: base and adapters are trained; its face quantizes the base, then Qwix adds LoRA."""
    import qwix

    provider = qwix.LoraProvider(module_path="wi|wo", rank=4, alpha=4.0)
    ids = jnp.zeros((8, 24), jnp.int32)

    def add(model: Any) -> Any:
        return qwix.apply_lora_to_model(model, provider, ids, rngs=nnx.Rngs(1))

    def face(config: dict[str, Any]) -> Loop:
        model = add(jaxquant.maybe_quantize_model(_Small(nnx.Rngs(0)), config, ids))
        return of_nnx_model(model, lambda model, ids: next_token(model(ids), ids))

    problem = of_nnx(add(_Small(nnx.Rngs(0))), lambda m, ids: m(ids), next_token, [(ids,) for ids in tokens()])
    return Problem(problem.params, problem.loss, problem.batches, face)
