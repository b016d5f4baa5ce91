"""ggml's K-quant encoders as plain loops with sums one after another, written apart from the package's code."""

from __future__ import annotations

import numpy as np

F = np.float32


def _sum(terms: np.ndarray) -> np.float32:
    return np.add.accumulate(terms, dtype=np.float32)[-1]


def _qkx2(x: np.ndarray, qmax: int, rmin: float, steps: int) -> tuple[np.float32, np.float32]:
    weights = np.sqrt(_sum(x * x) / F(32)) + np.abs(x)
    low, high = min(x.min(), F(0)), x.max()
    if low == high:
        return F(0), -low
    sum_w, sum_x = _sum(weights), _sum(weights * x)
    scale = F(1) / (F(qmax) / (high - low))
    q = np.clip(np.rint((F(qmax) / (high - low)) * (x - low)), 0, qmax).astype(F)
    best = _sum(weights * (scale * q + low - x) ** 2)
    for step in range(steps + 1):
        inverse = F(F(rmin) + F(0.1) * F(step) + F(qmax)) / (high - low)
        q = np.clip(np.rint(inverse * (x - low)), 0, qmax).astype(F)
        sum_q, sum_qq, sum_qx = _sum(weights * q), _sum(weights * q * q), _sum(weights * q * x)
        determinant = sum_w * sum_qq - sum_q * sum_q
        if determinant <= 0:
            continue
        new_scale = (sum_w * sum_qx - sum_x * sum_q) / determinant
        new_low = (sum_qq * sum_x - sum_q * sum_qx) / determinant
        if new_low > 0:
            new_low, new_scale = F(0), sum_qx / sum_qq
        error = _sum(weights * (new_scale * q + new_low - x) ** 2)
        if error < best:
            best, scale, low = error, new_scale, new_low
    return scale, -low


def _affine(x: np.ndarray, qmax: int, rmin: float, steps: int) -> np.ndarray:
    fits = [_qkx2(part, qmax, rmin, steps) for part in x.reshape(8, 32)]
    scales, lows = (np.array(values, F) for values in zip(*fits, strict=True))
    step, offset = (F(values.max()) / F(63) for values in (scales, lows))
    codes = [
        np.minimum(63, np.rint(F(63) / v.max() * v)).astype(int) if v.max() else v.astype(int) for v in (scales, lows)
    ]
    header = np.zeros(12, int)
    for j in range(8):
        scale, low = codes[0][j], codes[1][j]
        if j < 4:
            header[j] |= scale
            header[j + 4] |= low
        else:
            header[j + 4] |= scale & 15 | (low & 15) << 4
            header[j - 4] |= scale >> 4 << 6
            header[j] |= low >> 4 << 6
    halves = np.array([step, offset], np.float16)
    high, quants = np.zeros(32, int), np.zeros(128, int)
    for j in range(8):
        d, m = F(halves[0]) * F(codes[0][j]), F(halves[1]) * F(codes[1][j])
        if d == 0:
            continue
        q = np.clip(np.rint((x[32 * j : 32 * j + 32] + m) / d), 0, qmax).astype(int)
        quants[32 * (j // 2) : 32 * (j // 2) + 32] |= (q & 15) << 4 * (j % 2)
        high |= q >> 4 << j
    body = [halves.view(np.uint8), header] + ([high] if qmax == 31 else []) + [quants]
    return np.concatenate(body).astype(np.uint8)


def q4_k(x: np.ndarray) -> np.ndarray:
    return _affine(x, 15, -1.0, 20)


def q5_k(x: np.ndarray) -> np.ndarray:
    return _affine(x, 31, -0.5, 15)


def _qx(x: np.ndarray) -> np.float32:
    largest = x[np.abs(x).argmax()]
    if abs(largest) < 1e-15:
        return F(0)
    weights = x * x

    def sums(trial: float) -> tuple[np.float32, np.float32]:
        q = np.clip(np.rint(-(F(32) + F(0.1) * F(trial)) / largest * x), -32, 31).astype(F)
        return _sum(weights * x * q), _sum(weights * q * q)

    sum_xq, sum_qq = sums(0)
    scale = sum_xq / sum_qq if sum_qq else F(0)
    best = scale * sum_xq
    for trial in [*range(-9, 0), *range(1, 10)]:
        sum_xq, sum_qq = sums(trial)
        if sum_qq > 0 and sum_xq * sum_xq > best * sum_qq:
            scale = sum_xq / sum_qq
            best = scale * sum_xq
    return scale


def q6_k(x: np.ndarray) -> np.ndarray:
    scales = np.array([_qx(part) for part in x.reshape(16, 16)], F)
    largest = scales[np.abs(scales).argmax()]
    if abs(largest) < 1e-15:
        return np.zeros(210, np.uint8)
    inverse = F(-128) / largest
    step = np.array([F(1) / inverse], np.float16)
    codes = np.minimum(127, np.rint(inverse * scales)).astype(np.int8)
    q = np.zeros(256, int)
    for j in range(16):
        d = F(step[0]) * F(codes[j])
        q[16 * j : 16 * j + 16] = (np.clip(np.rint(x[16 * j : 16 * j + 16] / d), -32, 31) if d else 0) + np.full(16, 32)
    low, high = np.zeros(128, int), np.zeros(64, int)
    for half in range(2):
        for group in range(4):
            part = q[128 * half + 32 * group :][:32]
            low[64 * half + 32 * (group % 2) :][:32] |= (part & 15) << 4 * (group // 2)
            high[32 * half :][:32] |= part >> 4 << 2 * group
    return np.concatenate([low.astype(np.uint8), high.astype(np.uint8), codes.view(np.uint8), step.view(np.uint8)])
