"""What an adapter costs: the linear layers of a block and what follows them, but for attention, with LoRA and without.

    python benchmarks/block.py --output benchmarks/results/h200/block.json

In a CUDA graph over several blocks, so that no weight is in the cache. Needs a GPU, vLLM and humming-kernels.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from linear import COLD, _layer, _random
from torch import Tensor

from qerl_pl import decoding
from qerl_pl.bench.gpu_time import captured, milliseconds
from qerl_pl.bench.results import Results, names, numbers
from qerl_pl.engine.vllm_adapter import AdapterMethod, Rotary, SwiGLU
from qerl_pl.random_model import SHAPES

HEAD, POSITIONS = 128, 4096
Block = Callable[[Tensor, Tensor], Tensor]


def block(shape: dict[str, Any], rank: int, seed: int, kernel: Any) -> Block:
    """Of random weights: (x [N, H], positions [N]) -> [N, H]; ``rank`` 0 is without LoRA; ``kernel`` an Nvfp4Kernel."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads = HEAD * shape["num_key_value_heads"]
    widths = {"qkv": (hidden, heads, heads), "o": (hidden,), "gate_up": (inner, inner), "down": (hidden,)}
    layers: dict[str, Any] = {}
    methods: dict[str, Any] = {}
    for i, (name, parts) in enumerate(widths.items()):
        inputs = inner if name == "down" else hidden
        _, layers[name] = _layer(_random(sum(parts), inputs, 4 * seed + i), kernel)
        methods[name] = SimpleNamespace(apply=kernel.apply_weights)
        if rank:
            a = (torch.randn(len(parts) * rank, inputs, device="cuda") / inputs**0.5).bfloat16()
            b = torch.randn(sum(parts), rank, device="cuda").bfloat16()
            methods[name] = AdapterMethod(methods[name], a, b, parts, True)
    kernels = CompilationConfig(custom_ops=["all"])  # as in the engine, which compiles nothing
    with set_current_vllm_config(VllmConfig(compilation_config=kernels)):
        activation: Any = SiluAndMul()
        rotary: Any = RotaryEmbedding(HEAD, HEAD, POSITIONS, 1e6, True, torch.bfloat16).cuda()
    if rank:
        activation, rotary = SwiGLU(methods["gate_up"]), Rotary(rotary, methods["qkv"])
    norm = torch.ones(hidden, device="cuda")

    def run(x: Tensor, positions: Tensor) -> Tensor:
        def linear(name: str, x: Tensor) -> Tensor:
            y: Tensor = methods[name].apply(layers[name], x)
            return y

        q, k, _ = linear("qkv", x).split(widths["qkv"], -1)
        q, _ = rotary(positions, q, k)
        x = decoding.rms_norm(linear("o", q.contiguous()), None, norm, 1e-6)
        return decoding.rms_norm(linear("down", activation(linear("gate_up", x))), None, norm, 1e-6)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="7B,14B,32B")
    parser.add_argument("--rank", default="0,32")
    parser.add_argument("--tokens", default="1,8,16,64,144,256")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="if this is no git checkout")
    options = parser.parse_args()
    from qerl_pl.engine.vllm_nvfp4 import DENSE_ROWS, Nvfp4Kernel

    results = Results("block", options.output, options.commit)
    kernel = Nvfp4Kernel([n for n in numbers(options.tokens) if n <= DENSE_ROWS])  # compiles for them side by side
    for model in names(options.model):
        shape = SHAPES[model]
        hidden = shape["hidden_size"]
        copies = max(2, COLD // (hidden * (2 * hidden + 3 * shape["intermediate_size"]) * 9 // 16))
        for rank in numbers(options.rank):
            blocks = [block(shape, rank, seed, kernel) for seed in range(copies)]
            for tokens in numbers(options.tokens):
                x = torch.randn(tokens, hidden, device="cuda").bfloat16()
                positions = torch.randint(POSITIONS, (tokens,), device="cuda")
                replay = captured([partial(run, x, positions) for run in blocks * 3])
                times = sorted(1e3 * time / (3 * copies) for time in milliseconds(replay, repeats=5))
                measured = {"microseconds": times[2], "microseconds_min": times[0], "microseconds_max": times[-1]}
                results.add({"model": model, "rank": rank, "tokens": tokens}, measured)
            del blocks
            torch.cuda.empty_cache()
    results.finish()


if __name__ == "__main__":
    main()
