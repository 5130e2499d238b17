"""The RolloutDataModule: owns the engine and the prompts, and yields rollouts."""

import math
import re
from typing import Any

from lightning import LightningDataModule

from qerl_pl.chat import Chat
from qerl_pl.engine import Engine, EngineName, TransformersEngine
from qerl_pl.evaluation import Identified
from qerl_pl.prompts import Prompts, contamination, problem
from qerl_pl.rewards import SAMPLE, check_answer_format, check_signature, reward_keys, unverifiable
from qerl_pl.rollouts import Collector, EvaluationRollouts, TrainingRollouts
from qerl_pl.types import Sampling
from registry.prompts import Arithmetic, PromptsName, PromptSource
from registry.rewards import GSM8K, AnswerFormat, AnswerFormatName, Format, Reward, RewardName, ThinkAnswer

LEAST_TEMPERATURE = 0.01
"""vLLM samples at this one instead of at a lower one, of which the trainer's probabilities would be."""


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
        chat_template_args: what else the model's chat template takes, such as ``{enable_thinking: false}`` (Qwen3).
        keep_unverifiable: train also on prompts whose gold answer no reward can check; they are counted aloud anyway.
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
        chat_template_args: dict[str, Any] | None = None,
        keep_unverifiable: bool = False,
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
        eval_max_completion_length: int | None = None,
        eval_batch: int = 128,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (
            ("prompts_per_batch", prompts_per_batch),
            ("eval_samples", eval_samples),
            ("eval_batch", eval_batch),
            ("max_completion_length", max_completion_length),
        ):
            if value < 1:
                raise ValueError(f"{name}: {value} must be at least 1")
        if num_generations < 2:
            raise ValueError(f"num_generations: {num_generations}; a group needs at least 2 completions to compare")
        if not LEAST_TEMPERATURE <= temperature < math.inf:
            raise ValueError(
                f"temperature: {temperature} must be a number from {LEAST_TEMPERATURE} on: without chance the "
                "completions of a group are equal"
            )
        if eval_temperature != 0 and not LEAST_TEMPERATURE <= eval_temperature < math.inf:
            raise ValueError(
                f"eval_temperature: {eval_temperature} must be 0 (the likeliest token) or a number from "
                f"{LEAST_TEMPERATURE} on"
            )
        for name, share in (("top_p", top_p), ("eval_top_p", eval_top_p)):
            if not 0 < share <= 1:
                raise ValueError(f"{name}: {share} must be above 0 and at most 1, which keeps every token")
        if not rewards:
            raise ValueError("rewards: the list is empty; name at least one, for example [gsm8k]")
        for reward in rewards:
            check_signature(reward)
        longest = eval_max_completion_length
        longest = min(4096, max_completion_length) if longest is None else longest
        if not 1 <= longest <= max_completion_length:
            raise ValueError(
                f"eval_max_completion_length: {longest} must be in 1..{max_completion_length} (max_completion_length), "
                "for which engine and memory are planned"
            )
        self.sources = {"train": train, "validation": validation, "test": test}
        for split in ("validation", "test"):
            for name in self.sets(split):
                if not re.fullmatch(r"[\w.-]*", name):
                    raise ValueError(f"data.{split}: {name!r} cannot name a set; use letters, digits, and any of . _ -")
        self.engine = engine
        self.collector = Collector(engine, rewards, answer_format, scale_rewards, baseline, truncated_in_baseline)
        self.max_sampling_rounds = max_sampling_rounds
        self.batch, self.eval_batch, self.seed = prompts_per_batch, eval_batch, seed
        self.max_prompt_length = max_prompt_length
        self.chat_template_args, self.keep_unverifiable = chat_template_args, keep_unverifiable
        self.sampling = Sampling(num_generations, max_completion_length, temperature, top_p)
        self.eval_sampling = Sampling(eval_samples, longest, eval_temperature, eval_top_p)
        self._train: TrainingRollouts | None = None
        self._done = self._cursor = 0
        self._noted: set[str] = set()

    @property
    def correctness(self) -> str:
        """The reward that decides whether an answer is right (pass@1): the first one that checks correctness."""
        rewards = self.collector.rewards
        for name, reward in zip(reward_keys(rewards), rewards, strict=True):
            if reward.correctness:
                return name
        raise ValueError(
            "rewards: none of them checks correctness, so there is no pass@1 to report; add one such as gsm8k, or give "
            "--data.validation null"
        )

    @property
    def done(self) -> int:
        """Rollout batches that the policy was updated with."""
        return self._done

    def sets(self, split: str) -> dict[str, PromptSource]:
        """The sources of a split by name; a single one has the name ''."""
        source = self.sources[split]
        if source is None or source == {}:
            return {}
        return dict(source) if isinstance(source, dict) else {"": source}

    def prompts(self, split: str, name: str = "") -> Prompts:
        """The rendered prompts of a split, of validation and test those of one set; the engine has started, for its
        tokenizer renders them.
        """
        source = self.sets(split)[name]
        if split != "train":
            source = Identified(source)
        label = f"{split} {name}".strip()
        chat = Chat(self.engine.tokenizer, self.collector.answer_format, self.chat_template_args)
        prompts = Prompts(source, chat, self.max_prompt_length)
        try:
            doubts = self._without_verdict(split, prompts)
        except ValueError as error:  # what a reward lacks need not be lacking in the other splits
            raise ValueError(f"data.{_setting(split, name)}: {error}") from error
        for note in (*prompts.notes, *doubts):
            if note not in self._noted:  # what holds for all splits, or for a set that is evaluated again
                self._noted.add(note)
                self.collector.report("note", f"{label}: {note}")
        return prompts

    def _without_verdict(self, split: str, prompts: Prompts) -> list[str]:
        """Drop training prompts for which a right answer would not be paid; what to say of them."""
        rewards, answer_format = self.collector.rewards, self.collector.answer_format
        bad = unverifiable(rewards, prompts)
        sound = sorted({*range(len(prompts))}.difference(bad))
        if not sound:
            raise ValueError(
                f"no reward can check any of the {len(prompts)} gold answers, such as "
                f"{prompts[0].columns.get('answer')!r}; choose a reward that fits the data, or map its columns"
            )
        failing = check_answer_format(answer_format, rewards, [prompts[i] for i in sound])
        fate = "counted as wrong" if split != "train" else "kept" if self.keep_unverifiable else "dropped"
        notes = []
        if bad:
            examples = ", ".join(repr(prompts[i].columns.get("answer")) for i in bad[:3])
            notes.append(
                f"{len(bad):,} of {len(prompts):,} gold answers can never be earned, as no reward can check them: "
                f"{fate}. {examples}"
            )
        if failing:
            notes.append(
                f"a perfect completion is not paid for {len(failing)} of the first {len(sound[:SAMPLE])} prompts: "
                f"{fate}. {next(iter(failing.values()))}"
            )
        if fate == "dropped":
            prompts.drop([*bad, *(sound[i] for i in failing)])
        return notes

    def train_dataloader(self) -> TrainingRollouts:
        rank, world = self._ranks()
        if self.batch % world:
            raise ValueError(f"prompts_per_batch: {self.batch} is not divisible by the {world} ranks")
        if self._train is None:
            prompts = self.prompts("train")
            self._report_contamination(prompts)
            self._train = TrainingRollouts(
                self.collector, prompts, self.batch, self.sampling, self.seed, rank, world, self.max_sampling_rounds
            )
            self._train.step, self._train.cursor = self._done, self._cursor
        return self._train

    def _report_contamination(self, train: Prompts) -> None:
        sets = {_setting(s, name): source for s in ("validation", "test") for name, source in self.sets(s).items()}
        for label, source in sets.items():
            try:
                note = contamination(train.problems, map(problem, source), label)
            except Exception as error:  # of any library that reads data; training does not need the test set
                note = f"data.{label} cannot be read: {error}"
            if note:
                self.collector.report("note", note)

    def val_dataloader(self) -> EvaluationRollouts | list[Any]:
        return self.evaluation("validation") if self.sets("validation") else []

    def test_dataloader(self) -> EvaluationRollouts:
        return self.evaluation("test")

    def evaluated(self, split: str) -> dict[str, PromptSource]:
        """The sources of validation or test by name; ValueError if there is none."""
        if not (sets := self.sets(split)):
            raise ValueError(
                f"data.{split}: no prompts are configured; name a source, as in {{class_path: file, init_args: ...}}"
            )
        return sets

    def evaluation(self, split: str) -> EvaluationRollouts:
        """Rollouts of all sets of validation or test."""
        prompts = {name: self.prompts(split, name) for name in self.evaluated(split)}
        return EvaluationRollouts(
            self.collector, prompts, self.eval_batch, self.eval_sampling, self.seed, *self._ranks()
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


def _setting(split: str, name: str) -> str:
    """Where a set of a split is configured, below ``data``."""
    return f"{split}.{name}" if name else split
