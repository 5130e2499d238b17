"""NVFP4 linear layers of a decoding step of few tokens: a CUDA kernel, compiled when it is first used (NVRTC).

A step of few tokens waits for the weights. The kernel reads them from Humming's tensors in the order in which they lie,
16 bytes a lane, straight into the operands of the matrix units; sums over the inputs are left in shares, which the
kernel that adds the adapter (decoding.py) sums up. A x of the adapter is computed in the same launch.
"""

import ctypes
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

TOKENS = 8  # the most
OUTPUTS = 128  # of a block
Z_SHARES = 8
SLOTS = 264  # blocks that run at the same time on a card of 132 multiprocessors
LEAST = 8  # tiles of 16 inputs that are worth a block
FACTOR = 2.0**10  # codes and scales are computed with as numbers times 2^-126 and 2^116


@cache
def deal(blocks: int, tiles: int, slots: int = SLOTS - Z_SHARES) -> tuple[int, int]:
    """(tiles of a slot, the most slots that share a block of outputs), of ``blocks`` times ``tiles`` tiles in a row."""
    units = max(-(-blocks * tiles // slots), min(LEAST, tiles))
    return units, max((b * tiles + tiles - 1) // units - b * tiles // units for b in range(blocks)) + 1


def decode_linear(
    x: Tensor, packed: Tensor, scales: Tensor, scale: float, bias: Tensor | None, a: Tensor, arrived: Tensor
) -> tuple[Tensor, Tensor]:
    """(y [shares, N, out], z [N, columns]) in FP32; y is still to be summed over the first dimension.

    y is x [N, in] times the weight, plus ``bias`` [out]: ``packed`` int32 [in / 16, 2 · out] and ``scales`` FP8
    [in / 16, out] in Humming's layout (marlin.py), ``scale`` the reciprocal of the checkpoint's global scale. z is x aᵀ
    for the adapter's ``a`` [columns, in]. All BF16; N at most 8, and the inputs a multiple of 32. ``arrived`` is an
    int32 0, which calls that may run at the same time do not share; it is 0 again afterwards.
    """
    (tokens, inputs), columns, outputs = x.shape, a.shape[0], scales.shape[1]
    if inputs % 32 or x.data_ptr() % 16:
        raise ValueError(
            f"x [{tokens}, {inputs}] must have a multiple of 32 inputs and begin at a multiple of 16 bytes"
        )
    blocks, tiles = outputs // OUTPUTS, inputs // 16
    units, shares = deal(blocks, tiles)
    y = torch.empty(shares, tokens, outputs, dtype=torch.float32, device=x.device)
    z = torch.empty(1 + Z_SHARES, tokens, columns, dtype=torch.float32, device=x.device)
    _launch(
        compiled(torch.cuda.get_device_capability(x.device)),
        -(-blocks * tiles // units) + Z_SHARES,
        [x, packed, scales, bias, y, a, z, arrived],
        [tokens, inputs, outputs, units, shares, columns, Z_SHARES],
        scale * FACTOR,
    )
    return y, z[0]


@cache
def compiled(capability: tuple[int, int]) -> Any:
    """The kernel for GPUs of this compute capability. RuntimeError or ImportError if it cannot be compiled here."""
    from cuda.bindings import driver, nvrtc

    torch.cuda.synchronize()  # the driver loads modules into a context, and so far there may be none
    source = (files("qerl_pl") / "decode_linear.cu").read_bytes()
    program = _check(nvrtc.nvrtcCreateProgram(source, b"decode_linear.cu", 0, [], []))
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode(), b"--std=c++17"]
    [result] = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"decode_linear.cu was not compiled: {log.decode()}")
    binary = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
    nvrtc.nvrtcGetCUBIN(program, binary)
    module = _check(driver.cuModuleLoadData(binary))
    return _check(driver.cuModuleGetFunction(module, b"decode_linear"))


def _check(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status):
        raise RuntimeError(f"CUDA: {status}")
    return values[0] if values else None


def _launch(kernel: Any, blocks: int, tensors: list[Tensor | None], sizes: list[int], factor: float) -> None:
    """On the current stream, and already while the kernel before it runs: weights can be read meanwhile."""
    from cuda.bindings import driver

    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    types = [ctypes.c_void_p] * len(pointers) + [ctypes.c_int] * len(sizes) + [ctypes.c_float]
    early = driver.CUlaunchAttribute()
    early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 256, 1, 1
    config.hStream = torch.cuda.current_stream().cuda_stream
    config.attrs, config.numAttrs = [early], 1
    _check(driver.cuLaunchKernelEx(config, kernel, ((*pointers, *sizes, factor), tuple(types)), 0))
