"""The benchmark of KV caches has a row for every format, and its errors are in the order of the formats' bits."""

import pytest

from benchmarks.decode import FORMATS, measure_decode, random_decoder

OPTIMIZED = False  # what is timed is not what is tested
SMALL = {"emb_dim": 32, "mlp_dim": 64, "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 16}


@pytest.mark.slow
def test_every_format_is_set_against_the_unquantized_cache():
    rows = measure_decode(random_decoder(2, 24, SMALL), rounds=1, chunk=8)
    assert [(row["kv cache"], row["axis"]) for row in rows] == [(d or "none", a or "–") for d, a in FORMATS]
    errors = {row["kv cache"]: float(row["logits"]) for row in rows if row["axis"] != "heads_and_dkv"}
    assert errors["none"] == 0 < errors["int8"] < errors["fp8"] < errors["int4"]
    assert rows[0]["bytes"] == 2 * 2 * 2 * 24 * 2 * 16 * 4
    assert rows[0]["agreement"] == "100.00%"
    assert all(row[name] > 0 for row in rows for name in ("prefill tokens/s", "decode tokens/s", "decode ratio"))
