"""``python -m benchmarks layers``: a small layer, and the committed page."""

import json
import subprocess
import sys

import pytest

from benchmarks.layer_audits import UNKNOWN, page, with_ratios
from benchmarks.schemes import ROOT
from jaxquant.aot.topology import environment

SCRIPT = """
import dataclasses, json
from benchmarks.layer_audits import LAYERS, measure
name, sizes = "Mixtral 8x7B", {"emb_dim": 256, "mlp_dim": 256, "num_query_heads": 2, "num_kv_heads": 2}
config = dataclasses.replace(LAYERS[name], **sizes)
print(json.dumps([measure(name, string, "h200", 256, config) for string in ("bf16", "fp8_block pallas")]))
"""


@pytest.mark.aot
def test_a_small_layer_of_experts_says_of_each_matmul_what_it_runs_on_and_why():
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]
    rows = with_ratios(json.loads(done.stdout.splitlines()[-1]))
    assert [row["string"] for row in rows] == ["bf16", "fp8_block pallas"]
    assert rows[0]["× bf16"] == 1.0
    found = {(each["weight"], each["matmul"]): each for each in rows[1]["matmuls"]}
    weights = [f"self_attention/{name}" for name in ("query", "key", "value", "out")]
    weights += [f"mlp/{name}" for name in ("gate", "wi_0", "wi_1", "wo")]
    assert set(found) == {(weight, matmul) for weight in weights for matmul in ("fwd", "dlhs", "drhs")}
    for (weight, _), each in found.items():
        if weight == "mlp/gate":
            assert "router" in each["why"]
        else:
            kernel = "f8e4m3fn by jaxquant block_matmul, grouped" if "mlp" in weight else "f8e4m3fn in blocks by"
            assert each["runs on"].startswith(kernel), each
            assert not each["why"]
    assert "| f8e4m3fn in blocks by jaxquant_block_matmul | self_attention/query fwd, " in page(rows)


def test_the_committed_page_is_written_from_its_rows_and_nothing_fell_back():
    rows = json.loads((ROOT / "benchmarks/layer-audits.json").read_text())
    assert (ROOT / "benchmarks/layer-audits.md").read_text() == page(with_ratios(rows))
    assert not [(row["string"], row["chip"], row["fell back"]) for row in rows if row["fell back"]]
    wide = [each for row in rows if row["string"] != "bf16" for each in row["matmuls"] if "8" not in each["runs on"]]
    assert not [each for each in wide if not each["why"] and not each["runs on"].startswith(("in ", UNKNOWN))]
