"""Readers of Hugging Face folders, float or quantized: all tensors of any model, or a decoder of a known family."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from jaxquant.config.loader import read_json
from jaxquant.core.typed import show
from jaxquant.export.families import layout_of, shape_of_config
from jaxquant.export.folder import INDEX
from jaxquant.export.fused import ENDS, Slice
from jaxquant.export.hf import CheckpointQuantization, LayerSpec, read_quantization
from jaxquant.export.hf.read import SIDECAR
from jaxquant.export.layouts import check_finite, row_chunks
from jaxquant.export.safetensors import SafetensorsFile
from jaxquant.export.source import EMBEDDING, HEAD, Source, Vocabulary
from jaxquant.export.stored import StoredLayer, read_layer, stored_shape, take_input_amax
from jaxquant.export.vocabulary import read_tokenizer

_FLOATS = ("float32", "bfloat16", "float16", "float64")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")


class TensorFolder:
    """A folder of safetensors files with its config; the architecture can be unknown.

    Attributes:
      config: contents of ``config.json``.
      entries: shape and dtype of each stored tensor by name.
      quantization: ordered rules for the quantization of layers, or None for a float checkpoint.

    Args:
      folder: folder with ``config.json`` and ``model.safetensors`` or its shards and index.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged.
      NotImplementedError: the quantization is not supported.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.config = read_json(self.folder / "config.json")
        sidecar = self.folder / SIDECAR
        self._files = self._open_files()
        found = [item for file in self._files for item in file.entries.items()]
        self.entries = {name: (entry.shape, entry.dtype) for name, entry in found}
        self._where = {name: file for file in self._files for name in file.entries}
        self._ends: dict[str, dict[str, str]] = {}
        if len(self.entries) != len(found):
            raise ValueError(f"{self.folder} has a tensor in two of its files; download it again")
        # A folder of Mistral also has consolidated.safetensors, the same model under other names.
        there = {path for path in self.folder.glob("*.safetensors") if not path.name.startswith("consolidated")}
        if others := sorted(there - {file.path for file in self._files}):
            raise ValueError(f"{others[0]} is not listed in the index; move it to another folder")
        self.quantization: CheckpointQuantization | None = read_quantization(
            self.config, self.entries, read_json(sidecar) if sidecar.exists() else None
        )

    def spec(self, module: str) -> LayerSpec | None:
        """Return the quantization of a linear layer, or None if the layer is float."""
        return None if self.quantization is None else self.quantization.spec(module)

    def tensors(self, module: str) -> dict[str, np.ndarray]:
        """Return the tensors of a layer by the suffix of their name, as views of the files."""
        return {end: self._stored(name) for end, name in self._ends.get(module, {}).items()}

    def _stored(self, name: str) -> np.ndarray:
        """Return a tensor as a view of the files."""
        self._where[name].release()  # the pages of the tensor that was read before
        return self._where[name][name]

    def _group(self, names: Iterable[str], is_single: Callable[[str], bool]) -> None:
        """Group tensors by layer, except for tensors that are not part of a layer's weight."""
        for name in names:
            module, _, end = name.rpartition(".")
            if is_single(name):
                self._ends[name] = {"": name}
            else:
                self._ends.setdefault(module, {})[f".{end}"] = name

    def _read_layer(self, module: str, shape: tuple[int, ...] | None) -> StoredLayer | None:
        """Return a linear layer as stored, or None for a float layer; ``shape`` is read from the files if it is None.

        Raises:
          ValueError, NotImplementedError: raised by ``read_layer``; the message names the layer.
        """
        spec = self.spec(module)
        if spec is None:
            return None
        try:
            tensors = self.tensors(module)
            return read_layer(spec, tensors, shape or stored_shape(spec, tensors))
        except (ValueError, NotImplementedError) as error:
            raise type(error)(f"{self.folder}: {module}: {error}") from None

    def _open_files(self) -> list[SafetensorsFile]:
        index, single = self.folder / INDEX, self.folder / "model.safetensors"
        if not index.exists() and not single.exists():
            raise FileNotFoundError(f"{self.folder} has no model.safetensors; save the model as safetensors")
        if not index.exists():
            return [SafetensorsFile(single)]
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(value, str) for value in places.values()):
            raise ValueError(f"{index} has no weight_map from names to files")
        names = sorted(set(places.values()))
        for name in names:
            if not re.fullmatch(r"[\w.-]+\.safetensors", name):
                raise ValueError(f"{index} lists {show(name)}, which is not the name of a safetensors file")
        files = {name: SafetensorsFile(self.folder / name) for name in names}
        for tensor, name in places.items():
            if tensor not in files[name]:
                raise ValueError(f"{index} lists {show(tensor)} in {name}, which does not have it; download it again")
        for name, file in files.items():
            for tensor in file:
                if places.get(tensor) != name:
                    raise ValueError(f"{self.folder / name} has {show(tensor)}, but the index lists it in another file")
        return list(files.values())


def check_float(array: np.ndarray, place: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a float tensor after checking its dtype, shape and values.

    Raises:
      ValueError: the tensor is not float, has another shape, or a value is not finite.
    """
    if array.shape != shape or array.dtype.name not in _FLOATS:
        raise ValueError(f"{place} is {array.dtype.name}{array.shape}, but must be a float array of shape {shape}")
    return check_finite(array, place)


class HfFolder(TensorFolder):
    """A folder with a decoder of a known family.

    Attributes:
      config: contents of ``config.json``.
      layout: tensors of the model.
      quantization: ordered rules for the quantization of layers, or None for a float checkpoint.

    Args:
      folder: folder with ``config.json`` and ``model.safetensors`` or its shards and index.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or a tensor does not match the config; the message names the tensor.
      NotImplementedError: the architecture or quantization is not supported.
    """

    def __init__(self, folder: str | Path):
        # Before the files are opened, so that a model of another family is refused from its config alone.
        self.layout = layout_of(shape_of_config(read_json(Path(folder) / "config.json")))
        super().__init__(folder)
        self._slices = self._find_slices()
        stored = {each.stored for each in self._slices.values()}
        is_single = lambda name: name in self.layout.tensors and not name.endswith(".weight")  # noqa: E731
        self._group((*(self._where.keys() - stored), *self._slices), is_single)
        if self.quantization is not None and self.quantization.kv_cache is not None:
            raise NotImplementedError(
                f"{self.folder} quantizes its KV cache ({self.quantization.kv_cache}), whose scales are not "
                "supported; export it without kv_cache_scheme, and serve with quantize_kvcache"
            )
        self._check_names()

    def layer(self, module: str) -> StoredLayer | None:
        """Return a linear layer as stored, or None for a float layer; raises if a tensor of the layer is not used.

        Raises:
          ValueError, NotImplementedError: raised by ``read_layer``; the message names the layer.
        """
        return self._read_layer(module, self.layout.linears[module])

    def read(self, name: str) -> np.ndarray:
        """Return a tensor of ``layout.tensors`` decoded to float32; raises if a value is not finite."""
        module, size = name.removesuffix(".weight"), self.layout.tensors[name]
        layer = self.layer(module) if module in self.layout.linears else None
        place = f"{self.folder}: {name}"
        if layer is not None:
            return check_finite(layer.decode(), place)
        tensors = self.tensors(module)
        array = tensors.pop(name.removeprefix(module), None)
        if array is None:
            raise ValueError(f"{self.folder} has no tensor {name}")
        if tensors:
            raise ValueError(
                f"{self.folder}: {module} is a float layer in the config, but has the tensor "
                f"{next(iter(tensors))[1:]}; export the checkpoint again"
            )
        with np.errstate(over="ignore"):  # float64 beyond the range becomes infinite and raises
            return check_finite(check_float(array, place, size).astype(np.float32), place)

    def source(self, *, has_tokenizer: bool = True) -> Source:
        """Return the model as a ``Source`` for an export or an import; static input scales become input amaxes.

        Args:
          has_tokenizer: whether to read the tokenizer.
        """
        vocabulary = self.vocabulary() if has_tokenizer else None
        return Source(self.layout, self.read, vocabulary, self.input_amax(), lambda name: None)

    def input_amax(self) -> dict[str, float]:
        """Return the input amax of each layer that stores a static input scale, by layer name."""
        found = {}
        for module in self.layout.linears:
            spec = self.spec(module)
            try:
                amax = None if spec is None else take_input_amax(spec, self.tensors(module))
            except ValueError as error:
                raise ValueError(f"{self.folder}: {module}: {error}") from None
            if amax is not None:
                found[module] = amax
        return found

    def vocabulary(self) -> Vocabulary | None:
        """Return the tokenizer, or None if the folder has none.

        Raises:
          NotImplementedError: the tokenizer is neither ``tokenizer.json`` nor a BPE model of SentencePiece.
          ValueError: a file is not a tokenizer.
        """
        path = next((path for name in _TOKENIZERS if (path := self.folder / name).exists()), None)
        if path is None:
            return None
        if path.name not in ("tokenizer.json", "tokenizer.model"):
            raise NotImplementedError(f"{self.folder} has its tokenizer as {path.name}; save it as tokenizer.json")
        return read_tokenizer(path, self.config)

    def _stored(self, name: str) -> np.ndarray:
        """Return a tensor as a view of the files; ``name`` may be a tensor of one expert that is stored with others."""
        part = self._slices.get(name)
        return super()._stored(name) if part is None else part.read(super()._stored(part.stored))

    def _find_slices(self) -> dict[str, Slice]:
        """Return the tensors of single experts that the folder stores together, as gpt-oss does."""
        shape = self.layout.shape
        if shape is None or not self.layout.has_fused_experts:
            return {}
        names = {f"{name.removesuffix('.weight')}{end}" for name in self.layout.tensors for end in ENDS}
        found = {name: part for name in names if (part := Slice.of(name)) is not None and part.stored in self._where}
        for part in set(found.values()):
            if (count := self._where[part.stored].entries[part.stored].shape[0]) != shape.num_experts:
                wrong = f"{part.stored} has {count} experts, but its config has {shape.num_experts}"
                raise ValueError(f"{self.folder}: {wrong}")
        return found

    def _check_names(self) -> None:
        """Raise if a tensor is unused or missing, or if a float tensor does not have the shape of the config."""
        wanted = {name.removesuffix(".weight") for name in self.layout.tensors}
        for module, ends in self._ends.items():
            if module == HEAD and f"{HEAD}.weight" not in self.layout.tensors and ".weight" in ends:
                self._check_tied(f"{EMBEDDING}.weight", f"{HEAD}.weight")
                ends = {end: name for end, name in ends.items() if end != ".weight"}
            for end, name in ends.items():
                is_buffer = name.endswith("rotary_emb.inv_freq")  # derived from the config
                if (module not in wanted and not is_buffer) or end == ".bias":
                    family = self.config["architectures"][0]
                    raise ValueError(f"{self.folder} has the tensor {show(name)}, which no {family} of its config has")
        if missing := sorted(wanted - self._ends.keys()):
            raise ValueError(f"{self.folder} has no tensors of {missing[0]}; download it again")
        for name, size in self.layout.tensors.items():
            module = name.removesuffix(".weight")
            is_float = module not in self.layout.linears or self.spec(module) is None
            found = self._where[name].entries[name].shape if name in self._where and is_float else size
            if found != size:
                raise ValueError(f"{self.folder}: {name} has shape {found}, but its config requires {size}")

    def _check_tied(self, embedding: str, head: str) -> None:
        """Raise if a stored head differs from the embedding, which a tied model uses as its head."""
        if embedding not in self._where:
            raise ValueError(f"{self.folder} has {head}, but no {embedding}; save the model again")
        one, other = (self._where[name][name] for name in (embedding, head))
        is_same = one.shape == other.shape == self.layout.tensors[embedding] and one.dtype == other.dtype
        if not is_same or not all(np.array_equal(one[rows], other[rows]) for rows in row_chunks(one.shape)):
            raise ValueError(
                f"{self.folder} has {head} and {embedding} with different values, but its config has "
                "tie_word_embeddings true; set it to false, or remove the wrong tensor"
            )
