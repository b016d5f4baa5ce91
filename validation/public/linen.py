"""Public Linen models."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import optax

from validation.public.problem import Problem, classes, images, next_token, of_linen, tokens

At = Callable[[str], str]
"""Returns the folder of a path in a checkout, such as "flax/examples/lm1b"."""


def lm1b(at: At) -> Problem:
    """flax/examples/lm1b: the decoder-only transformer, which shifts its input right by itself."""
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
    """nanodo: the decoder, its head tied to the embedding, with remat."""
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
    """big_vision Gemma: einsums on its own parameters, scanned."""
    sys.path.insert(0, at("big_vision"))
    from big_vision.models.ppp import gemma

    model = gemma.Model(
        variant="tiny", width=32, depth=2, mlp_dim=64, num_heads=4, num_kv_heads=1, head_dim=8, norm_eps=1e-6,
        vocab_size=64, scan=True, remat_policy="nothing_saveable",
    )  # fmt: skip
    batches = [(ids,) for ids in tokens()]
    return of_linen(model, lambda apply, ids: next_token(apply(ids)[0], ids), batches, batches[0][0])


def vmoe(at: At) -> Problem:
    """vmoe: a vision transformer whose second block has experts under its own lifted vmap."""
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
    """FlaxGPT2LMHeadModel of transformers below 5: FlaxConv1D, a tied head applied from outside."""
    import transformers

    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    model = transformers.FlaxGPT2LMHeadModel(config, input_shape=(8, 24))
    return _hugging_face(model, next_token, lambda ids: (ids, ids > -1, _positions(ids)))


def _positions(ids: Any) -> Any:
    return jax.numpy.broadcast_to(jax.numpy.arange(ids.shape[-1]), ids.shape)


def _hugging_face(model: Any, loss: Callable[..., Any], arguments: Callable[[Any], tuple[Any, ...]]) -> Problem:
    """Describe a model that holds its parameters; its face is its module, called with what it calls it with."""
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
