"""Every pair of string and backend is measured once."""

from benchmarks.schemes import Scheme, schemes
from jaxquant import RECIPES


def test_every_pair_of_the_table_is_listed_once():
    found = schemes(None, None)
    rows = {id(row): row for name, row in RECIPES.items() if name}.values()
    assert len(found) == sum(len(row.backends) for row in rows)
    assert {name for scheme in found for name in (scheme.string, *scheme.also)} == set(RECIPES) - {""}
    assert all(scheme.backend in RECIPES[scheme.string].backends for scheme in found)


def test_strings_and_backends_choose():
    assert schemes(["int8"], ["auto"]) == [Scheme("int8", RECIPES["int8"].auto)]
    assert schemes(["fp8_gpu"], None)[0].also == ("fp8", "te_fp8_delayedscaling")
