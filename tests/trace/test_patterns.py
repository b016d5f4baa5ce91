"""What public models do to their parameters, written anew and small: layers by path, heads and routers float."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.trace.functions import layers, shape

IDS = shape(2, 6, dtype="int32")
QUANTIZED = "fp8_current"


def linen(model, loss, *args, rngs=()):
    """The layers of a Linen model under a loss."""
    keys = {name: jax.random.key(0) for name in ("params", *rngs)}
    params = jax.eval_shape(lambda: model.init(keys, *(jnp.zeros(x.shape, x.dtype) for x in args)))["params"]
    rest = {name: key for name, key in keys.items() if name != "params"}
    return layers(lambda p, *args: loss(model.apply({"params": p}, *args, rngs=rest)), params, *args)


def cross_entropy(logits):
    return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])


def quantized_and(found, **others):
    """Check that all layers are quantized but those named, whose reasons begin so."""
    for path, reason in others.items():
        assert found.pop(path.replace("__", "/")).startswith(reason)
    assert set(found.values()) == {QUANTIZED}
    return sorted(found)


class Einsum(nn.Module):
    """An einsum on the author's own parameter."""

    shape: tuple[int, ...]
    equation: str

    @nn.compact
    def __call__(self, x):
        return jnp.einsum(self.equation, x, self.param("w", nn.initializers.normal(), self.shape))


class GatedBlock(nn.Module):
    """Fused query, key and value; one parameter whose two halves are two matmuls."""

    @nn.compact
    def __call__(self, x, _):
        q, k, v = Einsum((3, 2, 8, 4), "btd,sndh->sbtnh", name="qkv_einsum")(x)
        scores = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        out = jnp.einsum("bnts,bsnh->btnh", scores, v)
        x = x + Einsum((2, 4, 8), "btnh,nhd->btd", name="attn_vec_einsum")(out)
        gating = self.param("gating_einsum", nn.initializers.normal(), (2, 8, 16))
        hidden = nn.gelu(x @ gating[0]) * (x @ gating[1])
        return x + hidden @ self.param("linear", nn.initializers.normal(), (16, 8)), None


class Scanned(nn.Module):
    """Blocks under nn.remat and nn.scan, and a head that is the table of the embedding."""

    @nn.compact
    def __call__(self, ids):
        table = self.param("input_embedding", nn.initializers.normal(), (16, 8))
        scan = nn.scan(
            nn.remat(GatedBlock),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=3,
        )
        return scan(name="layers")(table[ids], ())[0] @ table.T


def test_einsums_on_parameters_of_ones_own_in_a_scan_of_others():
    found = linen(Scanned(), cross_entropy, IDS)
    expected = ["layers/attn_vec_einsum", "layers/gating_einsum", "layers/linear", "layers/qkv_einsum"]
    assert quantized_and(found, input_embedding="tied embedding") == expected


class Conv1D(nn.Module):
    """A dense layer whose kernel lies the other way round."""

    features: int

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(), (self.features, x.shape[-1]))
        return jax.lax.dot_general(x, kernel.T, (((x.ndim - 1,), (0,)), ((), ())))


class TiedFromOutside(nn.Module):
    """A head that is applied from outside, on the variables of another module."""

    def setup(self):
        self.wte = nn.Embed(16, 8)
        self.c_attn = Conv1D(8)
        self.lm_head = nn.Dense(16, use_bias=False, parent=None)

    def __call__(self, ids):
        x = self.c_attn(self.wte(ids))
        return self.lm_head.apply({"params": {"kernel": self.wte.variables["params"]["embedding"].T}}, x)


def test_a_transposed_kernel_and_a_head_applied_from_outside():
    assert quantized_and(linen(TiedFromOutside(), cross_entropy, IDS), wte="tied embedding") == ["c_attn"]
