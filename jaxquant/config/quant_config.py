"""``QuantConfig``, the user's config, which is read strictly and checked completely at construction."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
import warnings
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import jax

from jaxquant.config import loader, options
from jaxquant.config.backends import BACKENDS, BackendName, check_library_implementation
from jaxquant.config.mixed_precision import load_mixed_precision
from jaxquant.config.recipes import RECIPES, lookup, spell
from jaxquant.config.rules import SWITCHES, Decision, PathEntry, Resolver, Rule
from jaxquant.core import typed
from jaxquant.core.recipe import Recipe

# Fields of a MaxText config for features that jaxquant does not implement, with the values that disable them.
_NOT_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "use_manual_quantization": (False, None),
    "te_comm_gemm_overlap": ("disabled", "", False, None),
    "experimental_sa_quant_q_fp8": (False, None),
    "experimental_sa_quant_k_fp8": (False, None),
}
KVCacheName = Literal["int8", "int4", "fp8"]
KV_ELEMENTS: dict[KVCacheName, str] = {"int8": "int8", "int4": "int4", "fp8": "float8_e4m3fn"}
"""Element type of each quantized key/value cache."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantConfig(options.Options):
    """All settings of jaxquant, under MaxText's names where MaxText has them. The fields are validated at construction.

    Attributes:
      quantization: config string, a key of ``RECIPES``; "" means no quantization. A composition is a mapping with a
        config string for each of the three matmuls, such as
        ``{fwd: fp8_current, dlhs: quartet2, drhs: null}``, where null means float. Compositions are stored as text.
      quant_backend: library that runs the matmuls. ``auto`` selects ``native`` for most config strings. For ``aqt_fp8``
        and ``aqt_fp8_full``, ``auto`` selects ``aqt``, and contractions that AQT does not support run on ``native``.
      implementation: implementation of casts and matmuls in the native backend. ``xla`` uses XLA; ``pallas`` uses
        jaxquant's kernels where they support the call, otherwise XLA; null selects by chip and operation. The results
        differ only in block matmuls, by one rounding.
      use_qwix_quantization: MaxText's spelling of ``quant_backend: qwix``.
      strict: whether a training run raises an error at the start if a matmul does not run in the dtypes of its layer's
        recipe. In your own training loop, call ``jaxquant.coverage(step, ...).check()``.
      rules: ordered rules; the first match wins. The config strings of the rules must run on the config's backend. In
        Python, a rule can contain your own ``Recipe`` if the backend supports it.
      float_first_blocks: number of blocks at the start of the model that stay in float, unless a rule decides. A block
        is the layers below one numbered part of a path, such as ``layers_3/`` or ``blocks/7/``. If numbers are nested,
        the outermost number counts.
      float_last_blocks: number of blocks at the end of the model that stay in float, unless a rule decides.
      quantize_router_proj: whether to quantize routers, which stay in float by default, unless a rule decides.
      quantize_logits_proj: whether to quantize output heads, which stay in float by default, unless a rule decides.
      quantize_mtp: whether to quantize the layers of ``mtp_block`` (MaxText's multi-token prediction), which stay in
        float by default, unless a rule decides.
      quantization_local_shard_count: number of blocks into which the contraction of the weight gradient is split; each
        block has its own scales. -1 is the number of devices that share the batch (1 if nothing is sharded; see
        ``docs/guide/meshes.md``). 0 keeps the weight gradient in float. A positive count must divide the batch. With a
        count above 1, convolutions stay in float.
      constant_bound_config: six constant bounds of the operands, in the order of ``options.OPERANDS``, or empty.
      per_tensor_scales: six flags in the same order as ``constant_bound_config``: one scale per tensor (true, the
        default) or per channel (false).
      weight_quantization_calibration_method: calibration of weights.
      act_quantization_calibration_method: calibration of activations.
      bwd_quantization_calibration_method: calibration of output gradients.
      drhs_grad_quantization_calibration_method: calibration of the output gradient in the matmul of the weight
        gradient; "" uses ``bwd_quantization_calibration_method``.
      weight_sparsity_n: number of weights in each group of ``weight_sparsity_m`` that are not set to zero (N:M
        sparsity).
      weight_sparsity_m: number of neighbouring weights in a group of N:M sparsity.
      weight_sparsity_start_step: first step with sparse weights.
      weight_sparsity_update_step: number of steps between two updates of the sparsity mask.
      amax_history_length: number of past steps whose amax determines the scale in delayed scaling.
      amax_margin: exponent of a factor ``2**amax_margin`` that multiplies the scale in delayed scaling.
      amax_init: scale of a tensor without amax history in delayed scaling. ``warmup`` uses the amax of the tensor;
        ``flax`` uses scale 1 and reproduces flax's op bit for bit.
      four_over_six: whether each block of NVFP4's forward operands maps its amax to 4 instead of 6 if the error is
        smaller.
      scale_fmt: rounding of the scales of ``fp8_block``. ``ue8m0`` rounds scales up to powers of two, as in checkpoints
        that have this field; "" does not round.
      activation_scale_ub: upper bound of the amax of activations, or null for no bound. Larger values are clipped, and
        their gradient is zero.
      square_weight_blocks: whether ``mxfp8`` uses weight blocks of 32 by 32, so that the forward matmul and the input
        gradient share one quantized weight.
      quantization_share_expert_scales: whether all experts of a weight share per-tensor scales and their state. If
        false, each expert has its own. Experts are the batch axes of a weight, or the groups of a ragged matmul.
      quant_cfg_path: path of the JSON or YAML file of ``intmp``.
      replicate_quant_scale: whether the scales of a sharded converted kernel are replicated. Training stores no scales.
      quantize_kvcache: whether the KV cache is quantized in serving.
      kv_quant_axis: values that share a scale in the KV cache: ``dkv`` is the features of one head, ``heads_and_dkv``
        is the features of all heads of a token.
      kv_quant_dtype: element type of the quantized KV cache.
      checkpoint_is_quantized: whether the parameters come from ``jaxquant.convert``.
      save_quantized_params_path: field of MaxText that jaxquant does not support; save converted parameters with
        ``jaxquant.serving.save``.

    Raises:
      ValueError: a value is out of range, unknown, or not read by the recipe.
      TypeError: a value has the wrong type.
      NotImplementedError: a backward matmul of a composition has its weight in a tensor format that the forward matmul
        does not use.
    """

    quantization: str = ""
    quant_backend: Literal["auto", BackendName] = "auto"
    implementation: Literal["xla", "pallas"] | None = None
    use_qwix_quantization: bool = False
    strict: bool = False
    rules: tuple[Rule, ...] = ()
    float_first_blocks: int = 0
    float_last_blocks: int = 0
    quantize_router_proj: bool = False
    quantize_logits_proj: bool = False
    quantize_mtp: bool = False
    quantize_kvcache: bool = False
    kv_quant_axis: Literal["", "dkv", "heads_and_dkv"] = "heads_and_dkv"
    kv_quant_dtype: KVCacheName = "int8"
    checkpoint_is_quantized: bool = False
    save_quantized_params_path: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "quantization", spell(self.quantization))
        typed.check_fields(self)
        options.check(self)
        object.__setattr__(self, "constant_bound_config", options.read_bounds(self.constant_bound_config))
        if self.quantize_kvcache and not self.kv_quant_axis:
            raise ValueError("quantize_kvcache needs an axis; set kv_quant_axis to 'dkv' or 'heads_and_dkv', got ''")
        for name in ("kv_quant_axis", "kv_quant_dtype"):
            if not self.quantize_kvcache and (value := getattr(self, name)) not in ("", getattr(QuantConfig, name)):
                raise ValueError(
                    f"{name} {value!r} has no effect without quantize_kvcache; set quantize_kvcache, or remove {name}"
                )
        if self.use_qwix_quantization and self.quant_backend not in ("auto", "qwix"):
            raise ValueError(
                f"use_qwix_quantization true contradicts quant_backend {self.quant_backend!r}; remove one of the two"
            )
        for name in ("float_first_blocks", "float_last_blocks", *SWITCHES):
            if (value := getattr(self, name)) and (value < 0 or not self._is_quantized):
                why = "must not be negative" if value < 0 else "has no effect, because quantization and rules are empty"
                raise ValueError(f"{name} {value} {why}; set {name} to {getattr(QuantConfig, name)}")
        self._check_pairs()
        self._check_options_are_read()
        self._make_resolver()  # builds all recipes and reads the intmp file, so that errors are raised here

    # -- meaning of the config ----------------------------------------------------------------------------------------

    @property
    def resolved_backend(self) -> BackendName | None:
        """Backend that runs the config, after ``auto`` is resolved; None if nothing is quantized.

        Raises:
          ValueError: ``auto`` is ambiguous, because the config strings of the rules have different backends.
        """
        strings = self.strings
        if not self._is_quantized:
            return None
        if self.use_qwix_quantization:
            return "qwix"
        if self.quant_backend != "auto":
            return self.quant_backend
        if not strings:
            return "native"  # supports every user-defined recipe
        autos = {lookup(name).auto for name in ([self.quantization] if self.quantization else strings)}
        if len(autos) > 1:
            raise ValueError(
                f"quant_backend 'auto' selects different backends for the rules with {', '.join(map(repr, strings))}; "
                f"set quant_backend to {typed.either(_common_backends(strings))}"
            )
        return autos.pop()  # pyright: ignore[reportReturnType]

    @property
    def leaves_backend_open(self) -> bool:
        """Whether no backend is set, so that native runs the operations that the resolved backend does not support."""
        return self.quant_backend == "auto" and not self.use_qwix_quantization

    @property
    def strings(self) -> list[str]:
        """Every config string in use: the base string, if it is not empty, and the strings of the rules."""
        return [name for name, _ in self._strings_in_use()]

    def recipe(self) -> Recipe | None:
        """Return the base recipe with the options applied, or None; for ``intmp`` the recipe of ``__default__``."""
        return self._make_resolver().base.recipe

    def resolver(self) -> Resolver | None:
        """Return the function that selects the recipe of each layer, or None if the config quantizes nothing."""
        return self._make_resolver() if self._is_quantized else None

    def _make_resolver(self) -> Resolver:
        entries = [
            PathEntry(rule.path, self._make_recipe(rule.recipe), f"rules[{index}].path", True)
            for index, rule in enumerate(self.rules)
        ]
        recipe, reason = self._make_recipe(self.quantization), f"quantization {self.quantization!r}"
        if self.quantization == "intmp":
            path, (listed, recipe) = self.quant_cfg_path, load_mixed_precision(self.quant_cfg_path)
            reason = f"default of {path}"
            entries += [PathEntry(pattern, each, f"{path}: entry", False) for pattern, each in listed]
        base = Decision(recipe, reason if recipe else f"left in float by {reason}", None, self.implementation)
        ends = self.float_first_blocks, self.float_last_blocks
        switches = tuple(name for name in SWITCHES if getattr(self, name))
        return Resolver(tuple(entries), base, self.implementation, ends, switches)

    def _make_recipe(self, recipe: str | Recipe | None) -> Recipe | None:
        """Return the recipe of a config string with the options applied; return a ``Recipe`` unchanged."""
        return recipe if isinstance(recipe, Recipe) else lookup(recipe or "").apply_options(self)

    @classmethod
    def from_any(cls, obj: Any) -> QuantConfig:
        """Read a config from any supported form.

        Args:
          obj: config in one of five forms. A QuantConfig is returned unchanged. Every key of a mapping must be a field.
            A string is a config string, or the path of a file with such a mapping if the string ends in ``.yml``,
            ``.yaml`` or ``.json``. A ``pathlib.Path`` is the path of such a file. Any other object must have an
            attribute ``quantization``, as MaxText's config has. A warning lists attributes of this object that are set
            and concern quantization, but that jaxquant does not read.

        Raises:
          TypeError: the object has none of these forms.
          ValueError: a file cannot be read, or ``QuantConfig`` raises.
          NotImplementedError: a MaxText config requests a feature that is not implemented.
        """
        if isinstance(obj, QuantConfig):
            return obj
        if isinstance(obj, Mapping):
            return typed.build(cls, obj)
        if isinstance(obj, os.PathLike) or (isinstance(obj, str) and obj.endswith(_FILES)):
            return typed.build(cls, loader.load_yaml(obj), os.fspath(obj))
        if isinstance(obj, str):
            return cls(quantization=obj)
        if isinstance(obj, type) or _attribute(obj, "quantization") is _MISSING:
            raise TypeError(
                f"config {typed.show(obj)} must be a QuantConfig, a mapping, a config string, the path of a YAML file "
                f"or an object with an attribute 'quantization', got {type(obj).__name__}"
            )
        for name, disabled in _NOT_IMPLEMENTED.items():
            value = _unwrap(_attribute(obj, name))
            if value is not _MISSING and value not in disabled:
                raise NotImplementedError(f"{name} {value!r} is not implemented; set {name} to {disabled[0]!r}")
        values = {field.name: _unwrap(_attribute(obj, field.name)) for field in dataclasses.fields(cls) if field.init}
        fields = {name: value for name, value in values.items() if value is not _MISSING}
        string = fields.get("quantization")
        if string == "te_no_quant":  # TransformerEngine's matmuls without quantization
            string = fields["quantization"] = ""
        if not string and not fields.get("rules"):
            # A program's config has a value for every option. Without quantization, no recipe reads these values.
            options_of_strings = {*SWITCHES, *(field.name for field in dataclasses.fields(options.Options))}
            fields = {name: value for name, value in fields.items() if name not in options_of_strings}
        elif unread := _unread_fields(obj):
            shown = ", ".join(f"{name} {typed.show(value)}" for name, value in unread.items())
            why = "which jaxquant does not read; remove these fields from the config"
            warnings.warn(f"the {type(obj).__name__} sets {shown}, {why}", stacklevel=2)
        if string in ("fp8_gpu", "fp8_nanoo") and fields.pop("use_qwix_quantization", False):
            fields["quant_backend"] = "native"  # MaxText's Qwix mode runs flax's op, which native reproduces
        if string == "fp8" and fields.get("use_qwix_quantization"):
            string = fields["quantization"] = "fp8_e4m3"  # the recipe that MaxText runs for it on Qwix
        count = fields.get("quantization_local_shard_count")
        is_resolved = isinstance(count, int) and count > 0 and count == jax.local_device_count()
        if is_resolved and "quantization_local_shard_count" not in lookup(spell(string or "")).fields:
            # MaxText has already resolved -1; this string does not read the field.
            del fields["quantization_local_shard_count"]
        config = typed.build(cls, fields)
        method = config.quantize_logits_proj and _attribute(obj, _LOGITS_CALIBRATION)
        if method is _MISSING or not method or _attribute(obj, "logits_via_embedding") is True:
            return config
        calibrations = {f"{operand}_quantization_calibration_method": method for operand in ("weight", "act")}
        head = Rule(HEAD, dataclasses.replace(config, **calibrations).recipe())
        return dataclasses.replace(config, rules=(*config.rules, head))

    @classmethod
    def prepare_mapping(cls, mapping: Mapping[str, Any]) -> dict[str, Any]:
        """Normalize MaxText's spellings: enums to their values, null to "" in text fields, compositions to text."""
        plain = {key: _unwrap(value) for key, value in mapping.items()}
        if "quantization" in plain:
            plain["quantization"] = spell(plain["quantization"])
        return {key: _NULLS.get(key) if value is None else value for key, value in plain.items()}

    # -- checks ------------------------------------------------------------------------------------------------------

    def _strings_in_use(self) -> list[tuple[str, str]]:
        """Return the config strings in use, each with the config field that contains the string."""
        named = [(self.quantization, "quantization")]
        named += [(rule.recipe, f"rules[{i}].recipe") for i, rule in enumerate(self.rules)]
        return [(name, place) for name, place in named if name and isinstance(name, str)]

    @property
    def _is_quantized(self) -> bool:
        return bool(self.quantization) or any(rule.recipe for rule in self.rules)

    def _check_pairs(self) -> None:
        named = self._strings_in_use()
        for name, place in named:
            lookup(name, place)
            if name == "intmp" and place != "quantization":
                raise ValueError(f"{place} 'intmp' is not supported in a rule; use 'intmp' only as quantization")
        backend = self.resolved_backend
        if backend is None:
            return
        check_library_implementation(backend, self.implementation)
        setting = f"quant_backend {backend!r}"
        if self.use_qwix_quantization:
            setting = "use_qwix_quantization true"
        elif self.quant_backend == "auto":
            setting += f" (selected by 'auto' for {self.quantization!r})"
        for name, place in named:
            row = lookup(name, place)
            if backend in row.backends:
                continue
            fix = f"set quant_backend to {typed.either(_common_backends(self.strings))}"
            if place == "quantization":
                others = f"use quant_backend {typed.either(('auto', *row.backends))}"
                fix = "remove use_qwix_quantization" if self.use_qwix_quantization else others
            if backend == "qwix" and name == "fp8":
                fix = f"use 'fp8_e4m3', as MaxText does for 'fp8' on Qwix, or {fix}"
            raise ValueError(f"{place} {name!r} does not run on {setting}; {fix}")

    def _check_options_are_read(self) -> None:
        read = frozenset[str]().union(*(lookup(name).fields for name in self.strings))
        for field in dataclasses.fields(options.Options):
            value = getattr(self, field.name)
            if field.name not in read and value != field.default:
                readers = [name for name, row in RECIPES.items() if field.name in row.fields]
                where = " in one of the matmuls" if any(name.startswith("{") for name in self.strings) else ""
                raise ValueError(
                    f"{field.name} {value!r} is not read by quantization {self.quantization!r}; "
                    f"remove the field, or use {typed.either(readers)}{where}"
                )


ConfigLike: TypeAlias = QuantConfig | Mapping[str, Any] | str | os.PathLike[str]
"""Type of a ``config`` argument: a QuantConfig, a mapping of its fields, a config string such as "fp8", or the path of
a YAML or JSON file. An object with these fields as attributes, such as MaxText's config, is accepted too."""
NO_KV_QUANT = {name: getattr(QuantConfig, name) for name in ("quantize_kvcache", "kv_quant_axis", "kv_quant_dtype")}
"""Fields of a config without a quantized KV cache."""
_MISSING: Any = object()
_NULLS = {field.name: field.default for field in dataclasses.fields(QuantConfig) if field.default in ("", ())}
_NULLS["kv_quant_axis"] = ""
"""Value that replaces null in a field that cannot be None."""
_FILES = (".yml", ".yaml", ".json")


def is_program_config(obj: Any) -> bool:
    """Return whether a config configures a complete program, such as MaxText's, and not only quantization."""
    return not isinstance(obj, (QuantConfig, Mapping, str, os.PathLike))


_QUANT_FIELD = re.compile(r"quant|fp8|fp4|calibration|qtype|weight_block_size|embed_moe_on_fsdp|(^|_)te_")
"""Pattern of the names of fields that concern quantization or TransformerEngine's matmuls."""
_LOW_DTYPE = re.compile(r"int[48]\b|float[48]|fp[48]")
_UNSET = {"", "()", "[]", "{}", "None", "False", "0", "0.0", "-1", "disabled", "te_no_quant"}
_LOGITS_CALIBRATION = "logits_proj_quant_calibration_method"
HEAD = "decoder/logits_dense"
"""Path of the output head in MaxText's models."""


def _unread_fields(program: Any) -> dict[str, Any]:
    """Return the fields of a program's config that concern quantization, are set, and that jaxquant does not read.

    A field concerns quantization if its name matches ``_QUANT_FIELD``, or if its value is a dtype of 8 bits or fewer. A
    field is set unless its value is in ``_UNSET`` or equals the field's default in a pydantic model or dataclass.
    """
    keys, model = _attribute(program, "get_keys"), _attribute(program, "_pydantic_config")  # MaxText's config has both
    fields = dict(getattr(program, "__dict__", {}) if keys is _MISSING else keys())
    for section in [each for each in fields.values() if isinstance(each, Mapping)]:
        fields |= section
    kind, unread = type(program if model is _MISSING else model), {}
    for name, value in ((str(name), _unwrap(value)) for name, value in fields.items()):
        is_read = name in (*_NOT_IMPLEMENTED, _LOGITS_CALIBRATION) or hasattr(QuantConfig, name)
        concerns_quantization = _QUANT_FIELD.search(name) or ("dtype" in name and _LOW_DTYPE.search(str(value)))
        default = getattr(getattr(kind, "model_fields", {}).get(name), "default", getattr(kind, name, None))
        if concerns_quantization and not is_read and str(value) not in (*_UNSET, str(_unwrap(default))):
            unread[name] = value
    return unread


def _attribute(obj: Any, name: str) -> Any:
    try:
        return getattr(obj, name)
    except (AttributeError, KeyError, ValueError):  # exceptions that MaxText's configs raise for an unknown name
        return _MISSING


def _unwrap(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def _common_backends(strings: list[str]) -> list[str]:
    return [backend for backend in BACKENDS if all(backend in lookup(s).backends for s in strings)]


def refuse_fields(config: QuantConfig, whys: Mapping[str, str], kind: type[Exception] = NotImplementedError) -> None:
    """Raise if a config sets a field that the called function does not support.

    Args:
      config: config to check.
      whys: mapping from a field to the text that follows the field and its value in the error.
      kind: class of the error.
    """
    for name, why in whys.items():
        if value := getattr(config, name):
            raise kind(f"{name} {'true' if value is True else repr(value)} {why}")
