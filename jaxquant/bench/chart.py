"""Bar chart of the README: speedup over bfloat16 by library and config string, from committed rows of the GEMM set.

python -m jaxquant.bench.chart > docs/images/speed.svg
"""

import json

from jaxquant.bench.schemes import RESULTS, ROOT


def draw() -> str:
    """Return the chart as SVG; ``docs/images/speed.json`` has the texts and rows of the chart."""
    texts = json.loads((ROOT / "docs/images/speed.json").read_text())
    rows = json.loads((ROOT / RESULTS / texts["rows"]).read_text())["rows"]
    speeds = {f"{row['library']} {row['recipe']}": row["speedup"] for row in rows}
    bars = [(70 + 28 * i, *bar, speeds[bar[1]], 118 * speeds[bar[1]]) for i, bar in enumerate(texts["bars"])]
    return "\n".join([*texts["head"], *(texts["bar"].format(*bar) for bar in bars), *texts["foot"], ""])


if __name__ == "__main__":
    print(draw(), end="")
