"""vLLM as it comes, with an adapter from disk: what the project's engine is compared with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qerl_pl.engine import vllm_compat
from qerl_pl.engine.base import EngineSpec
from qerl_pl.engine.vllm_formats import load_settings

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What ``max_lora_rank`` may be."""


class StockVLLM:
    """``vllm.LLM`` with settings of its own for all but sizes. Rank 0 is the base alone, without LoRA.

    On the CPU it samples from dense weights, as the project's engine does.
    """

    def __init__(self, spec: EngineSpec, max_num_seqs: int, adapter: Path | None, graphs: Sequence[int]) -> None:
        self._cuda = torch.device(spec.device).type == "cuda"
        vllm_compat.prepare(self._cuda)
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        settings: dict[str, Any] = {
            "model": str(spec.folder),
            "dtype": spec.dtype,
            "max_model_len": spec.max_length,
            "max_num_seqs": max_num_seqs,
            "kv_cache_memory_bytes": spec.kv_cache_bytes,
            "gpu_memory_utilization": 0.01,  # it then decides nothing, but must be free
            "enable_prefix_caching": True,
            "skip_tokenizer_init": True,
            "use_tqdm_on_load": False,
            "seed": 0,
            **load_settings(spec, dense=not self._cuda),
        }
        if adapter is not None:
            rank = min(r for r in LORA_RANKS if r >= max(spec.rank, 16))
            settings |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
        if self._cuda:
            settings["compilation_config"] = {"cudagraph_capture_sizes": sorted(graphs)}
        else:
            settings["enforce_eager"] = True
        with vllm_compat.unchanged_process(self._cuda), vllm_compat.uncompiled(self._cuda):
            self._llm: Any = LLM(**settings)
        self._request = None if adapter is None else LoRARequest("stock", 1, str(adapter))

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
        """Sample one completion of ``max_tokens`` tokens of each prompt at temperature 1; return how many tokens."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        params = SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=0)
        with vllm_compat.unchanged_process(self._cuda), vllm_compat.uncompiled(self._cuda):
            outputs = self._llm.generate(
                [tokens_input(list(prompt)) for prompt in prompts], params, lora_request=self._request, use_tqdm=False
            )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def model_bytes(self) -> int:
        """Memory of weights and LoRA buffers, without the KV cache."""
        model = vllm_compat.model(self._llm)
        tensors = [*model.parameters(), *model.buffers()]
        for module in model.modules():
            tensors += [*getattr(module, "lora_a_stacked", ()), *getattr(module, "lora_b_stacked", ())]
        return vllm_compat.storage_bytes(tensors)

    def close(self) -> None:
        vllm_compat.shut_down(self._llm)
        self._llm = None
        vllm_compat.free_memory()
