"""Attacks on real small runs: flipped bits in their checkpoints, two writers at once, and disks that fill up."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxquant import serving
from tests.train.conftest import read_losses
from train.__main__ import read_config
from train.checkpoint import Checkpoints, check_config
from train.config import TrainConfig
from train.conversion import convert_run
from train.exporting import export_run
from train.importing import open_checkpoint
from train.metrics import truncate_metrics
from train.parameters import open_parameters
from train.report import comparison_rows, notes, render
from train.runs import load_runs
from train.step import build as build_program

ROOT = Path(__file__).parents[2]
CONFIG = "configs/models/ci.yml"
TOLD = r"error: run .* cannot be written \(.*\);.* goes on from (there|the start)"
WORDS = ("quantization=fp8", "checkpoint_every=4", "log_every=1", "health_every=8")


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def start(run: Path, steps: int) -> subprocess.Popen[str]:
    """Start ``python -m train`` on a folder."""
    words = [sys.executable, "-m", "train", CONFIG, *WORDS, f"steps={steps}", f"run_dir={run}"]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=3000)
    return process.returncode, out, err


def fingerprint(run: Path) -> tuple[dict[int, float], str]:
    """Return all losses of a run, and a sum of the bits of its last parameters and quant state."""
    stored, digest = open_parameters(run, say=lambda text: None), hashlib.sha256()
    for path in sorted(stored.stores):
        digest.update(path.encode() + stored.read(path).tobytes())
    return read_losses(run), f"step {stored.step} {digest.hexdigest()}"


@contextlib.contextmanager
def whole_run(steps: int) -> Iterator[Path]:
    """Train a run to its end, undisturbed."""
    with tempfile.TemporaryDirectory() as folder:
        status, out, err = finish(start(Path(folder) / "whole", steps))
        if status:
            raise RuntimeError(f"the undisturbed run failed: {out}{err}")
        yield Path(folder) / "whole"


def attack_flips(count: int, seed: int, run: Path) -> dict[str, Any]:
    """Flip ``count`` single bits, one after the other, in the files of a run, of what it converts to, of two exports.

    A third of the flips chooses config.yml, a third any file alike, a third any bit alike. Whatever reads the file runs
    up to where it has all that its result depends on (``_READERS``). A flip is noticed where that is refused, or
    something is told that is not told of the undamaged files; harmless where what was read is the same to the bit; and
    else silent.
    """
    rng, silent, files, came = random.Random(seed), [], Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        whole, copy = Path(folder) / "whole", Path(folder) / "copy"
        shutil.copytree(run, whole / "run")
        convert_run(run, whole / "converted", {"quantization": "int8"}, say=lambda text: None)
        export_run(run, whole / "hf", "fp8_block", say=lambda text: None)
        export_run(run, whole / "model.gguf", "gguf_q8_0", say=lambda text: None)
        found = [path for path in sorted(whole.rglob("*")) if path.is_file() and path.stat().st_size]
        shutil.copytree(whole, copy)
        expected = {name: [read(copy) for read in readers] for name, readers in _READERS.items()}
        for number in range(count):
            weights = [path.stat().st_size if number % 3 == 2 else 1 for path in found]
            (path,) = rng.choices(found, weights) if number % 3 else [whole / "run/config.yml"]
            bit = rng.randrange(8 * path.stat().st_size)
            name = path.relative_to(whole)
            for place, read in enumerate(_READERS[name.parts[0]]):
                shutil.rmtree(copy)  # a reader may have moved a checkpoint away
                shutil.copytree(whole, copy)
                data = bytearray(path.read_bytes())
                data[bit // 8] ^= 1 << bit % 8
                (copy / name).write_bytes(data)
                try:
                    outcome, said = read(copy)
                except (ValueError, TypeError, NotImplementedError, OSError):
                    came["refused"] += 1
                    continue
                was, was_said = expected[name.parts[0]][place]
                kind = "told" if said != was_said else "harmless" if outcome == was else "silent"
                came[kind] += 1
                if kind == "silent":
                    silent.append(f"{read.__name__}: {name} bit {bit}")
            files[path.name] += 1
            if number % 25 == 0:
                tell(f"flip {number} of {count}: {dict(came)}")
    return {"flips": count, "readings": dict(came), "silent": silent, "files": len(files)}


def _digest(leaves: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for leaf in leaves:
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def _served(folder: Path) -> tuple[Any, list[str]]:
    """Read what evaluate, convert, export and serve read of a run."""
    said: list[str] = []
    stored = open_parameters(folder / "run", say=said.append)
    paths = sorted(stored.stores)
    return (stored.step, stored.config, paths, _digest(map(stored.read, paths))), said


def _resumed(folder: Path, config: TrainConfig | None = None) -> tuple[Any, list[str]]:
    """Go on with a run as its own config.yml asks, or another config, up to the first step."""
    run, said = folder / "run", list[str]()
    config = config or read_config(str(run / "config.yml"), [f"run_dir={run}"])
    check_config(run, config)
    with Checkpoints(run, config, said.append) as checkpoints:
        found = checkpoints.restore(_abstract(run), said.append)
    assert found is not None
    for name in ("metrics.jsonl", "health.jsonl"):
        truncate_metrics(run / name, int(found[0].step), said.append)
    lines = [(run / name).read_bytes() for name in ("metrics.jsonl", "health.jsonl")]
    return (config, found[1], _digest(jax.tree.leaves(found[0])), lines), said


def _resumed_by_another_file(folder: Path) -> tuple[Any, list[str]]:
    words = [*WORDS, f"run_dir={folder / 'run'}"]
    return _resumed(folder, read_config(str(ROOT / CONFIG), [*words, f"steps={_steps(folder / 'run')}"]))


def _compared(folder: Path) -> tuple[Any, list[str]]:
    """Read what compare reads: its table, its page and its notes, which are told."""
    runs = load_runs([folder / "run"])
    return (comparison_rows(runs), render(runs)), notes(runs)


def _loaded(folder: Path) -> tuple[Any, list[str]]:
    found = serving.load(folder / "converted")
    return (found.config, found.extra, _digest(jax.tree.leaves(found.params))), []


def _imported_folder(folder: Path) -> tuple[Any, list[str]]:
    source, _ = open_checkpoint(folder / "hf")
    return (source.shape, source.vocabulary, _digest(source.read(name) for name in source.shape.tensors())), []


def _imported_file(folder: Path) -> tuple[Any, list[str]]:
    source, _ = open_checkpoint(folder / "model.gguf")
    return (source.shape, _digest(source.read(name) for name in source.shape.tensors())), []


_READERS: dict[str, list[Callable[[Path], tuple[Any, list[str]]]]] = {
    "run": [_served, _resumed, _resumed_by_another_file, _compared],
    "converted": [_loaded],
    "hf": [_imported_folder],
    "model.gguf": [_imported_file],
    "model.gguf.sha256": [_imported_file],
}
"""What reads a folder or file, and returns what its result depends on and what it tells."""


def _steps(run: Path) -> int:
    return max(int(path.name) for path in (run / "checkpoints").iterdir())


@functools.cache
def _program(config: TrainConfig) -> Any:
    return build_program(config, 320).abstract_state


def _abstract(run: Path) -> Any:
    """Return the state that a run restores; a flip that changes a shape is refused before."""
    return _program(open_parameters(run, say=lambda text: None).config)


def attack_writers(count: int, seed: int, whole: Path, steps: int) -> dict[str, Any]:
    """Start two processes on one folder, ``count`` times: one trains to the end, one is refused, nothing is lost."""
    rng, wrong, expected = random.Random(seed), [], fingerprint(whole)
    for number in range(count):
        tell(f"pair {number} of {count}, {len(wrong)} wrong")
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            first = start(run, steps)
            time.sleep(rng.choice((0, 0, rng.random(), 2 * rng.random())))
            ended = [finish(process) for process in (first, start(run, steps))]
            refused = [err for status, _, err in ended if status == 2]
            if sorted(status for status, *_ in ended) != [0, 2]:
                wrong.append(f"pair {number}: statuses {[status for status, *_ in ended]}")
            elif not re.search(r"is being written by process \d+ on \S+; wait for it, stop it", refused[0]):
                wrong.append(f"pair {number}: {refused[0][-300:]}")
            elif fingerprint(run) != expected:
                wrong.append(f"pair {number}: the run that trained is not the undisturbed one")
    return {"pairs": count, "wrong": wrong}


def attack_disk(count: int, seed: int, whole: Path, steps: int) -> dict[str, Any]:
    """Fill the file system of a run at ``count`` random moments, make room, and go on.

    The moment is a random step, the room that is left a random number of bytes up to a checkpoint and a half, so that
    it runs out in an array, in a sum, in the metrics. What is told, and what the same command makes of it afterwards:
    losses, parameters and quant state bit for bit those of the undisturbed run.
    """
    rng, wrong, expected, told = random.Random(seed), [], fingerprint(whole), 0
    checkpoint = sum(path.stat().st_size for path in (whole / f"checkpoints/{steps}").rglob("*") if path.is_file())
    for number in range(count):
        with tempfile.TemporaryDirectory() as folder, _file_system(Path(folder), 12 * checkpoint):
            run, filler = Path(folder) / "run", Path(folder) / "filler"
            moment, room = rng.randrange(1, steps), rng.randrange(int(1.5 * checkpoint))
            process = start(run, steps)
            _wait_for_step(run, moment, process)
            process.send_signal(signal.SIGSTOP)  # so that the moment is this one
            _fill(Path(folder), filler, room)
            process.send_signal(signal.SIGCONT)
            status, out, err = finish(process)
            filler.unlink()
            what = f"step {moment}, {room} bytes left"
            tell(f"moment {number} of {count}: {what}, status {status}; {len(wrong)} wrong before")
            told += status == 1
            if status not in (0, 1) or "Traceback" in out + err:
                wrong.append(f"{what}: status {status}: {err}")
            elif status == 1 and not re.search(
                r"error: run .* cannot be written \(.*\);.* goes on from (there|the start)", err
            ):
                wrong.append(f"{what}: {err[-500:]}")
            status, out, err = finish(start(run, steps))
            if status:
                wrong.append(f"{what}: going on, status {status}: {err[-500:]}")
            elif fingerprint(run) != expected:
                wrong.append(f"{what}: the run that went on is not the undisturbed one")
    return {"moments": count, "told": told, "wrong": wrong}


@contextlib.contextmanager
def _file_system(folder: Path, size: int) -> Iterator[None]:
    """Mount a small file system in memory, which root may."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _fill(folder: Path, filler: Path, room: int) -> None:
    found = os.statvfs(folder)
    with filler.open("wb") as file, contextlib.suppress(OSError):
        file.write(b"\0" * max(0, found.f_bavail * found.f_frsize - room))


def _wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until a step stands in the metrics, or the process has ended."""
    metrics = run / "metrics.jsonl"
    while process.poll() is None:
        with contextlib.suppress(OSError, json.JSONDecodeError):
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
            if any(line.get("step", 0) >= step for line in lines if "loss" in line):
                return
        time.sleep(0.005)
