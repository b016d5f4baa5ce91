"""Kernels of our own, a folder an op: ``reference`` (the meaning), ``tpu``, ``gpu``, ``cases``, ``tuning``, ``api``.

A kernel is a faster way to compute a piece of an op, behind ``implementation=``, and never a second meaning.
"""

KERNEL_PREFIX = "jaxquant_"
"""How the names of all kernels begin, in traced and in compiled programs."""
CALLS = ("pallas_call", "mpmd_map")
"""Primitives that call a kernel: Pallas's for TPUs, and Mosaic GPU's, which ``custom_vmap_call`` wraps."""
DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
"""Elements of the quantized tensors that kernels read and write."""
