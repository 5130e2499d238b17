"""How a completion states its answer: one parser for prompt, rewards and evaluation, so that they cannot disagree."""

import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Never

from registry._registry import Name, Registry

THINK_ANSWER = (
    "Reason about the problem first, then answer. Put the reasoning between <think> and </think> and nothing but the "
    "final answer between <answer> and </answer>, like this: <think>the reasoning</think><answer>the answer</answer>"
)
BOXED = r"Reason about the problem step by step, then put nothing but the final answer within \boxed{}."


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


def after_thinking(completion: str) -> str | None:
    """What follows the last ``</think>``, or everything without one; None if thinking never ended."""
    final = completion.rpartition("</think>")[2]
    return None if "<think>" in final else final


_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


def last_box(text: str) -> tuple[int, int, str] | None:
    r"""Start, end and content of the last ``\boxed{...}`` or ``\fbox{...}`` with balanced braces (``\{`` is none).

    One pass with a stack: looking for the end of each box anew would take quadratic time on a completion full of
    ``\boxed{``.
    """
    boxes: list[tuple[int, int, str]] = []
    opened: list[re.Match[str]] = []
    for token in _BRACE.finditer(text):
        if token[0] == "}":
            if opened and (opening := opened.pop())[0] != "{":
                boxes.append((opening.start(), token.end(), text[opening.end() : token.start()].strip()))
        elif token[0][-1] == "{" and token[0] != r"\{":
            opened.append(token)
    return max(boxes, default=None)


@ANSWER_FORMATS.register("think_answer")
class ThinkAnswer(AnswerFormat):
    """Reasoning in ``<think>``, answer in ``<answer>`` (the prompt of QeRL). The last answer counts."""

    markers = ("<answer>",)

    _ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
    _TAG = re.compile(r"</?(?:think|answer)>")
    _WHOLE = re.compile(r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)

    def __init__(self, system_prompt: str = THINK_ANSWER) -> None:
        super().__init__(system_prompt)

    def extract(self, completion: str) -> str | None:
        final = after_thinking(completion)
        answers = self._ANSWER.findall(final) if final else []
        if not answers:
            return None
        answer: str = answers[-1].strip()
        box = last_box(answer)
        if box and box[:2] == (0, len(answer)):  # <answer>\boxed{5}</answer> is a habit of models trained on boxes
            answer = box[2]
        return answer or None

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
        box = last_box(after_thinking(completion) or "")
        return box[2] or None if box else None

    def well_formed(self, completion: str) -> bool:
        reasoning = re.split(r"\\(?:boxed|fbox)\b", completion, maxsplit=1)[0]
        return self.extract(completion) is not None and reasoning.strip() != ""

    def render(self, reasoning: str, answer: str) -> str:
        return f"{reasoning}\n\\boxed{{{answer}}}"
