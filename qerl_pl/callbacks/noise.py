"""Adaptive quantization noise (paper §3.3)."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning import Callback, Trainer
from torch import Tensor

from qerl_pl.losses import k3
from qerl_pl.noise import Applied, NormNoise
from qerl_pl.types import RolloutBatch
from registry.noise import NoiseSchedule


class AdaptiveQuantizationNoise(Callback):
    """Puts noise on the sampler's norm weights for each rollout batch, and takes it back for every evaluation.

    With ``in_trainer`` the trainer's log-probabilities of a batch are computed under the noise it was sampled with.
    ``noise/kl`` is the KL divergence per token that the noise causes, ``sampling/kl_kernels`` what is left of that
    between sampler and trainer without it: computed by the trainer on up to ``probe`` completions of the batch, as many
    as fit into a micro-batch.
    """

    def __init__(
        self, schedule: NoiseSchedule, norms: Sequence[str], in_trainer: bool, seed: int, probe: int = 8
    ) -> None:
        self.schedule, self.norms, self.in_trainer, self.seed, self.probe = schedule, norms, in_trainer, seed, probe
        self.applied = Applied(0, 0.0, 0.0)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.sampler = NormNoise(trainer.datamodule.engine.norms(), self.norms, self.seed)  # type: ignore[attr-defined]
        self.trainer = NormNoise(pl_module.policy.norms(), self.norms, self.seed)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._apply(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: RolloutBatch, batch_idx: int) -> None:
        metrics = {
            "noise/sigma": self.applied.sigma,
            "noise/realised_sigma": self.applied.realised,
            "noise/modules": self.applied.modules,
            **self._kl(pl_module, batch),
        }
        pl_module.log_dict({k: float(v) for k, v in metrics.items()}, batch_size=len(batch))
        if self.in_trainer:
            self.trainer.apply(self.applied.sigma, batch.step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        self.trainer.restore()
        started = time.perf_counter()
        self._apply(trainer, pl_module)
        pl_module.log("step_time/noise", time.perf_counter() - started, batch_size=len(batch))

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "fit":
            self._restore(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._apply(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if stage == "fit" and hasattr(self, "sampler"):
            self._restore(trainer)

    def rebase(self, clean: Mapping[str, Tensor]) -> None:
        """Norm weights that were trained; noise goes on top of these from now on."""
        self.sampler.rebase(clean)
        self.trainer.rebase(clean)

    def lift(self, trainer: Trainer) -> None:
        """Clean weights in sampler and trainer, until the noise of the next rollout batch comes."""
        self.trainer.restore()
        self._restore(trainer)

    def _apply(self, trainer: Trainer, pl_module: Any) -> None:
        """Noise of the rollout batch that comes next."""
        step = trainer.datamodule.done  # type: ignore[attr-defined]
        self.applied = self.sampler.apply(self.schedule.sigma(step, pl_module.total_rollouts), step)
        trainer.datamodule.engine.refresh()  # type: ignore[attr-defined]

    def _restore(self, trainer: Trainer) -> None:
        self.sampler.restore()
        trainer.datamodule.engine.refresh()  # type: ignore[attr-defined]

    @torch.no_grad()
    def _kl(self, pl_module: Any, batch: RolloutBatch) -> dict[str, float]:
        """KL divergences per token, taken apart: what the noise does, and what is left between sampler and trainer
        under the same noise (kernels, rounding).
        """
        part = batch.rows(torch.arange(self._rows(batch.lengths, pl_module.tokens_per_micro_batch)))
        arguments = (part.tokens, part.lengths, part.completion_mask, part.temperature)
        clean, _ = pl_module.policy(*arguments)
        noisy = clean
        if self.applied.sigma:
            self.trainer.apply(self.applied.sigma, batch.step)
            noisy, _ = pl_module.policy(*arguments)
            self.trainer.restore()
        pairs = {"noise/kl": (clean, noisy), "sampling/kl_kernels": (noisy, part.sampler_logprobs)}
        mask = part.completion_mask
        return {name: float(k3(other, sampled, mask)[mask].mean()) for name, (other, sampled) in pairs.items()}

    def _rows(self, lengths: Tensor, budget: int) -> int:
        """How many of the first completions go through the trainer at once: within the budget of tokens, at least 1."""
        return max(1, min(len(lengths), self.probe, budget // int(lengths[: self.probe].max())))
