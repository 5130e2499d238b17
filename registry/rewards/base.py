"""The interface of a reward."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Never

from registry._registry import Name, Registry

VERDICTS = ("correct", "wrong", "no_answer", "unverifiable_gold", "timeout", "crash")


class Verdict(NamedTuple):
    """How one completion was judged."""

    reward: float | None
    verdict: str  # one of VERDICTS
    extracted: str | None
    rule: str  # that decided
    ms: float  # milliseconds in a worker; 0 where none was needed


class Reward(ABC):
    """Scores completions, one number each. The rewards of a run are added up, each times its weight."""

    maximum: ClassVar[float | None] = None
    """What a perfect completion earns, if that is known: the check at the start of a run expects it."""

    correctness: ClassVar[bool] = False
    """Whether 1 means a right answer and anything less a wrong one: the first such reward of a run decides pass@1."""

    verdicts: Sequence[Verdict] = ()
    """Of the last call, one for each completion, of a reward that tells them: the run logs their rates."""

    def __init__(self, weight: float = 1.0) -> None:
        if not math.isfinite(weight):
            raise ValueError(f"weight of reward {self.name} must be finite, got {weight}; 0 only logs the reward")
        self.weight = weight

    @property
    def name(self) -> str:
        """The registered name, which metrics carry; the class name of a class that is not registered."""
        return REWARDS.name_of(type(self)) or type(self).__name__

    @abstractmethod
    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | None]:
        """A score for each completion; None abstains.

        ``columns`` has every column of the data (``answer`` among them), and of each completion: ``extracted``, the
        answer as the answer format read it (None: no answer), ``well_formed``, ``completion_ids`` and ``finished``
        (False: cut off). A reward never looks for the answer itself.
        """

    def unverifiable(self, **columns: Sequence[Any]) -> list[int]:
        """The rows of the data whose reward can never be earned, because their right answer cannot be checked."""
        return []


REWARDS: Registry[Reward] = Registry("reward", "qerl_pl.rewards")

if TYPE_CHECKING:
    RewardName = Never
else:

    class RewardName(Name, registry=REWARDS):
        """A registered reward."""


LARGEST = 3e38  # batches are FP32


def checked_scores(source: str, scores: Any, count: int) -> list[float | None]:
    """``scores`` as floats and None; ValueError unless there is one finite number, or None, for each completion."""
    scores = scores.tolist() if hasattr(scores, "tolist") else scores  # tensors, arrays
    if not isinstance(scores, list | tuple):
        raise ValueError(
            f"{source} returned {type(scores).__name__}; return a list with a number or None for each completion"
        )
    if len(scores) != count:
        raise ValueError(
            f"{source} returned {len(scores)} scores for {count} completions; return one for each, in order"
        )
    for i, score in enumerate(scores):
        if score is not None and not (isinstance(score, Real) and abs(float(score)) <= LARGEST):
            raise ValueError(
                f"{source} returned {score!r} for completion {i}; return a finite number, or None to abstain"
            )
    return [None if score is None else float(score) for score in scores]
