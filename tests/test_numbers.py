"""Reading the one number of an answer: what is read, what is refused, and that neither takes long."""

import time
from fractions import Fraction

import pytest

from registry.rewards.numbers import MAX_CHARS, parse_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", 18), ("18.", 18), ("18.00", 18), (" 18 \n", 18), ("+18", 18), ("018", 18), (".5", "1/2"), ("42!", 42),
        ("1,234", 1234), ("1,234,567.25", "4938269/4"), ("1 234 567", 1234567), ("1\u202f234", 1234), ("1'234", 1234),
        (r"1\,234", 1234), ("1{,}234", 1234),
        ("-5", -5), ("−5", -5), ("–5", -5), ("- 5", -5),
        ("minus 5", -5), ("negative 5", -5), ("(-5)", -5), ("x = -5", -5),
        ("$18", 18), ("$1,234.50", "2469/2"), ("-$5", -5), ("$-5", -5), (r"\$18", 18),
        ("€ 18", 18), ("18 USD", 18), ("US$5", 5),
        ("50%", 50), (r"50\%", 50), ("50 percent", 50),
        ("1/2", "1/2"), ("-1/2", "-1/2"), ("6/4", "3/2"), ("1 1/2", "3/2"), ("½", "1/2"), ("1½", "3/2"),
        ("-3½ cups", "-7/2"),
        (r"\frac{1}{2}", "1/2"), (r"\dfrac12", "1/2"), (r"-\frac{1}{2}", "-1/2"),
        ("1e3", 1000), ("1E3", 1000),
        ("2 Million", 2000000), ("1.0e10", 10**10), ("25e-2", "1/4"), ("2 million", 2000000), ("$1.5 million", 1500000),
        ("１８", 18), ("٤٢", 42), ("٣٫٥", "7/2"), ("5．", 5),
        ("5 apples", 5), ("5 more apples", 5), ("5 km/h", 5), ("a 5-foot board", 5),
        ("20 m²", 20), ("20 m^2", 20), ("90°", 90),
        (r"12^{\text{th}}", 12), ("3rd", 3), (r"5\text{ apples}", 5), ("10am", 10), ("5元", 5), ("2 dozen", 24),
        ("5 hundredths", "1/20"), ("2.5, to the nearest tenth", "5/2"),
        ("the most he can buy is 5", 5),
        ("The answer is 72, which is the total.", 72), ("**72**", 72), ("total: 72", 72), (r"\(72\)", 72), ("$72$", 72),
    ],
)  # fmt: skip
def test_numbers_read(text: str, number: int | str) -> None:
    assert parse_number(text) == Fraction(number)


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "-", "none", "five", "John", "NaN", "inf", "Ⅷ",
        "1 or 2", "1, 2", "1 and 2", "(1, 2)", "5 = 5", "10-15", "10–15", "2:30", "5 or six",
        "not 5", "5 and a half", "±5",
        "less than 5", "at least 5", "5 at most", "Not 5", "5+", ">5", "~~5 or so", "5 hundred two", "either 5",
        "2+2", "2*3", "2 x 3", "2×3", "10 - 6", "5x", "5 x", "x + 1", "x - 1", "(x) + 1", "x +1", "x5", "2^3", "5²",
        "sqrt(25)", r"\sqrt{25}", "√25", "f(5)", "5π", "5k", "5 squared", "5 is incorrect", "twice 5", "anything but 5",
        "5-", "--5", "1.2.3", "1,23", "1,2345", "12,34,5", "1_000", "0x10", "1.000,50", "1/2/3", "5/0", "3 1/0",
        "1e101", "1e-101", "1e999999999", "1" * (MAX_CHARS + 1),
        "8 because 2*4=8", "The area is 8 and the perimeter 12", "import os", "__import__('os')",
    ],
)  # fmt: skip
def test_numbers_refused(text: str) -> None:
    assert parse_number(text) is None


def test_numbers_are_exact() -> None:
    assert parse_number("0.1") == Fraction(1, 10)
    assert parse_number("0.000001") != parse_number("0.0000014")
    assert parse_number("9007199254740993") != parse_number("9007199254740992")  # equal as floats


def test_numbers_take_bounded_time() -> None:
    start = time.process_time()
    for text in (
        "1e999999999",
        "9e99999999999999999999",
        "1," * 50,
        "1 " * 50,
        "1/" * 50,
        "- " * 50,
        "9" * 10**6,
        "a " * 10**6,
    ):
        assert parse_number(text) is None
    for text in ("(" * 99 + "5", "a" * 98 + " 5", "5" + "-a" * 49):
        parse_number(text)
    assert time.process_time() - start < 0.5
