"""The RolloutDataModule: owns the engine and the prompts, and yields rollouts."""

import re
from typing import Any

from lightning import LightningDataModule

from qerl_pl.engine import Engine, EngineName, TransformersEngine
from qerl_pl.evaluation import Identified
from qerl_pl.prompts import Prompts
from qerl_pl.rewards import check_answer_format, reward_keys
from qerl_pl.rollouts import Collector, EvaluationRollouts, TrainingRollouts
from qerl_pl.types import Sampling
from registry.prompts import Arithmetic, PromptsName, PromptSource
from registry.rewards import GSM8K, AnswerFormat, AnswerFormatName, Format, Reward, RewardName, ThinkAnswer


class RolloutDataModule(LightningDataModule):
    """Prompts in, scored completions out.

    Args:
        train: prompts to learn from.
        validation: held-out prompts, evaluated while training and by ``qerl-pl validate``: one source, or several by
            name, as in ``{gsm8k: ..., amc: ...}``.
        test: prompts of ``qerl-pl test``; one source, or several by name.
        engine: what samples.
        rewards: what scores; each has a ``weight`` in the sum.
        answer_format: what the prompt asks for and the one parser reads.
        prompts_per_batch: prompts of a rollout batch, over all ranks.
        num_generations: G, completions of a prompt.
        max_prompt_length: longer prompts (in tokens) are dropped, and counted aloud.
        max_completion_length: tokens at which a completion is cut off.
        temperature: of training rollouts.
        top_p: of training rollouts; below 1 the trainer's probabilities are not those sampled from.
        scale_rewards: divide advantages by the standard deviation of the ``group``, of the ``batch``, or not
            (``none``).
        eval_samples: completions of a prompt in validation and test.
        eval_temperature: of validation and test.
        eval_top_p: of validation and test.
        eval_max_completion_length: of validation and test; by default 4,096 or ``max_completion_length``, whichever is
            less.
        eval_batch: prompts sampled at once in validation and test.
        seed: of order and sampling.
    """

    def __init__(
        self,
        train: PromptSource | PromptsName = Arithmetic(split="train"),
        validation: PromptSource | PromptsName | dict[str, PromptsName | PromptSource] | None = Arithmetic(
            split="validation", size=256
        ),
        test: PromptSource | PromptsName | dict[str, PromptsName | PromptSource] | None = Arithmetic(
            split="test", size=512
        ),
        engine: Engine | EngineName = TransformersEngine(),
        rewards: list[RewardName | Reward] = [GSM8K(), Format(weight=0.1)],  # noqa: B006 never changed
        answer_format: AnswerFormat | AnswerFormatName = ThinkAnswer(),
        prompts_per_batch: int = 32,
        num_generations: int = 8,
        max_prompt_length: int = 1024,
        max_completion_length: int = 4096,
        temperature: float = 1.0,
        top_p: float = 1.0,
        scale_rewards: str = "group",
        eval_samples: int = 1,
        eval_temperature: float = 0.6,
        eval_top_p: float = 0.95,
        eval_max_completion_length: int | None = None,
        eval_batch: int = 128,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (
            ("prompts_per_batch", prompts_per_batch),
            ("eval_samples", eval_samples),
            ("eval_batch", eval_batch),
        ):
            if value < 1:
                raise ValueError(f"{name}: {value} must be at least 1")
        if num_generations < 2:
            raise ValueError(f"num_generations: {num_generations}; a group needs at least 2 completions to compare")
        if temperature <= 0:
            raise ValueError(
                f"temperature: {temperature} must be above 0: without chance the completions of a group are equal"
            )
        if not rewards:
            raise ValueError("rewards: the list is empty; name at least one, for example [gsm8k]")
        longest = eval_max_completion_length
        longest = min(4096, max_completion_length) if longest is None else longest
        if not 1 <= longest <= max_completion_length:
            raise ValueError(
                f"eval_max_completion_length: {longest} must be in 1..{max_completion_length} (max_completion_length), "
                "for which engine and memory are planned"
            )
        self.train = train
        self.sources = {"train": train, "validation": validation, "test": test}
        for split in ("validation", "test"):
            for name in self.sets(split):
                if not re.fullmatch(r"[\w.-]*", name):
                    raise ValueError(f"data.{split}: {name!r} cannot name a set; use letters, digits, and any of . _ -")
        self.engine = engine
        self.collector = Collector(engine, rewards, answer_format, scale_rewards)
        self.batch, self.eval_batch, self.seed = prompts_per_batch, eval_batch, seed
        self.max_prompt_length = max_prompt_length
        self.sampling = Sampling(num_generations, max_completion_length, temperature, top_p)
        self.eval_sampling = Sampling(eval_samples, longest, eval_temperature, eval_top_p)
        self._train: TrainingRollouts | None = None
        self._done = 0

    @property
    def correctness(self) -> str:
        """The reward that decides whether an answer is right (pass@1): the first one that checks correctness."""
        rewards = self.collector.rewards
        for name, reward in zip(reward_keys(rewards), rewards, strict=True):
            if reward.correctness:
                return name
        raise ValueError(
            "rewards: none of them checks correctness, so there is no pass@1 to report; add one such as gsm8k"
        )

    @property
    def done(self) -> int:
        """Rollout batches that the policy was updated with."""
        return self._done

    def sets(self, split: str) -> dict[str, PromptSource]:
        """The sources of validation or test by name; a single one has the name ''."""
        source = self.sources[split]
        if source is None or source == {}:
            return {}
        return dict(source) if isinstance(source, dict) else {"": source}

    def prompts(self, source: PromptSource, name: str) -> Prompts:
        """The rendered prompts of a source; the engine has started, for its tokenizer renders them."""
        prompts = Prompts(source, self.collector.answer_format, self.engine.tokenizer, self.max_prompt_length)
        if prompts.dropped:
            self.collector.report(
                "note", f"{name}: {prompts.dropped} of {len(prompts) + prompts.dropped} prompts dropped as too long"
            )
        check_answer_format(self.collector.answer_format, self.collector.rewards, prompts[0])
        return prompts

    def train_dataloader(self) -> TrainingRollouts:
        rank, world = self._ranks()
        if self.batch % world:
            raise ValueError(f"prompts_per_batch: {self.batch} is not divisible by the {world} ranks")
        if self._train is None:
            prompts = self.prompts(self.train, "train")
            self._train = TrainingRollouts(self.collector, prompts, self.batch, self.sampling, self.seed, rank, world)
            self._train.step = self._done
        return self._train

    def val_dataloader(self) -> EvaluationRollouts | list[Any]:
        return self.evaluation("validation") if self.sets("validation") else []

    def test_dataloader(self) -> EvaluationRollouts:
        return self.evaluation("test")

    def evaluation(self, split: str) -> EvaluationRollouts:
        """Rollouts of all sets of validation or test."""
        sets = self.sets(split)
        if not sets:
            raise ValueError(
                f"data.{split}: no prompts are configured; name a source, as in {{class_path: file, init_args: ...}}"
            )
        prompts = {name: self.prompts(Identified(source), f"{split} {name}".strip()) for name, source in sets.items()}
        return EvaluationRollouts(
            self.collector, prompts, self.eval_batch, self.eval_sampling, self.seed, *self._ranks()
        )

    def _ranks(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)

    def completed(self, step: int) -> None:
        """The update with rollout batch ``step`` is done; a run that resumes goes on with the next."""
        self._done = step + 1

    def state_dict(self) -> dict[str, int]:
        return {"rollouts": self._done}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._done = state_dict["rollouts"]
        if self._train is not None:
            self._train.step = self._done

    def teardown(self, stage: str) -> None:
        """The engine stays up: validate, fit and test in one process share it."""
