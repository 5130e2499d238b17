"""The kernel for NVFP4 layers of few tokens, compiled for the CPU. Twin: gpu/test_kernels.py."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from registry.quantization import NVFP4
from tests.reference import dequantize_nvfp4
from tests.test_marlin import pack

HERE = Path(__file__).parent
SOURCE = HERE.parent / "qerl_pl" / "decode_linear.cu"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("kernel") / "kernel.so"
    command = [
        compiler, "-x", "c++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", f'-DKERNEL="{SOURCE}"',
        str(HERE / "cuda_on_cpu.h"), "-o", str(library),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("tokens", "inputs", "columns", "shares", "has_bias"),
    [(1, 80, 16, 1, True), (5, 336, 40, 2, False), (7, 96, 96, 3, True), (8, 48, 8, 1, False), (2, 640, 64, 1, True)],
)
def test_layer_and_adapter(
    compiled: ctypes.CDLL, tokens: int, inputs: int, columns: int, shares: int, has_bias: bool
) -> None:
    """Against float64; products of BF16 numbers are summed in FP32."""
    outputs = 256
    weight = random(outputs, inputs, seed=0) * 0.05
    weight[:3] *= 2e-4  # scales below the normal numbers of E4M3
    stored = NVFP4().quantize([weight])
    packed, scales, scale = pack(stored, "humming")
    x, a = random(tokens, inputs, seed=1).bfloat16(), random(columns, inputs, seed=2).bfloat16()
    bias = random(outputs, seed=3).bfloat16() if has_bias else None
    y = torch.full((shares, tokens, outputs), torch.nan)
    z = torch.full((8, tokens, columns), torch.nan)
    pointers = [None if t is None else t.data_ptr() for t in (x, packed, scales, bias, y, a, z)]
    sizes = [tokens, inputs, outputs, shares, columns, 8]
    compiled.run(
        *(ctypes.c_void_p(p) for p in pointers), *(ctypes.c_int(n) for n in sizes), ctypes.c_float(scale * 2.0**10)
    )
    want = x.double() @ dequantize_nvfp4(stored[0]).double().T
    if bias is not None:
        want += bias.double()
    assert ((y.double().sum(0) - want).norm() / want.norm()) < 1e-6
    small = want[:, :3] - (0 if bias is None else bias[:3].double())
    assert small.abs().max() > 0  # the scales below the normal numbers have their part
    torch.testing.assert_close(y.double().sum(0)[:, :3], want[:, :3], rtol=1e-5, atol=1e-7)
    want = x.double() @ a.double().T
    assert ((z.double().sum(0) - want).norm() / want.norm()) < 1e-6
