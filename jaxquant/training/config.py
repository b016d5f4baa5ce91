"""Configuration of a training run: one flat frozen dataclass that includes the quantization fields."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxquant.config.backends import BACKENDS
from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.typed import show

RUN_CONTROL = frozenset(
    (
        *("run_dir", "steps", "strict", "log_every", "eval_every", "checkpoint_every", "checkpoint_keep"),
        *("tensorboard", "health_every", "health_sequences", "mesh_data", "mesh_fsdp", "mesh_tensor"),
        "optimizer_state_axis",
    )
)
"""Fields that may differ when a run is resumed.

These fields set the run's length, checks, outputs and devices. All other fields determine the numerics of the run and
must equal the checkpoint's, except for the fields of ``ADJUSTABLE``; ``quantization_local_shard_count`` is compared
after it is resolved for the mesh. An 8-bit optimizer state loads only with the ``optimizer_state_axis`` of the
checkpoint. ``steps`` also sets the end of the cosine schedule: a run resumed with more steps continues along the longer
schedule.
"""

ADJUSTABLE = frozenset({"learning_rate", "weight_decay", "gradient_clipping_threshold"})
"""Other fields that may differ when a run is resumed; each change is recorded in metrics.jsonl."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Shape and numerics of the decoder; ``TrainConfig`` documents the fields."""

    vocab_size: int = 0
    emb_dim: int = 512
    mlp_dim: int = 1536
    num_layers: int = 8
    num_query_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    num_experts: int = 0
    num_experts_per_tok: int = 2
    shared_experts: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    rope_theta: float = 500000.0
    norm_epsilon: float = 1e-5
    logits_via_embedding: bool = True
    scan_layers: bool = True
    remat_policy: Literal["none", "full", "dots", "matmuls", "quantized"] = "none"
    saved_activations: Literal["full", "fp8"] = "full"
    attention: Literal["auto", "xla", "cudnn", "splash"] = "auto"
    head_chunks: int = 0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Shape, QuantConfig):
    """One training run.

    Attributes:
      run_dir: folder of the run; if it is empty, ``runs/NAME``, where NAME consists of the config file's name and the
        quantization.
      framework: Flax API of the decoder; only ``linen`` is supported.
      seed: random seed for the initial parameters and for stochastic rounding.
      steps: number of optimizer steps.
      vocab_size: rows of the embedding; 0 is the tokenizer's vocabulary rounded up to a multiple of 64.
      emb_dim, mlp_dim, num_layers, num_query_heads, num_kv_heads, head_dim: shape of the decoder.
      num_experts, num_experts_per_tok: number of experts of width ``mlp_dim`` in each layer (0: one MLP for all
        tokens), and number of experts per token.
      shared_experts: number of additional experts that every token uses, as one MLP of width ``shared_experts *
        mlp_dim``.
      kv_lora_rank, q_lora_rank, rope_head_dim: sizes in latent attention: the latent of keys and values (0:
        grouped-query attention), the latent of queries (0: none), and the rotated part of a head.
      rope_theta: base of the rotary embedding's wavelengths.
      norm_epsilon: value added to the mean square in RMSNorm.
      logits_via_embedding: whether the output head is the transposed embedding (tied).
      scan_layers: whether the layers are traced once and scanned; False gives every layer its own path
        (``layers_0/mlp/wi_0``).
      remat_policy: values that are saved for the backward pass. ``none``: everything; ``full``: layer inputs only;
        ``dots``: results of float and 8-bit matmuls; ``matmuls``: results of matmuls and of attention kernels, see
        ``jaxquant.save_matmuls``; ``quantized``: the residuals that quantized matmuls name.
      saved_activations: format in which inputs of norms and of the MLP's gate are saved for the backward pass: ``full``
        is their own dtype; ``fp8`` (``jaxquant.compress_residuals``) needs remat_policy ``none`` or ``quantized``.
      attention: attention implementation. ``auto``: cuDNN on NVIDIA GPUs and splash attention on TPUs if they support
        the shapes, otherwise ``xla``; ``cudnn`` and ``splash`` select that kernel or raise an error.
      head_chunks: number of chunks in which the loss computes a sequence's logits; 0 chooses it so that a chunk has
        less than half a gigabyte per sequence.
      dtype: dtype of activations and matmuls.
      dataset: ``stdlib`` (sources of Python's standard library), ``text`` (text files,
        split into documents at line ends), ``jsonl`` or ``parquet``.
      dataset_path: file or folder of the dataset.
      dataset_text_field: JSON key or Parquet column that contains the text.
      tokenizer_path: Hugging Face ``tokenizer.json``; empty for bytes.
      data_seed: random seed for the order of the documents.
      packing: whether a row holds as many documents as fit, instead of one.
      sequence_length: number of tokens in a sequence.
      batch_size: number of sequences in an optimizer step, over all devices and micro-batches.
      gradient_accumulation_steps: number of micro-batches in an optimizer step.
      learning_rate: peak learning rate. It is reached after the fraction ``warmup_steps_fraction`` of the steps and
        then decays along a cosine to ``learning_rate_final_fraction`` times the peak.
      optimizer: ``adamw`` or ``muon``. ``muon`` uses Muon for the matrices of the layers (momentum 0.95, learning rates
        of AdamW), and Adam with Nesterov momentum for the rest.
      adam_b1, adam_b2, adam_eps, weight_decay: parameters of AdamW; the decay applies only to matrices, and with
        ``muon`` only to the matrices that Muon updates.
      optimizer_state: format of the optimizer's moments: a scheme of ``jaxquant.optim.SCHEMES``, or float32.
      optimizer_state_axis: axis along which 8-bit moments are grouped: ``last``, ``rows`` (the axis before the last, or
        an axis with larger groups), or ``auto`` (``rows`` on TPUs, otherwise ``last``). A checkpoint can be loaded only
        with the same axis.
      weight_dtype: dtype of the parameters; bfloat16 parameters have no float32 copy.
      stochastic_rounding: whether bfloat16 weights are rounded stochastically (``optim.stochastic_round``) instead of
        to nearest.
      gradient_clipping_threshold: largest global norm of the gradient; 0 turns clipping off.
      mesh_data, mesh_fsdp, mesh_tensor: number of devices along each mesh axis: copies of the model, shards of every
        parameter, and shards of the heads and of ``mlp_dim``; -1 selects all remaining devices.
      log_every: number of steps between two progress lines; metrics.jsonl has every step.
      eval_every, eval_batches: number of steps between two evaluations on held-out text (0: only at the end), and
        number of batches of each.
      checkpoint_every, checkpoint_keep: number of steps between two checkpoints (0: only at the end), and number of
        checkpoints to keep.
      tensorboard: whether to write TensorBoard events.
      health_every: number of steps between two rows of health.jsonl (0: none).
      health_sequences: number of sequences of the step's batch on which health is measured (0: an eighth of the batch,
        at most a micro-batch).
    """

    run_dir: str = ""
    framework: Literal["linen", "nnx"] = "linen"
    seed: int = 0
    steps: int = 1000
    dataset: Literal["stdlib", "text", "jsonl", "parquet"] = "stdlib"
    dataset_path: str = ""
    dataset_text_field: str = "text"
    tokenizer_path: str = ""
    data_seed: int = 0
    packing: bool = True
    sequence_length: int = 512
    batch_size: int = 16
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-3
    learning_rate_final_fraction: float = 0.1
    warmup_steps_fraction: float = 0.1
    optimizer: Literal["adamw", "muon"] = "adamw"
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.1
    optimizer_state: Literal["float32", "fp8_coat", "int8_dynamic", "int8_linear"] = "float32"
    optimizer_state_axis: Literal["auto", "last", "rows"] = "auto"
    weight_dtype: Literal["float32", "bfloat16"] = "float32"
    stochastic_rounding: bool = False
    gradient_clipping_threshold: float = 1.0
    mesh_data: int = 1
    mesh_fsdp: int = -1
    mesh_tensor: int = 1
    log_every: int = 10
    eval_every: int = 100
    eval_batches: int = 8
    checkpoint_every: int = 100
    checkpoint_keep: int = 2
    tensorboard: bool = True
    health_every: int = 0
    health_sequences: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for (least, most), names in _RANGES.items():
            for name in names:
                _check_range(name, getattr(self, name), least, most)
        for name in ("mesh_data", "mesh_fsdp", "mesh_tensor"):
            if getattr(self, name) != -1:
                _check_range(name, getattr(self, name), 1, _SIZE, "-1 or ")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str) and "\0" in value:
                raise ValueError(f"{field.name} {show(value)} contains a null character; remove it")
        if self.framework == "nnx":
            raise ValueError(
                "framework 'nnx' is not supported by this program; leave framework out, and see "
                "examples/nnx_loop.py for a training loop of an NNX model"
            )
        backend = self.resolved_backend
        if self.remat_policy == "quantized" and not (backend and BACKENDS[backend].names_residuals):
            raise ValueError(
                "remat_policy 'quantized' saves the residuals of the native backend, but quantization "
                f"{self.quantization!r} runs on {backend or 'no backend'}; use 'full', 'dots' or 'none', or "
                "quant_backend 'native'"
            )
        if self.saved_activations == "fp8" and self.remat_policy not in ("none", "quantized"):
            raise ValueError(
                f"saved_activations 'fp8' has no effect with remat_policy {self.remat_policy!r}, which recomputes "
                "norms and gates; use remat_policy 'none' or 'quantized', or saved_activations 'full'"
            )
        if self.num_query_heads % self.num_kv_heads:
            raise ValueError(
                f"num_query_heads {self.num_query_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                "choose sizes that divide"
            )
        if self.stochastic_rounding and self.weight_dtype != "bfloat16":
            raise ValueError("stochastic_rounding requires bfloat16 weights; set weight_dtype: bfloat16")
        if self.optimizer_state_axis != "auto" and self.optimizer_state == "float32":
            raise ValueError(
                f"optimizer_state_axis {self.optimizer_state_axis!r} requires an 8-bit optimizer_state, but "
                "optimizer_state is 'float32'; set optimizer_state, or leave optimizer_state_axis out"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        self._check_experts()
        if self.head_chunks and self.sequence_length % self.head_chunks:
            raise ValueError(
                f"head_chunks {self.head_chunks} does not divide sequence_length {self.sequence_length}; use 0 to "
                "choose automatically"
            )
        if self.batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                f"batch_size {self.batch_size} does not divide into gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps} equal micro-batches; change one of them"
            )

    def _check_experts(self) -> None:
        """Check the fields of experts and of latent attention."""
        rank, heads, rotated = self.kv_lora_rank, self.num_query_heads, self.rope_head_dim
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok must lie between 1 and num_experts {self.num_experts}, got "
                f"{self.num_experts_per_tok}"
            )
        if not rank and (self.q_lora_rank or rotated):
            raise ValueError(
                f"q_lora_rank {self.q_lora_rank} and rope_head_dim {rotated} require latent attention, which "
                "kv_lora_rank 0 turns off; set kv_lora_rank, too"
            )
        if rank and self.num_kv_heads != heads:
            raise ValueError(
                f"num_kv_heads must be num_query_heads {heads} with kv_lora_rank {rank}, because latent attention "
                f"has one key and value per head; got {self.num_kv_heads}"
            )
        if rank and (rotated % 2 or not 0 < rotated < self.head_dim):
            raise ValueError(f"rope_head_dim must be even, above 0 and below head_dim {self.head_dim}, got {rotated}")


def _check_range(name: str, value: float, least: float, most: float, other: str = "") -> None:
    if not value >= least:
        raise ValueError(f"{name} must be {other}at least {least}, got {show(value)}")
    if not value <= most:
        raise ValueError(f"{name} must be {other}at most {most}, got {show(value)}")


_SIZE = 2**24  # larger than any real axis
_STEPS = 2**31 - 1  # steps are counted in int32
_TINY, _HUGE = 1.2e-38, 3.4e38  # normal float32 numbers; the optimizer runs in float32
_RANGES: dict[tuple[float, float], tuple[str, ...]] = {
    (0, 2**32 - 1): ("seed",),
    (0, 2**63 - 1): ("data_seed",),
    (0, _SIZE): (
        *("vocab_size", "head_chunks", "health_sequences"),
        *("num_experts", "num_experts_per_tok", "shared_experts", "q_lora_rank", "kv_lora_rank", "rope_head_dim"),
    ),
    (1, _SIZE): (
        *("emb_dim", "mlp_dim", "num_query_heads", "num_kv_heads", "head_dim"),
        *("sequence_length", "batch_size", "gradient_accumulation_steps"),
    ),
    (1, 10_000): ("num_layers",),
    (0, _STEPS): ("eval_every", "checkpoint_every", "health_every"),
    (1, _STEPS): ("steps", "log_every", "eval_batches", "checkpoint_keep"),
    (1, 1e30): ("rope_theta",),
    (_TINY, 1e30): ("norm_epsilon", "adam_eps"),
    (0, _HUGE): ("learning_rate", "weight_decay", "gradient_clipping_threshold"),
    (0, 1): ("learning_rate_final_fraction", "warmup_steps_fraction"),
    (0, 0.9999999): ("adam_b1", "adam_b2"),
}
"""(minimum, maximum) -> fields with these limits; mesh and quantization fields are checked elsewhere."""
