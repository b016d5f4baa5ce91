"""Public models in Linen, NNX, Haiku and Equinox."""

from __future__ import annotations

import ast
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxquant
from validation.public.problem import (
    Loop,
    Problem,
    classes,
    images,
    next_token,
    of_linen,
    of_nnx,
    of_nnx_model,
    tokens,
)

At = Callable[[str], str]
"""Function from a path in a checkout, such as "flax/examples/lm1b", to its folder."""


def lm1b(at: At) -> Problem:
    """flax/examples/lm1b: the decoder-only transformer, whose forward pass shifts the input to the right."""
    sys.path.insert(0, at("flax/examples/lm1b"))
    import models

    config = models.TransformerConfig(64, 64, emb_dim=32, num_heads=4, num_layers=2, qkv_dim=32, mlp_dim=64, max_len=32)
    batches = [(ids,) for ids in tokens()]
    model = models.TransformerLM(config.replace(deterministic=True))
    return of_linen(model, lambda apply, ids: classes(apply(ids), ids), batches, batches[0][0])


def seq2seq(at: At) -> Problem:
    """flax/examples/seq2seq: two LSTMs in nn.RNN."""
    sys.path.insert(0, at("flax/examples/seq2seq"))
    import models

    batches = [(jax.nn.one_hot(ids % 16, 16), jax.nn.one_hot(ids[:, ::-1] % 16, 16)) for ids in tokens(16, length=8)]

    def loss(apply: Any, source: Any, target: Any) -> Any:
        logits, _ = apply(source, target, rngs={"lstm": jax.random.key(1)})
        return optax.softmax_cross_entropy(logits, target[:, 1:]).mean()

    return of_linen(models.Seq2seq(True, 32, 16), loss, batches, *batches[0], lstm=jax.random.key(1))


def nanodo(at: At) -> Problem:
    """nanodo: the decoder, with remat and with a head that is tied to the embedding."""
    sys.path.insert(0, at("nanodo"))
    from nanodo import model as nanodo_model

    model = nanodo_model.TransformerDo(nanodo_model.DoConfig(32, 4, 24, 2, 64, 64, fsdp_enabled=False, remat=True))
    batches = [(ids,) for ids in tokens()]
    return of_linen(model, lambda apply, ids: next_token(apply(ids), ids), batches, batches[0][0])


def big_vision_vit(at: At) -> Problem:
    """big_vision ViT with scan=True, remat and a pooling head."""
    sys.path.insert(0, at("big_vision"))
    from big_vision.models import vit

    model = vit.Model(
        10, width=32, depth=2, mlp_dim=64, num_heads=4, patch_size=(4, 4), scan=True, pool_type="map",
        head_zeroinit=False,
    )  # fmt: skip
    batches = images()
    return of_linen(model, lambda apply, x, y: classes(apply(x)[0], y), batches, batches[0][0])


def big_vision_gemma(at: At) -> Problem:
    """big_vision Gemma: scanned layers that use einsums with their parameters."""
    sys.path.insert(0, at("big_vision"))
    from big_vision.models.ppp import gemma

    model = gemma.Model(
        variant="tiny", width=32, depth=2, mlp_dim=64, num_heads=4, num_kv_heads=1, head_dim=8, norm_eps=1e-6,
        vocab_size=64, scan=True, remat_policy="nothing_saveable",
    )  # fmt: skip
    batches = [(ids,) for ids in tokens()]
    return of_linen(model, lambda apply, ids: next_token(apply(ids)[0], ids), batches, batches[0][0])


def vmoe(at: At) -> Problem:
    """vmoe: a vision transformer with experts under a lifted vmap in its second block."""
    sys.path[:0] = [at("vmoe"), at("vision_transformer")]
    from vmoe.nn import vit_moe

    router = {"num_selected_experts": 2, "noise_std": 1e-3, "dispatcher": {
        "name": "einsum", "batch_priority": False, "bfloat16": False, "capacity_factor": 1.5,
        "partition_spec": None}}  # fmt: skip
    encoder = {"num_layers": 2, "mlp_dim": 64, "num_heads": 4, "position_emb": {"name": "sincos2d"}, "moe": {
        "layers": (1,), "num_experts": 4, "group_size": 16, "split_rngs": True, "router": router}}  # fmt: skip
    model = vit_moe.VisionTransformerMoe(
        10, (4, 4), 32, encoder, classifier="gap", deterministic=True, head_kernel_zero_init=False
    )
    batches = images()
    rng = jax.random.key(1)

    def loss(apply: Any, x: Any, y: Any) -> Any:
        logits, metrics = apply(x, rngs={"gating": rng})
        return classes(logits, y) + 0.01 * metrics["auxiliary_loss"].mean()

    return of_linen(model, loss, batches, batches[0][0], gating=rng)


def hf_bert(at: At) -> Problem:
    """FlaxBertForMaskedLM of transformers below 5."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    model = transformers.FlaxBertForMaskedLM(config, input_shape=(8, 24))
    return _hugging_face(model, classes, lambda ids: (ids, ids > -1, ids * 0, _positions(ids), None))


def hf_gpt2(at: At) -> Problem:
    """FlaxGPT2LMHeadModel of transformers below 5: FlaxConv1D layers, and a tied head outside of the decoder module."""
    import transformers

    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    model = transformers.FlaxGPT2LMHeadModel(config, input_shape=(8, 24))
    return _hugging_face(model, next_token, lambda ids: (ids, ids > -1, _positions(ids)))


def _positions(ids: Any) -> Any:
    return jax.numpy.broadcast_to(jax.numpy.arange(ids.shape[-1]), ids.shape)


def _hugging_face(model: Any, loss: Callable[..., Any], arguments: Callable[[Any], tuple[Any, ...]]) -> Problem:
    """Return the problem of a model that stores its parameters; the face quantizes the model's Linen module."""
    batches = [(ids,) for ids in tokens()]
    params = jax.tree.map(jax.numpy.asarray, model.params)
    face = of_linen(
        model.module,
        lambda apply, ids: loss(apply(*arguments(ids)).logits, ids),
        batches,
        *arguments(batches[0][0]),
        params=params,
    ).face
    return Problem(params, lambda p, ids: loss(model(ids, params=p, train=False).logits, ids), batches, face)


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
    """flax/examples/mnist: the CNN. The file imports tensorflow_datasets, so only the class definition is executed."""
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
    """bonsai Qwen3: nnx.Einsum and nnx.Linear layers, and a cache that the forward pass writes."""
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
    """bonsai ViT: its head has the name "classifier", an inner layer the name "linear2"."""
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
    """Qwix's LoRA on an NNX model; base and adapters are trained. ``Problem.face`` adds LoRA to the quantized base."""
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
