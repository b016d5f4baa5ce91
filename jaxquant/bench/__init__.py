"""Benchmarks of speed and losses, for ``jaxquant bench``."""
