"""``python -m benchmarks layers``: the committed page."""

import json

from benchmarks.layer_audits import UNKNOWN, page, with_ratios
from benchmarks.schemes import ROOT


def test_the_committed_page_is_written_from_its_rows_and_nothing_fell_back():
    rows = json.loads((ROOT / "benchmarks/results/layer-audits.json").read_text())
    assert (ROOT / "benchmarks/results/layer-audits.md").read_text() == page(with_ratios(rows))
    assert not [(row["string"], row["chip"], row["fell back"]) for row in rows if row["fell back"]]
    wide = [each for row in rows if row["string"] != "bf16" for each in row["matmuls"] if "8" not in each["runs on"]]
    assert not [each for each in wide if not each["why"] and not each["runs on"].startswith(("in ", UNKNOWN))]
