"""configs/quant holds one file for every config string, each a valid config."""

from pathlib import Path

import pytest

from jaxquant.config.loader import load_yaml
from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.recipes import RECIPES

FOLDER = Path("configs/quant")


@pytest.mark.parametrize("name", RECIPES)
def test_shipped(name):
    path = FOLDER / f"{name or 'none'}.yml"
    assert path.read_text().startswith("# ")
    config = QuantConfig.from_any(load_yaml(path))
    assert config.quantization == name
    assert (config.resolver() is None) == (name == "")


def test_nothing_else():
    assert {path.stem for path in FOLDER.iterdir()} == {name or "none" for name in RECIPES}
