"""Attention kernels other than XLA's, and a head that never stores all logits: the same numbers."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.aot.compile import audit_program
from jaxquant.export import DecoderShape
from jaxquant.training.attention import attend, choose_attention, make_mask
from jaxquant.training.config import TrainConfig
from jaxquant.training.model import head_chunks
from tests.lowering import equations
from tests.train.conftest import ROOT
from tests.train.decoder import POSITIONS, SEGMENTS, SHAPE, TOKENS, made

TARGETS = (TOKENS + 1) % 64


CHOICES = [
    ("auto", "cpu", 128, 2048, "bfloat16", "xla"),
    ("auto", "cuda", 128, 2048, "bfloat16", "cudnn"),
    ("auto", "cuda", 128, 2048, "float32", "xla"),
    ("auto", "tpu", 128, 2048, "float32", "splash"),
    ("auto", "tpu", 64, 2048, "bfloat16", "xla"),
    ("cudnn", "cpu", 128, 2048, "bfloat16", "runs on gpu or cuda, but the devices are cpu"),
    ("cudnn", "cuda", 128, 2048, "float32", "requires bfloat16, but dtype is float32"),
    ("splash", "tpu", 128, 100, "bfloat16", "sequence_length that is a multiple of 128, got 100"),
    ("auto", "cuda", {"sliding_window_size": 8}, 2048, "bfloat16", "cudnn"),
    ("auto", "tpu", {"sliding_window_size": 8, "head_dim": 128}, 2048, "bfloat16", "xla"),
    ("cudnn", "cuda", {"attn_logits_soft_cap": 50.0}, 2048, "bfloat16", "does not support attn_logits_soft_cap"),
    ("splash", "tpu", {"attention_sinks": True}, 2048, "bfloat16", "does not support attention_sinks"),
]


def test_attention_is_the_platforms_own_where_it_takes_the_shapes():
    for *asked, chosen in CHOICES:
        is_error = chosen not in ("xla", "cudnn", "splash")
        with pytest.raises(ValueError, match=chosen) if is_error else contextlib.nullcontext():
            requested, platform, head_dim, *rest = asked
            shape = DecoderShape(**head_dim) if isinstance(head_dim, dict) else DecoderShape(head_dim=head_dim)
            assert choose_attention(requested, platform, shape, *rest) == chosen


def test_splash_attention_keeps_documents_apart_and_equals_xlas_with_its_gradients():
    keys = jax.random.split(jax.random.key(0), 4)
    query = jax.random.normal(keys[0], (1, 128, 2, 128))
    key, value = (jax.random.normal(each, (1, 128, 1, 128)) for each in keys[1:3])
    weight = jax.random.normal(keys[3], query.shape)
    segments = jnp.asarray([[1] * 50 + [2] * 70 + [0] * 8])

    def loss(kind, *arrays):
        visible = make_mask(kind, segments, segments)
        mixed = attend(*arrays, visible, kind, interpret=kind == "splash")
        return jnp.sum(mixed * weight), mixed

    found = {
        kind: jax.value_and_grad(loss, (1, 2, 3), has_aux=True)(kind, query, key, value) for kind in ("xla", "splash")
    }
    for theirs, ours in zip(*(jax.tree.leaves(found[kind]) for kind in ("xla", "splash")), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)  # float32 sums of 128 in another order
    # The contents of a document do not change other documents.
    for kind in ("xla", "splash"):
        other = loss(kind, query, key.at[:, :50].add(1.0), value.at[:, :50].add(1.0))[1]
        np.testing.assert_array_equal(other[:, 50:120], found[kind][0][1][:, 50:120])


def test_cudnns_bias_hides_what_xlas_mask_hides_and_one_document_needs_none():
    segments = jnp.asarray([[1, 1, 2, 2, 0], [1, 1, 1, 1, 1]])
    for window in (3, 0):
        bias, mask = (make_mask(kind, segments, segments, window) for kind in ("cudnn", "xla"))
        np.testing.assert_array_equal(bias == 0, mask)
        assert mask[1, 0, 4].tolist() == [not window, not window, True, True, True]
    assert bias.dtype == jnp.bfloat16
    assert set(np.unique(np.asarray(bias, np.float32))) == {0.0, -(2.0**41)}
    assert make_mask("cudnn", segments, None) is None


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_pieces_has_the_loss_and_gradients_of_the_whole(tied):
    found = {}
    for n in (1, 4):
        shape = dataclasses.replace(SHAPE, logits_via_embedding=tied, head_chunks=n, vocab_size=80)
        model = made(shape, quantization="")
        params, state = jax.jit(model.init)(jax.random.key(0))

        def losses(params, model=model, state=state):
            return model.apply(params, state, TOKENS, SEGMENTS, POSITIONS, rngs={}, targets=TARGETS)

        step = jax.jit(lambda params, f=losses: (f(params), jax.grad(lambda p: f(p).mean())(params)))
        found[n] = step(params)
        wide = {var.aval.shape for eqn in equations(step.trace(params).jaxpr.jaxpr) for var in eqn.outvars}
        assert ((2, 12, 80) in wide) == (n == 1)  # all logits
        assert ((2, 3, 80) in wide) == (n == 4)
    for whole, pieces in zip(*(jax.tree.leaves(found[n]) for n in (1, 4)), strict=True):
        np.testing.assert_allclose(pieces, whole, rtol=1e-5, atol=1e-7)


def test_only_large_heads_are_cut():
    assert head_chunks(SHAPE, 12) == 1
    assert [head_chunks(dataclasses.replace(SHAPE, head_chunks=4), length) for length in (8, 6, 3)] == [4, 6, 3]
    llama = dataclasses.replace(SHAPE, vocab_size=128256)
    assert [head_chunks(llama, length) for length in (1024, 2048, 8192)] == [1, 2, 8]
    with pytest.raises(ValueError, match="head_chunks 3 does not divide sequence_length 512"):
        TrainConfig(head_chunks=3)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("target", "words", "kernel"),
    [
        ("h200", ("attention=cudnn",), "cuDNN causal attention forward"),
        ("v6e", ("attention=splash", "head_dim=128", "sequence_length=128"), "splash attention fwd"),
    ],
)
def test_a_compiled_step_holds_each_matmul_and_attention_of_a_layer_once(target, words, kernel):
    fields = ("dtype=bfloat16", "vocab_size=64", "quantization=fp8", "quant_backend=native", "remat_policy=matmuls")
    found = audit_program(
        "jaxquant.training.audit:program", str(ROOT / "configs/models/ci.yml"), [*fields, *words], target=target
    )
    assert {row["kernel"]: row["times"] for row in found.kernels}[kernel] == 2  # layers
    assert not [row for row in found.matmuls if row["pass"] == "recomputed"]
    assert {row["pass"] for row in found.matmuls} == {"forward", "backward"}
