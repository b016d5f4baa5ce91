"""Attacks on real small runs: flipped bits in their checkpoints, two writers at once, and disks that fill up."""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxquant.config.loader import build, load_yaml
from tests.train.conftest import read_losses
from train.checkpoint import Checkpoints
from train.config import TrainConfig
from train.parameters import open_parameters
from train.step import build as build_program

ROOT = Path(__file__).parents[2]
CONFIG = "configs/models/ci.yml"
TOLD = r"error: run .* cannot be written \(.*\);.* goes on from (there|the start)"
WORDS = ("quantization=fp8", "checkpoint_every=4", "log_every=1")


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
    for path in sorted(stored.leaves):
        digest.update(path.encode() + np.asarray(stored.leaves[path].read()).tobytes())
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
    """Flip ``count`` single bits in the checkpoints of a run, one after the other, and read each as users do.

    Half of the flips choose any file alike, half any bit alike. A flip is silent where what reads parameters for
    serving, or what a resumed run restores, takes the damaged checkpoint without a word.
    """
    rng, silent, files = random.Random(seed), [], {}
    config = build(TrainConfig, load_yaml(run / "config.yml"))
    abstract = build_program(config, 320).abstract_state
    folders = sorted((run / "checkpoints").iterdir(), key=lambda folder: int(folder.name))
    newest = int(folders[-1].name)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for number in range(count):
            copy = Path(folder) / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(run, copy)
            found = [p for p in sorted((copy / f"checkpoints/{newest}").rglob("*")) if p.is_file() and p.stat().st_size]
            (path,) = rng.choices(found, [1 if number % 2 else p.stat().st_size for p in found])
            bit = rng.randrange(8 * path.stat().st_size)
            data = bytearray(path.read_bytes())
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            what = f"{path.relative_to(copy)} bit {bit}"
            files[path.name] = files.get(path.name, 0) + 1
            said: list[str] = []
            if open_parameters(copy, say=said.append).step == newest or not said:
                silent.append(f"served: {what}")
            said.clear()
            with Checkpoints(copy, config, said.append) as checkpoints:
                restored = checkpoints.restore(abstract, said.append)
            if restored is None or int(restored[0].step) == newest or not said:
                silent.append(f"resumed: {what}")
    return {"flips": count, "silent": silent, "files": len(files)}


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
