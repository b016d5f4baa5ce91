"""The table of predictions: which anchors are priced, and beside what."""

from benchmarks import published
from jaxquant.aot.price import Roofline


def test_a_step_is_set_beside_the_float_step_of_its_own_config_compiled_once(monkeypatch):
    compiled = []

    def price(anchor, string):
        compiled.append((anchor.name, string))
        return Roofline({"": 3e-3, "fp8_current": 2e-3, "fp8_full": 2.5e-3}[string], 0.0, 0.0, 0.0)

    monkeypatch.setattr(published, "price_step", price)
    monkeypatch.setattr(published, "price_gemms", lambda *_: 1 / 0)
    rows = published.rows(["torchao"])
    assert [(row["published"], row["audit"], row["error"]) for row in rows] == [
        ("1.25×", "1.50×", "+20%"),
        ("1.10×", "1.20×", "+9%"),
    ]
    assert [string for _, string in compiled] == ["", "fp8_current", "fp8_full"]
