"""Bandwidth of the kernels that make packed weights dense, as a share of the card's copy bandwidth.

    python benchmarks/dequantize.py --output OUT.json

Bytes are counted once: 4.5 bits a weight read, 16 written. The copy counts bytes read and written.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from qerl_pl.bench.gpu_time import captured, milliseconds
from qerl_pl.bench.machine import describe
from qerl_pl.marlin import TiledWeight
from registry.quantization import NVFP4

SHAPES = {  # (out, in) of the largest layers: gate or up, and down
    "7B": ((18944, 3584), (3584, 18944)),
    "14B": ((13824, 5120), (5120, 13824)),
    "32B": ((27648, 5120), (5120, 27648)),
}
CALLS = 10  # in a CUDA graph


def copy_bandwidth() -> float:
    """TB/s, bytes read and bytes written. By itself: in a CUDA graph the copy is another, slower operation."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / statistics.median(milliseconds(lambda: target.copy_(source), 8, warm_up=2)) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--commit", help="if this is no git checkout")
    options = parser.parse_args()
    copy, rows = copy_bandwidth(), []
    for model, shapes in SHAPES.items():
        for out_features, in_features in shapes:
            count = out_features * in_features
            words = torch.randint(-(2**31), 2**31 - 1, (in_features // 16, 2 * out_features), device="cuda")
            scales = torch.randint(0x70, 0xA0, (in_features // 16, out_features), device="cuda").to(torch.uint8)
            marlin = TiledWeight(words.int(), scales.view(torch.float8_e4m3fn), 1.0, 0, out_features)
            stored = NVFP4().quantize([torch.randn(out_features, in_features, device="cuda")])[0]
            calls: dict[str, Callable[[], object]] = {
                "marlin": lambda weight=marlin: weight.dense(torch.bfloat16),
                "checkpoint": lambda part=stored: NVFP4().dequantize(part, torch.bfloat16),
            }
            for layout, call in calls.items():
                time = statistics.median(milliseconds(captured([call] * CALLS), 5, warm_up=2)) / CALLS
                rate = count * (4.5 / 8 + 2) / time / 1e9
                rows.append({
                    "model": model, "layout": layout, "out": out_features, "in": in_features, "milliseconds": time,
                    "tb_per_s": rate, "share_of_copy": rate / copy,
                })  # fmt: skip
                print(f"{model:>4} {layout:>10} {out_features:>6} x {in_features:<6} {time:.4f} ms  {rate / copy:.0%}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(describe(options.commit) | {"copy_tb_per_s": copy, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
