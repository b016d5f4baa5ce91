"""Training loop: steps, held-out loss, checkpoints, graceful stop, and divergence handling."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import math
import platform
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import jax
import numpy as np

from jaxquant import state as quantization_state
from jaxquant.audit.coverage import of_trace
from jaxquant.core.paths import tree_bytes
from jaxquant.export.sums import write_sums
from jaxquant.ops.implementation import choices_made
from jaxquant.training import processes
from jaxquant.training.checkpoint import Checkpoints, read_final_loss, reason_of, write_config
from jaxquant.training.config import TrainConfig
from jaxquant.training.data import Data, make_iterators
from jaxquant.training.health import FiniteCheck, Health, HealthLog, build_health, explain_non_finite
from jaxquant.training.lock import Busy, RunLock
from jaxquant.training.metrics import Metrics
from jaxquant.training.sharding import BATCH
from jaxquant.training.step import Batch, Program, TrainState, build, check_step, saved_activation_bytes

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "qwix", "aqtp", "numpy")


class Diverged(RuntimeError):
    """Raised when a loss, gradient norm, update or state is not finite."""


class Halted(RuntimeError):
    """Raised when the run folder can no longer be written, or another run has taken the folder."""


@dataclasses.dataclass
class _PendingStep:
    """A dispatched step whose metrics have not been read yet."""

    step: int
    metrics: dict[str, jax.Array]
    batch: Batch
    data_state: Any
    stop: Any
    health: tuple[dict[str, jax.Array], dict[str, Any]] | None


class StopRequest:
    """Handler of SIGTERM, SIGHUP and Ctrl-C: the first signal stops the loop after the current step.

    A second signal ends the process at once. A closing terminal sends SIGHUP more than once, so repeats are ignored.
    Under ``nohup``, SIGHUP is not handled.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._record_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else self._before[number])


def prepare(config: TrainConfig, say: Callable[[str], None]) -> Callable[[], None]:
    """Validate the configuration, build the run, and return the function that trains it.

    Args:
      config: configuration of the run.
      say: function that prints a line of output before training starts.

    Raises:
      ValueError, TypeError, NotImplementedError, OSError: the configuration, the data or the run folder is invalid.
    """
    if not config.run_dir:
        raise ValueError("run_dir is empty; set it to the folder of the run")
    run_dir = Path(config.run_dir)
    lock = RunLock(run_dir)
    with contextlib.ExitStack() as stack:
        stack.callback(lock.release)
        if jax.process_count() == 1 and run_dir.is_dir():  # with several processes, some may not see the folder yet
            _lock_or_raise(lambda: lock.acquire(say), run_dir)
        loss = read_final_loss(run_dir, config)
        if processes.all_agree(loss is not None) and loss is not None:
            say(f"done: {config.steps} steps, held-out loss {loss:.4f}, in {run_dir}")
            return lambda: None
        if config.tensorboard:
            importlib.import_module("tensorboardX")  # checked before the step is traced, which takes minutes
        data = make_iterators(config, config.batch_size)
        program = build(config, data.vocab_size)
        config = program.config
        coverage = of_trace(check_step(program, next(data.held_out())))
        if config.strict:
            coverage.check()
        health = build_health(program) if config.health_every else None
        processes.wait_for_all("configuration read")
        if processes.is_main():
            run_dir.mkdir(parents=True, exist_ok=True)
        _lock_or_raise(lambda: lock.acquire(say), run_dir)
        say(str(coverage))
        say(f"data: {data.description}")
        checkpoints = stack.enter_context(Checkpoints(run_dir, config))
        run = _Run(run_dir, lock, program, data, checkpoints, health, FiniteCheck(program))
        run.start(say)
        if processes.is_main():
            (run_dir / "coverage.json").write_text(coverage.to_json())
            write_sums(run_dir, ["coverage.json"])
        processes.wait_for_all("configuration written")
        count = sum(leaf.size for leaf in jax.tree.leaves(run.state.params))
        low = [layer for layer in program.model.layers if layer.recipe is not None]
        share = f"{len(low)} of {len(program.model.layers)} linear layers quantized"
        say(f"model: {count:,} parameters, {share}{f' on {config.resolved_backend}' if low else ''}, {_devices()}")
        say("compiling the step")
        resources = stack.pop_all()  # closed by the training function

    def train() -> None:
        with resources, _convert_write_errors(run_dir, checkpoints):
            run.train()

    return train


def _lock_or_raise(ask: Callable[[], None], run_dir: Path) -> None:
    """Call ``ask`` on the main process to acquire or check the lock; raise ``Busy`` on every process on failure."""
    lock_error = None
    if processes.is_main():
        try:
            ask()
        except Busy as busy:
            lock_error = busy
    if not processes.all_agree(lock_error is None):
        raise lock_error or Busy(f"run {run_dir} is being written by another run; see the first process")


@dataclasses.dataclass
class _Run:
    """A run: its components and its current state."""

    run_dir: Path
    lock: RunLock
    program: Program
    data: Data
    checkpoints: Checkpoints
    health: Health | None
    check: FiniteCheck
    state: TrainState = dataclasses.field(init=False)
    metrics: Metrics = dataclasses.field(init=False)
    stop: StopRequest = dataclasses.field(default_factory=StopRequest)
    pending: _PendingStep | None = None
    stop_agreed: bool = False  # true if the processes have agreed to stop

    def start(self, say: Callable[[str], None]) -> None:
        """Resume from the newest checkpoint, or start a new run; write config.yml and delete a stale summary.json."""
        restored = self.checkpoints.restore(self.program.abstract_state, say)
        self.state = restored[0] if restored else _initialize_state(self.program)
        if (found := self.check(self.state)) is not None:
            remedy = f"delete checkpoint {int(self.state.step)}" if restored else "choose another seed or shape"
            raise ValueError(f"the run would start with {found} that is not finite; {remedy}")
        if restored:
            self.data.train.set_state(restored[1])
            say(f"resumed {self.run_dir} at step {int(self.state.step)}")
        if processes.is_main():
            if int(self.state.step) < self.program.config.steps:  # summary of an earlier run with fewer steps
                (self.run_dir / "summary.json").unlink(missing_ok=True)
            write_config(self.run_dir, self.program.config)

    def train(self) -> None:
        """Train to the last step, or until a stop is requested."""
        config, first = self.program.config, int(self.state.step)
        with Metrics(self.run_dir, config, first) as self.metrics, self.stop:
            metrics = self.metrics
            metrics.record_changes(first, self.checkpoints.changes)
            held_out = self._run_steps(first)
            self.checkpoints.wait()
            if held_out is None:
                by, step = self._stop_reason or "a signal to another process", int(self.state.step)
                metrics.say(f"stopped by {by} after step {step}, saved; run the same command again to resume")
                return
            _check_held_out(held_out, config.steps, self.checkpoints)
            summary = _summarize(self.program, self.data, self.state) | metrics.medians() | {"held_out_loss": held_out}
            if processes.is_main():
                (self.run_dir / "summary.json").write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n")
                write_sums(self.run_dir, ["summary.json"])
            metrics.say(f"done: {config.steps} steps, held-out loss {held_out:.4f}, in {self.run_dir}")

    def _run_steps(self, first: int) -> float | None:
        """Run the remaining steps. Returns the last held-out loss, or None if a stop was requested before the end."""
        program, config, metrics = self.program, self.program.config, self.metrics
        healthy = jax.device_put(np.bool_(True), program.replicated)  # as the step returns it: one trace of the step
        shared_stop_flag = processes.Flag(program.mesh)
        health_log = HealthLog(self.health, metrics) if self.health else None
        uses_warm_state = program.mesh.devices.flat[0].platform != "cpu" or config.implementation == "pallas"
        held_out = _evaluate_held_out(program, self.data, self.state) if first >= config.steps else None
        for step in range(first + 1, config.steps + 1):
            before = self.data.train.get_state()
            batch = processes.shard(program.mesh, BATCH, next(self.data.train))
            # Measured before the step, because the step donates the state.
            measures = self.health is not None and _is_due(step, config.health_every)
            measured = processes.sync_cpu(self.health.measure(self.state, batch)) if self.health and measures else None
            self.state, values = processes.sync_cpu(program.step(self.state, batch, healthy))
            healthy = values["healthy"]
            stop_answer = shared_stop_flag.any_process(self._stop_reason is not None)
            self._read_pending_metrics(health_log)
            self.pending = _PendingStep(step, values, batch, before, stop_answer, measured)
            if uses_warm_state and (step == first + 1 or _is_due(step, config.eval_every)):
                # With warm quant state, casts do not depend on the current amax, and kernels can compute them. This
                # costs one more compilation, which does not pay off on CPUs.
                self.state = self.state._replace(quant_state=quantization_state.warm(self.state.quant_state))
            last = step == config.steps
            if (step == first + 2 or (last and step == first + 1)) and (said := _describe_implementations(config)):
                metrics.say(said)
            # Several processes must stop at the same step: use the answer of an earlier step, which all processes have
            # read.
            stops_now = self.stop_agreed if jax.process_count() > 1 else self._stop_reason is not None
            saving = last or stops_now or _is_due(step, config.checkpoint_every)
            evaluating = last or _is_due(step, config.eval_every)
            if saving or evaluating:
                self._read_pending_metrics(health_log)
            if saving and (found := self.check(self.state)) is not None:
                raise Diverged(f"after step {step} {found} is not finite; {_resume_point(self.checkpoints)}")
            if evaluating:
                held_out = _evaluate_held_out(program, self.data, self.state)
                metrics.record_held_out(step, held_out)
            if last:
                _check_held_out(held_out, step, self.checkpoints)
            if saving:
                self._save(step, self.data.train.get_state())
            if saving or evaluating:
                metrics.pause()
            if stops_now and not last:
                return None
        return held_out

    def _save(self, step: int, data_state: Any) -> None:
        """Save a checkpoint; raise ``Halted`` if another run has taken the folder."""
        try:
            _lock_or_raise(self.lock.check, self.run_dir)
        except Busy as busy:
            raise Halted(f"{busy}; this run stops writing") from None
        self.checkpoints.save(step, self.state, data_state)

    @property
    def _stop_reason(self) -> str | None:
        """Return the reason why this process requests a stop, or None."""
        return self.stop.signal or ("a closed output" if self.metrics.is_output_closed else None)

    def _read_pending_metrics(self, health_log: HealthLog | None) -> None:
        """Read the metrics of the pending step; blocks until the step has finished."""
        if (pending := self.pending) is None:
            return
        if health_log and pending.health:
            health_log.write(pending.step, pending.health)
        values = {name: float(value) for name, value in pending.metrics.items()}
        if not values["healthy"]:
            self._raise_diverged(pending, values)
        self.metrics.record_step(pending.step, values)
        self.stop_agreed = self.stop_agreed or bool(pending.stop)
        self.pending = None

    def _raise_diverged(self, failed: _PendingStep, values: dict[str, float]) -> NoReturn:
        """Save the last finite state, if it still exists, and raise ``Diverged`` with the first non-finite value.

        A step with a non-finite loss or gradient norm returns the state that it started from. A step that overflows in
        the update itself has overwritten that state.
        """
        metric = next((name for name in ("loss", "grad_norm") if not math.isfinite(values[name])), None)
        broken = self.check(self.state)
        if metric is None or broken is not None:
            where = f"{broken} is not finite" if broken else "a sum in it overflows"
            found = f"step {failed.step}: loss is {values['loss']:.6g} and the update overflows: {where}"
            raise Diverged(f"{found}; {_resume_point(self.checkpoints)}")
        last_good_step = int(self.state.step)
        self._save(last_good_step, failed.data_state)
        self.checkpoints.wait()
        key = jax.random.fold_in(jax.random.key(self.program.config.seed), last_good_step)
        where = explain_non_finite(self.program, self.state, failed.batch, key)
        name = "loss" if metric == "loss" else "gradient norm"
        raise Diverged(f"step {failed.step}: {name} is {values[metric]}; {where}; {_resume_point(self.checkpoints)}")


def _initialize_state(program: Program) -> TrainState:
    try:
        return processes.sync_cpu(jax.block_until_ready(program.init()))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        state = f"parameters and optimizer state of {tree_bytes(program.abstract_state):,} bytes"
        fix = "make the model smaller, or spread it over more devices with mesh_fsdp"
        raise ValueError(f"{state} do not fit into the memory of {_devices()}; {fix}") from None


@contextlib.contextmanager
def _convert_write_errors(run_dir: Path, checkpoints: Checkpoints) -> Iterator[None]:
    """Convert write errors (disk full, quota, read-only, folder gone) to ``Halted``, naming the newest checkpoint."""
    try:
        yield
        checkpoints.wait()
    except OSError as error:
        step = checkpoints.newest if run_dir.is_dir() else None
        kept = "no checkpoint is kept" if step is None else f"checkpoint {step} is kept"
        raise Halted(
            f"run {run_dir} cannot be written ({reason_of(error)}); {kept}; make the folder writable, with free "
            f"space, and run the same command again to resume from {'the start' if step is None else 'there'}"
        ) from error


def _check_held_out(held_out: float | None, step: int, checkpoints: Checkpoints) -> None:
    if held_out is None or not math.isfinite(held_out):
        raise Diverged(f"after step {step} the held-out loss is {held_out}; {_resume_point(checkpoints)}")


def _resume_point(checkpoints: Checkpoints) -> str:
    """Describe the checkpoint from which a diverged run can be resumed."""
    checkpoints.wait()
    step = checkpoints.newest
    if step is None:
        return "nothing is saved yet; start again with a lower learning_rate"
    return f"the last good state, step {step}, is saved; resume with a lower learning_rate, or start a new run_dir"


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _evaluate_held_out(program: Program, data: Data, state: TrainState) -> float:
    batches = (processes.shard(program.mesh, BATCH, batch) for batch in data.held_out())
    parts = [processes.sync_cpu(program.evaluate(state, batch)) for batch in batches]
    return float(sum(total for total, _ in parts)) / float(sum(count for _, count in parts))


def _summarize(program: Program, data: Data, state: TrainState) -> dict[str, Any]:
    config = program.config
    return {
        "steps": config.steps,
        "quantization": config.quantization,
        "backend": config.resolved_backend or "",
        "parameter_bytes": tree_bytes(state.params),
        "quant_state_bytes": tree_bytes(state.quant_state),
        "saved_activation_bytes": saved_activation_bytes(program, next(data.held_out())),
        "layers": [dataclasses.asdict(layer) for layer in program.model.layers],
        "data": data.description,
        "versions": {"python": platform.python_version()} | versions(),
        "devices": _devices(),
    }


def _describe_implementations(config: TrainConfig) -> str:
    """Describe which operations run on kernels and why others do not; "" if no kernel was requested or chosen."""
    made = [] if config.implementation == "xla" else [each for each in choices_made() if each[1].requests_kernel]
    reasons = sorted({f"{piece}: {each.name}, {each.reason}" for piece, each in made if each.reason != "requested"})
    kernels = sorted({piece for piece, choice in made if choice.name == "pallas"})
    return "; ".join([f"kernels (pallas): {', '.join(kernels) or 'none'}", *reasons]) if made else ""


def versions() -> dict[str, str]:
    """Return the versions of the installed packages among ``PACKAGES``."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _devices() -> str:
    devices = jax.devices()
    return f"{len(devices)} x {devices[0].device_kind}"
