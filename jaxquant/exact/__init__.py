"""Float functions whose result for a row has the same bits in every program: any batch, padding, chunk or mesh.

A compiler may add floats in any order, and it may join a product and the sum that follows it to one rounding. Both
depend on the shapes of a program, so a trainer and a sampler compute different bits. The functions here avoid both:
sums are integer sums, which need no order, and products are held apart from sums. docs/guide/agreement.md lists the
cause that each function removes.
"""

from jaxquant.exact.arithmetic import exp, hold, log, round_to, rsqrt, sum
from jaxquant.exact.attention import attend
from jaxquant.exact.digits import Digits, contract, dot, split
from jaxquant.exact.layers import rms_norm, rotate, sigmoid, soft_cap, softmax, token_log_probs

__all__ = [
    "Digits",
    "attend",
    "contract",
    "dot",
    "exp",
    "hold",
    "log",
    "rms_norm",
    "rotate",
    "round_to",
    "rsqrt",
    "sigmoid",
    "soft_cap",
    "softmax",
    "split",
    "sum",
    "token_log_probs",
]
