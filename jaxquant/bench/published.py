"""Predictions of the audit next to published measurements, as a check of the audit's cost model.

Shares of peak are fitted only on TransformerEngine's GEMM set (``chips``); every other row is a prediction. A row is a
jaxquant program for the same chip, shapes and recipe, compiled here and estimated by ``price.estimate``. The published
figure was measured with other code, so the row also describes the differences. Whole steps are steps of the training
program, compiled by the audit.

``jaxquant bench published``; ``--only NAME`` selects rows. ``jaxquant bench gemm-set`` estimates the GEMM set.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxquant.aot.chips import CHIPS, chip
from jaxquant.aot.price import Roofline, estimate
from jaxquant.aot.program import read_program
from jaxquant.aot.topology import devices
from jaxquant.config.quant_config import QuantConfig
from jaxquant.core import delayed
from jaxquant.ops.dot_general import dot_general, initial_state
from jaxquant.training.audit import program as program_of

TOKENS = 15872
GEMMS = {"qkv": (4096, 12288), "out": (4096, 4096), "up": (4096, 16384), "down": (16384, 4096)}
"""TransformerEngine's GEMM set of a layer: (contraction size, output features) per matmul; hidden 4096, MLP 16384."""

STRINGS = ("fp8", "fp8_current", "fp8_full", "int8", "int8_delayed", "fp8_block")
"""Config strings of the GEMM set."""


@dataclasses.dataclass(frozen=True)
class Anchor:
    """A published speed ratio and the program to compile for it.

    Attributes:
      name: source and subject of the measurement.
      ratio: published ratio to bf16's time.
      string: corresponding config string of jaxquant.
      source: source of the figure.
      is_fitted: whether shares of peak were fitted on this measurement.
      differs: difference between jaxquant's program and the measured program.
    """

    name: str
    ratio: float
    string: str
    source: str
    is_fitted: bool = False
    differs: str = ""


_TE_PLAIN = "TE bf16, H200 NVL"
_TE = "TransformerEngine docs/examples/gemm_profiling"
_OWN_CASTS = "theirs casts and transposes in one kernel; XLA reads a tensor once more"
GEMM_SET = (
    Anchor("TE delayed, H200 NVL", 1.69, "fp8", _TE, True, _OWN_CASTS),
    Anchor("TE current, H200 NVL", 1.58, "fp8_current", _TE, True, _OWN_CASTS),
    Anchor("TE block, H200 NVL", 1.40, "fp8_block", _TE, False, "XLA has no block-scaled matmul on Hopper"),
)


@dataclasses.dataclass(frozen=True)
class StepAnchor:
    """A published ratio of whole training steps, and the corresponding config.

    Attributes:
      name, ratio, string, source, differs: same as for ``Anchor``.
      target: chip, one of ``CHIPS``.
      topology: number of chips.
      config: YAML file.
      overrides: fields that override the file.
    """

    name: str
    ratio: float
    string: str
    source: str
    differs: str
    target: str
    topology: str
    config: str
    overrides: tuple[str, ...]


_TORCHAO = "torchao docs/source/workflows/training.md"
_ON_H100 = {
    "target": "h100",
    "topology": "8",
    "config": "configs/models/llama3-8b.yml",
    # One row of 8192 tokens per chip. torchao saves the results of some operations, "dots" the results of all matmuls.
    "overrides": ("batch_size=8", "sequence_length=8192", "attention=cudnn", "remat_policy=dots"),
}
_EAGER = "theirs is PyTorch with torch.compile, FSDP2 and another choice of what is recomputed"
STEPS = (
    StepAnchor("torchao tensorwise, Llama-3-8B, 8 H100", 1.25, "fp8_current", _TORCHAO, f"{_EAGER}", **_ON_H100),
    StepAnchor(
        "torchao rowwise, Llama-3-8B, 8 H100",
        1.10,
        "fp8_full",
        _TORCHAO,
        f"{_EAGER}; their gradients are e4m3, their gathers bf16",
        **_ON_H100,
    ),
)
"""Published ratios of whole steps."""


def gemm_step(string: str) -> tuple[Any, tuple[Any, ...]]:
    """Return the forward pass and both gradients of the GEMM set, and the shapes of its arguments.

    All operands are inputs in memory, as for a layer with one matmul in ``maybe_quantize_model``. Quant state is warm.

    Args:
      string: config string, "" for bf16.
    """
    recipe = QuantConfig(quantization=string, quant_backend="native" if string else "auto").recipe()
    state: dict[str, Any] = {}
    if recipe is not None:
        bins = jax.eval_shape(lambda: delayed.widen_bins(delayed.empty_bins()))
        own = jax.eval_shape(lambda: initial_state(recipe))
        state = {name: {tensor: fields | {"amax_bins": bins} for tensor, fields in own.items()} for name in GEMMS}
    x = {name: jax.ShapeDtypeStruct((TOKENS, k), jnp.bfloat16) for name, (k, _) in GEMMS.items()}
    kernels = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in GEMMS.items()}
    grads = {name: jax.ShapeDtypeStruct((TOKENS, n), jnp.bfloat16) for name, (_, n) in GEMMS.items()}
    dims = (((1,), (0,)), ((), ()))

    def step(x: Any, kernels: Any, state: Any, grads: Any) -> Any:
        found = {}
        for name in GEMMS:

            def product(x: jax.Array, kernel: jax.Array, own: Any) -> jax.Array:
                if recipe is None:
                    return jax.lax.dot_general(x, kernel, dims)
                return dot_general(x, kernel, dims, recipe=recipe, state=own, stored=(True, True, True))

            out, pull = jax.vjp(product, x[name], kernels[name], state.get(name, {}))
            found[name] = out, pull(grads[name])
        return found

    return step, (x, kernels, state, grads)


def price_gemms(string: str, target: str) -> Roofline:
    """Compile the GEMM set for a chip, which this machine need not have, and estimate its time.

    Args:
      string: config string, "" for bf16.
      target: chip, one of ``CHIPS``.
    """
    function, shapes = gemm_step(string)
    where = NamedSharding(Mesh(devices(chip(target))[:1], ("x",)), PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes)
    return estimate(chip(target), read_program(jax.jit(function).lower(*placed).compile().as_text() or ""))


def gemm_rows(target: str, strings: Sequence[str]) -> list[dict[str, Any]]:
    """Estimate the GEMM set for a chip, unquantized and under config strings of the native backend.

    Args:
      target: chip, one of ``CHIPS``.
      strings: config strings; empty selects ``STRINGS``.
    """
    rows = []
    for name in ("bf16", *(strings or STRINGS)):
        one = price_gemms(name.replace("bf16", ""), target)
        parts = {"ms": one.step, "matmuls ms": one.matmul, "moves ms": one.moves}
        rows.append({"string": name} | {each: round(1e3 * taken, 3) for each, taken in parts.items()})
    return [row | {"× bf16": round(rows[0]["ms"] / row["ms"], 2)} for row in rows]


def price_step(anchor: StepAnchor, string: str) -> Roofline:
    """Compile a whole training step for the chips of an anchor and estimate its time.

    Args:
      anchor: published ratio, with the config to compile.
      string: config string, "" for bf16.
    """
    given, target = devices(chip(anchor.target), anchor.topology), chip(anchor.target)
    quantization = [f"quantization={string}", f"quant_backend={'native' if string else 'auto'}"]
    step, shapes = program_of(anchor.config, [*anchor.overrides, *quantization], given)
    program = read_program(step.lower(*shapes).compile().as_text() or "")
    return estimate(target, program, devices=len(given))


def rows(names: list[str] | None = None) -> list[dict[str, Any]]:
    """Compile and estimate the anchors whose name contains one of ``names``; None selects all anchors.

    Args:
      names: parts of anchors' names.
    """
    is_wanted = lambda name: not names or any(part in name for part in names)  # noqa: E731
    found = []
    gemms = [anchor for anchor in GEMM_SET if is_wanted(anchor.name)]
    if gemms or is_wanted(_TE_PLAIN):
        plain = price_gemms("", "h200-nvl")
        found.append(_row(_TE_PLAIN, 32.014e-3, plain, None, _TE, "fitted", ""))
        for anchor in gemms:
            priced = price_gemms(anchor.string, "h200-nvl")
            kind = "fitted" if anchor.is_fitted else "predicted"
            found.append(_row(anchor.name, anchor.ratio, priced, plain, anchor.source, kind, anchor.differs))
    float_steps: dict[tuple[Any, ...], Roofline] = {}
    for anchor in STEPS:
        if not is_wanted(anchor.name):
            continue
        place = anchor.target, anchor.topology, anchor.config, anchor.overrides
        plain = float_steps.get(place) or float_steps.setdefault(place, price_step(anchor, ""))
        priced = price_step(anchor, anchor.string)
        found.append(_row(anchor.name, anchor.ratio, priced, plain, anchor.source, "predicted", anchor.differs))
    return found


def _row(
    name: str, published: float, priced: Roofline, plain: Roofline | None, source: str, kind: str, differs: str
) -> dict[str, Any]:
    if plain is None:
        ours, shown, unit = priced.step * 1e3, published * 1e3, " ms"
    else:
        ours, shown, unit = plain.step / priced.step, published, "×"
    return {
        "anchor": name,
        "published": f"{shown:.2f}{unit}",
        "audit": f"{ours:.2f}{unit}",
        "error": f"{ours / shown - 1:+.0%}",
        "ours: matmuls, moves ms": f"{priced.matmul * 1e3:.2f}, {priced.moves * 1e3:.2f}",
        "": kind,
        "why": differs,
        "source": source,
    }


if __name__ == "__main__":
    what, *words = sys.argv[1:] or [""]
    print(json.dumps(gemm_rows(what, words) if what in CHIPS else rows(sys.argv[1:])))
