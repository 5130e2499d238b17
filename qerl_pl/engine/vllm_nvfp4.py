"""NVFP4 linear layers of vLLM on a GPU: Humming's kernels for few tokens, dense products for many; one set of tensors.

vLLM up to 0.31 takes Marlin on GPUs without FP4 units, which needs more than twice the time of a dense BF16 product
from 256 tokens on. Humming, which recent releases of vLLM depend on and 0.32 takes on Hopper, stores weights alike.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from qerl_pl import decode_linear
from qerl_pl.checkpoint import FUSED
from qerl_pl.marlin import TILE_OUT, TiledWeight
from qerl_pl.memory import Shape
from registry.quantization import QuantFormat

DENSE_ROWS = 1024
"""From more tokens than these a weight is made dense first: one pass over it that many products pay for."""
BUCKETS = (16, 32, 64, 128, 256, 512, DENSE_ROWS)
"""Numbers of tokens up to which one compiled kernel serves, beside those of CUDA graphs: a kernel made for 256 computes
as much for 144.
"""
_SCHEMA = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "type": "float",
    "num_bits": 4,
    "strategy": "group",
    "group_size": 16,
}


def unusable(config: Mapping[str, Any]) -> str | None:
    """Why a model with this ``config.json`` cannot be computed here, or None."""
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"ours were tried on GPUs of compute capability 9.0 only, this one has {major}.{minor}"
    shapes = Shape.read(config).projections
    for group in FUSED:
        parts, inputs = [shapes[name][0] for name in group], shapes[group[0]][1]
        if sum(parts) % 128 or any(part % TILE_OUT for part in parts) or inputs % 64:
            return (
                f"{', '.join(group)} have {' + '.join(map(str, parts))} outputs of {inputs} inputs; together they must "
                f"be a multiple of 128, each of {TILE_OUT}, and the inputs of 64"
            )
    try:
        import humming.kernel.humming
        import humming.layer
        import humming.transform
        import humming.tune  # noqa: F401

        decode_linear.compiled((major, minor))
    except Exception as error:  # both compile when they are first used
        return f"humming-kernels 0.1.17 or later and a CUDA toolkit of PyTorch's release are needed ({error})"
    return None


class Nvfp4Kernel:
    """A kernel of vLLM's scheme for NVFP4: weights are transformed once, then a layer is computed from them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """``sizes``: numbers of tokens in CUDA graphs."""
        self._wanted = {-(-size // 16) * 16 for size in sizes if size > decode_linear.TOKENS}
        self._buckets = sorted({*BUCKETS, *self._wanted})
        self._pool = ThreadPoolExecutor(8)
        self._known: set[tuple[str, str]] = set()
        self._compiling: dict[tuple[str, str], Future[Any]] = {}

    def input_quant_key(self) -> None:
        return None

    def transform(self, layer: Any, quantization: QuantFormat) -> None:
        """Replace the checkpoint's tensors of a fused layer by Humming's.

        Raises ValueError if what is read back from them is not the checkpoint's weight.
        """
        from humming.layer import HummingLayer

        rows, columns = layer.output_size_per_partition, layer.input_size_per_partition
        stored = {
            "weight_packed": layer.weight_packed.data,
            "weight_scale": layer.weight_scale.data,
            "weight_global_scale": layer.weight_global_scale.data[:1],
        }
        bias = getattr(layer, "bias", None)
        with torch.device(stored["weight_packed"].device):
            humming = HummingLayer(
                shape_n=rows,
                shape_k=columns,
                weight_config=dict(_SCHEMA),
                has_bias=bias is not None,
                torch_dtype=torch.bfloat16,
            )
            humming.load_from_tensors(stored | ({} if bias is None else {"bias": bias.data}))
            humming.transform()
        for name in stored:
            delattr(layer, name)
        scale = float(humming.weight_scale_2)
        layer.humming, layer.humming_scale = humming, TiledWeight.global_scale(scale, "humming")
        _check(layer, quantization, stored)
        layer.humming_tuning = self._tuning(humming)

        arrived = torch.zeros(1, dtype=torch.int32, device=humming.weight.device)

        def few_tokens(x: Tensor, bias: Tensor | None, a: Tensor) -> tuple[Tensor, Tensor] | None:
            """x [N, in] times the weight, in shares, and x aᵀ (decode_linear.py); None for more tokens."""
            if len(x) > decode_linear.TOKENS:
                return None
            packed, scales = humming.weight, humming.weight_scale
            return decode_linear.decode_linear(x.contiguous(), packed, scales, scale, bias, a, arrived)

        layer.few_tokens = few_tokens

    def _tuning(self, humming: Any) -> dict[int, str]:
        """Humming's settings by the number of tokens up to which they serve.

        It would choose from dozens of kernels for a layer, each to be compiled on every new machine for seconds. Those
        that CUDA graphs need are compiled beside whatever else is loaded, the others when they are first used.
        """
        from humming.kernel.humming import HummingKernel as Compiled
        from humming.tune import get_heuristics_config

        config, device = humming.humming_config, humming.weight.device
        tuning = {}
        for bucket in self._buckets:
            settings = get_heuristics_config(config, shape_m=bucket, device=device)
            tuning[bucket] = json.dumps([[0, 1 << 30, settings]])
            job = config.to_str(), tuning[bucket]
            if bucket in self._wanted and job not in self._known:
                self._known.add(job)
                self._compiling[job] = self._pool.submit(Compiled.prepare_kernels, job[0], None, job[1], device)
        return tuning

    def bucket(self, rows: int) -> int:
        """Which of the compiled kernels computes so many tokens."""
        return next(bucket for bucket in self._buckets if rows <= bucket)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in] -> [..., out]; ``bias`` is the layer's own, which Humming holds too."""
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) > DENSE_ROWS:
            y = torch.empty(len(rows), layer.output_size_per_partition, dtype=x.dtype, device=x.device)
            if bias is not None:
                y.copy_(bias)
            for weight in weights(layer, layer.output_partition_sizes):
                part = y[:, weight.first : weight.first + weight.width]
                part.addmm_(rows, weight.dense(x.dtype).T, beta=float(bias is not None), alpha=weight.scale)
        else:
            for job in list(self._compiling):
                self._compiling.pop(job).result()
            y = layer.humming(rows, tuning_config=layer.humming_tuning[self.bucket(len(rows))])
        return y.view(*x.shape[:-1], -1)


def weights(layer: Any, sizes: list[int]) -> list[TiledWeight]:
    """The parts of a layer that :class:`Nvfp4Kernel` transformed, as the trainer reads them."""
    packed, scales = layer.humming.weight.detach(), layer.humming.weight_scale.detach()
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        TiledWeight(packed, scales, layer.humming_scale, first, size, "humming")
        for first, size in zip(starts, sizes, strict=True)
    ]


def _check(layer: Any, quantization: QuantFormat, stored: Mapping[str, Tensor]) -> None:
    """Some outputs of the layer: another release of Humming's may store them otherwise."""
    part = {name: tensor[: 4 * TILE_OUT] for name, tensor in stored.items()}
    want = quantization.dequantize(part, torch.float32)
    [weight] = weights(layer, [len(want)])
    if not torch.allclose(weight.dense(torch.float32) * weight.scale, want, rtol=1e-6, atol=0):
        import humming

        raise ValueError(
            f"humming-kernels {getattr(humming, '__version__', '?')} stores NVFP4 weights in a layout that is not "
            "known here; set data.engine.kernels: false, or install the release of requirements/cuda.lock"
        )
