"""Delivers the adapter to the engine, and proves it."""

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from lightning import Callback, Trainer
from torch import Tensor

from qerl_pl.callbacks.noise import AdaptiveQuantizationNoise
from qerl_pl.rollouts import collate
from qerl_pl.seeds import derive_seed
from qerl_pl.types import RolloutBatch, Sampling

PROMPTS, TOKENS = 4, 16  # of a proof: enough for a mean, a moment's work
FIRST, FLOOR, JUMP = 0.5, 0.05, 5.0
"""Limits of mean |Δ log p| in nats. BF16 engines stay around 0.006 on real and 0.04 on random weights, FP32 below 1e-4;
a wrong base or adapter costs more than 1 nat once it matters.
"""


class AdapterSync(Callback):
    """Copies the LoRA matrices into the running engine before its first and after every update, and proves it.

    After each copy the engine's matrices are read back and compared; a difference beyond the engine's rounding stops
    the run. That cannot see an adapter that is held right and used wrongly. So after every ``every``-th rollout batch
    the engine also samples a few tokens without noise, with fixed seeds, and the trainer computes their
    log-probabilities: a jump of their mean difference stops the run too.
    """

    def __init__(self, noise: AdaptiveQuantizationNoise, every: int = 10) -> None:
        if every < 1:
            raise ValueError(f"proof_every: {every} must be at least 1; 1 proves every sync, 10 every tenth")
        self.noise, self.every = noise, every
        self.differences: list[float] = []  # of the proofs so far

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._deliver(trainer, pl_module)

    def _deliver(self, trainer: Trainer, pl_module: Any) -> float:
        error = deliver(trainer, pl_module)
        self.noise.rebase(pl_module.policy.norm_parameters())
        return error

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        started = time.perf_counter()
        pl_module.log("sync/adapter_difference", self._deliver(trainer, pl_module), batch_size=len(batch))
        pl_module.log("step_time/sync", time.perf_counter() - started, batch_size=len(batch))
        if batch.step % self.every == 0:
            self.noise.lift(trainer)  # it applies that of the next batch after this
            difference = logp_difference(trainer, pl_module, batch)
            for logger in trainer.loggers:  # pl_module.log would repeat the value at all steps until the next proof
                logger.log_metrics({"sync/logp_difference": difference}, step=batch.step)
            check_proof(difference, self.differences, batch.step)
            self.differences.append(difference)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:  # while fitting the engine has it already
            deliver(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: Any) -> None:
        deliver(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"differences": self.differences}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.differences = list(state_dict["differences"])


def deliver(trainer: Trainer, pl_module: Any) -> float:
    """Copy the policy's adapter into the engine; return the largest relative difference of what it then holds."""
    engine = trainer.datamodule.engine  # type: ignore[attr-defined]
    tensors = {name: p.detach() for name, p in pl_module.policy.adapter_parameters().items()}
    engine.load_adapter(tensors)
    if norms := pl_module.policy.norm_parameters():  # clean; noise comes on top later
        live = engine.norms()
        with torch.no_grad():
            torch._foreach_copy_([live[name] for name in norms], [weight.detach() for weight in norms.values()])
    engine.refresh()
    return check_delivery(tensors, engine.adapter())


def check_delivery(sent: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> float:
    """Largest ‖held − sent‖ / ‖sent‖ over the matrices. RuntimeError above 1 %: BF16 rounding stays below 0.4 %."""
    if sent.keys() != held.keys():
        raise RuntimeError(
            f"the engine holds {len(held)} LoRA matrices, {len(sent)} were sent; it would sample from another policy"
        )
    names = list(sent)
    ours, theirs = list(sent.values()), [held[name].to(sent[name]) for name in names]
    norms = (torch.stack(torch._foreach_norm(t)) for t in (torch._foreach_sub(theirs, ours), ours))
    errors = [error / max(norm, 1e-12) for error, norm in zip(*(n.tolist() for n in norms), strict=True)]
    for name, error in zip(names, errors, strict=True):
        if not error <= 0.01:
            raise RuntimeError(
                f"the engine's {name} differs from the policy's by {error:.1%}; it would sample from another policy"
            )
    return max(errors)


def logp_difference(trainer: Trainer, pl_module: Any, batch: RolloutBatch) -> float:
    """Mean |log p(engine) − log p(trainer)| in nats over tokens that the engine samples now for prompts of ``batch``.

    The seeds are the same at every call, and no random state is touched.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    prompts = batch.prompts[:: data.sampling.n][:PROMPTS]
    seeds = [derive_seed(pl_module.seed, "proof", i) for i in range(len(prompts))]
    sampling = Sampling(n=1, max_tokens=min(TOKENS, data.sampling.max_tokens))
    groups = data.engine.generate([p.token_ids for p in prompts], sampling, seeds)
    sampled = collate(prompts, [completion for group in groups for completion in group]).to(pl_module.device)
    logprobs, _ = pl_module.objective.score(sampled)
    return float((logprobs - sampled.sampler_logprobs)[sampled.completion_mask].abs().mean())


def check_proof(difference: float, earlier: Sequence[float], step: int) -> None:
    """RuntimeError if the difference is beyond all rounding: above ``FIRST`` in the first proof of a run, then above
    ``JUMP`` × the median of the earlier ones, but never for less than ``FLOOR``.
    """
    usual = median(earlier) if earlier else None
    limit = FIRST if usual is None else max(FLOOR, JUMP * usual)
    if difference <= limit:
        return
    before = "this is the first proof" if usual is None else f"{len(earlier)} earlier proofs: {usual:.2g} in the median"
    raise RuntimeError(
        f"the engine no longer samples from the policy: after the sync of rollout {step} its log-probabilities of "
        f"tokens that it sampled without noise differ from the trainer's by {difference:.3g} nats on average, limit "
        f"{limit:.2g} ({before}). The adapter read back from the engine is right, so the engine does not compute with "
        "it, or base or norms differ. Go on from the checkpoint in a fresh process with --ckpt_path last; if it stops "
        "again, compare with data.engine: transformers"
    )
