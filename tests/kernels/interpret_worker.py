"""Run every case of block_matmul in the interpreter, in a separate process with warpgroup threads; print failures."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant.kernels.block_matmul import cases, gpu, reference
from tests import numerics


def arguments(case, is_exact):
    """Return small integers and powers of two, whose sums are exact, or normal numbers with special values."""
    generator = np.random.default_rng(0)
    made = []
    for shape, dtype in case.shapes:
        if dtype == "int32":
            made.append(jnp.asarray(case.groups, dtype))
        elif dtype == "float32":
            scale = 2.0 ** generator.integers(-3, 4, shape)
            made.append(jnp.asarray(scale if is_exact else scale * generator.uniform(0.5, 1, shape), dtype))
        else:
            x = generator.integers(-3, 4, shape) if is_exact else 20 * generator.normal(size=shape)
            made.append(jnp.asarray(x, "float32").astype(dtype))
    if not is_exact:
        # Zeros and non-finite values (e5m2: infinities, e4m3: NaN), also in rows without a group.
        made[0] = made[0].at[..., -1, :].set(0).at[..., case.sizes[1] // 2, 3].set(np.inf)
        made[0] = made[0].at[-1, 0].set(np.inf) if case.form == "grouped" else made[0]
        made[2] = made[2].at[..., 0, 0].set(0)
    return made


def check(case):
    """Return the error of a case, or None if there is no error."""
    exact = arguments(case, True)
    found, expected = (
        getattr(place, case.form)(*exact, out_dtype=case.out_dtype, **more)
        for place, more in ((gpu, {"interpret": True}), (reference, {}))
    )
    if found.dtype != expected.dtype or found.tobytes() != expected.tobytes():
        return "differs from its reference"
    given = arguments(case, False)
    found = np.asarray(getattr(gpu, case.form)(*given, out_dtype="float32", interpret=True), np.float64)
    expected = np.asarray(getattr(reference, case.form)(*given, out_dtype="float32"), np.float64)
    magnitudes = [jnp.nan_to_num(jnp.abs(x.astype("float32")), posinf=0).astype(x.dtype) for x in given[:4]]
    size = np.asarray(getattr(reference, case.form)(*magnitudes, *given[4:], out_dtype="float32"), np.float64)
    is_finite = np.isfinite(expected)
    if not np.array_equal(is_finite, np.isfinite(found)) or is_finite.all():
        return "is not finite elsewhere than its reference"
    if not np.array_equal(expected[~is_finite], found[~is_finite], equal_nan=True):
        return "has other infinities than its reference"
    bound = numerics.block_bound(case.sizes[3], size)
    worst = np.max(np.abs(found[is_finite] - expected[is_finite]) - bound[is_finite], initial=0)
    return f"is {worst} beyond its bound" if worst > 0 else None


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    for each in cases.CASES:
        print(each, check(each) or "is right", flush=True)
