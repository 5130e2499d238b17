"""One LoRA adapter inside vLLM's linear layers, in buffers that are written in place.

RL samples with one adapter, the same for every request. vLLM's own LoRA chooses one of several for each token; here a
fused layer (q, k, v) has one A and one B, A x runs beside the layer, and what follows q, k, v or gate, up adds B (A x).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from qerl_pl.checkpoint import PROJECTIONS

ATTENTIONS = ("Qwen2Attention", "LlamaAttention")
"""vLLM's classes that do nothing with q, k and v before they rotate q and k."""

Slots = dict[str, tuple[Tensor, Tensor]]
"""Hugging Face's name of a module -> A [rank, in] and B [out, rank] (times alpha / rank), which are views."""


class AdapterMethod:
    """What computes a linear layer of vLLM's, its ``quant_method``, with B A x added.

    ``a`` [parts · rank, in] holds the parts' A, ``b`` [out, rank] their B, one below the other.
    """

    def __init__(self, method: Any, a: Tensor, b: Tensor, widths: Sequence[int], kernels: bool) -> None:
        self.method, self.a, self.b, self.widths = method, a, b, tuple(widths)
        self.kernels = kernels and len(widths) <= 3 and _tiles(self.widths)
        self.after: After | None = None  # what takes the layer's output, if it adds the adapter itself

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in] -> [..., out]; before an :class:`After` it is what that makes of it."""
        rows = x.reshape(-1, x.shape[-1])
        if not self.kernels:
            y = self.method.apply(layer, x, bias)
            self.add(y.view(-1, y.shape[-1]), rows)
            return y
        y, low = self._sums(layer, rows, x, bias)
        if self.after is not None:
            return self.after.take(y, low)
        from qerl_pl import decoding

        return decoding.expand(y, low, self.b, self.widths)

    def _sums(self, layer: Any, rows: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the layer computes, maybe still in shares, and A x."""
        few = getattr(layer, "few_tokens", None)  # Nvfp4Kernel's
        if few is not None and (sums := few(rows, bias, self.a)) is not None:
            return sums
        from qerl_pl import decoding

        side, main = _side_stream(x.device), torch.cuda.current_stream(x.device)
        side.wait_stream(main)
        low = decoding.shrink(rows, self.a, side)
        y = self.method.apply(layer, x, bias)
        main.wait_stream(side)
        return y.view(len(rows), -1), low

    def add(self, y: Tensor, x: Tensor) -> None:
        """The same by PyTorch: y [N, out] += B A x [N, in]."""
        low = (x @ self.a.T).split(self.b.shape[1], 1)
        for part, of_part, b in zip(y.split(self.widths, 1), low, self.b.split(self.widths), strict=True):
            part.addmm_(of_part, b.T)


class After(nn.Module):
    """What follows a layer and also adds its adapter: one kernel reads and writes the outputs once."""

    def __init__(self, method: AdapterMethod) -> None:
        super().__init__()
        self.b, self.widths = method.b, method.widths
        self.sums: tuple[Tensor, ...] | None = None  # of the layer and A x, still to be added
        method.after = self

    def take(self, y: Tensor, low: Tensor) -> Tensor:
        """Called with the layer's sums, y [N, out] or [shares, N, out], and A x; returns what the model passes on."""
        self.sums = y, low
        return y

    def taken(self) -> tuple[Tensor, ...]:
        sums, self.sums = self.sums, None
        assert sums is not None, "called without the layer before it"
        return sums


class SwiGLU(After):
    """The activation of an MLP, after gate and up."""

    def forward(self, gate_up: Tensor) -> Tensor:
        """gate_up [N, 2 I] -> [N, I]."""
        from qerl_pl import decoding

        y, low = self.taken()
        return decoding.swiglu(y, low, self.b)


class Rotary(After):
    """The rotary position embedding after q, k and v, which all three are views of one tensor when it is called."""

    def __init__(self, plain: Any, method: AdapterMethod) -> None:
        super().__init__(method)
        self.cos_sin: Tensor = plain._match_cos_sin_cache_dtype(method.b)  # no launch of a step is to write it

    def take(self, y: Tensor, low: Tensor) -> Tensor:
        out = y if y.dim() == 2 else torch.empty(y.shape[1:], dtype=self.b.dtype, device=y.device)
        self.sums = y, low, out
        return out

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """positions [N], query and key [N, heads · D] -> both, rotated; the values get their adapter too."""
        from qerl_pl import decoding

        y, low, out = self.taken()
        decoding.rotary(y, low, self.b, self.widths, positions, self.cos_sin, out)
        return query, key


def _tiles(widths: tuple[int, ...]) -> bool:
    from qerl_pl import decoding

    return decoding.tile_of_outputs(widths) >= 16


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def fused_layers(model: Any) -> Iterator[tuple[Any, list[tuple[str, int]]]]:
    """(layer, parts) of every linear layer in the blocks; the parts are (Hugging Face's name, outputs)."""
    members: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for name, layer in model.named_modules():
        parent, _, leaf = name.rpartition(".")
        if hasattr(layer, "quant_method") and leaf in {*members, *PROJECTIONS}:
            sizes = getattr(layer, "output_partition_sizes", None) or [layer.output_size_per_partition]
            parts = zip(members.get(leaf, [leaf]), sizes, strict=True)
            yield layer, [(f"{parent}.{part}", size) for part, size in parts]


def install(
    model: nn.Module, targets: Sequence[str], rank: int, dtype: torch.dtype, device: torch.device, kernels: bool
) -> Slots:
    """Give every layer with a target a zero adapter; return its matrices."""
    slots: Slots = {}
    for layer, parts in fused_layers(model):
        wanted = [name.rpartition(".")[2] in targets for name, _ in parts]
        if not any(wanted):
            continue
        widths = [width for _, width in parts]
        a = torch.zeros(len(parts) * rank, layer.input_size_per_partition, dtype=dtype, device=device)
        b = torch.zeros(sum(widths), rank, dtype=dtype, device=device)
        for (name, _), is_target, low, high in zip(parts, wanted, a.split(rank), b.split(widths), strict=True):
            if is_target:
                slots[name] = low, high
        layer.quant_method = AdapterMethod(layer.quant_method, a, b, widths, kernels)
    for module in model.modules():
        place_after(module)
    return slots


def place_after(module: Any) -> None:
    """Let what follows gate and up in an MLP, or q, k and v in an attention, add their adapter."""

    def method(layer: str) -> AdapterMethod | None:
        found = getattr(getattr(module, layer, None), "quant_method", None)
        return found if isinstance(found, AdapterMethod) and found.kernels else None

    gate_up, qkv = method("gate_up_proj"), method("qkv_proj")
    if gate_up is not None and type(module.act_fn).__name__ == "SiluAndMul":
        module.act_fn = SwiGLU(gate_up)
    if qkv is not None and type(module).__name__ in ATTENTIONS and _rotates_halves(module):
        module.rotary_emb = Rotary(module.rotary_emb, qkv)


def _rotates_halves(attention: Any) -> bool:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotary, kind = attention.rotary_emb, type(attention.rotary_emb)
    if not isinstance(rotary, RotaryEmbedding) or getattr(attention, "qk_norm", False):
        return False
    names = ("forward_native", "forward_cuda")
    plain = all(getattr(kind, name) is getattr(RotaryEmbedding, name) for name in names) and rotary.is_neox_style
    size = rotary.head_size
    return plain and rotary.rotary_dim == size >= 32 and size & (size - 1) == 0  # Triton's tiles are powers of two


@contextmanager
def adapter_layers(
    targets: Sequence[str], rank: int, dtype: torch.dtype, device: torch.device, kernels: bool
) -> Iterator[Slots]:
    """While the engine is built: the model that it loads gets an adapter, before graphs are captured."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    load, slots = BaseModelLoader.load_model, Slots()

    def load_model(*args: Any, **kwargs: Any) -> nn.Module:
        model = load(*args, **kwargs)
        slots.update(install(model, targets, rank, dtype, device, kernels))
        return model

    with patch.object(BaseModelLoader, "load_model", load_model):
        yield slots
