"""Run MaxText's own quantization tests and read all of MaxText's YAML files, with jaxquant instead of its module.

    python validation/maxtext_tests.py CHECKOUT [pytest arguments]

The checkout is not changed: while the tests run, functions of ``maxtext.layers.quantizations`` are replaced by
jaxquant's functions with the same names. This script needs Python 3.12 and the packages that MaxText imports: jax,
flax, aqtp, qwix, pydantic, omegaconf, jinja2, tensorflow-cpu, transformers, pillow, sympy, tokamax, sentencepiece,
tiktoken, datasets, grain, pathwaysutils, drjax, gcsfs, google-cloud-storage, cloud-tpu-diagnostics,
ml-goodput-measurement, tensorboardX, pytest.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import types

from ecosystem import shimmed

from jaxquant import terminal

TESTS = "tests/unit/quantizations_test.py"


def read_yamls(checkout: pathlib.Path) -> int:
    """Read every YAML file of MaxText, merged over its base configs as MaxText does; print the files with errors."""
    import yaml

    import jaxquant

    def load(path: pathlib.Path) -> dict:
        own = yaml.safe_load(path.read_text()) or {}
        base = own.get("base_config")
        if not base:
            return own
        found = next((at for at in (path.parent / base, configs / base, checkout / base) if at.exists()), None)
        return (load(found) if found else {}) | own

    configs = next(path for path in (checkout / "src/maxtext/configs", checkout / "MaxText/configs") if path.exists())
    everything = yaml.safe_load((configs / "base.yml").read_text())
    count = refused = 0
    for path in sorted(checkout.rglob("*.yml")):
        if "configs" not in path.parts:
            continue
        own = load(path)
        if not isinstance(own, dict):
            continue
        count += 1
        try:
            jaxquant.QuantConfig.from_any(types.SimpleNamespace(**(everything | own)))
        except Exception as error:  # an error is a result of this script
            refused += 1
            print(f"refused {path.relative_to(checkout)}: {type(error).__name__}: {error}")
    print(f"{count - refused} of {count} YAMLs are read")
    return refused


def main() -> int:
    """Read the YAMLs, then run the tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=pathlib.Path, help="checkout of MaxText")
    given, others = parser.parse_known_args()
    terminal.accept_all_characters()
    checkout = given.checkout.resolve()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path[:0] = [str(checkout / "src"), str(checkout)]
    refused = read_yamls(checkout)
    os.chdir(checkout)
    import pytest
    from absl import flags

    flags.FLAGS(sys.argv[:1])
    # MaxText's conftest skips tests without the right chip, but they also run on CPUs.
    options = f"--noconftest -c {os.devnull} --rootdir {checkout} -p no:cacheprovider -q -rA --tb=line".split()
    with shimmed():
        return pytest.main([*options, *others, TESTS]) or refused


if __name__ == "__main__":
    sys.exit(main())
