"""Line plots."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest

from jaxquant.bench.curves import Panel, draw


def test_zeros_have_a_line_and_points_that_are_not_finite_are_left_out():
    curves = {f"<run & {n}>": [(1, 0.0), (2, 0.01), (3, math.nan), (4, math.inf)] for n in range(12)}
    text = draw([Panel("difference", "step", curves, is_log=True)])
    ET.fromstring(text)
    assert "&lt;run &amp; 11&gt;" in text
    points = re.findall(r'points="([^"]*)"', text)
    assert len(points) == 12
    heights = [[float(pair.split(",")[1]) for pair in each.split()] for each in points]
    assert all(len(each) == 2 and each[0] > each[1] for each in heights)
    with pytest.raises(ValueError, match="difference"):
        draw([Panel("difference", "step", {"a": [(1, math.nan)]})])
