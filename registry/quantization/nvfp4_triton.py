"""NVFP4 in the checkpoint's layout to dense numbers, as one kernel on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _dequantize(packed, scales, divisor, dense, total, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """BLOCK bytes of two codes, low nibble first; eight bytes share a scale. Rows do not matter to either."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(packed + at, mask=at < total, other=0).to(tl.int32)
    code = tl.reshape(tl.join(byte & 0xF, byte >> 4), [2 * BLOCK])
    # The three low bits of a code, put at FP16's lowest exponent and highest mantissa bits, are its value times 2^-14;
    # an E4M3 number shifted by seven is its value times 2^-8.
    value = (((code & 7) << 9) | ((code & 8) << 12)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    block = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    scale = tl.load(scales + block, mask=block < total // 8, other=0).to(tl.int32)
    scale = (((scale & 0x7F) << 7) | ((scale & 0x80) << 8)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    step = tl.div_rn(scale * 256.0, tl.load(divisor))
    value = tl.reshape(tl.reshape(value, [BLOCK // 8, 16]) * step[:, None], [2 * BLOCK])
    out = tl.program_id(0).to(tl.int64) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    tl.store(dense + out, value.to(dense.dtype.element_ty), mask=out < 2 * total)


def dequantize(packed: Tensor, scales: Tensor, divisor: Tensor, dtype: torch.dtype) -> Tensor:
    """packed uint8 [out, in / 2], scales E4M3 [out, in / 16], divisor FP32 [1] -> [out, in]."""
    rows, half = packed.shape
    dense = torch.empty(rows, 2 * half, dtype=dtype, device=packed.device)
    block = 1024
    _dequantize[(triton.cdiv(rows * half, block),)](
        packed.contiguous(), scales.contiguous().view(torch.uint8), divisor, dense, rows * half, BLOCK=block
    )
    return dense
