"""The README is short, its example trains and prints what stands below it; the table of strings is that of recipes."""

import contextlib
import io
import re
from pathlib import Path

from jaxquant import RECIPES
from jaxquant.config.explain import whole_tensors

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CHOOSING = (ROOT / "docs/guide/choosing.md").read_text()
OPTIMIZED = False


def strings_table():
    """Write the table of recipes as the docs have it."""
    groups = {}
    for name, row in RECIPES.items():
        groups.setdefault(id(row), (row, []))[1].append(f"`{name}`" if name else '`""`')
    lines = ["| `quantization` | numbers | `auto` | also on | one NaN spoils all of |", "| --- " * 5 + "|"]
    for row, names in groups.values():
        others = ", ".join(row.backends[1:])
        whole = ", ".join(whole_tensors(row.recipe)) if row.recipe else ""
        lines.append(f"| {', '.join(names)} | {row.summary} | {row.auto} | {others} | {whole} |")
    return "\n".join(lines)


def test_the_table_of_strings_is_current():
    assert strings_table() in CHOOSING, f"replace the table of docs/guide/choosing.md with:\n{strings_table()}"


def example():
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    return block


def test_the_example_trains_and_prints_loss_and_coverage():
    code = example()
    assert '{"quantization": "fp8"}' in code
    config = '{"quantization": "fp8", "quant_backend": "native"}'
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.replace('{"quantization": "fp8"}', config), {})
    loss, *coverage = printed.getvalue().splitlines()
    assert float(loss.removeprefix("loss ")) < 0.1  # of about 1 in the first step
    (shown,) = re.findall(r"```text\n(.*?)```", README, flags=re.S)
    assert [line.rstrip() for line in shown.splitlines()[1:]] == coverage
