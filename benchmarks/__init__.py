"""What quantization costs and gains, for ``scripts/bench.py``."""
