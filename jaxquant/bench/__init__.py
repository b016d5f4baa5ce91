"""What quantization costs and gains; ``python -m jaxquant.bench`` measures and compiles it."""
