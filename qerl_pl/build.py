"""Puts engine and policy onto the device, from the same stored bytes."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from qerl_pl.checkpoint import prepare
from qerl_pl.engine.base import CannotShareError, EngineSpec
from qerl_pl.gpu_memory import limit_memory
from qerl_pl.memory import GB, Plan, plan_memory
from qerl_pl.policy import ALL, LoRA, Policy
from qerl_pl.seeds import derive_seed
from registry.quantization import QuantFormat

Layers = bool | int | Literal["auto"]


BOUNDS = {
    "Invalid learning rate": ("lr", "a number from 0 on"),
    "Invalid beta parameter": ("betas", "numbers from 0 to below 1"),
    "Invalid weight_decay": ("weight_decay", "a number from 0 on"),
    "Invalid epsilon": ("eps", "a number from 0 on"),
}
"""Settings, and what they may be, by the words in which torch's and bitsandbytes' optimizers refuse them."""


def check_optimizer(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Of a matrix, as the adapter has: some take nothing else. ValueError that names the setting if one is refused."""
    try:
        return make([torch.nn.Parameter(torch.zeros(1, 1))])
    except ValueError as error:
        name, allowed = next((bound for said, bound in BOUNDS.items() if said in str(error)), ("", ""))
        fix = f"; give {name} {allowed}" if name else ""
        raise ValueError(f"{'.'.join(filter(None, ['model.optimizer', name]))}: {error}{fix}") from error


def build_policy(
    data: Any,
    model: str,
    quantization: QuantFormat,
    lora: LoRA,
    *,
    device: torch.device,
    dtype: str,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    gradient_checkpointing: Layers,
    tokens_per_micro_batch: int,
    shared_base: bool,
    memory_gb: float | None,
    trained_norms: Sequence[str],
    seed: int,
) -> Policy:
    """Start the engine of the data module and build the policy beside it; what goes where on a GPU is said aloud."""
    on_gpu = device.type == "cuda"
    folder = prepare(model, quantization)
    plan = None
    if on_gpu and data.engine.plannable:
        optimizer_bytes = 2 if "8bit" in type(check_optimizer(optimizer)).__name__ else 8
        plan = _plan(data, folder, quantization, lora, optimizer_bytes, tokens_per_micro_batch, shared_base, memory_gb)
        data.collector.report("note", plan.table())
    spec = EngineSpec(
        folder,
        quantization,
        lora.rank,
        lora.effective_alpha,
        tuple(lora.targets),
        dtype if dtype != "auto" else "bfloat16" if on_gpu else "float32",
        device="cuda" if on_gpu else "cpu",
        max_length=data.max_prompt_length + data.sampling.max_tokens,
        kv_cache_bytes=None if plan is None else plan.kv_cache,
    )
    data.engine.start(spec)
    for note in data.engine.notes:
        data.collector.report("note", note)
    shared = _shared_weights(data, shared_base) if on_gpu else None
    layers = gradient_checkpointing
    if layers == "auto":
        layers = 0 if plan is None else plan.checkpointed_layers
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "adapter"))
        return Policy(spec, shared, ALL if layers is True else int(layers), trained_norms=trained_norms)


def _plan(
    data: Any,
    folder: Path,
    quantization: QuantFormat,
    lora: LoRA,
    optimizer_bytes: int,
    tokens_per_micro_batch: int,
    shared_base: bool,
    memory_gb: float | None,
) -> Plan:
    free = torch.cuda.mem_get_info()[0]
    if memory_gb is not None:
        free = min(free, int(memory_gb * GB))
        limit_memory(free)
    config = json.loads((folder / "config.json").read_text())
    copies, bits = data.engine.base_in_memory(config, quantization, shared_base)
    return plan_memory(
        config,
        device_bytes=free,
        bits_per_weight=bits,
        base_copies=copies,
        rank=lora.rank,
        targets=lora.targets,
        optimizer_bytes=optimizer_bytes,
        max_prompt_length=data.max_prompt_length,
        max_completion_length=data.sampling.max_tokens,
        num_generations=data.sampling.n,
        max_num_seqs=data.engine.max_num_seqs,
        max_num_batched_tokens=data.engine.max_num_batched_tokens,
        tokens_per_micro_batch=tokens_per_micro_batch,
        release_kv=data.engine.release_kv_cache,
    )


def _shared_weights(data: Any, wanted: bool) -> Mapping[str, Any] | None:
    """The engine's weights, or None for a copy of our own."""
    try:
        if not wanted:
            raise CannotShareError("model.shared_base is false")
        weights: Mapping[str, Any] = data.engine.shared_weights()
    except CannotShareError as reason:
        data.collector.report("note", f"base: the trainer holds a packed copy of its own ({reason})")
        return None
    data.collector.report("note", "base: one copy, the trainer computes from the engine's weights")
    return weights
