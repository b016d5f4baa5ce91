"""Our kernels, one folder for each op: ``reference`` (the semantics), ``tpu``, ``gpu``, ``cases``, ``tuning``, ``api``.

A kernel computes part of an op faster and never changes its semantics; ``implementation=`` selects it.
"""

KERNEL_PREFIX = "jaxquant_"
"""Prefix of the names of all kernels, in traced and in compiled programs."""
CALLS = ("pallas_call", "mpmd_map")
"""Primitives that call a kernel: Pallas for TPUs, and Mosaic GPU (inside ``custom_vmap_call``)."""
DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
"""Element types of the quantized tensors that kernels read and write."""
