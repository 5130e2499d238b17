"""The LightningModule: one training step of quantization-enhanced reinforcement learning (arXiv 2510.11696)."""

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from qerl_pl.batching import minibatches
from qerl_pl.build import Layers, build_policy, check_optimizer
from qerl_pl.callbacks import AdapterSync, AdaptiveQuantizationNoise
from qerl_pl.checkpoint import resolve
from qerl_pl.distributed import Replicas, add_up_gradients
from qerl_pl.evaluation import Grades
from qerl_pl.gpu_memory import GPUMemory
from qerl_pl.losses import Loss
from qerl_pl.metrics import StepLog
from qerl_pl.objective import Counter, Objective, Scores
from qerl_pl.policy import DTYPES, LoRA, Policy, copy_adapter
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
        trained_norms: norms whose weights are trained beside the adapter, by the last part of their names (the paper's
            Algorithm 1 trains input_layernorm and post_attention_layernorm).
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
        trained_norms: tuple[str, ...] = (),
        optimizer: OptimizerCallable = adamw,
        lr_schedule: str = "cosine",
        warmup: float = 0.1,
        max_grad_norm: float = 0.2,
        tokens_per_micro_batch: int = 16384,
        gradient_checkpointing: Layers = "auto",
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
        if not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm: {max_grad_norm} must be above 0; .inf never clips")
        for name, value in (("memory_gb", memory_gb), ("tokens_per_micro_batch", tokens_per_micro_batch)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}: {value} must be above 0")
        if not 0 <= warmup <= 1:
            raise ValueError(f"warmup: {warmup} is a share of the optimizer steps, from 0 to 1; for 4 of 100 give 0.04")
        check_optimizer(optimizer)
        self.model, self.quantization, self.lora, self.loss = model, quantization, lora, loss
        self.noise, self.noise_norms, self.noise_in_trainer = noise, noise_norms, noise_in_trainer
        if trained_norms and noise_in_trainer:
            raise ValueError(
                "noise_in_trainer with trained_norms: updates would go to weights that hold noise; use one of the two"
            )
        self.trained_norms = trained_norms
        self.make_optimizer, self.max_grad_norm = optimizer, max_grad_norm
        self.lr_schedule, self.warmup = lr_schedule, warmup
        self.tokens_per_micro_batch, self.gradient_checkpointing = tokens_per_micro_batch, gradient_checkpointing
        self.shared_base, self.memory_gb, self.proof_every = shared_base, memory_gb, proof_every
        self.dtype_name, self.seed = dtype, seed
        self.automatic_optimization = False  # Lightning would divide each micro-batch's loss by their number
        self.strict_loading = False  # checkpoints hold the adapter, never the base
        self.step_log = StepLog()
        self.memory = GPUMemory(memory_gb)
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
            self._check_replicas()
        if self.trainer.precision not in ("32-true", "bf16-mixed"):
            raise ValueError(
                f"trainer.precision: {self.trainer.precision} would cast the adapter and its optimizer state; "
                "use 32-true, and model.dtype: bfloat16 for the arithmetic of the base"
            )
        if stage == "fit" and self.data.sets("validation") and self.trainer.limit_val_batches:
            self.data.correctness  # noqa: B018  # raises now, and not at the first validation

    def _check_replicas(self) -> None:
        if not isinstance(self.trainer.strategy, Replicas):
            raise ValueError(
                f"trainer.devices: {self.trainer.world_size} processes need trainer.strategy: replicas, or devices: 1"
            )
        if self.loss.top_entropy_quantile < 1 or self.data.max_sampling_rounds > 1:
            raise ValueError(
                f"trainer.devices: {self.trainer.world_size} processes, with which top_entropy_quantile and "
                "max_sampling_rounds must be 1; use devices: 1"
            )

    def configure_model(self) -> None:
        """Start the engine and build the policy, once, from the same stored bytes."""
        if self.policy is not None:
            return
        self.policy = build_policy(
            self.data,
            self.model,
            self.quantization,
            self.lora,
            device=self.trainer.strategy.root_device,
            dtype=self.dtype_name,
            optimizer=self.make_optimizer,
            gradient_checkpointing=self.gradient_checkpointing,
            tokens_per_micro_batch=self.tokens_per_micro_batch,
            shared_base=self.shared_base,
            memory_gb=self.memory_gb,
            trained_norms=self.trained_norms,
            seed=self.seed,
        )
        self.objective = Objective(
            self.policy,
            self.loss,
            self.tokens_per_micro_batch,
            self.data.sampling.max_tokens,
            self.step_log,
            self.manual_backward,
            Counter(lambda phase, text: self.data.collector.report(phase, text)),
        )

    def configure_optimizers(self) -> Any:
        from transformers import get_scheduler

        assert self.policy is not None
        optimizer = self.make_optimizer(self._parameter_groups())
        updates = self.total_rollouts * self.updates_per_rollout
        name = "constant_with_warmup" if self.lr_schedule == "constant" else self.lr_schedule
        scheduler = get_scheduler(
            name, optimizer, num_warmup_steps=math.ceil(self.warmup * updates), num_training_steps=updates
        )
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def _parameter_groups(self) -> list[Any]:
        assert self.policy is not None
        adapter, norms = self.policy.adapter_parameters(), list(self.policy.norm_parameters().values())
        groups: list[dict[str, Any]] = [{"params": list(adapter.values())}]
        if self.lora.b_rate_ratio != 1:
            groups = [{"params": [p for name, p in adapter.items() if f".lora_{kind}." in name]} for kind in "AB"]
            groups[1]["lr"] = self.make_optimizer(groups[1]["params"]).defaults["lr"] * self.lora.b_rate_ratio
        if norms:
            groups.append({"params": norms, "weight_decay": 0.0})  # decay would pull them from 1 to 0
        return groups

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
        rate = float(self.lr_schedulers().get_last_lr()[0])  # type: ignore[union-attr, arg-type]
        with self.memory.update(self.device, self.data.engine.release_cache):
            scores = self.objective.prepare(batch, self.updates_per_rollout)
            for iteration in range(self.loss.num_iterations):
                seed = derive_seed(self.seed, "minibatches", batch.step, iteration)
                for rows in minibatches(len(batch), self.loss.num_minibatches, seed):
                    self._update(batch, rows.to(self.device), scores)
        self.data.completed(batch.step)
        metrics = self.step_log.finish(batch, time.perf_counter() - started, rate) | self.memory.peaks
        self.log_dict(metrics, batch_size=len(batch))

    def _update(self, batch: RolloutBatch, rows: Tensor, scores: Scores) -> None:
        """One optimizer step on the given completions."""
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        parameters = list(self._trained().values())
        optimizer.zero_grad()  # type: ignore[union-attr]
        loss = self.objective.accumulate(batch, rows, scores)
        for parameter in parameters:  # also where no completion teaches anything, so that every step is a step
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        add_up_gradients(parameters)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        if not torch.isfinite(norm):
            raise RuntimeError(
                f"gradient norm is {norm.item()} at rollout {batch.step}; lower the learning rate or check the rewards"
            )
        optimizer.step()  # type: ignore[union-attr]
        scheduler.step()  # type: ignore[union-attr]
        self.step_log.averages.add("loss", loss)
        self.step_log.averages.add("grad_norm", norm)

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
        self.grades = self.grades.gathered()
        self.log_dict(self.grades.metrics("validation"))

    def on_test_epoch_end(self) -> None:
        self.grades = self.grades.gathered()
        self.log_dict(self.grades.metrics("test"))

    # -------------------------------------------------------------- checkpoints

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The adapter, under the names of a saved PEFT folder, and the trained norms; nothing of the base."""
        return {} if self.policy is None else {name: p.detach() for name, p in self._trained().items()}

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        assert self.policy is not None
        return self.policy.adapter_parameters() | self.policy.norm_parameters()

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        copy_adapter(self._trained(), state_dict)

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter as a PEFT folder."""
        assert self.policy is not None
        self.policy.save_adapter(folder, str(resolve(self.model)) if self.model == "tiny" else self.model)
