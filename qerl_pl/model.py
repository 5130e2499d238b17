"""Builds the causal language model that trainer and transformers engine compute with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qerl_pl.checkpoint import Weights, is_projection, stored_projection
from qerl_pl.packed import PackedLinear, SharedLinear
from registry.quantization import QuantFormat


def build_model(
    folder: Path, quantization: QuantFormat, dtype: torch.dtype, device: str = "cpu", dense: bool = False,
    shared: Mapping[str, Any] | None = None,
) -> nn.Module:  # fmt: skip
    """A frozen Hugging Face model over the checkpoint in ``folder``.

    Projections become :class:`PackedLinear`, or with ``dense`` ordinary linears of the dequantized weights (faster to
    sample with, larger). Everything else is loaded in ``dtype``; RMSNorm weights always in FP32, so that small noise
    on them is not rounded away. What is in ``shared`` by its module's name is used and not loaded: a
    :class:`~qerl_pl.packed.Weight` for a projection, a tensor [V, H] for embeddings and head.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = json.loads((folder / "config.json").read_text())
    settings.pop("quantization_config", None)  # else transformers would look for a quantizer of its own
    config = AutoConfig.for_model(**settings)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights, shared = Weights(folder), shared or {}
    for name, module in list(model.named_modules()):
        if name in shared and is_projection(name):
            model.set_submodule(name, SharedLinear(shared[name], _bias(weights, name, dtype, device)))
        elif name in shared:
            module.weight = nn.Parameter(shared[name], requires_grad=False)
        elif isinstance(module, nn.Linear) and is_projection(name):
            model.set_submodule(name, _projection(weights, name, quantization, dtype, device, dense))
        elif _is_norm(module):
            _load(module, weights, name, torch.float32, device)
            module.register_forward_hook(_keep_dtype)  # else FP32 weights would lift all that follows to FP32
        elif next(module.parameters(recurse=False), None) is not None and not (
            name == "lm_head" and config.tie_word_embeddings
        ):
            _load(module, weights, name, dtype, device)
    model.tie_weights()
    unfilled = [n for n, p in model.named_parameters() if p.is_meta]
    if unfilled:
        raise ValueError(
            f"{folder}: no values for {', '.join(unfilled[:3])} (of {len(unfilled)}); the architecture is not supported"
        )
    return model.to(device).requires_grad_(False).eval()


def rms_norms(model: nn.Module) -> dict[str, Any]:
    """All RMSNorms by module name."""
    return {name: module for name, module in model.named_modules() if _is_norm(module)}


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm")  # Hugging Face has one class a model family


def _keep_dtype(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    return output.to(args[0].dtype)


def _projection(
    weights: Weights, name: str, quantization: QuantFormat, dtype: torch.dtype, device: str, dense: bool
) -> nn.Linear:
    format_, stored = stored_projection(weights, name, quantization)
    stored = {key: tensor.to(device) for key, tensor in stored.items()}
    bias = _bias(weights, name, dtype, device)
    if not dense:
        return PackedLinear(format_, stored, bias)
    weight = format_.dequantize(stored, dtype)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def _bias(weights: Weights, name: str, dtype: torch.dtype, device: str) -> torch.Tensor | None:
    return weights[f"{name}.bias"].to(device, dtype) if f"{name}.bias" in weights else None


def _load(module: nn.Module, weights: Weights, name: str, dtype: torch.dtype, device: str) -> None:
    for key, _ in list(module.named_parameters(recurse=False)):
        full = f"{name}.{key}"
        if full not in weights:
            raise ValueError(f"the checkpoint lacks {full}")
        setattr(module, key, nn.Parameter(weights[full].to(device, dtype), requires_grad=False))
