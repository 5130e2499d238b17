"""The ladder that compares answers: known right and wrong answers by kind, exactness, bounds."""

import contextlib
import json
import os
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from qerl_pl.verify import read, score_rows
from registry.rewards.answers import extract
from registry.rewards.answers.compare import UndecidedError, compare
from registry.rewards.answers.evaluate import equal, tree
from registry.rewards.answers.exact import TooLargeError, UndefinedError, exact
from registry.rewards.answers.normalise import normalise
from registry.rewards.answers.symbolic import refusal

DATA = Path(__file__).parent / "data" / "answers.jsonl"
CASES = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]


def wrong_rows(rows: list[dict[str, Any]]) -> list[str]:
    scored = score_rows(rows, None, workers=2, timeout=20)
    assert not [row for row in scored if row.verdict in ("timeout", "crash")]
    return [f"{row.line}: {row.gold!r} {row.extracted!r} {row.verdict}" for row in scored if not row.right]


def test_known_answers() -> None:
    """Of each kind at least five; expected by hand."""
    kinds = [row["kind"] for row in CASES]
    assert len(set(kinds)) == 31
    assert min(kinds.count(kind) for kind in set(kinds)) >= 5
    assert wrong_rows(read(DATA)) == []


def test_collected_answers() -> None:
    """A larger collection, if it is there: the path of JSON lines as qerl-pl verify reads them."""
    path = os.environ.get("QERL_PL_ANSWERS")
    if not path:
        pytest.skip("QERL_PL_ANSWERS does not name a file of collected answers")
    assert wrong_rows([row for row in read(Path(path)) if not row.get("debatable")]) == []


# ---- extraction ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "rule"),
    [
        (r"\boxed{3}, no: \boxed{5}", "5", "box"),
        (r"The roots are \boxed{3}, \boxed{5} and \boxed{7}.", "3, 5, 7", "box"),
        (r"It is \boxed{1}. Yes, \boxed{1}", "1", "box"),
        (r"\boxed{3", None, "box without an end"),
        (r"<think>\boxed{3}", None, "thinking never ended"),
        ("#### 10\nNext.\n#### 42", "42", "####"),
        ("#### 42\n\n#### Remarks on it\nnone", "42", "####"),
        ("The answer is $1,234.00", "1,234.00", "answer is"),
        ("Answer: $13$", "13", "answer is"),
        ("Answer: 1. Answer: 2. Answer: 3", None, "many answers"),
        ("The answer is maybe 3", None, "hedge"),
        ("The probability is 0.5.", "0.5", "last sentence"),
        ("The probability is not 0.5.", None, "no answer"),
        ("I thought about 42 and gave up", None, "no answer"),
        ("So:\n\n**72**", "72", "bare number"),
        ("Yes, it does.", "Yes", "first word"),
        (r"$\frac{1}{2}$", r"\frac{1}{2}", "bare expression"),
    ],
)
def test_stated(completion: str, answer: str | None, rule: str) -> None:
    found = extract.stated(completion)
    assert (found.text if found.text is None else found.text.lstrip("$"), found.rule) == (answer, rule)


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("So\n```python\nx = 1\n```\nand\n```output\n1\n```", "x = 1"),
        ("```python\nx = 1\n```\nbetter\n```python\nx = 2\n```", "x = 2"),
        ("```\nx = 1\n```", "x = 1"),
        ("```python\nx = 1", None),
        ("<think>```python\nx = 1\n```", None),
        ("x = 1", None),
    ],
)
def test_code_block(completion: str, program: str | None) -> None:
    assert extract.code_block(completion).text == program


HOSTILE = [
    r"\boxed{" * 5_000, r"\boxed{1}" * 5_000, "<answer>" * 5_000, "<answer>1</answer>" * 5_000, "$" * 20_000,
    "(" * 20_000,
    "The answer is " * 5_000, "check the answer: 1. " * 3_000,
    r"\boxed{1} or " * 3_000, "or   " * 6_000, "#### 1\n" * 5_000, "```python\n" * 5_000, "1 " * 20_000, "is " * 10_000,
    "." * 30_000, "a" * 30_000, "</s>" * 8_000, "</think>" * 5_000, "x" + " " * 30_000 + "x",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_extraction_takes_linear_time(text: str) -> None:
    start = time.process_time()
    for rule in (extract.stated, extract.boxed, extract.tagged, extract.code_block):
        rule(text)
        rule("<think>" + text + "</think> " + text)
    assert time.process_time() - start < 3.0


@pytest.mark.parametrize(
    "text", [text[:1_000] for text in HOSTILE] + ["1," * 499, r"\frac" * 199, "{" * 999, "1:" * 499]
)
def test_the_first_rungs_take_bounded_time(text: str) -> None:
    start = time.process_time()
    for gold in ("5", r"\{1,2\}", "x=1", "A", "(0,1)", "word"):
        with contextlib.suppress(UndecidedError):
            assert not compare(gold, text).right
    assert time.process_time() - start < 2.0


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2+3*4", 14), ("2^{10}", 1024), ("-2^2", -4), (r"2\frac{1}{3}", "7/3"), (r"\frac{1}{2}+\frac{1}{3}", "5/6"),
        (r"\sqrt{\frac{9}{4}}", "3/2"), (r"\sqrt[3]{-8}", -2), (r"\binom{10}{3}", 120), ("5!", 120),
        (r"\sum_{k=1}^{100} k", 5050), (r"\prod_{k=1}^{5} k", 120), (r"3^{10^{10}} \bmod 5", pow(3, 10**10, 5)),
        (r"\lfloor \frac{7}{2} \rfloor", 3), ("|-3|", 3), ("8^{2/3}", 4), ("1.5e3", 1500), ("2^3^2", 512),
    ],
)  # fmt: skip
def test_exact(text: str, value: int | str) -> None:
    node = tree(normalise(text))
    assert node is not None
    assert exact(node) == Fraction(value)


@pytest.mark.parametrize("text", ["9^{9^{9}}", "5000!", r"\sum_{k=1}^{10^9} k", r"2^{10^{30}}", r"\binom{10^6}{10^5}"])
def test_what_grows_is_refused(text: str) -> None:
    node = tree(normalise(text))
    assert node is not None
    with pytest.raises(TooLargeError):
        exact(node)


def test_undefined_values() -> None:
    for text in (r"\frac{1}{0}", r"\frac{0}{0}", "0^{0}", r"\log(0)"):
        left, right = tree(text), tree("1")
        assert left is not None and right is not None
        with pytest.raises(UndefinedError):
            equal(left, right)


@pytest.mark.parametrize(
    "text",
    [
        r"\sum_{i=1}^{1000}\sum_{j=1}^{1000} ij", r"\sum_{k=1}^{2000} \sin(kx) e^k", "e^{e^{e^{e^{10}}}}",
        r"\sin(10^{10^6})", r"\lfloor x \rfloor!", "(-1)!", r"\arcsin(10^5)", "((x^{1000})^{1000})^{1000}",
    ],
)  # fmt: skip
def test_values_out_of_bounds_are_no_answer(text: str) -> None:
    start = time.process_time()
    assert not compare("x+1", text, lambda *_: False).right
    assert time.process_time() - start < 2.0


def test_numbers_of_any_size_are_told_apart() -> None:
    assert compare("2^{100}", f"{2**100}", lambda *_: False).right
    assert not compare("2^{100}", f"{2**100 + 1}", lambda *_: False).right
    assert not compare("0.000001", "0.0000014").right
    assert not compare(r"\sqrt{10^{40}+1}", "10^{20}", lambda *_: False).right


def test_only_values_of_expressions_need_a_worker() -> None:
    for gold, answer in (("3, 5", "5, 3"), ("(1,2)", "(1, 2.0)"), ("yes", "Yes."), ("x=5", "5"), ("28\\%", "0.28")):
        assert compare(gold, answer).right
    for gold, answer in ((r"\sqrt{8}", r"2\sqrt{2}"), ("y=2x", "2x-y=0"), ("7", "3+4=7")):
        with pytest.raises(UndecidedError):
            compare(gold, answer)


# ---- what reaches the algebra system ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9}}", "10^{99999}", "(10^8)!", "1000!", "9" * 60, "(" * 20 + "1" + ")" * 20, "__import__('os')",
        "os.system", r"\undefined{1}", "x" * 301, "{1", "1}", "1e9999", r"\sum_{k=1}^{1000000} k", "eval(1)",
    ],
)  # fmt: skip
def test_refused_by_the_algebra_system(text: str) -> None:
    assert refusal(text) is not None


@pytest.mark.parametrize(
    "text", [r"\int_0^1 2x dx", r"\lim_{x \to 0} \frac{\sin x}{x}", r"\sum_{k=1}^{\infty} 2^{-k}", "5!"]
)
def test_admitted_to_the_algebra_system(text: str) -> None:
    assert refusal(text) is None
