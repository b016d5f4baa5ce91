"""Configuration of a training run: one flat frozen dataclass that includes the quantization fields."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxquant.config.backends import BACKENDS
from jaxquant.config.decoder import DecoderShape
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
must equal the fields of the checkpoint, except for the fields of ``ADJUSTABLE``. ``quantization_local_shard_count`` is
compared after it is resolved for the mesh. ``optimizer_state_axis`` must be the axis of a saved 8-bit optimizer state.
``steps`` also sets the end of the cosine schedule: a run with more steps continues along the longer schedule.
"""

ADJUSTABLE = frozenset({"learning_rate", "weight_decay", "gradient_clipping_threshold"})
"""Other fields that may differ when a run is resumed; each change is recorded in metrics.jsonl."""


@dataclasses.dataclass(frozen=True)
class DecoderOptions(DecoderShape):
    """Shape and numerics of the decoder; ``TrainConfig`` documents the fields."""

    shared_experts: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    scan_layers: bool = True
    remat_policy: Literal["none", "full", "dots", "matmuls", "quantized"] = "none"
    saved_activations: Literal["full", "fp8"] = "full"
    attention: Literal["auto", "xla", "cudnn", "splash"] = "auto"
    head_chunks: int = 0
    numerics: Literal["standard", "exact"] = "standard"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(DecoderOptions, QuantConfig):
    """One training run.

    Attributes:
      run_dir: folder of the run. "" means ``runs/NAME``, where NAME contains the name of the config file and the
        quantization.
      framework: Flax API of the decoder; only ``linen`` is supported.
      seed: seed of the initial parameters and of stochastic rounding.
      steps: number of optimizer steps.
      vocab_size: number of rows of the embedding. 0 means the vocabulary size of the tokenizer, rounded up to a
        multiple of 64.
      emb_dim: size of the embedding and of the residual stream.
      mlp_dim: width of the MLP in each layer, or of each expert.
      num_layers: number of layers.
      num_query_heads: number of query heads in each layer.
      num_kv_heads: number of key and value heads in each layer.
      head_dim: number of features in each head.
      num_experts: number of experts in each layer; each has the width ``mlp_dim``. 0 means a single MLP for all tokens.
      num_experts_per_tok: number of experts that each token uses.
      norm_topk_prob: whether the probabilities of a token's experts are divided by their sum.
      shared_experts: number of further experts that every token uses. All shared experts together are one MLP of width
        ``shared_experts * mlp_dim``.
      kv_lora_rank: size of the latent of keys and values in latent attention. 0 means grouped-query attention without
        latents.
      q_lora_rank: size of the latent of queries in latent attention. 0 means queries without a latent.
      rope_head_dim: number of features in each head that are rotated in latent attention.
      rope_theta: base of the rotary embedding's wavelengths.
      rope_local_theta: base of the wavelengths in layers with a sliding window, without scaling, as in Gemma 3. 0 means
        ``rope_theta`` with its scaling.
      rope_type: scaling of the rotary embedding for longer texts, with the names of Hugging Face: ``default`` (none),
        ``linear``, ``llama3`` or ``yarn``.
      rope_factor: factor by which the scaling stretches wavelengths.
      rope_low_freq_factor, rope_high_freq_factor: for ``llama3``, wavelengths above and below
        ``original_max_position_embeddings`` divided by these numbers are stretched by the whole factor and not at all.
      rope_beta_fast, rope_beta_slow: for ``yarn``, numbers of turns in ``original_max_position_embeddings`` positions
        from which a wavelength is not stretched, and below which it is stretched by the whole factor.
      rope_truncate: for ``yarn``, whether the bounds of the stretched features are rounded to whole features.
      original_max_position_embeddings: number of positions before the scaling, for ``llama3`` and ``yarn``.
      max_position_embeddings: number of positions that an exported model declares. 0 means ``sequence_length``.
      attention_bias: projections in attention that add a bias: ``none``, ``qkv`` as in Qwen2, or ``all``.
      attention_sinks: whether each head has a learned score that takes part in the softmax without a value, as in
        gpt-oss.
      use_qk_norm: whether the queries and keys of each head are normalized before the rotary embedding.
      query_pre_attn_scalar: attention scores are divided by the square root of this number. 0 means ``head_dim``.
      sliding_window_size: number of positions that a token attends to, including its own. 0 means all earlier ones.
      global_attention_every: every layer whose number is a multiple of this attends to all earlier positions, and only
        the others have the sliding window. 0 means that all layers have the window.
      attn_logits_soft_cap: bound c of attention scores s, ``c · tanh(s / c)``. 0 means no bound.
      final_logits_soft_cap: bound of the logits, computed in the same way. 0 means no bound.
      mlp_activation: function of the MLP's two inputs: ``silu`` (SwiGLU), ``gelu_tanh`` (GeGLU) or ``clipped_swiglu``
        of gpt-oss.
      mlp_bias: whether the matrices of the MLP or of the experts, and the router, add a bias.
      use_post_norms: whether the results of attention and MLP are normalized before they are added, as in Gemma.
      scale_embedding: whether embeddings are multiplied by the square root of ``emb_dim``, as in Gemma.
      norm_epsilon: value that RMSNorm adds to the mean square.
      logits_via_embedding: whether the output head is the transposed embedding (tied).
      scan_layers: whether the layers are traced once and scanned. If false, every layer has its own path, such as
        ``layers_0/mlp/wi_0``.
      remat_policy: values that are saved for the backward pass. ``none`` saves everything. ``full`` saves only the
        inputs of layers. ``dots`` saves the results of float and 8-bit matmuls. ``matmuls`` saves the results of
        matmuls and attention kernels, as ``jaxquant.save_matmuls`` does. ``quantized`` saves the residuals of quantized
        matmuls.
      saved_activations: dtype in which the inputs of norms and of the MLP's gate are saved for the backward pass.
        ``full`` keeps the dtype. ``fp8`` compresses these inputs, as ``jaxquant.compress_residuals`` does, and requires
        remat_policy ``none`` or ``quantized``.
      attention: attention implementation. ``auto`` selects cuDNN on NVIDIA GPUs and splash attention on TPUs if they
        support the shapes, otherwise ``xla``. ``cudnn`` and ``splash`` raise an error if the kernel does not support
        the shapes.
      head_chunks: least number of chunks into which the loss splits the logits of a sequence. 0 selects a number that
        keeps each chunk under half a gigabyte per sequence.
      numerics: float functions of the decoder. ``exact`` computes norms, attention, activations and log-probabilities
        with ``jaxquant.exact``, so that the log-probabilities of a token have the same bits in training, prefill and
        decoding; all layers then need a batch-invariant recipe such as ``int8``. ``standard`` is faster.
      dtype: dtype of activations and matmuls.
      dataset: type of the training data. ``stdlib`` is the source code of Python's standard library. ``text`` has one
        document in each file of a folder; a single file is split into documents at line ends. ``jsonl`` has one
        document in each line, and ``parquet`` has one document in each row.
      dataset_path: file or folder of the training data; folders are searched recursively.
      dataset_text_field: JSON field or Parquet column that contains the text.
      tokenizer_path: path of a Hugging Face ``tokenizer.json``; "" means that each byte is a token.
      data_seed: seed of the order of the training data.
      packing: whether a sequence contains as many documents as fit. If false, each sequence contains one document.
      sequence_length: number of tokens in a sequence.
      batch_size: number of sequences in an optimizer step, over all devices and micro-batches.
      gradient_accumulation_steps: number of micro-batches in an optimizer step.
      learning_rate: highest learning rate, which is reached after the warmup and followed by a cosine decay.
      learning_rate_final_fraction: learning rate at the last step, as a fraction of ``learning_rate``.
      warmup_steps_fraction: fraction of the steps in which the learning rate rises to ``learning_rate``.
      optimizer: ``adamw`` or ``muon``. ``muon`` uses Muon for the matrices of the layers (momentum 0.95, learning rates
        of AdamW), and Adam with Nesterov momentum for the rest.
      adam_b1: decay rate of AdamW's first moment.
      adam_b2: decay rate of AdamW's second moment.
      adam_eps: value that AdamW adds to the root of the second moment.
      weight_decay: weight decay of matrices, or with ``muon`` only of the matrices that Muon updates.
      optimizer_state: format of the optimizer's moments: ``float32``, or a scheme of ``jaxquant.optim.SCHEMES``.
      optimizer_state_axis: axis along which elements of an 8-bit optimizer state share a scale. ``last`` is the last
        axis of a parameter; ``rows`` is usually the second-last axis. ``auto`` selects ``rows`` on TPUs and ``last``
        elsewhere. A run must be resumed with the axis of its checkpoint.
      weight_dtype: dtype of the parameters; bfloat16 parameters have no float32 copy.
      stochastic_rounding: whether bfloat16 weights are rounded stochastically (``optim.stochastic_round``) instead of
        to nearest.
      gradient_clipping_threshold: largest global norm of the parameters' gradient; 0 turns clipping off.
      mesh_data: number of devices along the mesh axis ``data``, each with a copy of the model; -1 means all remaining
        devices.
      mesh_fsdp: number of devices over which every parameter is sharded; -1 means all remaining devices.
      mesh_tensor: number of devices over which the heads and ``mlp_dim`` are sharded; -1 means all remaining devices.
      log_every: number of steps between two progress lines; ``metrics.jsonl`` has every step.
      eval_every: number of steps between two held-out losses. 0 means only at the end.
      eval_batches: number of batches over which a held-out loss is computed.
      checkpoint_every: number of steps between two checkpoints. 0 means only at the end.
      checkpoint_keep: number of checkpoints to keep.
      tensorboard: whether to write TensorBoard events.
      health_every: number of steps between two rows of ``health.jsonl``, see ``jaxquant.training.health``. 0 writes
        none.
      health_sequences: number of sequences of a batch from which health is measured. 0 means an eighth of the batch,
        but at most a micro-batch.
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
        if self.numerics == "exact" and self.attention not in ("auto", "xla"):
            raise ValueError(f"numerics 'exact' has its own attention, but attention is {self.attention!r}; use 'auto'")
        if self.numerics == "exact" and self.quantize_kvcache:
            raise ValueError(
                "quantize_kvcache changes keys and values that training reads unquantized, but numerics is 'exact'; "
                "set one of them to its default"
            )
        if self.num_query_heads % self.num_kv_heads:
            raise ValueError(
                f"num_query_heads {self.num_query_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                "set num_kv_heads to a divisor of num_query_heads"
            )
        if self.stochastic_rounding and self.weight_dtype != "bfloat16":
            raise ValueError("stochastic_rounding requires bfloat16 weights; set weight_dtype to bfloat16")
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
                f"batch_size {self.batch_size} is not a multiple of gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps}; change one of them"
            )

    def _check_experts(self) -> None:
        """Check the fields of experts and of latent attention."""
        rank, heads, rotated = self.kv_lora_rank, self.num_query_heads, self.rope_head_dim
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok must lie between 1 and num_experts {self.num_experts}, got "
                f"{self.num_experts_per_tok}"
            )
        if self.rope_type in ("llama3", "yarn") and not self.original_max_position_embeddings:
            raise ValueError(f"rope_type {self.rope_type!r} requires original_max_position_embeddings; set it")
        if self.rope_type == "yarn" and self.rope_local_theta:
            raise ValueError("rope_local_theta is not supported with rope_type 'yarn'; leave one of them out")
        if self.rope_type == "llama3" and self.rope_high_freq_factor <= self.rope_low_freq_factor:
            raise ValueError(
                f"rope_high_freq_factor {self.rope_high_freq_factor} must be larger than rope_low_freq_factor "
                f"{self.rope_low_freq_factor}"
            )
        if rank and (name := next((x for x in _GROUPED if getattr(self, x) != getattr(DecoderShape, x)), None)):
            raise ValueError(f"{name} is not supported with latent attention; leave it out, or set kv_lora_rank to 0")
        if not rank and (self.q_lora_rank or rotated):
            raise ValueError(
                f"q_lora_rank {self.q_lora_rank} and rope_head_dim {rotated} require latent attention, but "
                "kv_lora_rank is 0; set kv_lora_rank, or set all three to 0"
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


_GROUPED = (
    *("attention_sinks", "attention_bias", "use_qk_norm", "query_pre_attn_scalar", "attn_logits_soft_cap"),
    *("sliding_window_size", "rope_local_theta", "rope_type"),
)
"""Fields that only grouped-query attention supports, not latent attention."""
_SIZE = 2**24  # maximum size of an axis, larger than any model
_STEPS = 2**31 - 1  # steps are counted in int32
_TINY, _HUGE = 1.2e-38, 3.4e38  # normal float32 numbers; the optimizer runs in float32
_RANGES: dict[tuple[float, float], tuple[str, ...]] = {
    (0, 2**32 - 1): ("seed",),
    (0, 2**63 - 1): ("data_seed",),
    (0, _SIZE): (
        *("vocab_size", "head_chunks", "health_sequences"),
        *("num_experts", "num_experts_per_tok", "shared_experts", "q_lora_rank", "kv_lora_rank", "rope_head_dim"),
        *("max_position_embeddings", "original_max_position_embeddings", "sliding_window_size"),
        *("global_attention_every", "query_pre_attn_scalar"),
    ),
    (1, _SIZE): (
        *("emb_dim", "mlp_dim", "num_query_heads", "num_kv_heads", "head_dim"),
        *("sequence_length", "batch_size", "gradient_accumulation_steps"),
    ),
    (1, 10_000): ("num_layers",),
    (0, _STEPS): ("eval_every", "checkpoint_every", "health_every"),
    (1, _STEPS): ("steps", "log_every", "eval_batches", "checkpoint_keep"),
    (1, 1e30): ("rope_theta", "rope_factor"),
    (0, 1e30): ("rope_local_theta", "attn_logits_soft_cap", "final_logits_soft_cap"),
    (_TINY, 1e30): (
        *("norm_epsilon", "adam_eps"),
        *("rope_low_freq_factor", "rope_high_freq_factor", "rope_beta_fast", "rope_beta_slow"),
    ),
    (0, _HUGE): ("learning_rate", "weight_decay", "gradient_clipping_threshold"),
    (0, 1): ("learning_rate_final_fraction", "warmup_steps_fraction"),
    (0, 0.9999999): ("adam_b1", "adam_b2"),
}
"""Fields by their minimum and maximum; the fields of the mesh and of quantization have their own checks."""
