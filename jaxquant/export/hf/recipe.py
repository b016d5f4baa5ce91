"""Conversion of a checkpoint's layer specs to recipes."""

from __future__ import annotations

from typing import Any

from jaxquant.core.calibration import Calibration
from jaxquant.core.recipe import MatmulSpec, Recipe, TensorSpec
from jaxquant.core.tensor_spec import keep_grid
from jaxquant.export.hf.spec import LayerSpec, OperandSpec, ScaleGranularity

_WHOLE_CONTRACTION = {"weight": ScaleGranularity.ROWWISE, "input": ScaleGranularity.COLWISE}


def tensor_fields(operand: OperandSpec, side: str) -> dict[str, Any]:
    """Return the fields of the equivalent ``TensorSpec`` that differ from their default values.

    Args:
      operand: spec of the operand.
      side: ``weight`` or ``input``.

    Raises:
      NotImplementedError: a ``TensorSpec`` cannot represent the operand. For example, the operand is asymmetric and
        float, its scale varies along the contraction, or its static scale is rounded.
    """
    fields: dict[str, Any] = {"dtype": operand.dtype}
    is_static = side == "input" and operand.origin.is_static
    if not operand.symmetric:
        if is_static or not operand.dtype.startswith("int"):
            raise NotImplementedError(
                f"an asymmetric {side} of {operand.dtype} is not supported; export with symmetric quantization"
            )
        fields["calibration"] = Calibration("minmax")
    if operand.granularity is ScaleGranularity.TENSOR:
        fields["granularity"] = "per_tensor"
    elif operand.granularity is _WHOLE_CONTRACTION[side]:
        fields["granularity"] = "per_channel"
    elif operand.block_size is None:
        raise NotImplementedError(f"a {side} scale of granularity {operand.granularity} varies along the contraction")
    else:
        free, tile = operand.block_size
        fields |= {"granularity": "per_tile" if free == 1 else "per_block", "tile_size": tile}
        if free > 1:
            fields["free_size"] = free
    if operand.scale_dtype != "float32":
        rounding = "nearest" if operand.scale_dtype == "float8_e4m3fn" else "up"
        fields |= {"scale_dtype": operand.scale_dtype, "scale_rounding": rounding}
    elif operand.power_of_two_scale:
        fields["scale_rounding"] = "up"
    if operand.outer_scale:
        fields["outer_scale"] = True
    if is_static:
        if "scale_rounding" in fields and not operand.outer_scale:
            raise NotImplementedError("rounded static scales of inputs are not supported; export with dynamic scales")
        fields["scaling"] = "static"
    if operand.scale_bound is not None:
        fields["amax_bound"] = operand.scale_bound
    return fields


def to_recipe(layer: LayerSpec, name: str) -> Recipe:
    """Convert a layer's spec to a recipe with a quantized forward matmul and float gradient matmuls.

    Args:
      layer: spec of the layer.
      name: name of the recipe, for reports.

    Raises:
      NotImplementedError: a ``TensorSpec`` cannot represent the layer.
    """
    weight = tensor_fields(layer.weight, "weight")
    inputs = None if layer.input is None else tensor_fields(layer.input, "input")
    lhs = None if inputs is None else TensorSpec(**inputs)
    return Recipe(name, MatmulSpec(lhs=lhs, rhs=keep_grid(TensorSpec(**weight))))
