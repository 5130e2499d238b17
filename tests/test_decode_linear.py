"""The kernel for NVFP4 layers of few tokens, compiled for the CPU. Twin: gpu/test_kernels.py."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qerl_pl.decode_linear import FACTOR, deal, decode_linear
from registry.quantization import NVFP4
from tests.reference import dequantize_nvfp4
from tests.test_marlin import pack

HERE = Path(__file__).parent
SOURCE = HERE.parent / "qerl_pl" / "decode_linear.cu"


@pytest.mark.parametrize(
    ("blocks", "tiles", "slots"), [(216, 320, 256), (40, 864, 256), (3, 5, 2), (1, 1, 256), (7, 11, 13)]
)
def test_tiles_are_dealt_evenly(blocks: int, tiles: int, slots: int) -> None:
    """Against the list of all tiles: none has two owners, and no output block more shares than there is room for."""
    units, shares = deal(blocks, tiles, slots)
    owners = [i // units for i in range(blocks * tiles)]
    assert owners[-1] < slots
    assert units <= max(-(-blocks * tiles // slots), 8)
    assert max(len(set(owners[b * tiles : (b + 1) * tiles])) for b in range(blocks)) == shares


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("kernel") / "kernel.so"
    command = [
        compiler, "-x", "c++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", f'-DKERNEL="{SOURCE}"',
        "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error",
        str(HERE / "cuda_on_cpu.h"), "-o", str(library),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("tokens", "inputs", "columns", "slots", "has_bias"),
    [
        (1, 96, 16, 3, True),
        (5, 352, 40, 5, False),
        (7, 192, 96, 2, True),
        (8, 64, 8, 1, False),
        (2, 1184, 64, 4, True),
        (3, 96, 72, 2, False),
        (2, 64, 200, 1, False),
    ],
)
def test_layer_and_adapter(
    compiled: ctypes.CDLL, tokens: int, inputs: int, columns: int, slots: int, has_bias: bool
) -> None:
    """Against float64; products of BF16 numbers are summed in FP32."""
    outputs = 384
    units, shares = deal(outputs // 128, inputs // 16, slots)
    weight = random(outputs, inputs, seed=0) * 0.05
    weight[:3] *= 2e-4  # scales below the normal numbers of E4M3
    stored = NVFP4().quantize([weight])
    packed, scales, scale = pack(stored, "humming")
    x, a = random(tokens, inputs, seed=1).bfloat16(), random(columns, inputs, seed=2).bfloat16()
    bias = random(outputs, seed=3).bfloat16() if has_bias else None
    y = torch.full((shares, tokens, outputs), torch.nan)
    z, arrived = torch.full((9, tokens, columns), torch.nan), torch.zeros(1, dtype=torch.int32)
    pointers = [None if t is None else t.data_ptr() for t in (x, packed, scales, bias, y, a, z, arrived)]
    sizes = [tokens, inputs, outputs, units, shares, columns, 8]
    compiled.run(
        *(ctypes.c_void_p(p) for p in pointers), *(ctypes.c_int(n) for n in sizes), ctypes.c_float(scale * FACTOR)
    )
    want = x.double() @ dequantize_nvfp4(stored[0]).double().T
    if bias is not None:
        want += bias.double()
    assert ((y.double().sum(0) - want).norm() / want.norm()) < 1e-6
    small = want[:, :3] - (0 if bias is None else bias[:3].double())
    assert small.abs().max() > 0  # the scales below the normal numbers have their part
    torch.testing.assert_close(y.double().sum(0)[:, :3], want[:, :3], rtol=1e-5, atol=1e-7)
    want = x.double() @ a.double().T
    assert arrived == 0
    assert ((z[0].double() - want).norm() / want.norm()) < 1e-6


def test_inputs_that_cannot_be_loaded() -> None:
    packed, scales, a = (torch.zeros(shape, dtype=torch.int32) for shape in ((21, 256), (21, 128), (8, 336)))
    with pytest.raises(ValueError, match=r"x \[1, 336\] must have a multiple of 32 inputs"):
        decode_linear(torch.zeros(1, 336).bfloat16(), packed, scales, 1.0, None, a, packed)
    x = torch.zeros(1, 356).bfloat16()[:, 4:]
    assert x.is_contiguous()
    with pytest.raises(ValueError, match="begin at a multiple of 16 bytes"):
        decode_linear(x, packed, scales, 1.0, None, a, packed)
