"""Quantized numerics: element types, recipes, calibration, rounding, quantize and dequantize."""
