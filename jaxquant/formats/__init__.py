"""Element packings and block formats: how quantized numbers lie in bytes."""
