"""Every tolerance of the test suite, each with the arithmetic that determines it."""

from __future__ import annotations

import numpy as np

FLOAT32_EPS = float(np.finfo(np.float32).eps)
BFLOAT16_EPS = 2.0**-8


def dot_bound(lhs: np.ndarray, rhs: np.ndarray, eps: float = FLOAT32_EPS) -> np.ndarray:
    """Bound a float matmul's error: each of K products and K − 1 sums rounds once, in any order.

    |fl(x·y) − x·y| ≤ K · eps · Σ|x||y| (Higham, Accuracy and Stability, section 3.1), with one more eps for each of
    three scale products.
    """
    depth = lhs.shape[-1]
    return (depth + 3) * eps * (np.abs(lhs) @ np.abs(rhs)) + np.finfo(np.float32).tiny


def block_bound(depth: int, magnitudes: np.ndarray) -> np.ndarray:
    """Bound the difference of two sums of scaled blocks, each within ``dot_bound``; ``magnitudes``: sums of |x||y|."""
    return 2 * (depth + 3) * FLOAT32_EPS * magnitudes


# Relative RMSE of quantize-dequantize on N(0, 1), published for 1e6 samples (recipes, section 5). With scales of small
# blocks, no single largest sample changes the error. What remains are the sampling error and the third printed digit
# (at most 0.0005 of 0.0257).
BLOCK_RMSE_RTOL = 0.01
# Lower bounds of torchao's tests in dB, for forward, dx and dw (recipes, section 5). torchao has none for mxfp4: the
# relative error of an operand is 0.1154, and two independent errors are 0.163, or 15.7 dB; 0.5 dB are subtracted for
# another sample. torchao has none for the last two either: the relative error is 0.0951 for forward operands, 0.0987
# for operands and gradients quantized with EDEN, and 0.153 with stochastic rounding.
SQNR_FLOORS = {
    "fp8_block": (28, 25, 25),
    "mxfp8": (27, 25, 24),
    "mxfp4": (15.2, 15.2, 15.2),
    "nvfp4": (15, 14, 12),
    "quartet2": (16.9, 14.9, 14.9),  # 2 · 0.0951²; 0.0951² + 2 · 0.0987²
    "tetrajet_v2": (16.9, 12, 12),  # 2 · 0.0951²; 0.0951² + 2 · 0.153²
}


# Mean of n stochastic roundings with ulp u deviates from x by at most 5 standard deviations, each u / 2 / sqrt(n).
def stochastic_mean_bound(ulp: float, n: int) -> float:
    return 5 * ulp / 2 / n**0.5


# The published distances are from one run of a random model, printed to three digits; the tolerance is 15 %. Two of our
# seeds differ by up to 14 % in the gradients of int8, which rounds stochastically, and by up to 8 % otherwise.
BAND_RTOL = 0.15

# compressed-tensors divides scales by the stored g = fl(1 / o), but training multiplies by o. The error of 1 / g is
# half an ulp; the quotient and the product with o add half an ulp each, and so do their products with an element.
RECIPROCAL = 5 * 2.0**-24
# A quotient rounds by half an ulp, a product with a reciprocal by two halves; the other values round by a half each.
LAST_BITS = 4 * 2.0**-24

# An integer matmul is exact; its two scales (one division each) and the two products with them round once each.
INTEGER_MATMUL_NULP = 4

# A float32 sum of K products of numbers of about 1 to 10 in another order, K <= 64: at most K eps of its largest term.
SMALL_SUM_RTOL = 64 * FLOAT32_EPS
SMALL_SUM_ATOL = 64 * FLOAT32_EPS * 10
# Training, float32: n terms added in another order differ by at most (n − 1) · eps / 2 of the sum of magnitudes. The
# longest sum in the tiny model's loss and gradient is over its 8 · 32 tokens, n = 256: 255 · 2⁻²⁴ = 1.5e-5. Loss and
# gradient norm contain a few such sums, with errors of different signs. Three steps, doubled: 1e-4.
TRAIN_SUMMATION_ORDER = 1e-4

# Twins: native against AQT and Qwix on a two-layer model, relative to the largest output. The first layer's qvalues are
# the same; a last bit of its float output can push an activation over a rounding boundary of the second layer, which
# moves the output by one step of that element (2^-8 of the channel's largest value in int8, 2^-4 of the value in e4m3)
# times one weight of 32: less than the step divided by 8.
TWIN_OUTPUT = {"int8": 2.0**-11, "fp8_full": 2.0**-7, "fp8_e4m3": 2.0**-7, "aqt_fp8": 2.0**-7}
# Gradients, relative norm. int8 rounds its gradient stochastically, with different noise in the two runs. They differ
# by sqrt(2) of one run's error, which is 1/sqrt(6) of a step of 1/127 of the largest in 16 to 24 terms: about 2 %. The
# other strings round to nearest and differ if a rounding boundary is crossed; aqt_fp8 also differs by its bfloat16
# accumulator, 2^-8 a layer.
TWIN_GRADIENT = {"int8": 0.03, "fp8_full": 0.01, "fp8_e4m3": 0.01, "aqt_fp8": 0.01}

# SQNR in dB of n elements summed in float32 against the same sum in float64: each sum of n squares is off by at most
# (n + 1) · eps, and 10 · log10(1 + 2 (n + 1) eps) = 8.7 (n + 1) eps; n <= 4096 here.
SQNR_ATOL_DB = 8.7 * 4097 * FLOAT32_EPS
# An amax of several uses is rounded up to a bin with three mantissa bits: by at most one eighth.
BIN_RTOL = 0.125
# Statistics of one tensor in two programs that add in a different order: a few of some hundred elements can round to
# the other neighbour, which changes SQNR, the amax of the next layer and the shares by well under 1 %.
REROUNDED_RTOL = 1e-2
# A contraction on a mesh against one device, relative norm. If both quantize with the same scales, only the order of
# sums differs: 32 products or fewer, in float32, and a bfloat16 accumulator rounds once more on each device (2^-8
# each).
#
# Inside shard_map, a per-channel scale is the scale of a device's own part. Both results are then quantizations of the
# same numbers with different errors. The error is that of a gradient element relative to the largest of its channel,
# for the numbers here (normal, 8 to 32 in a channel, largest about 2 standard deviations). int8: 1/127 of 2.5 over
# sqrt(12), 0.6 % to nearest and sqrt(2) times as much stochastic. e4m3: 2^-4 over sqrt(12), 1.8 %. The difference of
# two errors is sqrt(2) of one, two operands add another sqrt(2), doubled: 4 and 7.5 %.
_LOCAL_SCALE = dict.fromkeys(("int8", "int8 stochastic", "int8 shards"), 0.04)
_LOCAL_SCALE |= {"fp8_block": 0.075}


def sharded_contraction_bound(case: str, what: str) -> float:
    kind, rest = case.split(" ", 1)
    recipe, _, place = rest.rpartition(" ")
    if place in ("experts", "gathered") and what == "out":  # each row and expert has separate scales
        return 32 * FLOAT32_EPS
    if kind == "manual" and recipe in _LOCAL_SCALE:
        return _LOCAL_SCALE[recipe]
    return 2 * BFLOAT16_EPS if recipe.startswith("aqt_fp8") else 32 * FLOAT32_EPS


# One quantized step on a mesh against one device from the same state. A last bit can push an operand over a rounding
# boundary. The forward pass has 2 layers · 256 tokens · 4 · 64 operands, 2^17. Their sums of 64 walk by sqrt(64) ·
# 2^-24 = 2^-21: in int8, with 127 steps up to the largest, 2^17 · 2^-21 · 127 = 8 cross in a step; in e4m3, with up to
# 2^4 steps to a value, 1. An operand that crosses moves by a step: 2^-7 of the largest of its row in int8, 2^-3 of
# itself in e4m3. The largest is at most 4 times the row's root mean square and the norm of 64 is 8 of those, so the row
# moves by 2^-8 and 2^-4 of itself, and so do the logits of its token, which stay within ±6 here (the first loss is log
# 320 = 5.8): its loss by twice 6 times that, the mean of 256 by 1.8e-4 and 2.9e-3. Eight with random signs make sqrt(8)
# of one; five standard deviations of that are 2.6e-3.
MESH_REROUNDED_LOSS = {"int8": 2.6e-3, "fp8": 2.9e-3}
# Gradients and amaxes. e5m2: a gradient that crosses moves by at most 2^-2 of itself, so that were all to cross, a sum
# of them would move by 2^-2 of its magnitudes. int8: noise is redrawn. A stochastic rounding is off by at most half a
# step in the root mean square, 1/254 of the largest of a channel of 64, whose norm is at least its largest: 8/254 of
# the norm. The gradient passes at most four such roundings (two layers, in each wo and wi or out and query) and the
# weight's own; independent ones add in squares, and two draws differ by sqrt(2): sqrt(10) · 8/254 = 0.1.
MESH_REROUNDED = {"int8": 0.1, "fp8": 2.0**-2}

# Logits of tokens through an unquantized cache against the whole text at once, share of the largest logit: the same
# sums in another order. Of K = 64 products each, some 14 in a row (two layers of 7), errors of 2^-24 that walk: in
# float32 14 · sqrt(64) · 2^-24 = 7e-6, doubled. In int8 and fp8 a last bit can push an operand over a rounding
# boundary, which moves it by 1/127 of its row's largest or 2^-3 of itself, in a sum of 32 or more.
CACHED_LOGITS = {"": 1.4e-5, "int8": 2.0**-7, "fp8": 2.0**-4}

# Bytes that a quantized checkpoint takes beside those of its arrays. Each array has a .zarray (170 bytes), its place in
# orbax's three tables (_METADATA 200, _sharding 110, array_metadatas 140), and in jaxquant.json a row of leaves (250
# for the two arrays of a QTensor, more for one of its own) and two of files (150 each): below 1200, and seven times its
# path. Orbax's other files and the rest of jaxquant.json are below 2 KB. Seen: 7.3 KB for 6 arrays, 302 KB for 300.
CHECKPOINT_FIXED_BYTES = 2048
CHECKPOINT_ARRAY_BYTES = 1200


def checkpoint_overhead(paths: list[str]) -> int:
    """Bound the bytes that a checkpoint of arrays with these paths needs in addition to the arrays."""
    return CHECKPOINT_FIXED_BYTES + sum(CHECKPOINT_ARRAY_BYTES + 7 * len(path) for path in paths)


def reading_bytes(part: int, chunk: int) -> int:
    """Bound the memory for reading an array in parts: the current and the next part, four chunks, and 8 MiB.

    The 8 MiB are for Python, JAX and the allocator, which returns freed pages later.
    """
    return part + 4 * chunk + 8 * 2**20


# The table of `train evaluate` gives losses with four decimals and differences of logits with three digits: half a
# unit of the last is 5e-5, and at most 0.5 %. In float32 the sum of 1,024 tokens' losses walks by sqrt(1024) · 2^-24 of
# itself, 2e-6, which of a loss below log 320 = 5.8 is 1.1e-5. Logits are below 16, with last bits of 2^-20; 32 of them,
# of a difference of at least 0.3, are 0.01 %.
EVALUATION_LOSS_ATOL = 6.5e-5
EVALUATION_DIFFERENCE_RTOL = 0.0051

# Relative RMSE of tensor formats (recipes, section 5, and the reference tables of ggml's own encoders), printed to
# three digits from 102,400 samples. Errors within a block share its scale, so the spread of such a figure is the spread
# of a few thousand block scales, not of the samples: over four seeds of 131,072 normal samples it is 0.3 % (Q4_0 0.0858
# to 0.0863, Q4_K 0.0712 to 0.0717, Q6_K 0.0177 to 0.0178). Half a unit of the last digit is up to 0.5 %.
CODEC_RMSE = {
    "q4_0": {"normal": 0.0861, "laplace": 0.1077, "uniform": 0.0491},
    "q4_k": {"normal": 0.0715, "laplace": 0.0848, "uniform": 0.0243},
    "q5_k": {"normal": 0.0363, "laplace": 0.0428, "uniform": 0.0121},
    "q6_k": {"normal": 0.0178, "laplace": 0.0218, "uniform": 0.0109},
    "mxfp8": {"normal": 0.0265},
    "mxfp4": {"normal": 0.1154},
    "nvfp4": {"normal": 0.0950},
}
CODEC_RMSE_RTOL = 0.008

# Groups of rows, or a convolution without overlap, against one matmul each, share of the largest result. The quantized
# operands are the same; sums of at most 24 float32 products in another order walk by sqrt(24) · 2^-24, and the product
# with two scales rounds three times more: 4 · eps. Integers are exact and only the scales round. A bfloat16 accumulator
# rounds each side once, by half of its eps.
GROUPED_ATOL = {"float32": 4 * FLOAT32_EPS, "int32": 4 * FLOAT32_EPS, "bfloat16": BFLOAT16_EPS}
# SQNR of groups of rows against that of a dense matmul of each group with other noise: 133 to 333 rows of 160 numbers
# carry the signal, in 1,280 blocks of 16 or more that share a scale, whose squared errors are far apart by sqrt(2) each
# at most. The mean is off by sqrt(2 / 1280), 4.34 times that in dB; two differ by sqrt(2) of it, five standard
# deviations: 1.2 dB.
GROUPED_SQNR_DB = 1.2

# Losses of the gallery on another processor or another jax, relative: the first, and the second, after a step. Sums in
# another order change a last bit of an activation, and one that lies between two quantized numbers is rounded to the
# other: half a step, of 2^-3 in 8-bit floats and 1/7 in int4, in a few of the 16 terms of a sum. Seen between jax 0.10
# and 0.12, of 99 rows: at most 4e-7 in the first, 1.2 % in the second, and 12 % in that of int4 on Qwix, whose
# gradients are of four bits too.
GALLERY_LOSS = 0.02
GALLERY_SECOND_LOSS = 0.25

# Codes of optimizer moments against float64. fp8_coat computes k · log2(x / largest) in float32. The magnitude is at
# most log2(448² / 2) = 16.6 and a sixteenth more, with three absolute rounding errors of up to 2^-24 · 16.6 · 2 each.
# exp2 turns these into a relative error of ln 2 times the sum: 4.2e-6, doubled for the errors of log2 and exp2 on a
# CPU. int8_dynamic divides, multiplies and subtracts 0.1 from a number of at least 0.1: 2^-24 · 10 · 5 at most.
CODE_RTOL = 1e-5
# Updates of an optimizer whose moments are in 8 bits, of gradients between .5 and 1.5, for 2 steps, relative norm. A
# moment is off by half a step of its code: of fp8_coat 2^-4 / k of it, k >= 16.6 / log2 9; of int8_dynamic .45 / 128
# of the largest, which is 9 times the smallest of a second moment; of int8_linear 1 / 254, of 3 times. That is at most
# 3.2 % of the smallest and 1.2 % of the root mean square. It is carried on to the second step, in two moments: 5 %.
MOMENT_RTOL = 0.05

# A float32 scale computed again from decoded values differs by a few units in the last place, 2^-23: of the decoded
# amax, of the product with 1 / max, and of an outer scale. No element lies that close to the middle of two others.
SCALE_AGAIN = 1e-6
