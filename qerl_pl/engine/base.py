"""The interface of a sampling engine."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from torch import Tensor

from qerl_pl.types import Completion, Sampling
from registry._registry import Name, Registry
from registry.quantization import QuantFormat

Progress = Callable[[int, int, float], None]
"""Called now and then while sampling with (finished completions, all completions, tokens per second)."""


@dataclass(frozen=True)
class EngineSpec:
    """What an engine must know of the policy, before the policy is built."""

    folder: Path  # checkpoint of the base in the layout of ``quantization``, with tokenizer
    quantization: QuantFormat
    rank: int  # of the adapter
    alpha: float
    targets: tuple[str, ...]  # module names: q_proj, ...
    dtype: str = "float32"  # of the arithmetic: float32 or bfloat16
    device: str = "cpu"
    max_length: int = 4096  # longest prompt + completion that will be asked for
    kv_cache_bytes: int | None = None  # planned size of the KV cache

    @property
    def config(self) -> dict[str, Any]:
        """The base's ``config.json``."""
        found: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return found


class CannotShareError(Exception):
    """Why the trainer needs its own copy of the base."""


class Engine(ABC):
    """Samples from base + adapter + noise. The constructor takes settings only; ``start`` does the heavy work, once."""

    tokenizer: Any
    plannable = False
    """Whether the memory plan covers it: then it has max_num_seqs, max_num_batched_tokens, release_kv_cache and
    ``base_in_memory``.
    """
    notes: Sequence[str] = ()
    """After ``start``: what a user should know of the way it computes."""

    @abstractmethod
    def start(self, spec: EngineSpec) -> None:
        """Load the base and make room for one adapter, which is zero at first. A second call does nothing."""

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        progress: Progress | None = None,
    ) -> list[list[Completion]]:
        """Sample ``sampling.n`` completions of each prompt; ``seeds`` has one number a prompt.

        The same prompt, seed, weights and settings give the same tokens whatever else is in the call.
        """

    @abstractmethod
    def load_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy LoRA matrices into the running engine.

        ``tensors`` has PEFT's names, as in a saved adapter:
        ``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`` [rank, in], ``...lora_B.weight`` [out,
        rank]. B is not yet multiplied by alpha / rank.
        """

    @abstractmethod
    def adapter(self) -> dict[str, Tensor]:
        """The LoRA matrices that the engine computes with, read back under the same names (B without alpha / rank)."""

    @abstractmethod
    def norms(self) -> dict[str, Tensor]:
        """The live FP32 weights of all RMSNorms, by module name (``model.layers.0.input_layernorm``), to be written
        in place.
        """

    @abstractmethod
    def refresh(self) -> None:
        """Forget everything computed with earlier weights (prefix cache). Call after the adapter or a norm changed."""

    def shared_weights(self) -> Mapping[str, Any]:
        """The frozen weights that the trainer can compute from, by Hugging Face's module name, so that they exist once.

        A :class:`~qerl_pl.packed.Weight` for each projection, a tensor [V, H] for embeddings and head. Raises
        :class:`CannotShareError` where the engine holds them in a form of its own.
        """
        raise CannotShareError(f"{type(self).__name__} keeps a copy of its own")

    def base_in_memory(self, config: Mapping[str, Any], quantization: QuantFormat, shared: bool) -> tuple[int, float]:
        """How many copies of the base engine and trainer will hold (``shared``: one, if that can be) of a model with
        this ``config.json``, and the bits of a weight in one of them, on average. For the memory plan, before
        ``start``.
        """
        raise NotImplementedError

    def release_cache(self) -> int:
        """Give the memory of keys and values back until the next ``generate``; return how many bytes that freed."""
        return 0

    def close(self) -> None:
        """Free what ``start`` took."""


def stop_tokens(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a completion: the tokenizer's, and all that the generation config lists."""
    config = folder / "generation_config.json"
    listed = json.loads(config.read_text()).get("eos_token_id") if config.is_file() else None
    ids = {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])} - {None}
    if not ids:
        raise ValueError(
            f"{folder}: neither tokenizer nor generation_config.json names an end token; completions would never end"
        )
    return frozenset(ids)


ENGINES: Registry[Engine] = Registry("engine", "qerl_pl.engines")

if TYPE_CHECKING:
    EngineName = Never
else:

    class EngineName(Name, registry=ENGINES):
        """A registered engine."""
