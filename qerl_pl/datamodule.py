"""The RolloutDataModule: owns the engine and the prompts, and yields rollouts."""

from typing import Any

from lightning import LightningDataModule

from qerl_pl.engine import Engine, EngineName, TransformersEngine
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
        validation: held-out prompts, evaluated while training and by ``qerl-pl validate``.
        test: prompts of ``qerl-pl test``.
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
        baseline: what a reward is compared with: the ``mean`` of its group, or of the others in it (``leave_one_out``,
            RLOO).
        truncated_in_baseline: whether completions that hit the length limit count in baseline and deviation; if not,
            their advantage is 0.
        max_sampling_rounds: above 1 groups whose rewards are all equal are replaced, in at most so many rounds of
            sampling (DAPO's dynamic sampling).
        eval_samples: completions of a prompt in validation and test.
        eval_temperature: of validation and test.
        eval_top_p: of validation and test.
        eval_batch: prompts sampled at once in validation and test.
        seed: of order and sampling.
    """

    def __init__(
        self,
        train: PromptSource | PromptsName = Arithmetic(split="train"),
        validation: PromptSource | PromptsName | None = Arithmetic(split="validation", size=256),
        test: PromptSource | PromptsName | None = Arithmetic(split="test", size=512),
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
        baseline: str = "mean",
        truncated_in_baseline: bool = True,
        max_sampling_rounds: int = 1,
        eval_samples: int = 1,
        eval_temperature: float = 0.6,
        eval_top_p: float = 0.95,
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
        self.sources = {"train": train, "validation": validation, "test": test}
        self.engine = engine
        self.collector = Collector(engine, rewards, answer_format, scale_rewards, baseline, truncated_in_baseline)
        self.max_sampling_rounds = max_sampling_rounds
        self.batch, self.eval_batch, self.seed = prompts_per_batch, eval_batch, seed
        self.max_prompt_length = max_prompt_length
        self.sampling = Sampling(num_generations, max_completion_length, temperature, top_p)
        self.eval_sampling = Sampling(eval_samples, max_completion_length, eval_temperature, eval_top_p)
        self._train: TrainingRollouts | None = None
        self._done = self._cursor = 0

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

    def prompts(self, split: str) -> Prompts:
        """The rendered prompts of a split; the engine has started, for its tokenizer renders them."""
        source = self.sources[split]
        if source is None:
            raise ValueError(
                f"data.{split}: no prompts are configured; name a source, as in {{class_path: file, init_args: ...}}"
            )
        prompts = Prompts(source, self.collector.answer_format, self.engine.tokenizer, self.max_prompt_length)
        if prompts.dropped:
            self.collector.report(
                "note", f"{split}: {prompts.dropped} of {len(prompts) + prompts.dropped} prompts dropped as too long"
            )
        check_answer_format(self.collector.answer_format, self.collector.rewards, prompts[0])
        return prompts

    def train_dataloader(self) -> TrainingRollouts:
        rank, world = self._ranks()
        if self.batch % world:
            raise ValueError(f"prompts_per_batch: {self.batch} is not divisible by the {world} ranks")
        if self._train is None:
            self._train = TrainingRollouts(
                self.collector, self.prompts("train"), self.batch, self.sampling, self.seed, rank, world,
                self.max_sampling_rounds,
            )  # fmt: skip
            self._train.step, self._train.cursor = self._done, self._cursor
        return self._train

    def val_dataloader(self) -> EvaluationRollouts | list[Any]:
        return self._evaluation("validation") if self.sources["validation"] is not None else []

    def test_dataloader(self) -> EvaluationRollouts:
        return self._evaluation("test")

    def _evaluation(self, split: str) -> EvaluationRollouts:
        return EvaluationRollouts(
            self.collector, self.prompts(split), self.eval_batch, self.eval_sampling, self.seed, *self._ranks()
        )

    def _ranks(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)

    def completed(self, step: int) -> None:
        """The update with rollout batch ``step`` is done; a run that resumes goes on with the next."""
        self._done = step + 1
        if self._train is not None:
            self._cursor = self._train.cursor

    def state_dict(self) -> dict[str, int]:
        return {"rollouts": self._done, "prompts": self._cursor}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._done, self._cursor = state_dict["rollouts"], state_dict["prompts"]
        if self._train is not None:
            self._train.step, self._train.cursor = self._done, self._cursor

    def teardown(self, stage: str) -> None:
        """The engine stays up: validate, fit and test in one process share it."""
