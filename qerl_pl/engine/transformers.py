"""Batched sampling with the Hugging Face model itself: no extra dependency, the default where there is no GPU."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qerl_pl.engine.base import ENGINES, Engine, EngineSpec, Progress, stop_tokens
from qerl_pl.seeds import derive_seed
from qerl_pl.types import Completion, Sampling


@ENGINES.register("transformers")
class TransformersEngine(Engine):
    """Samples with a model of its own: base, adapter and FP32 norms, beside the trainer's.

    Args:
        max_batch: completions sampled at once.
        packed: keep the projections packed and dequantize them at every step (smaller, slower) instead of once.
    """

    def __init__(self, max_batch: int = 256, packed: bool = False) -> None:
        if max_batch < 1:
            raise ValueError(f"engine.max_batch: {max_batch} must be at least 1")
        self.max_batch, self.packed = max_batch, packed
        self._peft: Any = None

    def start(self, spec: EngineSpec) -> None:
        if self._peft is not None:
            return
        from transformers import AutoTokenizer

        from qerl_pl.model import build_model
        from qerl_pl.policy import DTYPES, attach_adapter

        self.tokenizer = AutoTokenizer.from_pretrained(spec.folder)
        self._stop = stop_tokens(spec.folder, self.tokenizer)
        base = build_model(spec.folder, spec.quantization, DTYPES[spec.dtype], spec.device, dense=not self.packed)
        self._peft = attach_adapter(base, spec).requires_grad_(False).eval()
        self._device = spec.device

    @property
    def _model(self) -> Any:
        if self._peft is None:
            raise RuntimeError("the engine has not been started; call start(spec) first")
        return self._peft.get_base_model()

    def load_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        from qerl_pl.policy import copy_adapter

        copy_adapter(self._adapter(), tensors)

    def adapter(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._adapter().items()}

    def _adapter(self) -> dict[str, nn.Parameter]:
        from qerl_pl.policy import adapter_parameters

        assert self._peft is not None
        return adapter_parameters(self._peft)

    def norms(self) -> dict[str, Tensor]:
        from qerl_pl.model import rms_norms

        return {name: norm.weight.data for name, norm in rms_norms(self._model).items()}

    def refresh(self) -> None:
        """Nothing is cached between two calls of ``generate``."""

    def close(self) -> None:
        self._peft = None

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        progress: Progress | None = None,
    ) -> list[list[Completion]]:
        started, told, done = time.perf_counter(), 0.0, 0
        tokens, out = 0, []
        at_once = max(1, self.max_batch // sampling.n)
        for first in range(0, len(prompts), at_once):
            batch = _Batch(
                self._model, prompts[first : first + at_once], sampling, seeds[first : first + at_once], self._stop
            )
            for _ in range(sampling.max_tokens):
                tokens += batch.step()
                now = time.perf_counter()
                if progress is not None and now - told > 0.5:
                    told = now
                    progress(done + batch.finished, len(prompts) * sampling.n, tokens / (now - started))
                if batch.finished == batch.size:
                    break
            done += batch.size
            out += batch.completions(self.tokenizer)
        return out


class _Batch:
    """Completions that are sampled together. Finished rows leave the batch once they are half of it."""

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        stop: frozenset[int],
    ) -> None:
        self.model, self.sampling = model, sampling
        device = model.lm_head.weight.device
        self.size = len(prompts) * sampling.n
        self.tokens: list[list[int]] = [[] for _ in range(self.size)]
        self.logprobs: list[list[float]] = [[] for _ in range(self.size)]
        self.done = [False] * self.size
        self.rows = list(range(self.size))  # which completion each row of the batch is
        self.stop = torch.tensor(sorted(stop), device=device)
        # One uniform number a token, drawn ahead from the row's own generator: what a row samples does not depend on
        # its neighbours.
        draws = [
            torch.rand(
                sampling.max_tokens, generator=torch.Generator().manual_seed(derive_seed(seed, i)), dtype=torch.float64
            )
            for seed in seeds
            for i in range(sampling.n)
        ]
        self.uniform = torch.stack(draws).to(device)  # [rows, max_tokens]
        longest = max(len(p) for p in prompts)
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)  # padded on the left
        self.mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        output = model.model(input_ids=ids, attention_mask=self.mask, position_ids=positions, use_cache=True)
        self.cache = output.past_key_values
        self.cache.batch_repeat_interleave(sampling.n)  # the prompt is computed once for its n completions
        self.hidden = output.last_hidden_state[:, -1].repeat_interleave(sampling.n, 0)  # [rows, H]
        self.mask = self.mask.repeat_interleave(sampling.n, 0)
        self.position = positions[:, -1:].repeat_interleave(sampling.n, 0) + 1
        self.alive = torch.ones(self.size, dtype=torch.bool, device=device)
        self.count = 0

    @property
    def finished(self) -> int:
        return sum(self.done)

    def step(self) -> int:
        """Sample one token for each row that is not finished; return how many."""
        if self.count:
            self._forward()
        head = self.model.lm_head
        logits = self.hidden.float() @ head.weight.float().T
        if head.bias is not None:
            logits = logits + head.bias.float()
        self.last, logprobs = draw(logits, self.uniform[:, self.count], self.sampling)
        self.count += 1
        ended = torch.isin(self.last, self.stop)
        alive = self.alive.tolist()
        for row, live, token, logprob, end in zip(
            self.rows, alive, self.last.tolist(), logprobs.tolist(), ended.tolist(), strict=True
        ):
            if live:
                self.tokens[row].append(token)
                self.logprobs[row].append(logprob)
                self.done[row] = end
        self.alive &= ~ended
        return sum(alive)

    def _forward(self) -> None:
        if 2 * int(self.alive.sum()) <= len(self.alive):
            keep = self.alive.nonzero().squeeze(-1)
            self.cache.batch_select_indices(keep)
            self.rows = [self.rows[i] for i in keep.tolist()]
            for name in ("uniform", "mask", "position", "last", "alive"):
                setattr(self, name, getattr(self, name)[keep])
        self.mask = nn.functional.pad(self.mask, (0, 1), value=1)
        output = self.model.model(
            input_ids=self.last.unsqueeze(1),
            attention_mask=self.mask,
            position_ids=self.position,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.hidden = output.last_hidden_state[:, -1]
        self.position = self.position + 1

    def completions(self, tokenizer: Any) -> list[list[Completion]]:
        texts = tokenizer.batch_decode(self.tokens, skip_special_tokens=True)
        flat = [Completion(*row) for row in zip(self.tokens, self.logprobs, texts, self.done, strict=True)]
        return [flat[i : i + self.sampling.n] for i in range(0, self.size, self.sampling.n)]


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their log-probabilities [B] from logits [B, V] by inverting the distribution function at uniform
    [B] in [0, 1).

    Temperature 0 takes the most probable token. Log-probabilities are those of the distribution drawn from (at
    temperature 0: of the model).
    """
    if sampling.temperature == 0:
        logprobs = logits.log_softmax(-1)
        tokens = logprobs.argmax(-1)
        return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    logprobs = (logits / sampling.temperature).log_softmax(-1)
    if sampling.top_p < 1:
        ordered, order = logprobs.sort(-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()  # mass of the more probable tokens
        dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= sampling.top_p)
        logprobs = logprobs.masked_fill(dropped, -torch.inf).log_softmax(-1)
    cumulative = logprobs.double().exp().cumsum(-1)  # [B, V]
    # right=True never picks a token of probability 0
    tokens = torch.searchsorted(cumulative, uniform.unsqueeze(-1) * cumulative[:, -1:], right=True).squeeze(-1)
    tokens = tokens.clamp(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
