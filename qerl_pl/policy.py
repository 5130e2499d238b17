"""The policy: a frozen packed base under LoRA matrices."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qerl_pl.checkpoint import PROJECTIONS
from qerl_pl.engine.base import EngineSpec
from qerl_pl.layers import Packing, use_packed_layers
from qerl_pl.logprobs import token_logprobs
from qerl_pl.model import build_model, rms_norms
from qerl_pl.packed import recomputation

ALL = 1 << 30  # layers
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class LoRA:
    """LoRA settings (paper Eq. 2: y = xŴ + alpha/rank · xAB).

    Args:
        rank: columns of A.
        alpha: scale of the product; the paper's scripts use alpha = rank.
        targets: names of the linear layers that get an adapter.
        rank_stabilized: scale by alpha / √rank (rsLoRA).
        b_rate_ratio: learning rate of B over that of A (LoRA+).
        dora: refused, with the reason.
    """

    rank: int = 32
    alpha: float = 32.0
    targets: tuple[str, ...] = PROJECTIONS
    rank_stabilized: bool = False
    b_rate_ratio: float = 1.0
    dora: bool = False

    def __post_init__(self) -> None:
        unknown = sorted(set(self.targets) - set(PROJECTIONS))
        if unknown or not self.targets:
            raise ValueError(f"lora.targets: {', '.join(unknown) or 'empty'}; choose from {', '.join(PROJECTIONS)}")
        if self.rank < 1 or self.alpha <= 0:
            raise ValueError(f"lora: rank {self.rank} must be at least 1 and alpha {self.alpha} above 0")
        if self.b_rate_ratio <= 0:
            raise ValueError(f"lora.b_rate_ratio: {self.b_rate_ratio} must be above 0; 1 is the same rate for A and B")
        if self.dora:
            raise ValueError(
                "lora.dora: vLLM serves no DoRA adapter (its magnitudes change with every update and would have to be "
                "merged into the 4-bit weights); use lora without it, or rank_stabilized"
            )

    @property
    def effective_alpha(self) -> float:
        """What divided by the rank is the scale of the product; adapters are saved with it."""
        return self.alpha * math.sqrt(self.rank) if self.rank_stabilized else self.alpha


class Policy(nn.Module):
    """log π(token) of completions under base + adapter. Trainable are the adapter and, by name, norms; both are FP32.

    Args:
        spec: what to build.
        shared: weights that the engine holds already, by module name; the rest is read from the checkpoint.
        checkpointed_layers: so many decoder layers compute their activations again in backward.
        chunk: completion tokens whose logits exist at the same time.
        trained_norms: last parts of the names of the RMSNorms that are trained too (paper, Algorithm 1).
    """

    def __init__(
        self,
        spec: EngineSpec,
        shared: Mapping[str, Any] | None = None,
        checkpointed_layers: int = 0,
        chunk: int = 1024,
        trained_norms: Sequence[str] = (),
    ) -> None:
        super().__init__()
        base: Any = build_model(spec.folder, spec.quantization, DTYPES[spec.dtype], spec.device, shared=shared)
        use_packed_layers(base)
        self.peft: Any = attach_adapter(base, spec)
        self._adapter = adapter_parameters(self.peft)
        self._norms = {n: m.weight for n, m in rms_norms(base).items() if n.rpartition(".")[2] in trained_norms}
        if trained_norms and not self._norms:
            raise ValueError(f"trained_norms: no norm of the model is named {', '.join(trained_norms)}")
        self._original = {name: weight.detach().clone() for name, weight in self._norms.items()}
        for weight in self._norms.values():
            weight.requires_grad_()
        self.checkpointed_layers, self.chunk = checkpointed_layers, chunk

    def forward(
        self,
        tokens: Tensor,
        lengths: Tensor,
        completion_mask: Tensor,
        temperature: float = 1.0,
        adapter: bool = True,
        entropy_grad: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """tokens [B, T], lengths [B], completion_mask [B, T] -> log-probabilities and entropy [B, T], 0 off the mask.

        Entry (b, t) belongs to token (b, t), predicted from those before it. ``adapter=False`` gives those of the base;
        with ``entropy_grad`` the entropy carries a gradient too.
        """
        real = torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(1)  # [B, T]
        row = tokens[real]  # all sequences one behind the other
        with nullcontext() if adapter else self._base_only():
            hidden = self._hidden(row, Packing.of(lengths))
        chosen = completion_mask[real].nonzero().squeeze(-1)
        head = self.peft.get_base_model().lm_head
        logprobs, entropy = token_logprobs(
            hidden[chosen - 1], head.weight, row[chosen], temperature, head.bias, self.chunk, entropy_grad
        )
        out = torch.zeros(2, *tokens.shape, device=tokens.device)
        full = out.masked_scatter(completion_mask.expand(2, *tokens.shape), torch.stack([logprobs, entropy]))
        return full[0], full[1]

    def _hidden(self, row: Tensor, packing: Packing) -> Tensor:
        """row [T] -> the last hidden states [T, H]."""
        decoder = self.peft.get_base_model().model
        x = decoder.embed_tokens(row.unsqueeze(0))
        arguments = {"position_embeddings": decoder.rotary_emb(x, packing.positions().unsqueeze(0)), "packing": packing}
        for number, layer in enumerate(decoder.layers):
            if number < self.checkpointed_layers and torch.is_grad_enabled():
                x = checkpoint(
                    layer, x, use_reentrant=False, preserve_rng_state=False,
                    context_fn=lambda: (nullcontext(), recomputation()), **arguments,
                )  # fmt: skip
            else:
                x = layer(x, **arguments)
        hidden: Tensor = decoder.norm(x)[0]
        return hidden

    @contextmanager
    def _base_only(self) -> Iterator[None]:
        trained = {name: weight.detach().clone() for name, weight in self._norms.items()}
        self._set_norms(self._original)
        try:
            with self.peft.disable_adapter():
                yield
        finally:
            self._set_norms(trained)

    @torch.no_grad()
    def _set_norms(self, values: Mapping[str, Tensor]) -> None:
        for name, weight in self._norms.items():
            weight.copy_(values[name])

    def _apply(self, fn: Any, recurse: bool = True) -> "Policy":
        """Stays where it was built. Lightning moves a module to the CPU after each stage and back before the next: what
        is the engine's would come back as a copy. TypeError if ``fn`` would change the dtype.
        """
        if (dtype := fn(torch.empty(0)).dtype) != torch.float32:
            raise TypeError(
                f"the policy cannot become {dtype}: its adapter is FP32; set model.dtype for the arithmetic"
            )
        return self

    def norm_parameters(self) -> dict[str, nn.Parameter]:
        """The norm weights that are trained, by module name; they are the live parameters."""
        return dict(self._norms)

    def adapter_parameters(self) -> dict[str, nn.Parameter]:
        """The LoRA matrices under the names of a saved adapter; they are the live parameters."""
        return dict(self._adapter)

    def norms(self) -> dict[str, Tensor]:
        """The live norm weights, by module name of the base."""
        return {name: norm.weight for name, norm in rms_norms(self.peft.get_base_model()).items()}

    def save_adapter(self, folder: Path, base: str) -> None:
        """Write a PEFT folder that PEFT and vLLM load unchanged; ``base`` is the model it names. Trained norms, which
        PEFT's format does not hold, are beside it in ``norms.safetensors`` under the base's names.
        """
        self.peft.peft_config["default"].base_model_name_or_path = base
        # The embeddings are never trained; False also keeps PEFT from asking the hub about them.
        self.peft.save_pretrained(str(folder), save_embedding_layers=False)
        if self._norms:
            from safetensors.torch import save_file

            save_file({f"{n}.weight": w.detach().cpu() for n, w in self._norms.items()}, folder / "norms.safetensors")


def attach_adapter(base: Any, spec: EngineSpec) -> Any:
    """Put PEFT's LoRA on the target layers; B is zero, so the policy starts as the base."""
    from peft import LoraConfig, get_peft_model

    from qerl_pl.lora import CUSTOM

    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # type: ignore[arg-type]  # a float in most adapters on the hub
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        target_modules=list(spec.targets),
    )
    config._register_custom_module(CUSTOM)
    peft = get_peft_model(base, config, autocast_adapter_dtype=True)
    for parameter in adapter_parameters(peft).values():
        parameter.data = parameter.data.float().to(spec.device)
    return peft


def adapter_parameters(peft: nn.Module) -> dict[str, nn.Parameter]:
    """LoRA matrices of a PEFT model by saved name (without the adapter's own name)."""
    return {n.replace(".default.weight", ".weight"): p for n, p in peft.named_parameters() if ".lora_" in n}


def copy_adapter(target: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy matrices in place, every one of them; ValueError if names or shapes differ."""
    if target.keys() != source.keys():
        differ = sorted(target.keys() ^ source.keys())
        raise ValueError(
            f"the adapter's matrices are not the policy's: {differ[0]} (and {len(differ) - 1} more) on one side only"
        )
    for name, tensor in source.items():
        if tensor.shape != target[name].shape:
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)}, expected {tuple(target[name].shape)}; is the rank the same?"
            )
    with torch.no_grad():
        for name, tensor in source.items():
            target[name].copy_(tensor)
