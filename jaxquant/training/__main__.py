"""``python -m train CONFIG.yml [key=value ...]``: start or resume the run that a YAML file describes.

``python -m train COMMAND ...`` works on finished runs; see ``jaxquant.training.cli``.

A run on several hosts is the same command on each, with ``--coordinator-address HOST:PORT --num-processes N
--process-id I`` as ``jax.distributed.initialize`` takes them; run_dir is a folder that all of them see.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxquant import terminal
from jaxquant.config.loader import load_yaml, parse_overrides
from jaxquant.core.typed import build
from jaxquant.training import needed
from jaxquant.training.config import TrainConfig

COMMANDS = ("compare", "convert", "evaluate", "export", "import", "serve")
"""Commands of ``jaxquant.training.cli``, which is imported only for them: it loads jax."""


def read_config(path: str, overrides: Sequence[str]) -> TrainConfig:
    """Read a YAML file, lay ``key=value`` words over it, and name the run's folder where neither does.

    Raises:
      TypeError, ValueError: an unknown or duplicate key, or a value of the wrong type or range; the ``config.yml`` of a
        run that names another folder.
      OSError: the file cannot be read.
    """
    words = parse_overrides(overrides)
    fields = load_yaml(path) | words
    config: TrainConfig = build(TrainConfig, fields)
    folder = Path(path).resolve().parent
    is_of_run = Path(path).name == "config.yml" and (folder / "checkpoints").is_dir()
    if is_of_run and "run_dir" not in words and Path(config.run_dir).resolve() != folder:
        raise ValueError(
            f"{path} is of the run in its folder, and its run_dir is {config.run_dir!r}; add "
            f"run_dir={Path(path).parent} to go on with it, or another run_dir to start one"
        )
    if config.run_dir:
        return config
    quantization = "-".join(re.findall(r"\w+", config.quantization)) or "float"  # a composition is no name of a folder
    parts = (Path(path).stem, quantization, config.resolved_backend)
    return dataclasses.replace(config, run_dir=f"runs/{'-'.join(word for word in parts if word)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program.

    Returns:
      0 when the run ended or was stopped in order, 1 when it diverged or cannot be written, 2 when it could not start,
      130 when Ctrl-C ended it at once.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in COMMANDS:
        from jaxquant.training import cli

        return cli.main(arguments[0], arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m train",
        description="Start or resume the run that a YAML file describes.",
        epilog=f"Commands for finished runs: python -m train {{{','.join(COMMANDS)}}} --help",
    )
    parser.add_argument("config", help="YAML file, such as configs/quickstart.yml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields laid over the file")
    parser.add_argument("--coordinator-address", metavar="HOST:PORT", help="of process 0, in a run of several")
    parser.add_argument("--num-processes", type=int, help="how many processes make up the run")
    parser.add_argument("--process-id", type=int, help="number of this process, from 0")
    words = parser.parse_intermixed_args(arguments)  # overrides may follow the options
    terminal.accept_all_characters()
    try:
        return _run(words)
    except KeyboardInterrupt:
        print("interrupted; the last checkpoint is kept, and the same command goes on from there", file=sys.stderr)
        return terminal.INTERRUPTED


def _run(words: argparse.Namespace) -> int:
    try:
        config = read_config(words.config, words.overrides)
        from jaxquant.training import processes  # after the configuration: a typo is reported before jax loads

        processes.join(words.coordinator_address, words.num_processes, words.process_id)
        processes.check_devices()
        from jaxquant.training.loop import Diverged, Halted, prepare

        with needed():
            train = prepare(config, lambda text: print(text, flush=True) if processes.is_main() else None)
    except BrokenPipeError:
        terminal.close_output()
        print("stopped before the first step: the output is closed", file=sys.stderr)
        return 1
    except (TypeError, ValueError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"error: the run's folder cannot be written ({where}); choose another run_dir", file=sys.stderr)
        return 2
    try:
        train()
    except (Diverged, Halted) as error:
        if processes.is_main():
            print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
