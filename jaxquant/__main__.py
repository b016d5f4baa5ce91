"""``python -m jaxquant``: list the recipes, explain one, list what a training step multiplies, audit it for a chip."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Sequence

from jaxquant import terminal
from jaxquant.aot.plugin import add_program, load_program

DESCRIPTION = "Quantized training in JAX: what a config string means, and what a training step makes of it."


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser of the command line, and that of what follows ``coverage``."""
    parser = argparse.ArgumentParser(prog="python -m jaxquant", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("strings", help="list every config string with its dtypes and backends")
    one = commands.add_parser("explain", help="describe a config string in words and numbers")
    one.add_argument("string", metavar="STRING", help="such as fp8")
    one.add_argument("options", nargs="*", metavar="key=value", help="fields of QuantConfig that change it")
    found = commands.add_parser("coverage", help="list every matmul of a training step, with the dtypes that it has")
    found.add_argument("config", help="YAML file, such as configs/quickstart.yml")
    found.add_argument("overrides", nargs="*", metavar="key=value", help="fields laid over the file")
    found.add_argument("--check", action="store_true", help="exit with 1 where a layer is not as its recipe says")
    found.add_argument("--json", action="store_true", help="write JSON")
    add_program(found)
    commands.add_parser(
        "audit", add_help=False, help="compile a training step for a chip that is not here (audit --help has the rest)"
    )
    return parser, found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
      arguments: the command line; None is that of the process.

    Returns:
      0 on success, 1 where ``coverage --check`` finds a fault, 2 on an error; that of its own command for ``audit``.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["audit"]:
        return importlib.import_module("jaxquant.aot.command").main(given[1:])
    return terminal.run(lambda: _command(given), also=(ImportError,), interrupted="interrupted")


def _command(given: list[str]) -> int:
    parser, of_coverage = _parsers()
    if given[:1] == ["coverage"]:
        return _coverage(of_coverage.parse_intermixed_args(given[1:]))  # overrides may follow the options
    words = parser.parse_args(given)
    return {"strings": _strings, "explain": _explain}[words.command](words)


def _strings(words: argparse.Namespace) -> int:
    from jaxquant.config import explain

    print(explain.strings())
    return 0


def _explain(words: argparse.Namespace) -> int:
    from jaxquant.config.explain import explain
    from jaxquant.config.loader import parse_overrides

    print(explain(words.string, parse_overrides(words.options)))
    return 0


def _coverage(words: argparse.Namespace) -> int:
    from jaxquant.config.loader import load_yaml, parse_overrides
    from jaxquant.config.quant_config import QuantConfig

    fields = load_yaml(words.config) | parse_overrides(words.overrides)
    known = {field.name for field in dataclasses.fields(QuantConfig)}
    config = QuantConfig.from_any({name: value for name, value in fields.items() if name in known})
    import jax

    from jaxquant.audit.coverage import coverage

    step, shapes = load_program(words.program)(words.config, words.overrides, jax.devices())
    found = coverage(step, *shapes, config=config)
    print(found.to_json() if words.json else found)
    if words.check:
        try:
            found.check()
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
