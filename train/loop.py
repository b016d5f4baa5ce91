"""The training loop: steps, held-out loss, checkpoints, an orderly stop, and the end of a run that diverged."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import platform
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np

from jaxquant.audit.coverage import of_trace
from train import processes
from train.checkpoint import Checkpoints, check_config, write_config
from train.config import TrainConfig
from train.data import Data, make_iterators
from train.diagnose import explain_non_finite
from train.health import Health, HealthLog, build_health
from train.metrics import Metrics
from train.sharding import BATCH
from train.step import (
    Batch,
    Program,
    TrainState,
    build,
    check_step,
    saved_activation_bytes,
)

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "qwix", "aqtp", "numpy")


class Diverged(RuntimeError):
    """A loss or gradient norm was not finite; the last good state is saved."""


@dataclasses.dataclass
class _Pending:
    """A step that was started and whose metrics have not been read."""

    step: int
    metrics: dict[str, jax.Array]
    batch: Batch
    data_state: Any
    stop: Any
    health: dict[str, jax.Array] | None


class StopRequest:
    """Notes SIGTERM and Ctrl-C, so that the loop stops after the step at hand; a second one stops at once."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        signal.signal(number, self._before[number])


def prepare(config: TrainConfig, say: Callable[[str], None]) -> Callable[[], None]:
    """Check and build all that a run needs, and return the function that trains.

    Raises:
      ValueError, TypeError, NotImplementedError, OSError: the configuration, the data or the run's folder do not fit.
    """
    if not config.run_dir:
        raise ValueError("run_dir is empty; name the folder of the run")
    run_dir = Path(config.run_dir)
    data = make_iterators(config, config.batch_size)
    program = build(config, data.vocab_size)
    config = program.config
    check_config(run_dir, config)
    reports = program.model.layers
    coverage = of_trace(check_step(program, next(data.held_out())), layers=reports)
    if config.strict:
        coverage.check()
    layers = [dataclasses.asdict(report) for report in reports]
    health = build_health(program) if config.health_every else None
    processes.wait_for_all("configuration read")
    if processes.is_main():
        write_config(run_dir, config)
        (run_dir / "coverage.json").write_text(coverage.to_json() + "\n")
    processes.wait_for_all("configuration written")
    say(coverage.text())
    say(f"data: {data.description}")
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(run_dir, config))
        restored = checkpoints.restore(program.abstract_state, say)
        if restored is None:
            state = processes.in_order(program.init())
        else:
            state, data_state = restored
            data.train.set_state(data_state)
            say(f"resumed {run_dir} at step {int(state.step)}")
        stack.pop_all()  # they stay open: the training function closes them
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    low = [layer for layer in layers if layer["recipe"] is not None]
    say(
        f"model: {count:,} parameters, {len(low)} of {len(layers)} linear layers quantized"
        f"{f' on {config.resolved_backend}' if low else ''}, {_devices()}"
    )
    return lambda: _train(program, data, state, checkpoints, run_dir, layers, health)


def _train(
    program: Program,
    data: Data,
    state: TrainState,
    checkpoints: Checkpoints,
    run_dir: Path,
    layers: list[dict[str, Any]],
    health: Health | None,
) -> None:
    config = program.config
    healthy = jax.device_put(np.bool_(True), program.replicated)  # as a step returns it: one trace for all steps
    stop_anywhere = processes.Flag(program.mesh)
    pending: _Pending | None = None
    agreed = False
    first = int(state.step)
    with checkpoints, Metrics(run_dir, config, first) as metrics, StopRequest() as stop:
        health_log = HealthLog(health, run_dir, metrics, first) if health else None

        def settle() -> None:
            """Read the pending step's metrics, which waits for it."""
            nonlocal pending, agreed
            if pending is None:
                return
            if health_log and pending.health:
                health_log.write(pending.step, pending.health)
            values = {name: float(value) for name, value in pending.metrics.items()}
            if not values["healthy"]:
                _diverged(program, state, pending, values, checkpoints)
            metrics.step(pending.step, values)
            agreed = agreed or bool(pending.stop)
            pending = None

        def stopping() -> bool:
            """Whether to stop. Several processes stop together, where the answer of an earlier step is known to all."""
            return agreed if jax.process_count() > 1 else stop.signal is not None

        batch: Batch = {}
        saved = 0
        held_out = _held_out(program, data, state) if first >= config.steps else None
        for step in range(first + 1, config.steps + 1):
            before = data.train.get_state()
            batch = next(data.train)
            placed = processes.place(program.mesh, BATCH, batch)
            # Before the step, which takes the state for its own.
            due = _due(step, config.health_every)
            measured = processes.in_order(health.measure(state, placed)) if health and due else None
            state, values = processes.in_order(program.step(state, placed, healthy))
            healthy = values["healthy"]
            asked = stop_anywhere.ask(stop.signal is not None)
            settle()
            pending = _Pending(step, values, placed, before, asked, measured)
            last = step == config.steps
            if last or _due(step, config.eval_every):
                settle()
                held_out = _held_out(program, data, state)
                metrics.held_out(step, held_out)
                metrics.pause()
            if last or _due(step, config.checkpoint_every) or stopping():
                settle()
                checkpoints.save(step, state, data.train.get_state())
                saved = step
                metrics.pause()
            if saved == step and stopping() and not last:
                checkpoints.wait()
                by = stop.signal or "a signal to another process"
                metrics.say(f"stopped by {by} after step {step}, saved; the same command goes on from there")
                return
        checkpoints.wait()
        batch = batch or next(data.train)
        assert held_out is not None
        summary = _summary(program, data, state, batch, layers) | metrics.timing() | {"held_out_loss": held_out}
        if processes.is_main():
            (run_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        metrics.say(f"done: {config.steps} steps, held-out loss {held_out:.4f}, in {run_dir}")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _held_out(program: Program, data: Data, state: TrainState) -> float:
    batches = (processes.place(program.mesh, BATCH, batch) for batch in data.held_out())
    parts = [processes.in_order(program.evaluate(state, batch)) for batch in batches]
    return float(sum(total for total, _ in parts)) / float(sum(count for _, count in parts))


def _diverged(
    program: Program, state: TrainState, failed: _Pending, values: dict[str, float], checkpoints: Checkpoints
) -> None:
    """Save the last good state and raise with the layer that went first."""
    good = int(state.step)
    checkpoints.save(good, state, failed.data_state)
    checkpoints.wait()
    key = jax.random.fold_in(jax.random.key(program.config.seed), good)
    where = explain_non_finite(program, state, failed.batch, key)
    what = "loss" if not math.isfinite(values["loss"]) else "gradient norm"
    value = values["loss"] if what == "loss" else values["grad_norm"]
    raise Diverged(
        f"step {failed.step}: {what} is {value}; {where}; the last good state, step {good}, is saved; "
        "lower learning_rate, or start a new run_dir"
    )


def _summary(
    program: Program, data: Data, state: TrainState, batch: Batch, layers: list[dict[str, Any]]
) -> dict[str, Any]:
    config = program.config
    return {
        "steps": config.steps,
        "quantization": config.quantization,
        "backend": config.resolved_backend or "",
        "parameter_bytes": _bytes(state.params),
        "quant_state_bytes": _bytes(state.quant_state),
        "saved_activation_bytes": saved_activation_bytes(program, {k: np.asarray(v) for k, v in batch.items()}),
        "layers": layers,
        "data": data.description,
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        "devices": _devices(),
    }


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _devices() -> str:
    devices = jax.devices()
    return f"{len(devices)} x {devices[0].device_kind}"
