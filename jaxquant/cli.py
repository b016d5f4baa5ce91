"""The command ``jaxquant``: every command and its options.

Each function parses the arguments of one command and passes them to the module that does the work. That module is
imported inside the function, so that ``jaxquant --help`` does not import JAX.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from jaxquant import terminal
from jaxquant.bench.cli import bench
from jaxquant.command_line import SETTINGS, Names, exit_code

BUNDLED = Path(__file__).parent / "training" / "configs"
"""Folder of the configurations that a user can select by name."""
BUILDER = "jaxquant.training.audit:program"
GENERATION = ("jaxquant.training.audit:prefill", "jaxquant.training.audit:decode")
COUNT = click.IntRange(min=1)
FLOATS = click.Choice(["bfloat16", "float16", "float32"])
WORDS = "[KEY=VALUE]..."
NOTHING_WRITTEN = "interrupted; nothing was written"


@click.group(context_settings=SETTINGS)
@click.version_option(package_name="jaxquant", message="%(prog)s %(version)s")
def program() -> None:
    """Quantized training in JAX: explain a config string, train with it, audit it for a chip, serve the result.

    train, compare, convert, evaluate, serve, export, import and bench need the extra train:

    \b
        pip install -e '.[train]'    # in a checkout of jaxquant

    Shell completion for bash (zsh_source and fish_source for other shells):

    \b
        eval "$(_JAXQUANT_COMPLETE=bash_source jaxquant)"
    """


program.add_command(bench)


def _bundled(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Return the path of a bundled configuration from its name; return any other value unchanged, as a path."""
    file = BUNDLED / f"{value}.yml"
    return str(file) if value.isidentifier() and file.is_file() and not Path(value).exists() else value


def _config(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments CONFIG and KEY=VALUE."""
    words = click.argument("overrides", nargs=-1, metavar=WORDS)
    return click.argument("config", callback=_bundled)(words(command))


_changes = click.argument("changes", nargs=-1, metavar=WORDS)
_program = click.option("--program", "step", default=BUILDER, metavar="MODULE:FUNCTION", help="Builds the step.")
_out = click.option("--out", required=True, metavar="FOLDER", help="Folder to write; it must not exist.")
_step = click.option("--step", type=int, metavar="N", help="Step of the checkpoint; default: the latest one.")


@program.command()
@exit_code(ImportError, interrupted="interrupted")
def strings() -> None:
    """List every config string with its dtypes and backends.

    Exit codes: 0 on success, 2 on an error, 130 after Ctrl-C.
    """
    from jaxquant.config import explain

    print(explain.strings())


@program.command()
@click.argument("string")
@click.argument("options", nargs=-1, metavar=WORDS)
@exit_code(ImportError, interrupted="interrupted")
def explain(string: str, options: Sequence[str]) -> None:
    """Describe a config string in words and numbers.

    STRING is a config string such as fp8. KEY=VALUE words set fields of QuantConfig, for example amax_margin=1.

    Exit codes: 0 on success, 2 on an error, 130 after Ctrl-C.
    """
    from jaxquant.config.explain import explain
    from jaxquant.config.loader import parse_overrides

    print(explain(string, parse_overrides(options)))


@program.command()
@_config
@click.option("--check", is_flag=True, help="Exit with 1 if a layer does not run as its recipe defines.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_program
@exit_code(ImportError, interrupted="interrupted")
def coverage(**options: Any) -> int:
    """List every matmul of a training step with its dtypes.

    CONFIG is a YAML file or the name of a bundled one (quickstart). KEY=VALUE words replace fields of CONFIG, for
    example quantization=fp8. The step is traced, not run. For a step of your own, --program names a function
    (config, overrides, devices) -> (jitted step, shapes).

    Exit codes: 0 on success, 1 if --check finds a difference, 2 on an error, 130 after Ctrl-C.
    """
    from jaxquant.aot.command import print_coverage

    return print_coverage(**options)


@program.command()
@_config
@click.option("--target", default="h200", type=Names("jaxquant.aot.command:TARGETS"), help="Chip to compile for.")
@click.option("--topology", default="", show_default="smallest", help="Number of GPUs (64) or TPU slice (8x8).")
@click.option("--string", "strings", multiple=True, metavar="S", help="Config string to audit; may be repeated.")
@click.option("--out", default="", show_default="none", metavar="FOLDER", help="Folder for JSON and markdown.")
@click.option(
    "--largest-batch", type=COUNT, metavar="N", help="Find the largest multiple of N that fits as batch_size."
)
@click.option("--invariant", is_flag=True, help="List operations whose result for a row may depend on the batch.")
@_program
@exit_code(ModuleNotFoundError, RuntimeError, interrupted="interrupted")
def audit(strings: Sequence[str], largest_batch: int | None, invariant: bool, **request: Any) -> int:
    """Compile a training step for a chip that is not here.

    CONFIG is a YAML file or the name of a bundled one (quickstart). KEY=VALUE words replace fields of CONFIG. The
    report compares the quantized step with the unquantized one: matmuls and their dtypes, memory, estimated time.
    Needs the extra audit-gpu or audit-tpu. For a step of your own, --program names a function
    (config, overrides, devices) -> (jitted step, shapes).

    --invariant compiles the training step, the prefill and the decoding instead, for a chip or for the target cpu. It
    lists forward operations whose result for a row may depend on the batch, on padding or on chunks of the prompt. It
    does not find operations that combine rows.

    Exit codes: 0 on success, 1 if an 8-bit matmul fell back to a wider dtype, the step does not fit, or --invariant
    lists an operation of the forward pass, 2 if the step cannot be audited, 130 after Ctrl-C.
    """
    from jaxquant.aot.command import Request, print_audits, print_largest_batches, print_variant_operations

    if invariant and largest_batch is not None:
        raise click.UsageError("Pass --invariant or --largest-batch, but not both")
    if invariant:
        programs = [request["step"], *(GENERATION if request["step"] == BUILDER else ())]
        return print_variant_operations(Request(**request), strings, programs)
    if largest_batch is not None:
        return print_largest_batches(Request(**request), strings, largest_batch)
    return print_audits(Request(**request), strings)


@program.command()
@_config
@click.option("--coordinator-address", metavar="HOST:PORT", help="Address of process 0, in a run of several processes.")
@click.option("--num-processes", type=int, metavar="N", help="Number of processes of the run.")
@click.option("--process-id", type=int, metavar="I", help="Number of this process, from 0.")
def train(**options: Any) -> int:
    """Start or resume a training run.

    CONFIG is a YAML file or the name of a bundled one (quickstart). KEY=VALUE words replace fields of CONFIG and may
    stand anywhere after it:

    \b
        jaxquant train quickstart quantization=int8 steps=100

    A config of your own needs only the fields that differ from their defaults:

    \b
        dataset: text            # or stdlib, jsonl, parquet
        dataset_path: my_texts
        quantization: fp8

    The run is written to run_dir (default: runs/CONFIG-QUANTIZATION-BACKEND). The same command resumes it.

    In a run on several hosts, each host runs the same command with all three options below, which have the meaning of
    jax.distributed.initialize; run_dir is a folder that all hosts see.

    Exit codes: 0 if the run ends or stops in order, 1 if it diverges or cannot write, 2 if it cannot start, 130 if
    Ctrl-C ends it at once.
    """
    from jaxquant.training.start import train

    return train(**options)


def _commands() -> Any:
    return importlib.import_module("jaxquant.training.commands")


@program.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--out", default="report.html", metavar="FILE", help="Page to write.")
@exit_code(interrupted="interrupted")
def compare(runs: Sequence[str], out: str) -> None:
    """Compare training runs in a table and an HTML page.

    RUN is the folder of a run, for example runs/quickstart-int8-native. The page has curves, bytes and dtypes.

    Exit codes: 0 on success, 2 on an error, 130 after Ctrl-C.
    """
    _commands().compare(runs, out)


@program.command()
@click.argument("source")
@_changes
@_out
@_step
@exit_code(interrupted=NOTHING_WRITTEN)
def convert(**options: Any) -> None:
    """Convert a run to a quantized checkpoint for serving.

    SOURCE is the folder of a run. KEY=VALUE words change fields of the quantization, for example quantization=int8;
    without them, the run's quantization is used. Recipes with static scales are calibrated on held-out text. Layers are
    converted one at a time, in bounded memory.

    Exit codes: 0 on success, 2 on an error, 130 after Ctrl-C.
    """
    _commands().convert(**options)


@program.command()
@click.argument("run")
@click.argument("converted", nargs=-1, metavar="[DIR]...")
@click.option("--batches", type=COUNT, metavar="N", help="Held-out batches; default: eval_batches of the run.")
@exit_code(interrupted="interrupted")
def evaluate(**options: Any) -> None:
    """Compare a run in float, as trained and as served.

    RUN is the folder of a run. Each DIR is a folder that `jaxquant convert` wrote; without DIR, the run is compared
    with its float model only. The table has the held-out loss, and the share of positions with the same most likely
    next token.

    Exit codes: 0 on success, 2 on an error, 130 after Ctrl-C.
    """
    _commands().evaluate(**options)


@program.command()
@click.argument("directory", metavar="DIR")
@click.option("--prompt", multiple=True, metavar="TEXT", help="Text to complete; may be repeated.")
@click.option("--prompts-file", metavar="FILE", help="File with one prompt a line; - is standard input.")
@click.option("--max-new-tokens", type=COUNT, default=128, metavar="N", help="Tokens to generate.")
@click.option("--max-length", default=0, metavar="N", show_default="as in training", help="Longest text in tokens.")
@click.option("--temperature", default=0.0, metavar="T", help="Sampling temperature; 0 is greedy.")
@click.option("--top-p", default=1.0, metavar="P", help="Probability mass to sample from.")
@click.option("--seed", default=0, metavar="N", help="Seed of the sampling.")
@click.option("--kv-cache", type=Names("jaxquant.training.serving:KV_CACHES"), help="Dtype; default: the config's.")
@click.option("--kv-axis", type=click.Choice(["dkv", "heads_and_dkv"]), help="A scale for each head, or for all heads.")
@click.option("--slots", default=8, metavar="N", help="Prompts to run at the same time.")
@click.option("--prefill-chunk", default=64, metavar="N", help="Tokens of a prompt to process in one step.")
@exit_code(interrupted="\ninterrupted")
def serve(prompt: Sequence[str], prompts_file: str | None, **options: Any) -> int:
    """Complete prompts with a trained model.

    DIR is a folder that `jaxquant convert` wrote, or the folder of a run. Give either --prompt or --prompts-file. One
    prompt is streamed; several are printed in order.

    Exit codes: 0 on success, 1 if a prompt is refused or the output is closed, 2 on an error, 130 after Ctrl-C.
    """
    if bool(prompt) == (prompts_file is not None):
        raise click.UsageError("Pass --prompt or --prompts-file, but not both")
    return _commands().serve(prompt, prompts_file, **options)


@program.command()
@click.argument("source")
@click.option("--out", required=True, metavar="PATH", help="Folder or GGUF file to write; it must not exist.")
@click.option("--format", required=True, type=Names("jaxquant.export:FORMATS"), help="Format of the file.")
@_step
@click.option("--dtype", default="bfloat16", type=FLOATS, help="Dtype of float tensors.")
@exit_code(interrupted=NOTHING_WRITTEN)
def export(**options: Any) -> None:
    """Export a run for vLLM, SGLang, MAX or llama.cpp.

    SOURCE is the folder of a run, or a folder that `jaxquant convert` wrote. The formats ct_*, fp8_block and fbgemm_fp8
    are Hugging Face folders for vLLM and SGLang, modelopt_* also for TensorRT-LLM, hf is a float folder, and gguf_* is
    a file for llama.cpp. Formats with static scales of inputs are calibrated on held-out text.

    Exit codes: 0 on success, 2 on an error, 130 after Ctrl-C.
    """
    _commands().export(**options)


@program.command()
@click.argument("checkpoint")
@click.option("--server", metavar="NAME", help="Server that loads the checkpoint; default: a row for each server.")
@click.option("--chip", metavar="NAME", help="Chip of the server; default: a row for each class of chips.")
@click.option("--strict", is_flag=True, help="Exit with 1 if a layer is not known to be computed as stored.")
@exit_code(interrupted="interrupted")
def servers(**options: Any) -> int:
    """List how servers compute a checkpoint.

    CHECKPOINT is a Hugging Face folder or a GGUF file. Servers change weights and scales when they load them, and some
    chips do not quantize inputs. With --server and --chip, the table has a row for each layer. A combination without a
    known rule reads "not known".

    Exit codes: 0 on success, 1 if --strict finds a difference, 2 on an error, 130 after Ctrl-C.
    """
    from jaxquant.export.command import print_servers

    return print_servers(**options)


@program.command("import")
@click.argument("source")
@_changes
@_out
@click.option("--serve", is_flag=True, help="Write a checkpoint for serving; keeps elements and scales if possible.")
@exit_code(interrupted=NOTHING_WRITTEN)
def import_(**options: Any) -> None:
    """Import a model from Hugging Face or a GGUF file.

    SOURCE is a Hugging Face folder or a GGUF file. The result is a run, which `jaxquant train` continues, or with
    --serve a checkpoint for `jaxquant serve`. KEY=VALUE words set fields of the run's config, such as dataset and
    quantization; a float checkpoint needs quantization=... to be served.

    Exit codes: 0 on success, 2 on an error, 130 after Ctrl-C.
    """
    _commands().import_(**options)


def run(words: Sequence[str] | None = None) -> None:
    """Run a command and exit. After Ctrl-C the process ends at once, because XLA may still compile in a thread."""
    code = main(words)
    sys.stdout.flush()
    (os._exit if code == terminal.INTERRUPTED else sys.exit)(code)


def main(words: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
      words: words after ``jaxquant``; None for the words of the process.

    Returns:
      The exit code; ``jaxquant COMMAND --help`` lists the codes of a command.
    """
    given = list(sys.argv[1:] if words is None else words) or ["--help"]
    try:
        return program.main(given, prog_name="jaxquant", standalone_mode=False)
    except click.Abort:  # Ctrl-C while the words are parsed
        return terminal.INTERRUPTED
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "jaxquant"
        print(f"error: {error.format_message().rstrip('.')}; see '{path} --help'", file=sys.stderr)
        return 2
