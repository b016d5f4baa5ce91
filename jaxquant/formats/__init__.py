"""Element packings and block formats: the layout of quantized numbers in bytes."""

from jaxquant.formats.codec import Codec as Codec
from jaxquant.formats.encoded import encode_tensor as encode_tensor
from jaxquant.formats.packed_array import PackedArray as PackedArray
from jaxquant.formats.packed_array import fake_quantize as fake_quantize
from jaxquant.formats.packed_array import pack_array as pack_array
from jaxquant.formats.packed_matmul import matmul as matmul
from jaxquant.formats.table import CODECS as CODECS
from jaxquant.formats.table import BlockParameters as BlockParameters
from jaxquant.formats.table import block_parameters as block_parameters
from jaxquant.formats.table import codec as codec
