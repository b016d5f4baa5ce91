"""Health of a run: amax, scale, saturation, flushing and SQNR of the tensors of every linear layer, at intervals.

At a health step, the model runs forward and backward once more on part of the step's batch, with the state that the
step starts from. Statistics of ``input`` and ``output_grad``, and dynamic per-tensor scales, cover only the sampled
sequences. Statistics of kernels, and scales from quant state, do not depend on the sample.

If a state or a step is not finite, the first non-finite array is reported with its layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxquant import state as quantization_state
from jaxquant.audit.health import HealthRow, health
from jaxquant.audit.statistics import STATISTICS
from jaxquant.core.dtypes import element
from jaxquant.core.paths import leaves_by_path
from jaxquant.core.quant_state import TENSORS
from jaxquant.optim import moment_health
from jaxquant.state.table import tables_of
from jaxquant.training import processes
from jaxquant.training.config import TrainConfig
from jaxquant.training.metrics import Metrics
from jaxquant.training.sharding import BATCH
from jaxquant.training.step import Batch, Program, TrainState, example_inputs

SHARE = 8
"""Health is measured on one in this many sequences, unless ``health_sequences`` is set."""

WARN_SATURATED = 0.01
"""Share of clipped elements above which a warning is printed.

Delayed scaling that follows its tensor clips almost nothing; a calibration that clips one element in a hundred has too
small a range.
"""

WARN_SQNR_DB = {8: 20.0, 4: 10.0}
"""SQNR in dB below which a warning is printed, by bits of the element.

At 20 dB, the RMS error is a tenth of the tensor's RMS; at 10 dB it is a third. Values from N(0, 1) have 31.5 dB (e4m3),
25.8 (e5m2), about 40 (int8) and 16 to 19 (int4, e2m1): a tensor below the limit has about twice that error or more,
because of clipping, flushing or outliers.
"""
_LINES = 3


@dataclasses.dataclass(frozen=True)
class Health:
    """A jitted health pass.

    Attributes:
      rows: linear layers, with the dtypes of their tensors.
      sequences: number of sequences measured per batch.
      measure: function (state, batch) -> ({statistic: float32 [rows, 3]}, shares of ``jaxquant.optim.moment_health``);
        does not change the state.
    """

    rows: tuple[HealthRow, ...]
    sequences: int
    measure: Callable[[TrainState, Batch], tuple[dict[str, jax.Array], dict[str, Any]]]


def build_health(program: Program) -> Health:
    """Build the health pass of a program.

    Raises:
      ValueError: ``health_sequences`` does not divide the batch, or is not divisible by the devices or shards.
    """
    config, mesh = program.config, program.mesh

    def share_of_loss(params: Any, quant_state: Any, part: Batch, key: jax.Array, share: jax.Array) -> jax.Array:
        return program.loss(params, quant_state, part, key) * share

    monitor = health(program.model.module, share_of_loss, example_inputs(config))
    sequences = sampled_sequences(config, mesh.shape["data"] * mesh.shape["fsdp"], monitor.shards)
    stride = config.batch_size // sequences

    def measure(state: TrainState, batch: Batch) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        # Strided, so that the batch axis keeps its sharding.
        part = {name: x.reshape(-1, stride, *x.shape[1:])[:, 0] for name, x in batch.items()}
        tokens, all_tokens = ((b["segment_ids"] != 0).sum().astype(jnp.float32) for b in (part, batch))
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        # Gradient of the mean loss of the whole batch, so that the output gradients have the same magnitude as in the
        # step.
        found = monitor(state.params, state.quant_state, part, key, tokens / jnp.maximum(all_tokens, 1))
        return found, moment_health(state.opt_state)

    given = None, NamedSharding(mesh, BATCH)
    jitted = jax.jit(measure, in_shardings=given, out_shardings=program.replicated)
    return Health(monitor.rows, sequences, jitted)


def sampled_sequences(config: TrainConfig, devices: int, shards: int) -> int:
    """Return the number of sequences of a batch to measure.

    Args:
      config: ``batch_size``, ``gradient_accumulation_steps`` and ``health_sequences``. 0 selects the smallest valid
        number that is at least an eighth of the batch. If that number exceeds a micro-batch, 0 selects the largest
        valid number that fits into a micro-batch, because the pass holds all measured sequences in memory at once.
      devices: number of devices that share a batch evenly.
      shards: number of blocks into which a recipe splits the batch.

    Raises:
      ValueError: ``health_sequences`` does not divide ``batch_size``, or is not divisible by the devices or shards; or
        it is 0, and no valid number fits into a micro-batch.
    """
    batch, unit = config.batch_size, math.lcm(devices, shards)
    fitting = [n for n in range(1, batch + 1) if batch % n == 0 and n % unit == 0]
    if config.health_sequences in fitting:
        return config.health_sequences
    small = [n for n in fitting if n * config.gradient_accumulation_steps <= batch]
    of_unit = f"a multiple of {unit} ({devices} devices, {shards} shards)"
    way_out = f"set {f'health_sequences to one of {fitting}, or ' if fitting else ''}health_every to 0"
    if config.health_sequences:
        found = f"health_sequences {config.health_sequences} must divide batch_size {batch} and be {of_unit}"
        raise ValueError(f"{found}; {way_out}")
    if not small:
        part = f"fits into one of {config.gradient_accumulation_steps} micro-batches and is {of_unit}"
        raise ValueError(f"health_every {config.health_every}: no part of batch_size {batch} {part}; {way_out}")
    return next((n for n in small if n * SHARE >= batch), small[-1])


class HealthLog:
    """Writer of the results of health passes, which also prints one warning for each tensor with a fault.

    Args:
      health: health pass.
      metrics: writer that receives the rows, the worst values and the warnings.
    """

    def __init__(self, health: Health, metrics: Metrics):
        self._health, self._metrics = health, metrics
        self._told: set[tuple[int, str]] = set()

    def write(self, step: int, measured: tuple[dict[str, jax.Array], dict[str, Any]]) -> None:
        """Write the result of ``Health.measure`` for a step; blocks until the result is computed."""
        table, moments = jax.tree.map(np.asarray, measured)
        self._metrics.record_health(to_json(step, self._health, table, moments), worst_values(table, moments))
        found = [(place, text) for place, text in find_faults(self._health.rows, table) if place not in self._told]
        self._told.update(place for place, _ in found)
        for _, text in found[:_LINES]:
            self._metrics.say(f"health, step {step}: {text}")
        if len(found) > _LINES:
            self._metrics.say(f"health, step {step}: {len(found) - _LINES} more tensors like these, see health.jsonl")


def to_json(step: int, health: Health, table: dict[str, np.ndarray], moments: dict[str, Any]) -> dict[str, Any]:
    """Return a line of ``health.jsonl``: layer names and, by tensor and statistic, one number per layer.

    If the optimizer has 8-bit moments, the line also has the shares of moments that underflow, by path.

    A missing number (the scale of a float tensor) is null. An infinite number is also null, because JSON cannot
    represent it: the SQNR of a tensor that quantization does not change, or the amax of a tensor whose ``nonfinite`` is
    above 0.

    Args:
      step: step of the pass.
      health: health pass.
      table: statistic -> [rows, 3].
      moments: result of ``moment_health``.
    """

    def column(statistic: str, place: int) -> list[float | None]:
        return [float(f"{v:.6g}") if math.isfinite(v) else None for v in table[statistic][:, place].tolist()]

    tensors = {each: {name: column(name, place) for name in STATISTICS} for place, each in enumerate(TENSORS)}
    ends = {path: {end: float(f"{share:.6g}") for end, share in shares.items()} for path, shares in moments.items()}
    names = [row.name for row in health.rows]
    found = {"step": step, "sequences": health.sequences, "layers": names, **tensors}
    return found | ({"moments": ends} if ends else {})


def worst_values(table: dict[str, np.ndarray], moments: dict[str, Any]) -> dict[str, float]:
    """Return the lowest SQNR and the largest shares over all quantized tensors and moments."""
    names = {"lowest_sqnr_db": "sqnr"} | {f"largest_{name}": name for name in ("saturated", "flushed", "nonfinite")}
    of = {"sqnr": np.nanmin}
    known = {name: each for name, each in names.items() if not np.isnan(table[each]).all()}
    ends = {f"largest_moments_{end}": [each[end] for each in moments.values()] for end in ("zero", "smallest")}
    found = {name: float(of.get(each, np.nanmax)(table[each])) for name, each in known.items()}
    return found | {name: float(max(shares)) for name, shares in ends.items() if shares}


def find_faults(rows: Sequence[HealthRow], table: dict[str, np.ndarray]) -> list[tuple[tuple[int, str], str]]:
    """Return the tensors that are not finite, saturate, or are below the SQNR limit of their format; worst first.

    Args:
      rows: linear layers.
      table: statistic -> [rows, 3].

    Returns:
      List of ((row, tensor), text).
    """
    found: list[tuple[float, tuple[int, str], str]] = []
    for index, row in enumerate(rows):
        for place, (tensor, dtype) in enumerate(row.dtypes.items()):
            at = {name: float(table[name][index, place]) for name in STATISTICS}
            where = f"{row.name}, {tensor}" + (f" ({dtype})" if dtype else "")
            floor = WARN_SQNR_DB[8 if element(dtype).bits >= 8 else 4] if dtype else math.nan
            if at["nonfinite"] > 0:
                found.append((-math.inf, (index, tensor), f"{where}: {at['nonfinite']:.2%} not finite"))
            elif at["saturated"] > WARN_SATURATED:
                text = f"{where}: {at['saturated']:.1%} saturated, SQNR {at['sqnr']:.1f} dB"
                found.append((at["sqnr"], (index, tensor), f"{text} (warns above {WARN_SATURATED:.0%})"))
            elif at["sqnr"] < floor:
                text = f"{where}: SQNR {at['sqnr']:.1f} dB, {at['flushed']:.1%} flushed to zero"
                found.append((at["sqnr"], (index, tensor), f"{text} (warns below {floor:.0f} dB)"))
    return [(place, text) for _, place, text in sorted(found, key=lambda fault: fault[0])]


# -- non-finite values -------------------------------------------------------------------------------------------------


class FiniteCheck:
    """Search for the first non-finite array of a state; reads every array once, on its device."""

    def __init__(self, program: Program):
        self._are_finite = jax.jit(_are_finite, out_shardings=program.replicated)

    def __call__(self, state: TrainState) -> str | None:
        """Return the path of the first non-finite array, or None. Blocks until the state is ready.

        The path includes the layer if layers are stacked; parameters come first.
        """
        for part in ("params", "quant_state", "opt_state"):
            for path, finite in jax.device_get(processes.sync_cpu(self._are_finite(getattr(state, part)))).items():
                if not finite.all():
                    return f"{part}/{path}" + (f", layer {int(np.argmin(finite))}" if finite.ndim else "")
        return None


def _are_finite(tree: Any) -> dict[str, jax.Array]:
    """Return whether each array of a tree is finite; an array of stacked layers has one result per layer."""

    def reduce(path: str, x: jax.Array) -> jax.Array:
        return jnp.isfinite(x).all(axis=tuple(range(int("layers" in path.split("/") and x.ndim > 0), x.ndim)))

    leaves = leaves_by_path(quantization_state.rows_of(tree) if tables_of(tree) else tree).items()
    return {path: reduce(path, leaf) for path, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)}


def explain_non_finite(program: Program, state: TrainState, batch: Batch, key: jax.Array) -> str:
    """Find the linear layer with the first non-finite number of a step, with a health pass over the complete batch.

    Args:
      program: program of the run.
      state: last finite state, from which the failing step started.
      batch: batch of the failing step.
      key: key of the failing step's random streams.
    """
    monitor = health(program.model.module, program.loss, example_inputs(program.config))
    run = jax.jit(monitor, out_shardings=program.replicated)
    found = jax.device_get(processes.sync_cpu(run(state.params, state.quant_state, dict(batch), key)))
    # Search inputs and kernels in the order of the forward pass, output gradients in the order of the backward pass.
    for columns, order in (((0, 1), 1), ((2,), -1)):
        numbers = [*range(len(monitor.rows))][::order]
        for place, number in enumerate(numbers):
            for column in columns:
                if found["nonfinite"][number, column] > 0:
                    at, before = monitor.rows[number].name, monitor.rows[numbers[place - 1]].name
                    amax = found["amax"][numbers[place - 1], column]
                    known = f" (the layer before it is {before}, amax {amax:.4g})" if place else ""
                    return f"the first non-finite {[*TENSORS][column]} of a linear layer belongs to {at}{known}"
    return "every linear layer's input, kernel and output gradient are finite; a value computed from them overflows"
