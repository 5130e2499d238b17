"""What an answer format reads, and what it calls well formed."""

import time

import pytest

from registry.rewards import ANSWER_FORMATS, AnswerFormat, Boxed, ThinkAnswer, gold_answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<think>2 + 2</think><answer>4</answer>", "4"),
        ("<think>2 + 2</think>\n<answer>\n  4\n</answer>\n", "4"),
        ("<answer>4</answer>", "4"),
        ("2 + 2</think><answer>4</answer>", "4"),  # the chat template opened <think>
        ("<think>a</think><answer>1</answer> No: <answer>3</answer>", "3"),
        ("<answer>4</answer> and also 9", "4"),
        ("<answer>4</answer><answer>5", "4"),
        ("<answer>1<answer>2</answer></answer>", "2"),
        (r"<answer>\boxed{42}</answer>", "42"),
        (r"<answer>\boxed{1} or \boxed{2}</answer>", r"\boxed{1} or \boxed{2}"),
        ("<think>it is <answer>4</answer></think>", None),
        ("<think>it is <answer>4</answer>", None),
        ("<think>a</think><answer>4</answer><think>hm", None),
        ("<think>a</think><think>b</think><answer>4</answer>", "4"),
        ("<answer></answer>", None),
        ("<answer> \n </answer>", None),
        ("<answer>4</answer><answer></answer>", None),
        (r"<answer>\boxed{}</answer>", None),
        ("<answer>4", None),
        ("4</answer>", None),
        ("the answer is 4", None),
        ("", None),
    ],
)
def test_think_answer_extracts(completion: str, answer: str | None) -> None:
    assert ThinkAnswer().extract(completion) == answer


@pytest.mark.parametrize(
    ("completion", "ok"),
    [
        ("<think>a</think><answer>4</answer>", True),
        (" <think>\na\nb\n</think>\n\n<answer>\n4\n</answer>\n", True),
        ("<think>a</think> so <answer>4</answer>", False),
        ("<think>a</think><answer>4</answer> done", False),
        ("hm <think>a</think><answer>4</answer>", False),
        ("<think> </think><answer>4</answer>", False),
        ("<think>a</think><answer> </answer>", False),
        ("<answer>4</answer>", False),
        ("<answer>4</answer><think>a</think>", False),
        ("<think>a</think><answer>3</answer><answer>4</answer>", False),
        ("<think>a<think>b</think></think><answer>4</answer>", False),
        ("<think>a</think><answer>4", False),
        ("", False),
    ],
)
def test_think_answer_well_formed(completion: str, ok: bool) -> None:
    assert ThinkAnswer().well_formed(completion) is ok


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so \boxed{4}", "4"),
        (r"so \fbox{4}.", "4"),
        (r"so $\boxed {4}$", "4"),
        (r"\boxed{3}, no, \boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1\}", None),  # the brace is escaped
        (r"\boxed{\boxed{7}}", "7"),
        (r"{ \boxed{7}", "7"),
        (r"} \boxed{7}", "7"),
        (r"\boxed{3} and then \boxed{5", "3"),
        (r"\boxed{3} and then \boxed{}", None),
        (r"<think>\boxed{3}</think>", None),
        (r"<think>\boxed{3}</think> So \boxed{4}", "4"),
        (r"<think>\boxed{3}", None),
        (r"a backslash \\boxed{3}", None),
        ("4", None),
        ("", None),
    ],
)
def test_boxed_extracts(completion: str, answer: str | None) -> None:
    assert Boxed().extract(completion) == answer


@pytest.mark.parametrize(
    ("completion", "ok"),
    [
        (r"2 + 2 is \boxed{4}", True),
        (r"<think>2 + 2</think> So \boxed{4}.", True),
        (r"\boxed{4}", False),
        (r"2 + 2 is \boxed{4", False),
        (r"2 + 2 is \boxed{}", False),
        ("2 + 2 is 4", False),
        (r"<think>2 + 2 is \boxed{4}", False),
    ],
)
def test_boxed_well_formed(completion: str, ok: bool) -> None:
    assert Boxed().well_formed(completion) is ok


@pytest.mark.parametrize("name", sorted(ANSWER_FORMATS))
@pytest.mark.parametrize("answer", ["4", "-1/2", r"\frac{1}{2}", "$1,234.50", "a word"])
def test_what_is_rendered_is_well_formed_and_read_back(name: str, answer: str) -> None:
    answer_format: AnswerFormat = ANSWER_FORMATS[name]()
    completion = answer_format.render("some reasoning", answer)
    assert answer_format.extract(completion) == answer
    assert answer_format.well_formed(completion)


def test_the_prompt_shows_what_is_read() -> None:
    """The example in the system prompt is itself in the format, so prompt and parser cannot drift apart."""
    example = ThinkAnswer().system_prompt.partition("like this: ")[2]
    assert ThinkAnswer().extract(example) == "the answer"
    assert ThinkAnswer().well_formed(example)
    assert r"\boxed{}" in Boxed().system_prompt
    assert ThinkAnswer(system_prompt="mine").system_prompt == "mine"


@pytest.mark.parametrize(
    "completion",
    [
        r"\boxed{" * 40_000,
        "<answer>" * 40_000,
        "</answer>" * 40_000,
        "<think>" * 40_000,
        "{" * 200_000,
        "<think>" + "a" * 200_000 + "</think> so <answer></answer>",
        "<think>" + " " * 200_000 + "</think><answer> </answer>",
        " " * 200_000 + "<think>a</think><answer> </answer>",
    ],
)
def test_hostile_completions_take_linear_time(completion: str) -> None:
    start = time.perf_counter()
    for answer_format in (ThinkAnswer(), Boxed()):
        assert answer_format.extract(completion) is None
        assert not answer_format.well_formed(completion)
    assert time.perf_counter() - start < 2.0


@pytest.mark.parametrize(
    ("column", "answer"),
    [("5 * 3 = <<5*3=15>>15\n#### 15", "15"), ("#### 1 #### 1,234 ", "1,234"), ("15", "15"), (15, "15"), (0.5, "0.5")],
)
def test_gold_answer(column: object, answer: str) -> None:
    assert gold_answer(column) == answer
