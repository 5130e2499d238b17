"""What quantization did to a model: weights, distribution on held-out text, entropy of its own samples."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import torch
from torch import Tensor

from qerl_pl.checkpoint import PROJECTIONS, Weights, projection, stored_projection
from qerl_pl.logprobs import head_logits, token_logprobs
from qerl_pl.seeds import derive_seed
from qerl_pl.statistics import Estimate, t_quantile
from qerl_pl.types import Sampling
from registry.quantization import BF16, QuantFormat

CHUNK = 128
"""Tokens whose logits exist at a time: of two models with a vocabulary of 152k that is 160 MB."""
_NORMS = {"q_proj": "input_layernorm", "k_proj": "input_layernorm", "v_proj": "input_layernorm",
          "gate_proj": "post_attention_layernorm", "up_proj": "post_attention_layernorm"}  # fmt: skip
_AFTER = {"v_proj": "o_proj", "up_proj": "down_proj"}
"""Whose inputs are the outputs of these, element by element; AWQ moves scales across."""


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    quantization: QuantFormat


def mean(values: Sequence[float], least: float = -math.inf) -> Estimate:
    """The mean with a 95 % interval by the t distribution; values are independent (one a sequence).

    ``least`` is the smallest that the true mean can be: 0 for KL. The interval is cut there, which takes nothing that
    could be true, so it holds the mean as often as before. (The value is left alone: rounding may make the KL of equal
    models −1e-9.)
    """
    value = fmean(values)
    half = math.inf
    if len(values) > 1:
        half = t_quantile(len(values) - 1) * math.sqrt(variance(values) / len(values))
    return Estimate(value, min(value, max(least, value - half)), value + half)


def weight_errors(base: Checkpoint, quantized: Checkpoint, device: str = "cpu") -> dict[str, list[float]]:
    """‖Ŵ − W‖ / ‖W‖ (Frobenius) of each projection: kind -> one number a layer, in order.

    A norm whose weights differ tells which scales AWQ moved from it into the layer behind it; they are taken out of Ŵ
    again. Scales moved from v into o, or from up into down, leave no such trace: the rows of v or up then get
    the length of the base's, which changes the error by about one part in a hundred.
    """
    ours, theirs = Weights(base.folder), Weights(quantized.folder)
    modules = list(dict.fromkeys(found[0] for found in map(projection, ours) if found))
    norms = [n for n in ours if n.endswith(("input_layernorm.weight", "post_attention_layernorm.weight"))]
    folded = any(not torch.equal(ours[n].float(), theirs[n].float()) for n in norms)
    errors: dict[str, list[float]] = {kind: [] for kind in PROJECTIONS}
    rows: dict[str, Tensor] = {}  # o or down -> what each output of the layer before it was multiplied by
    for module in sorted(modules, key=lambda m: m.endswith(tuple(_AFTER.values()))):  # v before o, up before down
        parent, _, kind = module.rpartition(".")
        weight = ours[f"{module}.weight"].to(device, torch.float32)
        format_, stored = stored_projection(theirs, module, quantized.quantization)
        dense = format_.dequantize({k: t.to(device) for k, t in stored.items()}, torch.float32)
        if folded and kind in _NORMS:
            norm = f"{parent.rpartition('.')[0]}.{_NORMS[kind]}.weight"
            clean, moved = ours[norm].to(device, torch.float32), theirs[norm].to(device, torch.float32)
            dense = dense * torch.where(clean == 0, 1, moved / clean)
        after = f"{parent}.{_AFTER[kind]}.weight" if kind in _AFTER else ""
        if folded and after and ours.shape(after)[1] == len(weight):  # v has fewer outputs with grouped queries
            lengths = dense.norm(dim=1), weight.norm(dim=1)
            r = torch.where(lengths[0] * lengths[1] == 0, 1, lengths[0] / lengths[1])
            rows[f"{parent}.{_AFTER[kind]}"] = r
            dense = dense / r.unsqueeze(1)
        if module in rows:
            dense = dense * rows[module]
        errors[kind].append(((dense - weight).norm() / weight.norm()).item())
    return errors


@torch.no_grad()
def hidden_states(
    checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], device: str, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    """Final hidden states of each sequence ([T, H], on the CPU), and the head [V, H]. The model is gone afterwards."""
    from qerl_pl.model import build_model

    model: Any = build_model(checkpoint.folder, checkpoint.quantization, dtype, device, dense=True)
    if model.lm_head.bias is not None:
        raise ValueError(f"{checkpoint.folder}: its head has a bias; the report supports none")
    found = [model.model(torch.tensor([s], device=device)).last_hidden_state[0].cpu() for s in sequences]
    return found, model.lm_head.weight.detach().cpu()


@dataclass(frozen=True)
class Distribution:
    """Per sequence, the means over its tokens; nats."""

    kl: list[float]  # KL(base || quantized) of the next token
    nll: tuple[list[float], list[float]]  # −log p of the next token, under base and quantized
    entropy: tuple[list[float], list[float]]


@torch.no_grad()
def compare(
    base: tuple[Sequence[Tensor], Tensor], quantized: tuple[Sequence[Tensor], Tensor],
    sequences: Sequence[Sequence[int]], device: str,
) -> Distribution:  # fmt: skip
    """Next-token distributions of both models at every position but the last, from hidden states."""
    heads = [head.to(device) for _, head in (base, quantized)]
    kl: list[float] = []
    nll: tuple[list[float], list[float]] = ([], [])
    entropy: tuple[list[float], list[float]] = ([], [])
    for i, sequence in enumerate(sequences):
        targets = torch.tensor(sequence[1:], device=device)
        totals = torch.zeros(5, dtype=torch.float64)
        for start in range(0, len(targets), CHUNK):
            part = slice(start, min(start + CHUNK, len(targets)))
            logp = [
                head_logits(states[i][part].to(device), head).log_softmax(-1)
                for (states, _), head in zip((base, quantized), heads, strict=True)
            ]  # 2 × [chunk, V]
            p = [x.exp() for x in logp]
            sums = [(p[0] * (logp[0] - logp[1])).sum()]
            sums += [-x.gather(-1, targets[part].unsqueeze(-1)).sum() for x in logp]
            sums += [-(q * x).sum() for q, x in zip(p, logp, strict=True)]
            totals += torch.stack(sums).double().cpu()
        means = (totals / len(targets)).tolist()
        kl.append(means[0])
        for j in (0, 1):
            nll[j].append(means[1 + j])
            entropy[j].append(means[3 + j])
    return Distribution(kl, nll, entropy)


def sampling_entropy(
    checkpoint: Checkpoint, prompts: Sequence[Sequence[int]], tokens: int, seed: int, device: str, dtype: torch.dtype
) -> list[float]:
    """Entropy of the next token (nats), averaged over what the model itself samples at T = 1: one number a prompt."""
    from qerl_pl.engine.base import EngineSpec
    from qerl_pl.engine.transformers import TransformersEngine

    engine = TransformersEngine()
    name = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[dtype]
    # Its adapter is zero; the engine has no other way to sample.
    spec = EngineSpec(checkpoint.folder, checkpoint.quantization, 1, 1.0, ("q_proj",), name, device)
    engine.start(spec)
    seeds = [derive_seed("entropy", seed, i) for i in range(len(prompts))]
    groups = engine.generate(prompts, Sampling(n=1, max_tokens=tokens), seeds)
    engine.close()
    del engine
    sampled = [completion.token_ids for (completion,) in groups]
    texts = [[*prompt, *own] for prompt, own in zip(prompts, sampled, strict=True)]
    states, head = hidden_states(checkpoint, texts, device, dtype)
    head = head.to(device)
    found = []
    for prompt, own, hidden in zip(prompts, sampled, states, strict=True):
        at = hidden[len(prompt) - 1 : -1].to(device)
        found.append(token_logprobs(at, head, torch.tensor(own, device=device), chunk=CHUNK)[1].mean().item())
    return found


def assess(
    base: Checkpoint, quantized: Checkpoint, held_out: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]],
    sample_tokens: int, seed: int, device: str, say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """All numbers of the report, ready for JSON. One model is in memory at a time."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    say("report: weights")
    errors = weight_errors(base, quantized, device)
    say("report: held-out text")
    states = [hidden_states(c, held_out, device, dtype) for c in (base, quantized)]
    found = compare(states[0], states[1], held_out, device)
    del states
    result: dict[str, Any] = {
        "arithmetic": f"{str(dtype).removeprefix('torch.')} on {device}",
        "weight_error": {kind: {"mean": fmean(e), "by_layer": e} for kind, e in errors.items() if e},
        "held_out": {
            "kl": asdict(mean(found.kl, least=0.0)),
            "kl_by_sequence": found.kl,
            "perplexity": {"base": math.exp(fmean(found.nll[0])), "quantized": math.exp(fmean(found.nll[1]))},
            "entropy": {"base": fmean(found.entropy[0]), "quantized": fmean(found.entropy[1])},
        },
    }
    if prompts:
        say("report: samples")
        own = [sampling_entropy(c, prompts, sample_tokens, seed, device, dtype) for c in (base, quantized)]
        result["sampling_entropy"] = {
            "prompts": len(prompts),
            "max_tokens": sample_tokens,
            "base": asdict(mean(own[0])),
            "quantized": asdict(mean(own[1])),
            "difference": asdict(mean([b - a for a, b in zip(*own, strict=True)])),
        }
    return result


def unquantized(folder: Path) -> Checkpoint:
    return Checkpoint(folder, BF16())
