"""The LightningModule: one training step of quantization-enhanced reinforcement learning (arXiv 2510.11696)."""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from qerl_pl.batching import micro_batches, minibatches
from qerl_pl.callbacks import AdapterSync, AdaptiveQuantizationNoise
from qerl_pl.checkpoint import prepare, resolve
from qerl_pl.engine.base import CannotShareError, EngineSpec
from qerl_pl.evaluation import Grades
from qerl_pl.losses import Loss, clipped_surrogate, importance_weights, token_weights
from qerl_pl.memory import GB, MemoryLog, Plan, limit_memory, plan_memory
from qerl_pl.metrics import StepLog
from qerl_pl.policy import ALL, DTYPES, LoRA, Policy, copy_adapter
from qerl_pl.seeds import derive_seed
from qerl_pl.types import RolloutBatch
from registry.noise import Exponential, NoiseSchedule, ScheduleName
from registry.quantization import NVFP4, FormatName, QuantFormat


def adamw(
    params: Iterable[torch.nn.Parameter],
    lr: float = 1e-5,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.1,
) -> torch.optim.Optimizer:
    """AdamW with the settings of the paper's runs."""
    return torch.optim.AdamW(params, lr=lr, betas=betas, weight_decay=weight_decay)


class QeRLModule(LightningModule):
    """A 4-bit base under LoRA, trained on scored completions.

    Args:
        model: folder or hub name of a causal language model with a chat template; ``tiny`` is the embedded one.
        quantization: weight format of the frozen base. A BF16 model is rounded to it once, on loading.
        lora: the adapter.
        loss: the objective.
        noise: schedule of the noise on the sampler's norm weights.
        noise_norms: which norms carry it, by the last part of their names.
        noise_in_trainer: compute the trainer's log-probabilities under the same noise.
        optimizer: made over the adapter alone.
        lr_schedule: of the learning rate over all optimizer steps: constant, linear or cosine, after the warm-up.
        warmup: share of the optimizer steps in which the rate rises from 0.
        max_grad_norm: gradients are scaled down to this norm.
        tokens_per_micro_batch: tokens, prompts included, that go through the model at once.
        gradient_checkpointing: decoder layers that compute their activations again in backward (true: all; a number:
            so many; auto: as many as the memory needs). A layer takes a third more time and a tenth of the memory.
        shared_base: on CUDA, compute from the engine's own copy of the base.
        memory_gb: GPU memory (1e9 bytes) to plan with and to stay within; by default all that is free.
        proof_every: rollout batches between two proofs that the engine's log-probabilities are the trainer's.
        dtype: of the trainer's and engine's arithmetic: float32, bfloat16, or auto (bfloat16 on a GPU).
        seed: of noise and minibatch order.
    """

    def __init__(
        self,
        model: str = "tiny",
        quantization: QuantFormat | FormatName = NVFP4(),
        lora: LoRA = LoRA(),
        loss: Loss = Loss(),
        noise: NoiseSchedule | ScheduleName = Exponential(),
        noise_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
        noise_in_trainer: bool = False,
        optimizer: OptimizerCallable = adamw,
        lr_schedule: str = "cosine",
        warmup: float = 0.1,
        max_grad_norm: float = 0.2,
        tokens_per_micro_batch: int = 16384,
        gradient_checkpointing: bool | int | Literal["auto"] = "auto",
        shared_base: bool = True,
        memory_gb: float | None = None,
        proof_every: int = 10,
        dtype: str = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype: {dtype!r} is not one of auto, {', '.join(DTYPES)}")
        if lr_schedule not in ("constant", "linear", "cosine"):
            raise ValueError(f"lr_schedule: {lr_schedule!r} is not one of constant, linear, cosine")
        self.model, self.quantization, self.lora, self.loss = model, quantization, lora, loss
        self.noise, self.noise_norms, self.noise_in_trainer = noise, noise_norms, noise_in_trainer
        self.make_optimizer, self.max_grad_norm = optimizer, max_grad_norm
        self.lr_schedule, self.warmup = lr_schedule, warmup
        self.tokens_per_micro_batch, self.gradient_checkpointing = tokens_per_micro_batch, gradient_checkpointing
        self.shared_base, self.memory_gb, self.proof_every = shared_base, memory_gb, proof_every
        self.dtype_name, self.seed = dtype, seed
        self.automatic_optimization = False  # Lightning would divide each micro-batch's loss by their number
        self.strict_loading = False  # checkpoints hold the adapter, never the base
        self.step_log = StepLog()
        self.grades = Grades()
        self.policy: Policy | None = None

    # ------------------------------------------------------------------ set-up

    @property
    def data(self) -> Any:
        """The data module; the two meet here and know nothing else of each other."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    def configure_callbacks(self) -> list[Callback]:
        """The adapter goes to the sampler first, then the noise: the proof between the two has none."""
        noise = AdaptiveQuantizationNoise(self.noise, self.noise_norms, self.noise_in_trainer, self.seed)
        return [AdapterSync(noise, self.proof_every), noise]

    def setup(self, stage: str) -> None:
        if self.trainer.world_size > 1:
            raise ValueError(
                f"trainer.devices: {self.trainer.world_size} processes; only one is supported, use devices: 1"
            )
        if self.trainer.precision not in ("32-true", "bf16-mixed"):
            raise ValueError(
                f"trainer.precision: {self.trainer.precision} would cast the adapter and its optimizer state; "
                "use 32-true, and model.dtype: bfloat16 for the arithmetic of the base"
            )

    def configure_model(self) -> None:
        """Start the engine and build the policy, once, from the same stored bytes."""
        if self.policy is not None:
            return
        on_gpu = self.trainer.strategy.root_device.type == "cuda"
        dtype = self.dtype_name if self.dtype_name != "auto" else "bfloat16" if on_gpu else "float32"
        folder = prepare(self.model, self.quantization)
        plan = self._plan(folder) if on_gpu and self.data.engine.plannable else None
        spec = EngineSpec(
            folder,
            self.quantization,
            self.lora.rank,
            self.lora.alpha,
            tuple(self.lora.targets),
            dtype,
            device="cuda" if on_gpu else "cpu",
            max_length=self.data.max_prompt_length + self.data.sampling.max_tokens,
            kv_cache_bytes=None if plan is None else plan.kv_cache,
        )
        self.data.engine.start(spec)
        shared = self._shared_weights() if on_gpu else None
        layers = self.gradient_checkpointing
        if layers == "auto":
            layers = 0 if plan is None else plan.checkpointed_layers
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.seed, "adapter"))
            self.policy = Policy(spec, shared, ALL if layers is True else int(layers))

    def _plan(self, folder: Path) -> Plan:
        """What goes where on the GPU; said aloud."""
        free = torch.cuda.mem_get_info()[0]
        if self.memory_gb is not None:
            free = min(free, int(self.memory_gb * GB))
            limit_memory(free)
        engine, sampling = self.data.engine, self.data.sampling
        optimizer = type(self.make_optimizer([torch.nn.Parameter(torch.zeros(1))])).__name__
        plan = plan_memory(
            json.loads((folder / "config.json").read_text()),
            device_bytes=free,
            bits_per_weight=self.quantization.bits_per_weight,
            base_copies=1 if self.shared_base else 2,
            rank=self.lora.rank,
            targets=self.lora.targets,
            optimizer_bytes=2 if "8bit" in optimizer else 8,
            max_prompt_length=self.data.max_prompt_length,
            max_completion_length=sampling.max_tokens,
            num_generations=sampling.n,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            tokens_per_micro_batch=self.tokens_per_micro_batch,
            release_kv=engine.release_kv_cache,
        )
        self.data.collector.report("note", plan.table())
        return plan

    def _shared_weights(self) -> Mapping[str, Any] | None:
        """The engine's weights, or None for a copy of our own; which of the two is said aloud."""
        try:
            if not self.shared_base:
                raise CannotShareError("model.shared_base is false")
            weights = self.data.engine.shared_weights()
        except CannotShareError as reason:
            self.data.collector.report("note", f"base: the trainer holds a packed copy of its own ({reason})")
            return None
        self.data.collector.report("note", "base: one copy, the trainer computes from the engine's weights")
        return weights  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        from transformers import get_scheduler

        assert self.policy is not None
        optimizer = self.make_optimizer(list(self.policy.adapter_parameters().values()))
        updates = self.total_rollouts * self.updates_per_rollout
        name = "constant_with_warmup" if self.lr_schedule == "constant" else self.lr_schedule
        scheduler = get_scheduler(
            name, optimizer, num_warmup_steps=math.ceil(self.warmup * updates), num_training_steps=updates
        )
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps for each rollout batch."""
        return self.loss.num_iterations * self.loss.num_minibatches

    @property
    def total_rollouts(self) -> int:
        """Rollout batches in the whole run, from ``max_steps`` (optimizer steps) or ``max_epochs``, whichever ends it
        first.
        """
        limits = []
        if self.trainer.max_steps > 0:
            limits.append(math.ceil(self.trainer.max_steps / self.updates_per_rollout))
        if self.trainer.max_epochs is not None and self.trainer.max_epochs > 0:
            self.trainer.fit_loop.setup_data()
            limits.append(int(self.trainer.max_epochs * self.trainer.num_training_batches))
        if not limits:
            raise ValueError(
                "trainer: give max_steps or max_epochs; schedules of rate and noise need the length of the run"
            )
        return min(limits)

    # ---------------------------------------------------------------- one step

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        """rollouts, rewards and advantages are in the batch; here: old log-probabilities, μ passes of clipped
        updates.
        """
        started = time.perf_counter()
        memory = MemoryLog(self.device)
        released = self.data.engine.release_cache()
        if self.memory_gb is not None:
            limit_memory(int(self.memory_gb * GB) + released)
        memory.update_begins(released)
        rate = float(self.lr_schedulers().get_last_lr()[0])  # type: ignore[union-attr, arg-type]
        mask = self._loss_mask(batch)
        old = None
        if self.updates_per_rollout > 1:  # at the first and only update π_old is π
            old = self.logprobs_without_grad(batch)
        reference = self.logprobs_without_grad(batch, adapter=False) if self.loss.beta else None
        for iteration in range(self.loss.num_iterations):
            seed = derive_seed(self.seed, "minibatches", batch.step, iteration)
            for rows in minibatches(len(batch), self.loss.num_minibatches, seed):
                self._update(batch, rows, mask, old, reference)
        self.data.completed(batch.step)
        metrics = self.step_log.finish(batch, time.perf_counter() - started, rate) | memory.peaks()
        self.log_dict(metrics, batch_size=len(batch))
        if self.memory_gb is not None:  # keys and values come back
            limit_memory(int(self.memory_gb * GB))

    def _update(
        self, batch: RolloutBatch, rows: Tensor, mask: Tensor, old: Tensor | None, reference: Tensor | None
    ) -> None:
        """One optimizer step on the given completions."""
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        assert self.policy is not None
        parameters = list(self.policy.adapter_parameters().values())
        optimizer.zero_grad()  # type: ignore[union-attr]
        counted = mask[rows]
        completions, tokens = float(counted.any(-1).sum()), float(counted.sum())
        max_length = self.data.sampling.max_tokens
        total = torch.zeros((), device=self.device)
        # Without a KL term a completion whose advantage is 0 has no gradient: it is measured, but not differentiated.
        learn = (batch.advantages[rows.to(self.device)] != 0).cpu() | bool(self.loss.beta)
        for chosen, with_grad in ((rows[learn], True), (rows[~learn], False)):
            for micro in self._micro_batches(batch, chosen):
                part = batch.rows(micro)
                with torch.set_grad_enabled(with_grad):
                    logprobs, entropy = self.policy(part.tokens, part.lengths, part.completion_mask, part.temperature)
                width = logprobs.shape[1]
                before = logprobs.detach() if old is None else old[micro, :width]
                keep = mask[micro, :width]
                weights = token_weights(keep, self.loss.loss_type, completions, tokens, max_length)
                correction = importance_weights(before, part.sampler_logprobs, keep, self.loss.importance_cap)
                base = None if reference is None else reference[micro, :width]
                loss, metrics = clipped_surrogate(
                    logprobs, before, part.advantages, keep, weights, correction, self.loss.clip, self.loss.beta, base
                )
                if with_grad:
                    self.manual_backward(loss)
                total += loss.detach()
                self.step_log.add(part, before, entropy, metrics, keep, self.loss.importance_cap)
        for parameter in parameters:  # also where no completion teaches anything, so that every step is a step
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        if not torch.isfinite(norm):
            raise RuntimeError(
                f"gradient norm is {norm.item()} at rollout {batch.step}; lower the learning rate or check the rewards"
            )
        optimizer.step()  # type: ignore[union-attr]
        scheduler.step()  # type: ignore[union-attr]
        self.step_log.averages.add("loss", total)
        self.step_log.averages.add("grad_norm", norm)

    def _loss_mask(self, batch: RolloutBatch) -> Tensor:  # [B, T]
        if self.loss.mask_truncated_completions:
            return batch.completion_mask & batch.finished.unsqueeze(-1)
        return batch.completion_mask

    def _micro_batches(self, batch: RolloutBatch, rows: Tensor | None = None) -> Iterator[Tensor]:
        rows = torch.arange(len(batch)) if rows is None else rows
        done = 0
        for micro in micro_batches(batch.lengths.cpu(), rows, self.tokens_per_micro_batch):
            self.data.collector.report("update", f"{done}/{len(rows)} completions")
            yield micro.to(self.device)
            done += len(micro)

    @torch.no_grad()
    def logprobs_without_grad(self, batch: RolloutBatch, adapter: bool = True) -> Tensor:
        """log π(token) at completion tokens [B, T], 0 elsewhere; in micro-batches."""
        assert self.policy is not None
        out = torch.zeros_like(batch.sampler_logprobs)
        for micro in self._micro_batches(batch):
            part = batch.rows(micro)
            logprobs, _ = self.policy(part.tokens, part.lengths, part.completion_mask, part.temperature, adapter)
            out[micro, : logprobs.shape[1]] = logprobs
        return out

    # --------------------------------------------------------------- evaluation

    def on_validation_epoch_start(self) -> None:
        self.grades = Grades()

    def on_test_epoch_start(self) -> None:
        self.grades = Grades()

    def validation_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        self._evaluate(batch, "validation")

    def test_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def _evaluate(self, batch: RolloutBatch, split: str) -> None:
        self.grades.add(batch, self.data.correctness, self.data.collector.answer_format)
        metrics = {
            "reward": batch.rewards.nanmean(),
            "mean_length": batch.completion_mask.sum(-1).float().mean(),
            "clipped_ratio": 1 - batch.finished.float().mean(),
        }
        prefix = f"{split}/{batch.source}" if batch.source else split
        self.log_dict({f"{prefix}/{k}": v for k, v in metrics.items()}, batch_size=len(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.grades.metrics("validation"))

    def on_test_epoch_end(self) -> None:
        self.log_dict(self.grades.metrics("test"))

    # -------------------------------------------------------------- checkpoints

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The adapter, under the names of a saved PEFT folder; nothing of the base."""
        return {} if self.policy is None else {n: p.detach() for n, p in self.policy.adapter_parameters().items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        assert self.policy is not None
        copy_adapter(self.policy.adapter_parameters(), state_dict)

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter as a PEFT folder."""
        assert self.policy is not None
        self.policy.save_adapter(folder, str(resolve(self.model)) if self.model == "tiny" else self.model)
