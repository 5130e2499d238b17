"""Loss and every gradient of the adapter against TRL's GRPOTrainer, in FP32, with completions and advantages given.

TRL computes with Hugging Face's model under PEFT, we with the packed policy.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qerl_pl.engine.base import EngineSpec
from qerl_pl.losses import Loss
from qerl_pl.metrics import StepLog
from qerl_pl.objective import Objective, Scores
from qerl_pl.policy import Policy, copy_adapter
from qerl_pl.rollouts import collate
from qerl_pl.types import Completion, Prompt, RolloutBatch
from registry.quantization import BF16
from tests.reference import ALPHA, RANK, TARGETS, Reference, qwen2, random_adapter, write_checkpoint

trl = pytest.importorskip("trl", reason="TRL is not installed; it is in the extra 'test'")

PROMPTS = [[5, 9, 31], [5, 9, 31], [8, 90], [8, 90], [40, 41, 42, 43], [40, 41, 42, 43]]
COMPLETIONS = [[7, 60, 2, 44, 3], [12], [30, 31, 32, 33], [9, 1], [50, 51, 52], [77, 78, 79, 80, 81]]
ADVANTAGES = [1.2, -1.2, -0.7, 0.7, 0.4, -0.4]
MAX_LENGTH = 5


def ours(policy: Policy, settings: Loss, budget: int, batch: RolloutBatch, scores: Scores) -> tuple[Tensor, Any]:
    """Loss and gradients, in micro-batches of ``budget`` tokens."""
    policy.zero_grad()
    objective = Objective(policy, settings, budget, MAX_LENGTH, StepLog(), lambda loss: loss.backward())
    if settings.top_entropy_quantile < 1:
        scores = replace(scores, entropy=objective.score(batch)[1])
    loss = objective.accumulate(batch, torch.arange(len(batch)), scores)
    return loss, {name: p.grad.clone() for name, p in policy.adapter_parameters().items()}


class Case:
    def __init__(self, folder: Path) -> None:
        dense = write_checkpoint(folder / "model", qwen2(), BF16())
        self.reference = Reference(qwen2(), dense)
        adapter = random_adapter(self.reference, 1)
        self.reference.set_adapter(adapter)
        self.policy = Policy(EngineSpec(folder / "model", BF16(), RANK, ALPHA, TARGETS))
        copy_adapter(self.policy.adapter_parameters(), adapter)
        generator = torch.Generator().manual_seed(0)
        completions = [Completion(ids, [0.0] * len(ids), "", True) for ids in COMPLETIONS]
        self.batch = collate([Prompt(ids, "") for ids in PROMPTS], completions)
        self.batch.advantages = torch.tensor(ADVANTAGES)
        self.batch.groups = torch.tensor([0, 0, 1, 1, 2, 2])
        mask = self.batch.completion_mask
        with torch.no_grad():
            now, _ = self.policy(self.batch.tokens, self.batch.lengths, mask)
            base, _ = self.policy(self.batch.tokens, self.batch.lengths, mask, adapter=False)
        # ratios from about 0.4 to 2.5, so that every clip is met
        self.old = (now + 0.4 * torch.randn(now.shape, generator=generator)) * mask
        self.batch.sampler_logprobs = (self.old + 0.6 * torch.randn(now.shape, generator=generator)) * mask
        self.base = base
        self.trainer = self.make_trainer(folder)

    def make_trainer(self, folder: Path) -> Any:
        from datasets import Dataset
        from transformers import AutoTokenizer

        config = trl.GRPOConfig(
            str(folder / "trl"), per_device_train_batch_size=6, num_generations=2, max_completion_length=MAX_LENGTH,
            bf16=False, use_cpu=True, report_to="none", gradient_checkpointing=False, disable_dropout=True,
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        tokenizer.pad_token = tokenizer.eos_token
        data = Dataset.from_list([{"prompt": "w5 w9"}] * 6)
        trainer = trl.GRPOTrainer(
            self.reference.peft, lambda completions, **_: [0.0] * len(completions), config, data,
            processing_class=tokenizer,
        )  # fmt: skip
        trainer.current_gradient_accumulation_steps = 1
        return trainer

    def theirs(self, settings: Loss, level: str, correct: bool) -> tuple[Tensor, dict[str, Tensor]]:
        trainer, width = self.trainer, max(len(p) for p in PROMPTS)
        trainer.loss_type = "grpo" if settings.loss_type == "gspo" else settings.loss_type
        trainer.importance_sampling_level = settings.kind.level
        trainer.epsilon_low = settings.epsilon
        trainer.epsilon_high = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
        trainer.args.delta, trainer.beta = settings.delta, settings.beta
        trainer.args.use_bias_correction_kl = settings.use_bias_correction_kl
        trainer.top_entropy_quantile = settings.top_entropy_quantile
        trainer.entropy_coef, trainer._entropy_bonus_enabled = settings.entropy_coef, settings.entropy_coef != 0
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = correct
        rows = range(len(PROMPTS))

        def right(values: list[list[float]]) -> Tensor:
            return torch.tensor([v + [0] * (MAX_LENGTH - len(v)) for v in values])

        def completion(full: Tensor) -> Tensor:
            return right([full[i][self.batch.completion_mask[i]].tolist() for i in rows])

        mask = right([[1] * len(c) for c in COMPLETIONS])
        old, sampler = completion(self.old), completion(self.batch.sampler_logprobs)
        ratio = old - sampler
        if level == "sequence":
            ratio = ratio.sum(-1, keepdim=True)
        ratio = ratio.exp()
        cap = settings.importance_cap
        if cap is not None:
            ratio = (
                ratio.clamp(max=cap) if settings.importance_mode == "truncate" else ratio.masked_fill(ratio > cap, 0)
            )
        inputs = {
            "prompt_ids": torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS]),
            "prompt_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS]),
            "completion_ids": right(COMPLETIONS).long(), "completion_mask": mask,
            "advantages": torch.tensor(ADVANTAGES), "old_per_token_logps": old, "importance_sampling_ratio": ratio,
            "ref_per_token_logps": completion(self.base), "num_items_in_batch": mask.sum(),
        }  # fmt: skip
        trainer.model.zero_grad()
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in self.reference.lora.items()}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("trl"))


SETTINGS: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {"loss_type": "grpo", "epsilon_high": None},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "gspo": {"loss_type": "gspo", "epsilon": 0.05, "epsilon_high": 0.08},
    "luspo": {"loss_type": "luspo", "epsilon": 0.05, "epsilon_high": 0.08},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.4},
    "sapo": {"loss_type": "sapo"},
    "two-sided clip": {"loss_type": "grpo", "delta": 1.5},
    "kl": {"beta": 0.3},
    "kl of grpo": {"loss_type": "grpo", "beta": 0.3},
    "kl times the ratio": {"beta": 0.3, "use_bias_correction_kl": True},
    "no correction": {"importance_cap": None},
    "masked": {"importance_mode": "mask", "importance_cap": 1.3},
    "sequence level": {"importance_level": "sequence"},
    "sequence level, masked": {"importance_level": "sequence", "importance_mode": "mask", "importance_cap": 1.3},
    "half of the tokens": {"top_entropy_quantile": 0.5},
    "entropy bonus": {"entropy_coef": 0.2},
    "all at once": {"loss_type": "grpo", "beta": 0.1, "top_entropy_quantile": 0.6, "entropy_coef": 0.1, "delta": 1.6},
}


@pytest.mark.parametrize("budget", [10**6, 9], ids=["whole", "split"])
@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradients_are_trls(case: Case, name: str, budget: int) -> None:
    settings = Loss(**SETTINGS[name])
    correct = settings.importance_cap is not None
    theirs, their_grads = case.theirs(settings, settings.importance_level, correct)
    scores = Scores(old=case.old, reference=case.base if settings.beta else None)
    loss, our_grads = ours(case.policy, settings, budget, case.batch, scores)
    assert float(loss) == pytest.approx(float(theirs), rel=1e-5, abs=2e-6)  # its terms are of order 1 and cancel
    for key, expected in their_grads.items():
        assert float((our_grads[key] - expected).norm() / expected.norm()) < 1e-5, key
