"""Table of backends, with the properties that are needed before a backend's library is imported."""

from __future__ import annotations

import dataclasses
from typing import Literal

BackendName = Literal["aqt", "qwix", "native"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackendRow:
    """Properties of one backend.

    Attributes:
      title: name of the backend in errors.
      package, tested: Python package that the backend requires ("" if none), and its oldest and newest tested version.
      has_layer_ops: whether the backend quantizes a layer through an op that is passed to the layer. If false, the
        backend quantizes a complete model, which requires example inputs.
      needs_random_stream: whether stochastic rounding uses the random stream of a Linen model, if the model has one.
        Otherwise the noise is derived only from the bits of the output gradient.
      names_residuals: whether a remat policy can name the residuals of a quantized matmul.
      shards_batch: whether ``quantization_local_shard_count`` splits the first axis of the weight gradient's
        contraction, the batch. If false, it splits the last axis of that contraction.
    """

    title: str
    package: str = ""
    tested: tuple[str, str] = ("", "")
    has_layer_ops: bool = True
    needs_random_stream: bool = True
    names_residuals: bool = False
    shards_batch: bool = True


BACKENDS: dict[BackendName, BackendRow] = {
    "aqt": BackendRow(title="AQT", package="aqtp", tested=("0.9.0", "0.9.0")),
    "qwix": BackendRow(
        title="Qwix", package="qwix", tested=("0.1.8", "0.1.8"), has_layer_ops=False, shards_batch=False
    ),
    "native": BackendRow(title="native", needs_random_stream=False, names_residuals=True),
}
"""All backends, in the order in which errors list them."""


def check_library_implementation(backend: str, implementation: str | None) -> None:
    """Raise if an implementation is set for the backend of a library, because a library computes its own matmuls.

    Args:
      backend: key of ``BACKENDS``.
      implementation: implementation of the config, or None for automatic selection.

    Raises:
      ValueError: an implementation is set for a library.
    """
    if implementation is not None and (row := BACKENDS[backend]).package:  # pyright: ignore[reportArgumentType]
        raise ValueError(
            f"implementation {implementation!r} does not apply to quant_backend {backend!r}, because {row.title} "
            "computes its own matmuls; set implementation to null, or use quant_backend 'native'"
        )
