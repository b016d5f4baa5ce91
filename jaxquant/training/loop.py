"""The training loop: steps, held-out loss, checkpoints, an orderly stop, and the end of a run that diverged."""

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
from jaxquant.training.checkpoint import Checkpoints, finished, reason_of, write_config
from jaxquant.training.config import TrainConfig
from jaxquant.training.data import Data, make_iterators
from jaxquant.training.health import FiniteCheck, Health, HealthLog, build_health, explain_non_finite
from jaxquant.training.lock import Busy, RunLock
from jaxquant.training.metrics import Metrics
from jaxquant.training.sharding import BATCH
from jaxquant.training.step import Batch, Program, TrainState, build, check_step, saved_activation_bytes

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "qwix", "aqtp", "numpy")


class Diverged(RuntimeError):
    """A loss, a gradient norm, an update or a state was not finite."""


class Halted(RuntimeError):
    """What the run writes cannot be written any more, or is another's to write."""


@dataclasses.dataclass
class _Pending:
    """A step that was started and whose metrics have not been read."""

    step: int
    metrics: dict[str, jax.Array]
    batch: Batch
    data_state: Any
    stop: Any
    health: tuple[dict[str, jax.Array], dict[str, Any]] | None


class StopRequest:
    """Notes SIGTERM, SIGHUP and Ctrl-C, so that the loop stops after the step at hand; a second one stops at once.

    A terminal that closes sends SIGHUP more than once: the second is not heard. Nor is the first under ``nohup``.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else self._before[number])


def prepare(config: TrainConfig, say: Callable[[str], None]) -> Callable[[], None]:
    """Check and build all that a run needs, and return the function that trains.

    Raises:
      ValueError, TypeError, NotImplementedError, OSError: the configuration, the data or the run's folder do not fit.
    """
    if not config.run_dir:
        raise ValueError("run_dir is empty; name the folder of the run")
    run_dir = Path(config.run_dir)
    lock = RunLock(run_dir)
    with contextlib.ExitStack() as stack:
        stack.callback(lock.release)
        if jax.process_count() == 1 and run_dir.is_dir():  # of several, each may see it or not yet
            _own(lambda: lock.acquire(say), run_dir)
        loss = finished(run_dir, config)
        if processes.all_agree(loss is not None) and loss is not None:
            say(f"done: {config.steps} steps, held-out loss {loss:.4f}, in {run_dir}")
            return lambda: None
        if config.tensorboard:
            importlib.import_module("tensorboardX")  # before the step is traced, which takes minutes
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
        _own(lambda: lock.acquire(say), run_dir)
        say(coverage.text())
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
        opened = stack.pop_all()  # they stay open: the training function closes them

    def train() -> None:
        with opened, _writing(run_dir, checkpoints):
            run.train()

    return train


def _own(ask: Callable[[], None], run_dir: Path) -> None:
    """Take or keep the folder for this run, which ``ask`` refuses: its first process has it, for all of them."""
    refusal = None
    if processes.is_main():
        try:
            ask()
        except Busy as busy:
            refusal = busy
    if not processes.all_agree(refusal is None):
        raise refusal or Busy(f"run {run_dir} is being written by another run; see the first process")


@dataclasses.dataclass
class _Run:
    """A run: what it was built of, and the state that it has reached."""

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
    pending: _Pending | None = None
    agreed: bool = False  # by all processes, to stop

    def start(self, say: Callable[[str], None]) -> None:
        """Go on from the newest checkpoint, or begin; write config.yml, and remove the summary where steps are left."""
        restored = self.checkpoints.restore(self.program.abstract_state, say)
        self.state = restored[0] if restored else _initial(self.program)
        if (found := self.check(self.state)) is not None:
            way_out = f"delete checkpoint {int(self.state.step)}" if restored else "choose another seed or shape"
            raise ValueError(f"the run would start with {found} that is not finite; {way_out}")
        if restored:
            self.data.train.set_state(restored[1])
            say(f"resumed {self.run_dir} at step {int(self.state.step)}")
        if processes.is_main():
            if int(self.state.step) < self.program.config.steps:  # a summary is that of a run which ended before
                (self.run_dir / "summary.json").unlink(missing_ok=True)
            write_config(self.run_dir, self.program.config)

    def train(self) -> None:
        """Train to the last step, or until somebody asks to stop."""
        config, first = self.program.config, int(self.state.step)
        with Metrics(self.run_dir, config, first) as self.metrics, self.stop:
            metrics = self.metrics
            metrics.changed(first, self.checkpoints.changes)
            held_out = self._steps(first)
            self.checkpoints.wait()
            if held_out is None:
                by, step = self._reason or "a signal to another process", int(self.state.step)
                metrics.say(f"stopped by {by} after step {step}, saved; the same command goes on from there")
                return
            _check_held_out(held_out, config.steps, self.checkpoints)
            summary = _summary(self.program, self.data, self.state) | metrics.timing() | {"held_out_loss": held_out}
            if processes.is_main():
                (self.run_dir / "summary.json").write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n")
                write_sums(self.run_dir, ["summary.json"])
            metrics.say(f"done: {config.steps} steps, held-out loss {held_out:.4f}, in {self.run_dir}")

    def _steps(self, first: int) -> float | None:
        """Make the steps that are left; return the last held-out loss, or None where the run is to stop before."""
        program, config, metrics = self.program, self.program.config, self.metrics
        healthy = jax.device_put(np.bool_(True), program.replicated)  # as a step returns it: one trace for all steps
        stop_anywhere = processes.Flag(program.mesh)
        health_log = HealthLog(self.health, metrics) if self.health else None
        warms = program.mesh.devices.flat[0].platform != "cpu" or config.implementation == "pallas"
        held_out = _held_out(program, self.data, self.state) if first >= config.steps else None
        for step in range(first + 1, config.steps + 1):
            before = self.data.train.get_state()
            batch = processes.place(program.mesh, BATCH, next(self.data.train))
            # Before the step, which takes the state for its own.
            due = self.health is not None and _due(step, config.health_every)
            measured = processes.in_order(self.health.measure(self.state, batch)) if self.health and due else None
            self.state, values = processes.in_order(program.step(self.state, batch, healthy))
            healthy = values["healthy"]
            asked = stop_anywhere.ask(self._reason is not None)
            self._settle(health_log)
            self.pending = _Pending(step, values, batch, before, asked, measured)
            if warms and (step == first + 1 or _due(step, config.eval_every)):
                # From here on no cast waits for its own amax: one more compilation, which a CPU would not earn back,
                # but without which no cast is a kernel's.
                self.state = self.state._replace(quant_state=quantization_state.warm(self.state.quant_state))
            last = step == config.steps
            if (step == first + 2 or (last and step == first + 1)) and (said := _implementations(config)):
                metrics.say(said)
            # Several processes stop together, where the answer of an earlier step is known to all.
            stops = self.agreed if jax.process_count() > 1 else self._reason is not None
            saving = last or stops or _due(step, config.checkpoint_every)
            evaluating = last or _due(step, config.eval_every)
            if saving or evaluating:
                self._settle(health_log)
            if saving and (found := self.check(self.state)) is not None:
                raise Diverged(f"after step {step} {found} is not finite; {_kept(self.checkpoints)}")
            if evaluating:
                held_out = _held_out(program, self.data, self.state)
                metrics.held_out(step, held_out)
            if last:
                _check_held_out(held_out, step, self.checkpoints)
            if saving:
                self._save(step, self.data.train.get_state())
            if saving or evaluating:
                metrics.pause()
            if stops and not last:
                return None
        return held_out

    def _save(self, step: int, data_state: Any) -> None:
        """Save the state, unless another run has the folder by now."""
        try:
            _own(self.lock.check, self.run_dir)
        except Busy as busy:
            raise Halted(f"{busy}; nothing more is written") from None
        self.checkpoints.save(step, self.state, data_state)

    @property
    def _reason(self) -> str | None:
        """Why this process asks to stop."""
        return self.stop.signal or ("a closed output" if self.metrics.is_unheard else None)

    def _settle(self, health_log: HealthLog | None) -> None:
        """Read the pending step's metrics, which waits for it."""
        if (pending := self.pending) is None:
            return
        if health_log and pending.health:
            health_log.write(pending.step, pending.health)
        values = {name: float(value) for name, value in pending.metrics.items()}
        if not values["healthy"]:
            self._diverged(pending, values)
        self.metrics.step(pending.step, values)
        self.agreed = self.agreed or bool(pending.stop)
        self.pending = None

    def _diverged(self, failed: _Pending, values: dict[str, float]) -> NoReturn:
        """Save the last good state, where there is one, and raise with what went first.

        A step whose loss or gradient norm is not finite leaves the state that it started from. One that overflows in
        the update itself has overwritten it.
        """
        what = next((name for name in ("loss", "grad_norm") if not math.isfinite(values[name])), None)
        broken = self.check(self.state)
        if what is None or broken is not None:
            where = f"{broken} is not finite" if broken else "a sum in it overflows"
            found = f"step {failed.step}: loss is {values['loss']:.6g} and the update overflows: {where}"
            raise Diverged(f"{found}; {_kept(self.checkpoints)}")
        good = int(self.state.step)
        self._save(good, failed.data_state)
        self.checkpoints.wait()
        key = jax.random.fold_in(jax.random.key(self.program.config.seed), good)
        where = explain_non_finite(self.program, self.state, failed.batch, key)
        name = "loss" if what == "loss" else "gradient norm"
        raise Diverged(f"step {failed.step}: {name} is {values[what]}; {where}; {_kept(self.checkpoints)}")


def _initial(program: Program) -> TrainState:
    try:
        return processes.in_order(jax.block_until_ready(program.init()))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        state = f"parameters and optimizer state of {tree_bytes(program.abstract_state):,} bytes"
        fix = "make the model smaller, or spread it over more devices with mesh_fsdp"
        raise ValueError(f"{state} do not fit into the memory of {_devices()}; {fix}") from None


@contextlib.contextmanager
def _writing(run_dir: Path, checkpoints: Checkpoints) -> Iterator[None]:
    """Describe what is kept where the file system refuses to go on: full, over its quota, read-only, gone."""
    try:
        yield
        checkpoints.wait()
    except OSError as error:
        step = checkpoints.newest if run_dir.is_dir() else None
        kept = "no checkpoint is kept" if step is None else f"checkpoint {step} is kept"
        raise Halted(
            f"run {run_dir} cannot be written ({reason_of(error)}); {kept}; make it writable, with space, "
            f"and the same command goes on from {'the start' if step is None else 'there'}"
        ) from error


def _check_held_out(held_out: float | None, step: int, checkpoints: Checkpoints) -> None:
    if held_out is None or not math.isfinite(held_out):
        raise Diverged(f"after step {step} the held-out loss is {held_out}; {_kept(checkpoints)}")


def _kept(checkpoints: Checkpoints) -> str:
    """Describe what a run that diverged goes on from."""
    checkpoints.wait()
    step = checkpoints.newest
    if step is None:
        return "nothing is saved yet; start again with a lower learning_rate"
    return f"the last good state, step {step}, is saved; resume with a lower learning_rate, or start a new run_dir"


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _held_out(program: Program, data: Data, state: TrainState) -> float:
    batches = (processes.place(program.mesh, BATCH, batch) for batch in data.held_out())
    parts = [processes.in_order(program.evaluate(state, batch)) for batch in batches]
    return float(sum(total for total, _ in parts)) / float(sum(count for _, count in parts))


def _summary(program: Program, data: Data, state: TrainState) -> dict[str, Any]:
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


def _implementations(config: TrainConfig) -> str:
    """Describe what computes casts and matmuls where kernels were asked for or picked, and why; "" where none were."""
    made = [] if config.implementation == "xla" else [each for each in choices_made() if each[1].requests_kernel]
    reasons = sorted({f"{piece}: {each.name}, {each.reason}" for piece, each in made if each.reason != "requested"})
    kernels = sorted({piece for piece, choice in made if choice.name == "pallas"})
    return "; ".join([f"kernels (pallas): {', '.join(kernels) or 'none'}", *reasons]) if made else ""


def versions() -> dict[str, str]:
    """Return the versions of the packages of ``PACKAGES`` that are installed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _devices() -> str:
    devices = jax.devices()
    return f"{len(devices)} x {devices[0].device_kind}"
