"""vLLM as the sampling engine, in the trainer's process: base, adapter and norm weights are written in place."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from qerl_pl.engine import vllm_compat, vllm_shared
from qerl_pl.engine.base import ENGINES, CannotShareError, Engine, EngineSpec, Progress
from qerl_pl.engine.vllm_adapter import adapter_layers
from qerl_pl.engine.vllm_formats import load_settings, own_loaders
from qerl_pl.engine.vllm_kernels import choose, patched_layers
from qerl_pl.engine.vllm_slots import AdapterSlots
from qerl_pl.stored import stored_as
from qerl_pl.types import Completion, Sampling
from registry.quantization import BF16, NVFP4, QuantFormat

GIB = 2**30
PROGRESS_SECONDS = 0.5
LARGEST_GRAPH = 1024  # launches are hidden behind the work of such a batch, and its NVFP4 layers are made dense


@ENGINES.register("vllm")
class VLLMEngine(Engine):
    """Samples with vLLM (0.26 to 0.32), on a CUDA GPU or with the CPU build.

    One LoRA adapter lies in the layers and serves every request; no file is written and nothing is merged. Adapter,
    norm weights and prefix cache are the only state that changes after ``start``. vLLM's compiler is left out: kernels
    of our own do what it would fuse.

    Args:
        max_model_len: Longest prompt + completion, in tokens; by default what the data module asks for, and the model
            allows.
        max_num_seqs: Completions sampled at the same time.
        max_num_batched_tokens: Prompt tokens computed at once. Fewer take less memory.
        kv_cache_gb: Size of the KV cache in GiB; by default what the memory plan gives, on the CPU 1.
        release_kv_cache: Give the KV cache's memory to the trainer while it computes (CUDA only).
        enforce_eager: No CUDA graphs. By default on the CPU only.
        kernels: Adapter, norms and NVFP4 by kernels of our own and Humming's where they can be used (CUDA only); what
            is left out is said. Otherwise by PyTorch and vLLM's Marlin.
        cudagraph_sizes: Batch sizes to capture; others are padded up to the next. By default about a dozen up to
            ``max_num_seqs``.
        dense: Sample from dense weights in the numbers of the format, as the CPU build always does, instead of through
            vLLM's kernels: for formats that vLLM does not know. Takes the memory of BF16.
    """

    plannable = True

    def __init__(
        self,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        kv_cache_gb: float | None = None,
        release_kv_cache: bool = True,
        enforce_eager: bool | None = None,
        cudagraph_sizes: list[int] | None = None,
        dense: bool = False,
        kernels: bool = True,
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            if value < 1:
                raise ValueError(f"engine.{name}: {value} must be at least 1")
        if cudagraph_sizes and max(cudagraph_sizes) > LARGEST_GRAPH:
            raise ValueError(
                f"engine.cudagraph_sizes: {max(cudagraph_sizes)} is above {LARGEST_GRAPH}; larger batches gain nothing"
            )
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.kv_cache_gb = kv_cache_gb
        self.release_kv_cache = release_kv_cache
        self.enforce_eager = enforce_eager
        self.cudagraph_sizes = cudagraph_sizes
        self.dense = dense
        self.kernels = kernels
        self._llm: Any = None
        self._norms: Any = None
        self._adapter: Any = None
        self._released = False

    def start(self, spec: EngineSpec) -> None:
        if self._llm is not None:
            return
        _check(spec)
        self._spec = spec
        self._cuda = torch.device(spec.device).type == "cuda"
        vllm_compat.prepare(self._cuda)
        kernels = choose(spec, self.kernels, self.dense)
        self.notes = () if kernels.note is None else (kernels.note,)
        device, dtype = torch.device(spec.device), getattr(torch, spec.dtype)
        adapter = adapter_layers(spec.targets, spec.rank, dtype, device, kernels.ours)
        releasable = vllm_shared.releasable_cache() if self._cuda and self.release_kv_cache else nullcontext()
        try:
            with (
                torch.inference_mode(False),  # weights made within it could not be written outside
                vllm_compat.unchanged_process(self._cuda),
                vllm_compat.uncompiled(self._cuda),
                releasable,
                patched_layers(kernels, spec.quantization, self._sizes()),
                own_loaders(),
                adapter as slots,
            ):
                base = load_settings(spec, dense=self.dense or not self._cuda)
                self._llm = vllm_compat.build(self._settings(spec) | base | {"linear_backend": kernels.backend})
            self._norms = vllm_compat.norm_weights(self._llm)
            self._adapter = AdapterSlots(slots, spec)
            if absent := set(spec.targets) - {name.rpartition(".")[2] for name in slots}:
                kind = type(vllm_compat.model(self._llm)).__name__
                raise ValueError(f"LoRA targets {sorted(absent)} are not linear layers of {kind} in vLLM")
        except BaseException:
            self.close()
            raise
        self.tokenizer = self._llm.get_tokenizer()
        self._clean = self._versions()

    def _settings(self, spec: EngineSpec) -> dict[str, Any]:
        eager = not self._cuda if self.enforce_eager is None else self.enforce_eager
        settings: dict[str, Any] = {
            "model": str(spec.folder),
            "dtype": spec.dtype,
            "max_model_len": self.max_model_len or _max_length(spec),
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": max(self.max_num_batched_tokens, self.max_num_seqs),
            "enforce_eager": eager,
        }
        if not self._cuda:  # vLLM takes a prompt in parts with a generator whose place it sets, which a CPU's has not
            tokens = max(settings["max_num_batched_tokens"], settings["max_model_len"])
            settings |= {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}
        if self.kv_cache_gb is not None:
            settings["kv_cache_memory_bytes"] = int(self.kv_cache_gb * GIB)
        elif spec.kv_cache_bytes is not None or not self._cuda:
            settings["kv_cache_memory_bytes"] = spec.kv_cache_bytes or GIB
        if "kv_cache_memory_bytes" in settings:  # then the share decides nothing, but vLLM wants it to be free
            settings["gpu_memory_utilization"] = 0.01
        if self._cuda and not eager:
            settings["compilation_config"] = {
                "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": self._sizes()
            }  # fmt: skip
        return settings

    def _sizes(self) -> list[int]:
        return self.cudagraph_sizes or _graph_sizes(self.max_num_seqs)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        progress: Progress | None = None,
    ) -> list[list[Completion]]:
        """See the interface. At temperature 0 the likeliest token, with its log-probability at temperature 1."""
        llm = self._running()
        self._check_call(prompts, sampling, seeds)
        if self._released:
            vllm_shared.restore_cache(llm)
            self._released = False
        engine, outputs, tokens = llm.llm_engine, {}, 0
        rows = [[f"{i}:{j}" for j in range(sampling.n)] for i in range(len(prompts))]
        total, began = len(prompts) * sampling.n, time.monotonic()
        reported = began
        with vllm_compat.unchanged_process(self._cuda), vllm_compat.uncompiled(self._cuda):
            try:
                for prompt, seed, row in zip(prompts, seeds, rows, strict=True):
                    # One request a sample, not n of one: vLLM would give the siblings the seeds seed, seed + 1, ..., so
                    # that prompts with neighbouring seeds share random numbers. The prefix cache shares the prefill.
                    for j, request in enumerate(row):
                        vllm_compat.add_request(engine, request, prompt, sampling, _sample_seed(seed, j))
                while engine.has_unfinished_requests():
                    for output in engine.step():
                        outputs[output.request_id] = output.outputs[0]
                        tokens += len(output.outputs[0].token_ids)
                    now = time.monotonic()
                    if progress and now - reported >= PROGRESS_SECONDS and len(outputs) < total:
                        progress(len(outputs), total, (tokens + vllm_compat.running_tokens(llm)) / (now - began))
                        reported = now
            except BaseException:  # also Ctrl-C: what is left in the queue would come out of the next call
                engine.abort_request([request for row in rows for request in row])
                raise
        if progress:
            progress(total, total, tokens / (time.monotonic() - began))
        return [[self._completion(outputs[request]) for request in row] for row in rows]

    def _check_call(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> None:
        if len(prompts) != len(seeds):
            raise ValueError(f"{len(prompts)} prompts need as many seeds, got {len(seeds)}")
        model = self._llm.llm_engine.model_config
        longest = model.max_model_len - sampling.max_tokens
        vocabulary = model.get_vocab_size()  # vLLM lets the id behind the last pass
        for i, prompt in enumerate(prompts):
            if not 0 < len(prompt) <= longest:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens; 1 to {longest} are possible with "
                    f"max_tokens={sampling.max_tokens} and max_model_len={model.max_model_len}: raise the engine's "
                    "max_model_len, or drop long prompts"
                )
            if not 0 <= min(prompt) <= max(prompt) < vocabulary:
                raise ValueError(f"prompt {i} has token ids {min(prompt)} to {max(prompt)}; the model has {vocabulary}")
        if self._versions() != self._clean:
            raise RuntimeError(
                "adapter or norm weights changed without refresh(): cached prefixes are those of the old weights"
            )

    def _completion(self, output: Any) -> Completion:
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a request with {output.finish_reason!r}")
        ids = list(output.token_ids)
        return Completion(
            token_ids=ids,
            logprobs=[entry[token].logprob for token, entry in zip(ids, output.logprobs, strict=True)],
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            finished=output.finish_reason == "stop",
        )

    def load_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        self._running()
        self._adapter.write(tensors)

    def adapter(self) -> dict[str, Tensor]:
        self._running()
        return self._adapter.read()

    def norms(self) -> dict[str, Tensor]:
        self._running()
        return dict(self._norms)

    def refresh(self) -> None:
        if not self._running().reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not reset its prefix cache: completions would start from states of the old weights"
            )
        self._clean = self._versions()

    def shared_weights(self) -> Mapping[str, Any]:
        """See the interface. On CUDA: NVFP4 tensors of Humming's or Marlin's, or dense weights; embeddings, head."""
        llm = self._running()
        if not self._cuda:
            raise CannotShareError("vLLM's CPU build repacks its weights")
        linear: dict[str, Any] = dict(vllm_shared.linear_weights(llm))
        return linear | vllm_shared.embedding_weights(llm)

    def base_in_memory(self, config: Mapping[str, Any], quantization: QuantFormat, shared: bool) -> tuple[int, float]:
        """See the interface."""
        bits = BF16.bits_per_weight if self.dense else quantization.bits_per_weight
        tiled = isinstance(quantization, NVFP4) and not vllm_shared.padded(config)
        if shared and (self.dense or tiled or isinstance(quantization, BF16)):
            return 1, bits
        return 2, (bits + quantization.bits_per_weight) / 2

    def release_cache(self) -> int:
        """See the interface. Cached prefixes are lost."""
        if not (self._cuda and self.release_kv_cache):
            return 0
        if not self._released:
            self.refresh()
            vllm_shared.release_cache()
            self._released = True
        return vllm_shared.cache_bytes(self._llm)

    def _versions(self) -> int:
        """Grows with every write in place to norm or adapter."""
        return self._adapter.version() + sum(weight._version for weight in self._norms.values())

    def model_bytes(self) -> int:
        """Memory of the engine's weights, LoRA buffers included, without the KV cache.

        Dense weights that the CPU build has repacked are not seen.
        """
        module = vllm_compat.model(self._running())
        return vllm_compat.storage_bytes([*module.parameters(), *module.buffers(), *self._adapter.tensors()])

    def close(self) -> None:
        if self._llm is None:
            return
        if self._released:  # memory that is not mapped cannot be freed
            vllm_shared.restore_cache(self._llm)
            self._released = False
        vllm_compat.shut_down(self._llm)
        self._llm = None
        self._norms = self._adapter = None  # they share the model's memory
        vllm_compat.free_memory()  # not before nothing refers to the engine

    def _running(self) -> Any:
        if self._llm is None:
            raise RuntimeError("the engine is not running: call start first")
        return self._llm


def _check(spec: EngineSpec) -> None:
    if spec.rank < 1:
        raise ValueError(f"LoRA rank {spec.rank} must be at least 1")
    index = torch.device(spec.device).index
    if index:
        raise ValueError(f"device {spec.device}: vLLM takes the first visible GPU; set CUDA_VISIBLE_DEVICES={index}")
    if torch.distributed.is_initialized() and (world := torch.distributed.get_world_size()) > 1:
        raise ValueError(f"engine: vllm runs in one process, but torch.distributed has {world}; use devices: 1")
    stored, wanted = stored_as(spec.config.get("quantization_config")), stored_as(spec.quantization.config)
    if stored != wanted:
        raise ValueError(
            f"{spec.folder} holds {stored}, but quantization is {type(spec.quantization).__name__} ({wanted})"
        )


def _max_length(spec: EngineSpec) -> int:
    return min(spec.max_length, spec.config.get("max_position_embeddings", spec.max_length))


def _sample_seed(seed: int, sample: int) -> int:
    """63 bits that differ for every (seed, sample), without structure."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=8).digest(), "big") >> 1


def _graph_sizes(largest: int) -> list[int]:
    sizes = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768]
    return [size for size in sizes if size < largest] + [min(largest, LARGEST_GRAPH)]
