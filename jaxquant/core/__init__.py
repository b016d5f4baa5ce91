"""What a quantized number is: element types, recipes, calibration, rounding, quantize and dequantize."""
