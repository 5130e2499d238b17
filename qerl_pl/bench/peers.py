"""What people train with otherwise, over the same random weights: Hugging Face's model and PEFT's LoRA as they come."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from qerl_pl.checkpoint import Weights, is_projection, stored_projection
from qerl_pl.engine.base import EngineSpec
from qerl_pl.policy import DTYPES
from registry.quantization import NVFP4

CHUNK = 2048
"""Completion tokens whose logits exist at a time."""


class Peer(nn.Module):
    """Log-probabilities of completion tokens by a stock model.

    As in TRL with ``bf16``: autocast to BF16 around a forward of the whole sequences, FP32 LoRA matrices, BF16 norms,
    SDPA attention. The log-probability of the sampled tokens is taken from FP32 logits in chunks that are computed
    again in backward.
    """

    def __init__(self, variant: str, spec: EngineSpec, checkpointing: str) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model

        base = stock_model(spec, LINEARS[variant])
        if variant == "peft-nf4":
            base.is_loaded_in_4bit = True  # PEFT asks this, not the class of a layer
        self.autocast = spec.dtype == "bfloat16"
        config = LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,  # type: ignore[arg-type]
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
            target_modules=list(spec.targets),
        )
        self.peft: Any = get_peft_model(base, config)
        for name, parameter in self.peft.named_parameters():
            parameter.requires_grad_("lora_" in name)
            if "lora_" in name:
                parameter.data = parameter.data.float().to(spec.device)
        if checkpointing == "full":
            self.peft.train()  # Hugging Face checkpoints in training mode only; there is no dropout
            self.peft.enable_input_require_grads()
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def forward(self, tokens: Tensor, lengths: Tensor, completion_mask: Tensor) -> Tensor:
        """tokens [B, T], lengths [B], completion_mask [B, T] -> log-probabilities of completion tokens [N]."""
        base = self.peft.get_base_model()
        mask = torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(1)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.autocast):
            hidden = base.model(input_ids=tokens, attention_mask=mask.long(), use_cache=False).last_hidden_state
            chosen = completion_mask[:, 1:]
            hidden, targets = hidden[:, :-1][chosen], tokens[:, 1:][chosen]
            parts = [
                checkpoint(_logprobs, h, base.lm_head.weight, t, use_reentrant=False)
                for h, t in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
            ]
        return torch.cat(parts)


def _logprobs(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, head).float()  # [n, V]
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def stock_model(spec: EngineSpec, linear: Callable[[Weights, str, EngineSpec], nn.Module]) -> Any:
    """Hugging Face's model of the folder, all in one dtype, with projections by ``linear``."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = spec.config
    settings.pop("quantization_config", None)
    config = AutoConfig.for_model(**settings)
    dtype = DTYPES[spec.dtype]
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    weights = Weights(spec.folder)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and is_projection(name):
            model.set_submodule(name, linear(weights, name, spec))
            continue
        for key, _ in list(module.named_parameters(recurse=False)):
            if f"{name}.{key}" in weights:  # a tied head has no tensor of its own
                value = weights[f"{name}.{key}"].to(spec.device, dtype)
                setattr(module, key, nn.Parameter(value, requires_grad=False))
    model.tie_weights()
    assert not any(p.is_meta for p in model.parameters())
    return model.to(spec.device).requires_grad_(False).eval()


def _bias(weights: Weights, name: str, spec: EngineSpec) -> nn.Parameter | None:
    if f"{name}.bias" not in weights:
        return None
    return nn.Parameter(weights[f"{name}.bias"].to(spec.device, DTYPES[spec.dtype]), requires_grad=False)


def _dense(weights: Weights, name: str, spec: EngineSpec) -> nn.Module:
    weight = weights[f"{name}.weight"].to(spec.device, DTYPES[spec.dtype])
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.register_parameter("bias", _bias(weights, name, spec))
    return layer


def _nf4(weights: Weights, name: str, spec: EngineSpec) -> nn.Module:
    """bitsandbytes' NF4 with plain absmax, not quantized once more; its kernels compute in BF16 on a GPU."""
    import bitsandbytes

    bnb: Any = bitsandbytes  # its modules do not say what they export
    weight, dtype = weights[f"{name}.weight"], DTYPES[spec.dtype]
    layer = bnb.nn.Linear4bit(
        weight.shape[1],
        weight.shape[0],
        bias=False,
        compute_dtype=dtype,
        compress_statistics=False,
        quant_type="nf4",
        device="meta",
    )
    layer.weight = bnb.nn.Params4bit(
        weight.to(spec.device, dtype), requires_grad=False, compress_statistics=False, quant_type="nf4", module=layer
    )
    layer.register_parameter("bias", _bias(weights, name, spec))
    return layer.to(spec.device)  # this is where it quantizes


class Decompressed(nn.Linear):
    """A packed weight that compressed-tensors decompresses in every forward, as its CompressedLinear did.

    Autograd keeps the dense weight for backward, as it does for every linear layer.
    """

    def __init__(self, weights: Weights, name: str, spec: EngineSpec) -> None:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationConfig

        _, stored = stored_projection(weights, name, spec.quantization)
        rows, columns = spec.quantization.shape(stored)
        super().__init__(columns, rows, bias=False, device="meta")
        self.weight = nn.Parameter(torch.empty(0, device=spec.device), requires_grad=False)  # PEFT asks its device
        for key, tensor in stored.items():
            self.register_buffer(key, tensor.to(spec.device))
        self.register_parameter("bias", _bias(weights, name, spec))
        settings = spec.quantization.config
        assert settings is not None
        self.keys = tuple(stored)
        self.scheme = QuantizationConfig.model_validate(settings).config_groups["group_0"]
        self.compressor = BaseCompressor.get_value_from_registry(settings["format"])

    def forward(self, x: Tensor) -> Tensor:
        stored = {key: getattr(self, key) for key in self.keys}
        weight = self.compressor.decompress(stored, self.scheme)["weight"]
        return F.linear(x, weight.to(x.dtype), self.bias)


LINEARS: dict[str, Callable[[Weights, str, EngineSpec], nn.Module]] = {
    "peft-bf16": _dense,
    "peft-nf4": _nf4,
    "decompress": Decompressed,
}
FORMAT = {"peft-bf16": "bf16", "peft-nf4": "nf4", "decompress": NVFP4.__name__.lower()}
"""What each peer's base is stored as."""
NEEDS = {"peft-nf4": "bitsandbytes", "decompress": "compressed_tensors"}


def check(variants: list[str]) -> None:
    """ImportError if a peer's library is missing: before anything has been measured."""
    for variant in variants:
        if variant in NEEDS and find_spec(NEEDS[variant]) is None:
            package = NEEDS[variant].replace("_", "-")
            raise ImportError(f"--variant {variant} needs {package}: pip install {package}, or leave the variant out")
