"""The table of backends: what is known of each before its library is imported. ``jaxquant.backends`` runs them."""

from __future__ import annotations

import dataclasses
from typing import Literal

BackendName = Literal["aqt", "qwix", "native"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackendRow:
    """One backend.

    Attributes:
      title: its name in errors.
      package, tested: distribution that it needs, "" for none, and the first and the last version that was tested.
      has_layer_ops: whether a layer is quantized by an op that is passed to it; otherwise a whole model is, which needs
        example inputs.
      needs_random_stream: whether stochastic rounding draws from the random stream of a Linen model, where it has one;
        otherwise its noise is of the output gradient's bits alone.
      names_residuals: whether a remat policy can name what a quantized matmul saves.
      shards_batch: whether ``quantization_local_shard_count`` cuts the first axis of the weight gradient's contraction,
        the batch; otherwise the last.
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
"""Every backend, in the order in which errors list them."""


def check_library_implementation(backend: str, implementation: str | None) -> None:
    """Refuse an implementation for a library, which computes its matmuls itself.

    Args:
      backend: a key of ``BACKENDS``.
      implementation: of the config; None picks.

    Raises:
      ValueError: naming both, and what to do.
    """
    if implementation is not None and (row := BACKENDS[backend]).package:  # pyright: ignore[reportArgumentType]
        raise ValueError(
            f"implementation {implementation!r} is not one of quant_backend {backend!r}: {row.title} computes its "
            "matmuls itself; leave it at null, or use quant_backend 'native'"
        )
