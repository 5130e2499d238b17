"""NVFP4 weights in the layout that vLLM's kernels, Marlin's and Humming's, sample from, read back as dense matrices
(Triton).

The trainer computes from the engine's own tensors, so that the 4-bit base exists once. A weight [out, in] is stored as
tiles of 16 inputs × 64 outputs, 128 words of 32 bits each. Word 4·(4·i + q) + j (i < 8, q < 4, j < 4) holds eight
codes; the one at bits 4·(4·a + 2·b + c) (a, b, c < 2) belongs to input 8·c + 2·q + a and output 16·j + 8·b + i of the
tile. The scale of output 16·(2·u + v) + 8·b + i is a byte of its row:

- Humming: byte 8·i + 4·u + 2·v + b, the checkpoint's E4M3; the global scale is the reciprocal of the checkpoint's.
- Marlin: byte 8·i + 4·u + 2·b + v, E4M3 times 2^7 as an FP16 number without its sign and its seven lowest bits; the
  global scale holds a further 2^119.

With a sign and seven zeros a byte of either is an FP16 number: Humming's the scale times 2^-8, Marlin's times 2^7.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_IN, TILE_OUT = 16, 64
_GLOBAL = {"marlin": 2.0 ** (16 - 119), "humming": 2.0**31}


@triton.jit  # type: ignore[untyped-decorator]
def _dequantize(  # type: ignore[no-untyped-def]
    packed, scales, dense, columns, first, width, TILES: tl.constexpr, WIDE: tl.constexpr, HUMMING: tl.constexpr
):
    """TILES tiles along the inputs by WIDE along the outputs, times 2^-16 (Marlin) or 2^-31.

    No number is converted: a code's bits, put where FP32 has its sign, lowest exponent and highest mantissa bits, are
    its value times 2^-126, and FP4 · FP8 has so few digits that the upper half of an FP32 is the BF16.
    """
    row = tl.program_id(0) * TILES
    tile = tl.program_id(1) * WIDE
    rows = row + tl.arange(0, TILES)[:, None]
    begin = first // 64 + tile
    words = tl.load(packed + rows * (2 * columns) + begin * 128 + tl.arange(0, WIDE * 128)[None, :])
    left = 28 - 4 * tl.arange(0, 8)  # brings each code to the top of its word
    codes = words[:, :, None] << left[None, None, :]  # [TILES, (tile i q j), (a b c)]
    bits = (codes & -2147483648) | ((codes >> 6) & 0x01C00000)
    bits = tl.reshape(bits, [TILES, WIDE, 8, 4, 4, 2, 2, 2])
    bits = tl.reshape(tl.permute(bits, [0, 7, 3, 5, 1, 4, 6, 2]), [TILES, 16, WIDE * 64])  # (c q a) by (tile j b i)
    scale = tl.load(scales + rows * columns + begin * 64 + tl.arange(0, WIDE * 64)[None, :]).to(tl.int32)
    scale = tl.reshape(scale, [TILES, WIDE, 8, 2, 2, 2])
    scale = tl.permute(scale, [0, 1, 3, 4, 5, 2] if HUMMING else [0, 1, 3, 5, 4, 2])  # to (u v b i)
    scale = tl.reshape(scale << 7, [TILES, 1, WIDE * 64]).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    value = tl.reshape(
        bits.to(tl.float32, bitcast=True) * (scale * 10141204801825835211973625643008.0), [TILES * 16, WIDE * 64]
    )
    if dense.dtype.element_ty == tl.bfloat16:
        value = (value.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    inputs = row * 16 + tl.arange(0, TILES * 16)[:, None]
    outputs = tile * 64 + tl.arange(0, WIDE * 64)[None, :]
    tl.store(dense + inputs.to(tl.int64) * width + outputs, value)


@dataclass(frozen=True)
class TiledWeight:
    """Some of the outputs of one packed NVFP4 weight; the tensors are the engine's.

    ``packed`` int32 [in / 16, 2 · all outputs], ``scales`` FP8 [in / 16, all outputs] in the order of ``layout``
    (marlin or humming); this weight is the ``width`` outputs from ``first`` on. Its values are ``scale`` times those of
    :meth:`dense`.
    """

    packed: Tensor
    scales: Tensor
    scale: float
    first: int
    width: int
    layout: str = "marlin"

    def __post_init__(self) -> None:
        tiles, columns = self.packed.shape[0], self.packed.shape[1] // 2
        if self.first % TILE_OUT or self.width % TILE_OUT or not 0 <= self.first < self.first + self.width <= columns:
            raise ValueError(
                f"outputs {self.first} to {self.first + self.width} of {columns}: they must begin and end at multiples "
                f"of {TILE_OUT}, where tiles do; set shared_base: false"
            )
        if self.scales.shape != (tiles, columns):
            raise ValueError(f"scales are {list(self.scales.shape)}, expected {[tiles, columns]}")

    @staticmethod
    def global_scale(stored: float, layout: str = "marlin") -> float:
        """The factor of :meth:`dense` from the engine's global scale."""
        return stored * _GLOBAL[layout]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.width, self.packed.shape[0] * TILE_IN

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[out, in] without the factor ``scale``; exact in BF16. A view of memory that the next call overwrites."""
        out_features, in_features = self.shape
        dense = _scratch(out_features * in_features, dtype, self.packed.device).view(in_features, out_features)
        columns, tiles = self.packed.shape[1] // 2, self.packed.shape[0]
        wide = next(n for n in (2, 1) if out_features // TILE_OUT % n == 0)
        grid = (tiles, out_features // TILE_OUT // wide)
        scales = self.scales.view(torch.uint8)
        _dequantize[grid](
            self.packed, scales, dense, columns, self.first, out_features, TILES=1, WIDE=wide,
            HUMMING=self.layout == "humming", num_warps=2,
        )  # fmt: skip
        return dense.T


_buffers: dict[torch.device, Tensor] = {}


def _scratch(numbers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The first ``numbers`` of one buffer a device, which grows to the largest weight. One stream uses it in order."""
    wanted = numbers * dtype.itemsize
    if device not in _buffers or _buffers[device].numel() < wanted:
        _buffers[device] = torch.empty(wanted, dtype=torch.uint8, device=device)
    return _buffers[device][:wanted].view(dtype)
