"""Serving: conversion, calibration, quantized checkpoints and the key/value cache of a trained model."""

from jaxquant.inject.nnx_converted import nnx_params, update_nnx
from jaxquant.serving.calibration import calibrate
from jaxquant.serving.checkpoint import Checkpoint, load, read_manifest, save
from jaxquant.serving.conversion import convert, convert_each, find_kernels
from jaxquant.serving.kv_cache import KVCache

__all__ = [
    "Checkpoint",
    "KVCache",
    "calibrate",
    "convert",
    "convert_each",
    "find_kernels",
    "load",
    "nnx_params",
    "read_manifest",
    "save",
    "update_nnx",
]
