"""The command ``jaxquant train``: reads a configuration, and starts or resumes the run that it describes."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxquant import terminal
from jaxquant.config.loader import load_yaml, parse_overrides
from jaxquant.core.typed import build
from jaxquant.training import report_missing_library
from jaxquant.training.config import TrainConfig
from jaxquant.training.sums import use_own_tokenizer


def read_config(path: str, overrides: Sequence[str]) -> TrainConfig:
    """Read a YAML file, replace fields with ``key=value`` words, and set ``run_dir`` if it is empty.

    Raises:
      TypeError, ValueError: an unknown or duplicate key, or a value of the wrong type or range; or the
        ``config.yml`` of a run has another ``run_dir``.
      OSError: the file cannot be read.
    """
    words = parse_overrides(overrides)
    fields = load_yaml(path) | words
    if fields.get("run_dir") and "tokenizer_path" not in words:
        fields = use_own_tokenizer(fields, Path(str(fields["run_dir"])))
    config: TrainConfig = build(TrainConfig, fields)
    folder = Path(path).resolve().parent
    is_of_run = Path(path).name == "config.yml" and (folder / "checkpoints").is_dir()
    if is_of_run and "run_dir" not in words and Path(config.run_dir).resolve() != folder:
        raise ValueError(
            f"{path} belongs to the run in its folder, but its run_dir is {config.run_dir!r}; add "
            f"run_dir={Path(path).parent} to continue that run, or another run_dir to start a new one"
        )
    if config.run_dir:
        return config
    quantization = "-".join(re.findall(r"\w+", config.quantization)) or "float"  # a composition is not a folder name
    parts = (Path(path).stem, quantization, config.resolved_backend, config.numerics.removeprefix("standard"))
    return dataclasses.replace(config, run_dir=f"runs/{'-'.join(word for word in parts if word)}")


def train(
    config: str,
    overrides: Sequence[str],
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
) -> int:
    """Start or resume a run.

    Args:
      config: path of a YAML file.
      overrides: ``key=value`` words that replace its fields.
      coordinator_address, num_processes, process_id: arguments of ``jax.distributed.initialize``; all None for one
        process.

    Returns:
      0 if the run is complete or stops after a signal, 1 if it diverges or cannot write, 2 if it cannot start, 130 if
      Ctrl-C ends it at once.
    """
    terminal.accept_all_characters()
    try:
        return _run(config, overrides, (coordinator_address, num_processes, process_id))
    except KeyboardInterrupt:
        print("interrupted; the last checkpoint is kept, and the same command resumes from it", file=sys.stderr)
        return terminal.INTERRUPTED


def _run(path: str, overrides: Sequence[str], process: tuple[str | None, int | None, int | None]) -> int:
    try:
        config = read_config(path, overrides)
        from jaxquant.training import processes  # imported late: a typo is reported before jax loads

        processes.join(*process)
        processes.check_devices()
        from jaxquant.training.loop import Diverged, Halted, prepare

        with report_missing_library():
            run = prepare(config, lambda text: print(text, flush=True) if processes.is_main() else None)
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
        run()
    except (Diverged, Halted) as error:
        if processes.is_main():
            print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
