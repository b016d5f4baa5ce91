"""What quantization costs and gains; ``python -m benchmarks`` measures and compiles it."""
