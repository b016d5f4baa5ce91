"""Serving: what a trained model needs to answer."""

from jaxquant.serving.calibrate import calibrate
from jaxquant.serving.convert import convert, convert_each, find_sites

__all__ = ["calibrate", "convert", "convert_each", "find_sites"]
