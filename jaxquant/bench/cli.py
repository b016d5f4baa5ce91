"""The commands of ``jaxquant bench``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from jaxquant.command_line import Names, exit_code

CODES = "Exit codes: 0 on success, 1 if a number is wrong, 2 if something does not run or compile, 130 after Ctrl-C."
CHIPS = "jaxquant.aot.chips:CHIPS"
ABSENT = {
    "libraries": (CHIPS, "Compile one MLP step of jaxquant, flax, Qwix and AQT."),
    "published": (CHIPS, "Compare estimates with published ratios."),
    "gemm-set": (CHIPS, "Compile the matmuls of a layer under config strings."),
    "kernels": ("jaxquant.bench.absent:TPUS", "Compile the TPU kernels and count their bundles."),
    "strings": (CHIPS, "Compile every config string for a chip."),
    "speeds": (CHIPS, "Estimate an MLP step by config string.\n\nWith --out, also writes jaxquant/config/speeds.py."),
    "layers": (CHIPS, "Compile decoder layers; adds rows to the table."),
}
"""Commands that compile for chips that this machine may not have: name -> (chips, help text)."""


@click.group()
def bench() -> None:
    """Measure speed and losses, here or for absent chips.

    Compilation for a GPU or a TPU requires the extra audit-gpu or audit-tpu. benchmarks/README.md lists the results.
    """


_run = exit_code(RuntimeError, interrupted="interrupted")
_out = click.option("--out", default=Path("benchmarks/results"), type=click.Path(path_type=Path), help="Result folder.")
BACKENDS = click.Choice(["auto", "aqt", "qwix", "native"])


@bench.command()
@_out
@click.option("--small", is_flag=True, help="Use sizes that a CPU runs; the file is gpu-small-DEVICE.jsonl.")
@click.option("--limit", default=320.0, metavar="SECONDS", help="Longest time of the run, after its imports.")
@_run
def gpu(out: Path, limit: float, small: bool) -> int:
    """Check and time everything on a GPU, in one process.

    Exit codes: 0 on success, 1 if a number is wrong, 2 if something does not run or compile, 130 after Ctrl-C.
    """
    from jaxquant.bench.gpu import measure_gpu
    from jaxquant.bench.here import environment

    return measure_gpu(out, limit, small, environment)


@bench.command()
@_out
@click.option("--string", "strings", multiple=True, metavar="S", help="Config string; may be repeated; default: all.")
@click.option("--backend", "backends", multiple=True, type=BACKENDS, help="Backend; may be repeated; default: all.")
@_run
def against_cpu(strings: Sequence[str], backends: Sequence[str], out: Path) -> int:
    """Compare a layer here with the same layer on a CPU.

    Exit codes: 0 on success, 1 if a number is wrong, 2 if something does not run or compile, 130 after Ctrl-C.
    """
    from jaxquant.bench import here
    from jaxquant.bench.on_chip import measure_strings
    from jaxquant.bench.schemes import schemes

    return here.report("against-cpu", measure_strings, [schemes(strings, backends)], out)


@bench.command()
@_out
@click.option("--small", is_flag=True, help="Use sizes that a CPU runs in two minutes.")
@click.option("--only", multiple=True, type=Names("jaxquant.bench.speedrun:CONTENDERS"), help="Row; may be repeated.")
@click.option("--steps", type=int, metavar="N", help="Training steps; default: those of the size.")
@_run
def speedrun(out: Path, small: bool, only: Sequence[str], steps: int | None) -> int:
    """Race libraries and config strings to a held-out loss.

    One decoder, data set and seed, for each library at its defaults: time and steps until a fixed held-out loss, tokens
    per second, peak memory and final loss. About ten minutes on one GPU. A CPU runs a small size and compares losses
    only. Writes a table, a plot, and a JSONL file to which each row is appended when it is measured.

    Exit codes: 0 on success, 1 if a number is wrong, 2 if something does not run or compile, 130 after Ctrl-C.
    """
    from jaxquant.bench.speedrun import speedrun

    return speedrun(out, small, only, steps)


def _losses_by_seed(module: str, about: str) -> None:
    only = Names(f"jaxquant.bench.{module}:TRIALS")

    @bench.command(module.replace("_", "-"), help=f"{about}\n\n{CODES}")
    @_out
    @click.option("--only", multiple=True, type=only, help="Scheme to train; may be repeated; default: all.")
    @_run
    def command(only: Sequence[str], out: Path) -> int:
        from jaxquant.bench import here

        return here.report_losses(module, only, out)


_losses_by_seed("fp4_losses", "Compare held-out losses of FP4 schemes.")
_losses_by_seed("optimizer_losses", "Compare held-out losses of optimizer dtypes.")


def _compiled(name: str, chips: str, about: str) -> None:
    @bench.command(name, help=f"{about}\n\n{CODES}")
    @click.option("--out", default="", metavar="FOLDER", help="Folder for JSON and markdown; default: write no files.")
    @click.option("--target", type=Names(chips), default="v6e" if name == "kernels" else "h200", help="Chip.")
    @click.option("--only", multiple=True, metavar="NAME", help="Row to compile; may be repeated; default: all.")
    @click.option("--tokens", default=4096, metavar="N", help="Tokens of a step, for libraries and layers.")
    @_run
    def command(**options: Any) -> int:
        from jaxquant.bench import absent

        return absent.compile_table(name, absent.Options(**options))


for _name, (_chips, _about) in ABSENT.items():
    _compiled(_name, _chips, _about)
