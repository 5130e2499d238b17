"""The trainer's decoder layers: completions lie one behind the other, without padding."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from qerl_pl.fused import rms_norm, rotate


@dataclass(frozen=True)
class Packing:
    """B sequences in one row of T tokens."""

    starts: Tensor  # [B + 1] int32: where each begins, and the end
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Tensor) -> "Packing":
        """lengths [B], on the device of the tokens."""
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        return cls(starts, tuple(lengths.tolist()))

    def padded(self) -> tuple[Tensor, Tensor]:
        """(positions [B, longest] in the row, mask [B, longest]); padding on the right points into the row."""
        column = torch.arange(max(self.lengths), device=self.starts.device)
        starts, ends = self.starts[:-1, None], self.starts[1:, None]
        position = starts + column
        return position.clamp(max=sum(self.lengths) - 1).long(), position < ends

    def positions(self) -> Tensor:
        """[T]: of each token within its sequence."""
        position, mask = self.padded()
        return (position - self.starts[:-1, None])[mask]


def attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
    """Causal attention within each sequence. q [T, heads, D], k and v [T, fewer heads, D] -> [T, heads, D]."""
    if q.is_cuda and q.dtype != torch.float32:
        longest = max(packing.lengths)
        out: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, packing.starts, packing.starts, longest, longest, 0.0, True, False, scale=scale
        )[0]
        return out
    position, mask = packing.padded()
    q, k, v = (x[position].transpose(1, 2) for x in (q, k, v))  # [B, heads, longest, D]
    # Padding lies behind every token, so the causal mask hides it.
    padded = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return padded.transpose(1, 2)[mask]


class RMSNorm(nn.Module):
    """Root mean square norm, its weight FP32."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.weight, self.eps = source.weight, source.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = rms_norm(x, self.weight, self.eps)
        return y


class Attention(nn.Module):
    """Self-attention over packed sequences, with the projections of a Hugging Face layer."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (getattr(source, f"{n}_proj") for n in "qkvo")
        self.q_norm, self.k_norm = getattr(source, "q_norm", None), getattr(source, "k_norm", None)  # Qwen3
        self.head_dim, self.scaling = source.head_dim, source.scaling

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], packing: Packing, **_: Any
    ) -> tuple[Tensor, None]:
        """hidden_states [1, T, H] -> [1, T, H]; cos and sin of the positions are [1, T, D]."""
        x = hidden_states[0]
        q, k, v = (p(x).view(len(x), -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = (t[0] for t in position_embeddings)
        out = attention(rotate(q, cos, sin), rotate(k, cos, sin), v, packing, self.scaling)
        return self.o_proj(out.reshape(len(x), -1)).unsqueeze(0), None


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)); the product is part of the last layer, which makes it again in backward."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = source.gate_proj, source.up_proj, source.down_proj

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.gate_proj(x), self.up_proj(x))
        return y


def use_packed_layers(model: Any) -> None:
    """Replace norms, attention and MLPs of a Hugging Face decoder (Qwen2, Qwen3, Llama style) in place."""
    name = type(model).__name__
    if getattr(model.config, "hidden_act", None) != "silu":
        raise ValueError(f"{name}: hidden_act {model.config.hidden_act!r}; only silu is supported")
    for path, module in list(model.named_modules()):
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            model.set_submodule(path, RMSNorm(module))
    for path, module in list(model.named_modules()):
        kind = type(module).__name__
        if kind.endswith("Attention"):
            if getattr(module, "sliding_window", None) is not None:
                raise ValueError(f"{name}: {path} has a sliding window, which is not supported")
            model.set_submodule(path, Attention(module))
        elif kind.endswith("MLP"):
            model.set_submodule(path, GatedMLP(module))
    parts = ("embed_tokens", "rotary_emb", "layers", "norm")
    if any(not hasattr(model.model, part) for part in parts):
        raise ValueError(f"{name}: not a decoder of {', '.join(parts)}; the architecture is not supported")
