"""Models of any architecture: parameters as named tensors of a checkpoint, and the named tensors of a folder."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant.core.dtypes import element
from jaxquant.core.paths import leaves_by_path
from jaxquant.core.qtensor import QTensor, is_tensor
from jaxquant.core.recipe import Recipe
from jaxquant.core.typed import show
from jaxquant.export.gguf_file import U32
from jaxquant.export.hf import LayerSpec, to_recipe
from jaxquant.export.layouts import check_finite, concatenate, is_true, to_host, transpose
from jaxquant.export.reading import TensorFolder, check_float
from jaxquant.export.source import (
    GgufLayout,
    Layout,
    Source,
    Vocabulary,
    largest,
    layer_slice,
    quantized_matrix,
    to_float,
)
from jaxquant.export.stored import take_input_amax

Names = Mapping[str | tuple[str, ...], str | Mapping[str, int]]
Targets = Iterator[tuple[tuple[str, ...], tuple[int, ...], dict[str, int | None]]]


def named_source(
    parameters: Mapping[str, Any],
    names: Names,
    config: Mapping[str, Any],
    *,
    input_axes: Mapping[str, int | None] | None = None,
    floats: Collection[str] = (),
    input_amax: Mapping[str, Any] | None = None,
    vocabulary: Vocabulary | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Source:
    """Return a model of any architecture as a ``Source`` for ``export``.

    The path of a parameter is joined by "/". In the arguments, each ``*`` of a path matches any text without "/", and
    the first key of an argument that matches a path applies.

    A kernel [in…, out…] is written as a matrix [out, in]. Kernels are the parameters named ``kernel``, the ``QTensor``
    leaves and the parameters with input axes. If there are ``QTensor`` leaves, only these leaves are quantized in the
    file; otherwise all kernels are quantized. The kernels in ``floats`` stay in float. A ``QTensor`` keeps its elements
    and scales if the format can store them; otherwise the decoded values are quantized again.

    Args:
      parameters: nested dict of arrays and ``QTensor`` leaves, for example from ``convert``.
      names: name of each tensor in the file by path of the parameter. The ``{}`` of a name stand for the texts of
        ``*``, and then for the indices of the leading axes, along which layers or experts are stacked. A tuple of paths
        concatenates the outputs of these parameters. A mapping from names to numbers of outputs splits a parameter.
        A GGUF file stores ``x_exps.0.weight``, ``x_exps.1.weight``, … together as ``x_exps.weight``.
      config: ``config.json`` without dtype, special tokens and quantization.
      input_axes: number of input axes of parameters by path: n for a kernel [in…, out…], -n for a kernel [out…, in…],
        0 for a bias [out…], None for a parameter that is written as it is. The default is 1 for a kernel with two axes
        and None for a parameter that is not a kernel; kernels with more axes need an entry.
      floats: paths of kernels that stay in float, such as the output head and routers.
      input_amax: largest magnitude of the input of kernels by path, for formats with static scales: a number, or an
        array whose leading axes are the stacked axes.
      vocabulary: tokenizer, or None to write no tokenizer files.
      metadata: metadata of a GGUF file, such as ``general.architecture``; integers are written as uint32.

    Raises:
      ValueError: a parameter has no name, a name occurs twice, a path matches no parameter, or a shape does not fit.
    """
    leaves = leaves_by_path(parameters, is_leaf=is_tensor)
    spread = lambda table, argument: {  # noqa: E731
        path: value for key, value in reversed(table.items()) for path in _match(key, leaves, argument).values()
    }
    axes = spread(input_axes or {}, "input_axes")
    inputs = {path: 1 for path, leaf in leaves.items() if is_tensor(leaf) or path.rpartition("/")[2] == "kernel"} | axes
    amax, others = spread(input_amax or {}, "input_amax"), spread(dict.fromkeys(floats), "floats")
    weights = {path for path in inputs if is_tensor(leaves[path])} or {path for path, count in inputs.items() if count}
    tensors, linears, amaxes = {}, {}, {}
    places: dict[str, tuple[tuple[str, ...], tuple[int, ...], Any]] = {}  # paths, index, rows of the concatenation
    for paths, index, targets in _targets(leaves, names):
        path = " + ".join(paths)
        for each in paths:
            shape, count = leaves[each].shape[len(index) :], inputs.get(each)
            if count and not (len(shape) > abs(count) if each in axes else len(shape) == 2):
                fix = "set its number of input_axes, or name stacked layers with {}"
                raise ValueError(f"{each} of shape {shape} is not a kernel with {count} input axes; {fix}")
        shapes = [_matrix_shape(leaves[each].shape[len(index) :], inputs.get(each)) for each in paths]
        whole = shapes[0] if len(paths) == 1 else (sum(shape[0] for shape in shapes), *shapes[0][1:])
        if len({shape[1:] for shape in shapes}) > 1:
            raise ValueError(f"{path} have the shapes {shapes} and cannot be concatenated; name them separately")
        counts = [count for count in targets.values() if count is not None]
        if counts and whole[:1] != (sum(counts),):
            raise ValueError(f"{path} of shape {whole} cannot be split into {counts} outputs; correct the numbers")
        start = 0
        for name, count in targets.items():
            if name in places:
                other = " + ".join(places[name][0])
                raise ValueError(f"{path} and {other} have the same name {name}; change one, or add {{}} for layers")
            places[name] = paths, index, ... if count is None else slice(start, start + count)
            tensors[name] = whole if count is None else (count, *whole[1:])
            start += count or 0
            if weights - others.keys() >= {*paths} and len(whole) == 2:
                if not name.endswith(".weight"):
                    raise ValueError(f"{path} has the name {name}, which must end in .weight; rename, or set floats=")
                linears[module := name.removesuffix(".weight")] = tensors[name]
                if amax.keys() >= {*paths}:
                    found = [to_host(amax[each]) for each in paths]
                    amaxes[module] = largest([array[index[: array.ndim]].max() for array in found])

    def read(name: str) -> np.ndarray:
        paths, index, rows = places[name]
        parts = [_to_matrix(to_float(layer_slice(leaves[path], index)), inputs.get(path)) for path in paths]
        return (concatenate(parts) if parts[1:] else parts[0])[rows]

    def quantized(module: str) -> QTensor | None:
        if module not in linears:
            return None
        paths, index, rows = places[f"{module}.weight"]
        return _join([_scale_rows(layer_slice(leaves[path], index), inputs[path]) for path in paths], rows)

    gguf = None if metadata is None else _gguf_layout(metadata, tensors)
    return Source(Layout(tensors, linears, config, gguf=gguf), read, vocabulary, amaxes, quantized)


def _match(pattern: str, paths: Mapping[str, Any], argument: str) -> dict[tuple[str, ...], str]:
    """Return the paths that a pattern matches, by the texts of its ``*``."""
    regex = re.compile(re.escape(pattern).replace(r"\*", "([^/]*)"))
    found = {match.groups(): path for path in paths if (match := regex.fullmatch(path))}
    if not found:
        nearest = ", ".join(difflib.get_close_matches(pattern, paths, 3, 0)) or "none, because earlier keys match all"
        raise ValueError(f"{argument} has {pattern}, which matches no parameter; the nearest are {nearest}")
    return found


def _targets(leaves: Mapping[str, Any], names: Names) -> Targets:
    """Yield paths of parameters, an index of the stacked axes, and names of tensors with their number of outputs."""
    rest = dict.fromkeys(leaves)
    for key, value in names.items():
        targets = {value: None} if isinstance(value, str) else value
        found = [_match(pattern, rest, "names") for pattern in ((key,) if isinstance(key, str) else key)]
        for groups in dict.fromkeys(itertools.chain(*found)):
            if not all(groups in each for each in found):
                raise ValueError(f"names joins {' + '.join(key)}, but only some match with {show(groups)} as *")
            paths = tuple(each[groups] for each in found)
            count = max([0, *(len(re.findall(r"\{\d*\}", name)) - len(groups) for name in targets)])
            sizes = {path: leaves[path].shape[:count] for path in paths}
            if len({*sizes.values()}) > 1 or len(sizes[paths[0]]) < count:
                problem = f"{', '.join(targets)} has {count} indices of stacked axes, but these axes are {sizes}"
                raise ValueError(f"{problem}; correct the {{}} of the name")
            for index in itertools.product(*map(range, sizes[paths[0]])):
                yield paths, index, {name.format(*groups, *index): rows for name, rows in targets.items()}
            for path in paths:
                rest.pop(path, None)
    if rest:
        raise ValueError(f"{next(iter(rest))} has no name; add it to names, or remove it from the parameters")


def _matrix_shape(shape: tuple[int, ...], inputs: int | None) -> tuple[int, ...]:
    """Return the shape of a parameter in the file; ``inputs`` is an entry of ``input_axes``."""
    if not inputs:
        return shape if inputs is None else (math.prod(shape),)
    sizes = math.prod(shape[:inputs]), math.prod(shape[inputs:])
    return sizes[::-1] if inputs > 0 else sizes


def _to_matrix(array: np.ndarray, inputs: int | None) -> np.ndarray:
    shape = _matrix_shape(array.shape, inputs)
    return transpose(array.reshape(shape[::-1])) if inputs and inputs > 0 else array.reshape(shape)


def _scale_rows(leaf: Any, inputs: int) -> QTensor | None:
    """Return a quantized kernel as [out, in] with separate scales for each row, or None for a float kernel."""
    tensor = leaf.operand if is_tensor(leaf) else None
    if tensor is not None and inputs > 0:
        tensor = quantized_matrix(tensor, _matrix_shape(leaf.shape, inputs))
    if tensor is None or tensor.zero_point is not None or tensor.ndim != 2:
        return None
    if tensor.codec is None:
        scale = jnp.repeat(tensor.scale, tensor.blocks[0], axis=0)[: tensor.shape[0]]
        tensor = dataclasses.replace(tensor, scale=scale, block=(1, tensor.blocks[1]))
    return tensor


def _join(parts: list[QTensor | None], rows: Any) -> QTensor | None:
    """Return rows of the concatenation of quantized matrices, or None if their formats or outer scales differ.

    The outer scales of several traced matrices count as different.
    """
    found = [part for part in parts if part is not None]
    outers = [part.outer_scale for part in found]
    kinds = {(jax.tree.structure(part), *(each.dtype.name for each in part.parts.values())) for part in found}
    if len(found) < len(parts) or len(kinds) > 1:
        return None
    if not all(is_true(outer == outers[0], if_traced=False) for outer in outers[1:]):
        return None
    joined = jax.tree.map(lambda *each: concatenate(each)[rows], *found)
    return dataclasses.replace(joined, outer_scale=outers[0])


def _gguf_layout(metadata: Mapping[str, Any], tensors: Iterable[str]) -> GgufLayout:
    """Return the contents of a GGUF file; the experts of a layer are stored together."""
    stored: dict[str, list[str]] = {}
    for name in sorted(tensors, key=lambda name: [int(number) for number in re.findall(r"\d+", name)]):
        stored.setdefault(re.sub(r"(_exps)\.\d+\.", r"\1.", name), []).append(name)
    is_size = lambda value: type(value) is int and value >= 0  # noqa: E731
    return GgufLayout({key: U32(value) if is_size(value) else value for key, value in metadata.items()}, stored)


class NamedFolder(TensorFolder, Mapping[str, np.ndarray | QTensor]):
    """Tensors of a Hugging Face folder by name, for any architecture; each tensor is read when it is accessed.

    A float tensor is an array in its stored dtype. The weight of a quantized layer is a ``QTensor`` [out, in] with the
    name ``LAYER.weight``, the stored elements and scales, and the static scale of the input, if there is one.

    Args:
      folder: folder with ``config.json`` and ``model.safetensors`` or its shards and index.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged. Access raises this error for a tensor that is not float and not part of a quantized
        layer, or that has values that are not finite.
      NotImplementedError: the quantization is not supported.
    """

    def __init__(self, folder: str | Path):
        super().__init__(folder)
        self._group(self._where, lambda name: "." not in name or name.endswith(".bias"))
        self._specs: dict[str, LayerSpec | None] = {}
        for module, ends in self._ends.items():
            spec = self.spec(module) if any(end.startswith(".weight_") for end in ends) else None
            self._specs |= dict.fromkeys(ends.values()) if spec is None else {f"{module}.weight": spec}

    def __getitem__(self, name: str) -> np.ndarray | QTensor:
        spec, place, module = self._specs[name], f"{self.folder}: {name}", name.removesuffix(".weight")
        if spec is None:
            array = self._stored(name)
            return check_float(array, place, array.shape)
        layer = self._read_layer(module, None)
        assert layer is not None
        check_finite(layer.decode(), place)
        scale, amax = None, take_input_amax(spec, self.tensors(module))
        if amax is not None and spec.input is not None:
            scale = np.full((1, 1), amax / element(spec.input.dtype).bound, np.float32)
        return layer.to_qtensor(spec.weight, scale)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def recipe(self, name: str) -> Recipe | None:
        """Return the recipe of the quantized layer with this weight, or None for a float tensor.

        Raises:
          NotImplementedError: a recipe cannot represent the layer.
        """
        spec = self._specs[name]
        return None if spec is None else to_recipe(spec, name)
