"""Quantize models that know nothing of jaxquant, by a backend's ops."""
