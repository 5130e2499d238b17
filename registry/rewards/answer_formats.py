"""How a completion states its answer: one parser for prompt, rewards and evaluation, so that they cannot disagree."""

import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Never

from registry._registry import Name, Registry
from registry.rewards.answers import extract

THINK_ANSWER = (
    "Reason about the problem first, then answer. Put the reasoning between <think> and </think> and nothing but the "
    "final answer between <answer> and </answer>, like this: <think>the reasoning</think><answer>the answer</answer>"
)
BOXED = r"Reason about the problem step by step, then put nothing but the final answer within \boxed{}."

STATED = "Reason about the problem step by step, then put the final answer alone on a last line: Answer: the answer"
CODE_BLOCK = "Reason about the problem first, then write the whole program in one block: ```python ... ```"


class AnswerFormat(ABC):
    """What the system prompt asks for, and how it is read back."""

    markers: ClassVar[tuple[str, ...]] = ()
    """What ``extract`` looks for, so that a system prompt must mention it."""

    def __init__(self, system_prompt: str = "") -> None:
        self.system_prompt = system_prompt

    @abstractmethod
    def extract(self, completion: str) -> str | None:
        """The final answer as it was written, without surrounding space; None if there is none."""

    @abstractmethod
    def well_formed(self, completion: str) -> bool:
        """Whether the completion is what the system prompt asks for, whatever its answer."""

    @abstractmethod
    def render(self, reasoning: str, answer: str) -> str:
        """A well-formed completion from which ``extract`` gets ``answer`` back."""


ANSWER_FORMATS: Registry[AnswerFormat] = Registry("answer format", "qerl_pl.answer_formats")

if TYPE_CHECKING:
    AnswerFormatName = Never
else:

    class AnswerFormatName(Name, registry=ANSWER_FORMATS):
        """A registered answer format."""


def gold_answer(answer: Any) -> str:
    """The final answer in an ``answer`` column: what follows the last ``####`` of a GSM8K row, else all of it."""
    return str(answer).rpartition("####")[2].strip()


@ANSWER_FORMATS.register("think_answer")
class ThinkAnswer(AnswerFormat):
    """Reasoning in ``<think>``, answer in ``<answer>`` (the prompt of QeRL).

    The last answer counts; several in a row are one answer of several parts.
    """

    markers = ("<answer>",)

    _TAG = re.compile(r"</?(?:think|answer)>")
    _WHOLE = re.compile(r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)

    def __init__(self, system_prompt: str = THINK_ANSWER) -> None:
        super().__init__(system_prompt)

    def extract(self, completion: str) -> str | None:
        return extract.tagged(completion).text

    def well_formed(self, completion: str) -> bool:
        if len(self._TAG.findall(completion)) != 4:  # first, so that the pattern has one place to match each tag
            return False
        whole = self._WHOLE.fullmatch(completion)
        return whole is not None and all(part.strip() for part in whole.groups())

    def render(self, reasoning: str, answer: str) -> str:
        return f"<think>{reasoning}</think><answer>{answer}</answer>"


@ANSWER_FORMATS.register("boxed")
class Boxed(AnswerFormat):
    r"""Reasoning, then the answer in ``\boxed{}``. The last box counts; boxes inside ``<think>`` do not."""

    markers = (r"\boxed",)

    def __init__(self, system_prompt: str = BOXED) -> None:
        super().__init__(system_prompt)

    def extract(self, completion: str) -> str | None:
        return extract.boxed(completion).text

    def well_formed(self, completion: str) -> bool:
        reasoning = re.split(r"\\(?:boxed|fbox)\b", completion, maxsplit=1)[0]
        return self.extract(completion) is not None and reasoning.strip() != ""

    def render(self, reasoning: str, answer: str) -> str:
        return f"{reasoning}\n\\boxed{{{answer}}}"


@ANSWER_FORMATS.register("stated")
class Stated(AnswerFormat):
    """A last line ``Answer: ...`` (the prompt of DAPO), read wherever an answer is plainly stated: the last tag, box,
    ``####`` or "the answer is". A base model that was never asked for a form is read with it, too.
    """

    def __init__(self, system_prompt: str = STATED) -> None:
        super().__init__(system_prompt)

    def extract(self, completion: str) -> str | None:
        return extract.stated(completion).text

    def well_formed(self, completion: str) -> bool:
        reasoning, _, last = completion.rstrip().rpartition("\n")
        return last.startswith("Answer: ") and last != "Answer: " and reasoning.strip() != ""

    def render(self, reasoning: str, answer: str) -> str:
        return f"{reasoning}\nAnswer: {answer}"


@ANSWER_FORMATS.register("code_block")
class CodeBlock(AnswerFormat):
    """Reasoning, then a program in a fenced block of Python. The last block counts."""

    def __init__(self, system_prompt: str = CODE_BLOCK) -> None:
        super().__init__(system_prompt)

    def extract(self, completion: str) -> str | None:
        return extract.code_block(completion).text

    def well_formed(self, completion: str) -> bool:
        return self.extract(completion) is not None and not completion.lstrip().startswith("```")

    def render(self, reasoning: str, answer: str) -> str:
        return f"{reasoning}\n```python\n{answer}\n```"
