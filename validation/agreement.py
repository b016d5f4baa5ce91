"""Bits of token log-probabilities in training, in other batches and in a cache, over random decoders.

    python validation/agreement.py [--cases 300] [--out FILE]

A case draws parameters and texts for a random configuration; 20 cases share a configuration and its programs. The
reference is ``jax.value_and_grad`` of the losses on 1 device, or on 8 with data parallelism or FSDP. A token counts as
different if its loss has other bits in a batch of other rows and padding, or in chunks of a prefill and decoding steps,
or if its loss is not finite. A tenth of the cases runs again with standard numerics. FILE gets a JSON line per case.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
import jax
import jax.numpy as jnp
import numpy as np

import jaxquant
from jaxquant.aot.report import table
from jaxquant.training.config import TrainConfig
from jaxquant.training.model import Decoder, empty_cache
from jaxquant.training.sharding import BATCH, make_mesh, state_shardings
from jaxquant.training.step import make_model, model_config

ROWS, SHARED, RNGS = 8, 20, {"quant": jax.random.key(0)}
COUNTS = ("tokens", "differ in a batch", "differ in a cache")
MESHES: dict[str, Any] = {"1 device": (1, 1), "data 8": (8, 1), "fsdp 8": (1, 8)}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen": {"attention_bias": "qkv", "use_qk_norm": True, "rope_type": "linear", "rope_factor": 4.0},
    "gemma": {"mlp_activation": "gelu_tanh", "use_post_norms": True, "scale_embedding": True, "rope_local_theta": 1e4}
    | {"final_logits_soft_cap": 30.0, "attn_logits_soft_cap": 50.0, "query_pre_attn_scalar": 24},
    "gpt-oss": {"attention_bias": "all", "mlp_bias": True, "attention_sinks": True, "mlp_activation": "clipped_swiglu"}
    | {"rope_type": "yarn", "rope_factor": 8.0, "original_max_position_embeddings": 32, "num_experts": 4},
    "mixtral": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek": {"kv_lora_rank": 24, "q_lora_rank": 16, "num_experts": 4, "shared_experts": 1, "norm_topk_prob": False},
}
POLICIES = ("none", "full", "dots", "matmuls", "quantized")


def draw(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the axes of a configuration in the table, and its fields of ``TrainConfig``."""
    rng = np.random.default_rng((0, number))
    pick = lambda *options: options[rng.integers(len(options))]  # noqa: E731
    own = {"dtype": ("float32", "bfloat16")[number % 2], "remat_policy": POLICIES[number % 5]}
    own |= {"scan_layers": (scanned := pick(True, False)), "num_layers": pick(2, 3) if scanned else pick(1, 2)}
    own |= {"checkpoint_is_quantized": pick(True, False), "logits_via_embedding": pick(True, False)}
    axes = own | {"family": (*FAMILIES,)[number // 2 % len(FAMILIES)], "mesh": (*MESHES,)[number % len(MESHES)]}
    axes |= {"chunk": pick(5, 8, 16), "padding": pick(1, 8, 27)}
    own |= {"head_dim": pick(12, 16, 20), "num_kv_heads": (keys := pick(1, 2)), "vocab_size": pick(67, 96, 300)}
    own |= {"emb_dim": pick(24, 48, 72), "mlp_dim": pick(40, 100, 136), "sequence_length": pick(26, 32, 34)}
    own |= {"num_query_heads": (heads := keys * pick(1, 2, 3)), "head_chunks": pick(1, 2)}
    own["saved_activations"] = pick("full", "fp8") if own["remat_policy"] in ("none", "quantized") else "full"
    if axes["family"] == "deepseek":
        own |= {"rope_head_dim": 8, "num_kv_heads": heads}
    elif axes["family"] in ("gemma", "gpt-oss") or pick(True, False, False):
        own |= {"sliding_window_size": 7, "global_attention_every": pick(0, 2)}
    return axes, own | FAMILIES[axes["family"]] | {"batch_size": ROWS, "quantization": "int8"}


def compare(number: int, numerics: Any, cases: range) -> Iterator[dict[str, Any]]:
    """Yield the number of tokens of each case, and the numbers of tokens that differ in a batch and in a cache."""
    (axes, fields), example = draw(number), jnp.zeros((1, 8), jnp.int32)
    data, fsdp = MESHES[axes["mesh"]]
    served: Any = TrainConfig(**fields, numerics=numerics, mesh_data=data, mesh_fsdp=fsdp)
    config = dataclasses.replace(served, checkpoint_is_quantized=False)
    mesh, width = make_mesh(config, jax.devices()[: data * fsdp]), config.sequence_length
    sharded = model_config(config, 1, mesh)
    shape = dataclasses.replace(sharded, activation_sharding=None, head_chunks=0)
    shapes = jax.eval_shape(Decoder(shape).init, jax.random.key(0), example)["params"]
    setups = ((config, sharded), (config, shape), (served, shape))
    of_step, of_batch, of_cache = (make_model(*setup, example).apply for setup in setups)
    convert = lambda params: jaxquant.convert(Decoder(shape), {"params": params}, config, example)["params"]  # noqa: E731
    convert = jax.jit(convert) if served.checkpoint_is_quantized else lambda params: params

    def losses(params: Any, *arrays: Any) -> Any:
        found = of_step(params, {}, *arrays[:3], targets=arrays[3], rngs=RNGS)
        return (found * arrays[1]).sum(), found

    @jax.jit
    def chunk(params: Any, cache: Any, *arrays: Any) -> Any:
        logits, cache = of_cache(params, {}, *arrays[:3], cache=cache, rngs=RNGS)
        return shape.math.token_losses(logits, arrays[3]), cache

    step = jax.jit(jax.value_and_grad(losses, has_aux=True))
    batch = jax.jit(lambda params, *arrays: of_batch(params, {}, *arrays[:3], targets=arrays[3], rngs=RNGS))
    prefill = width // 2 // axes["chunk"] * axes["chunk"] or axes["chunk"]
    ends = [*range(0, prefill, axes["chunk"]), *range(prefill, width + 1)]
    for case in cases:
        rng = np.random.default_rng(case)
        params = jax.tree_util.tree_map_with_path(functools.partial(draw_parameter, rng), shapes)
        texts = [rng.integers(0, shape.vocab_size, n + 1) for n in rng.integers(4, width + 1, ROWS)]
        arrays = [jax.device_put(x, jax.NamedSharding(mesh, BATCH)) for x in pad(texts, width)]
        (_, reference), _ = step(jax.device_put(params, state_shardings(mesh, shapes)), *arrays)
        rows = rng.permutation(ROWS)[:3]
        reference, arrays = np.asarray(reference)[rows], pad([texts[row] for row in rows], width + axes["padding"])
        cache, found, weights = empty_cache(shape, 3, width + axes["padding"]), [], convert(params)
        for start, end in itertools.pairwise(ends):
            part, cache = chunk(weights, cache, *(x[:, start:end] for x in arrays))
            found.append(part)
        counts, is_text = [int(arrays[1].sum())], arrays[1][:, :width] == 1
        for other in (batch(params, *arrays)[:, :width], np.concatenate(found, axis=1)):
            differs = np.asarray(other).view(np.uint32) != reference.view(np.uint32)
            counts.append(int((differs | ~np.isfinite(reference))[is_text].sum()))
        yield {"case": case, "numerics": numerics, **axes, **dict(zip(COUNTS, counts, strict=True))}


def draw_parameter(rng: np.random.Generator, path: Any, x: Any) -> np.ndarray:
    """Return a random parameter: norms vary around 1, and matrices have random magnitudes."""
    name, noise = jax.tree_util.keystr(path), rng.standard_normal(x.shape, np.float32)
    if "scale" in name or "bias" in name or "sinks" in name:
        return np.float32(0.3) * noise + np.float32("scale" in name)
    return noise * np.float32(np.exp(rng.normal(0, 0.5)) / np.sqrt(48))


def pad(texts: list[np.ndarray], width: int) -> list[np.ndarray]:
    """Return inputs, segment ids, positions and targets."""
    positions = np.broadcast_to(np.arange(width, dtype=np.int32), (len(texts), width))
    fill = lambda x: np.pad(x, (0, width - len(x))).astype(np.int32)  # noqa: E731
    parts = ([text[:-1], np.ones_like(text[1:]), text[1:]] for text in texts)
    inputs, segments, targets = (np.stack([*map(fill, part)]) for part in zip(*parts, strict=True))
    return [inputs, segments, positions, targets]


def summarize(rows: list[dict[str, Any]]) -> list[str]:
    """Return a markdown table of the counts by numerics and, for exact numerics, by the value of each axis."""
    groups: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in rows:
        for axis in [*row][1 : -len(COUNTS)] if row["numerics"] == "exact" else ["numerics"]:
            groups[axis, str(row[axis])].update({"cases": 1} | {name: row[name] for name in COUNTS})
    return table([{"axis": axis, "value": value, **counts} for (axis, value), counts in sorted(groups.items())])


def main(cases: int, out: str) -> None:
    """Run all cases, write a JSON line for each, and print a table."""
    rows = []
    Path(out).unlink(missing_ok=True)
    for numerics, count in (("exact", cases), ("standard", cases // 10)):
        for start in range(0, count, SHARED):
            for row in compare(start // SHARED, numerics, range(start, min(start + SHARED, count))):
                rows.append(row)
                with Path(out).open("a") as file:
                    print(json.dumps(row), file=file)
    print("\n".join(summarize(rows)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--out", default="agreement.jsonl")
    main(**vars(parser.parse_args()))
