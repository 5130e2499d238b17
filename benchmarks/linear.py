"""A layer of a decoding step by kernel and number of tokens: vLLM's Marlin, Humming (also with all inputs of an
output in one block, so that its sums are FP32), ours for few tokens, dense BF16.

    python benchmarks/linear.py --output benchmarks/results/h200/linear.json

Time in a CUDA graph over several copies of the weight, so that none is in the cache; relative error: the norm of the
difference from a product in FP32, over the norm of that. Needs a GPU, vLLM and humming-kernels.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from qerl_pl.bench.gpu_time import captured, milliseconds
from qerl_pl.bench.results import Results, choices, numbers
from qerl_pl.decode_linear import TOKENS, decode_linear
from registry.quantization import NVFP4

LAYERS = {  # (out, in)
    "14B qkv": (7168, 5120), "14B o": (5120, 5120), "14B gate, up": (27648, 5120), "14B down": (5120, 13824),
    "7B gate, up": (37888, 3584), "32B gate, up": (55296, 5120),
}  # fmt: skip
COLD = 300_000_000  # bytes of weights that no cache holds
RANK = 32
Call = Callable[[Tensor], object]


def marlin(stored: dict[str, Tensor]) -> Call:
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as fp4

    rows, columns = NVFP4().shape(stored)
    layer: Any = torch.nn.Module()
    layer.output_size_per_partition, layer.input_size_per_partition, layer.params_dtype = rows, columns, torch.bfloat16
    tensors = stored | {"weight_global_scale": (1 / stored["weight_global_scale"]).reshape(())}
    for name, tensor in tensors.items():
        setattr(layer, name.replace("_packed", ""), torch.nn.Parameter(tensor.clone(), requires_grad=False))
    fp4.prepare_fp4_layer_for_marlin(layer)
    workspace = getattr(layer, "workspace", None)  # of older releases
    held = layer.weight, layer.weight_scale, layer.weight_global_scale, workspace, rows, columns
    return lambda x: fp4.apply_fp4_marlin_linear(x, *held)


def humming(stored: dict[str, Tensor]) -> Call:
    """As the engine computes: of more tokens than 1,024 through a dense weight."""
    kernel, layer = _layer(stored)
    return lambda x: kernel.apply_weights(layer, x)


def humming_fp32(stored: dict[str, Tensor]) -> Call:
    """Without ``use_stream_k``, which divides inputs among blocks and adds their shares up in BF16; with its tiles."""
    from humming import tune

    chosen = tune.get_heuristics_config
    with patch.object(tune, "get_heuristics_config", lambda *a, **k: chosen(*a, **k) | {"use_stream_k": False}):
        return humming(stored)


def ours(stored: dict[str, Tensor]) -> Call:
    """With A x of an adapter; in shares that are still to be summed."""
    held, columns = _layer(stored)[1].humming, NVFP4().shape(stored)[1]
    a = torch.randn(RANK, columns, device="cuda").bfloat16()
    arrived, scale = torch.zeros(1, dtype=torch.int32, device="cuda"), 1 / float(stored["weight_global_scale"])
    return lambda x: decode_linear(x, held.weight, held.weight_scale, scale, None, a, arrived)[0]


def dense(stored: dict[str, Tensor]) -> Call:
    weight = NVFP4().dequantize(stored, torch.bfloat16)
    return lambda x: x @ weight.T


def _layer(stored: dict[str, Tensor], kernel: Any = None) -> tuple[Any, Any]:
    from qerl_pl.engine.vllm_nvfp4 import Nvfp4Kernel

    kernel = kernel or Nvfp4Kernel([])
    rows, columns = NVFP4().shape(stored)
    layer: Any = torch.nn.Module()
    layer.output_size_per_partition, layer.input_size_per_partition, layer.bias = rows, columns, None
    layer.output_partition_sizes = [rows]
    for name, tensor in stored.items():
        setattr(layer, name, SimpleNamespace(data=tensor.clone()))
    kernel.transform(layer, NVFP4())
    return kernel, layer


KERNELS = {"marlin": marlin, "humming": humming, "humming-fp32": humming_fp32, "ours": ours, "dense": dense}


def microseconds(calls: list[Call], x: Tensor) -> list[float]:
    replay = captured([partial(call, x) for call in calls])
    return sorted(1e3 * time / len(calls) for time in milliseconds(replay, repeats=5))


def relative_error(y: Any, x: Tensor, stored: dict[str, Tensor]) -> float:
    """Of y [N, out], or [shares, N, out] still to be summed."""
    want = x.float() @ NVFP4().dequantize(stored, torch.float32).T
    y = y.float() if y.dim() == 2 else y.sum(0)
    return ((y - want).norm() / want.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--tokens", default="1,8,16,64,128,256,512,4096")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="if this is no git checkout")
    options = parser.parse_args()
    results = Results("linear", options.output, options.commit)
    for layer, (rows, columns) in LAYERS.items():
        copies = max(4, min(16, COLD // (rows * columns * 9 // 16)))
        weights = [_random(rows, columns, seed) for seed in range(copies)]
        for kernel in choices("kernels", options.kernels, list(KERNELS)):
            calls = [KERNELS[kernel](stored) for stored in weights]
            for tokens in numbers(options.tokens):
                if kernel == "ours" and tokens > TOKENS:
                    continue
                generator = torch.Generator(device="cuda").manual_seed(tokens)
                x = torch.randn(tokens, columns, device="cuda", generator=generator).bfloat16()
                times = microseconds(calls, x)
                measured = {"microseconds": times[2], "microseconds_min": times[0], "microseconds_max": times[-1]}
                measured["relative_error"] = relative_error(calls[0](x), x, weights[0])
                results.add({"model": layer, "variant": kernel, "tokens": tokens}, measured)
            del calls
            torch.cuda.empty_cache()
    results.finish()


def _random(rows: int, columns: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    stored = {}
    for name, (shape, dtype) in NVFP4().layout(rows, columns).items():
        stored[name] = torch.empty(shape, dtype=dtype, device="cuda")
        NVFP4().fill_random(name, stored[name], (rows, columns), 0.02, generator)
    return stored


if __name__ == "__main__":
    main()
