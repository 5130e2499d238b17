"""Decimals: which are the value that was meant, and which are only near it."""

import re
from fractions import Fraction

from registry.rewards.answers.evaluate import approximate
from registry.rewards.answers.exact import exact
from registry.rewards.answers.expression import Node, symbols
from registry.rewards.numbers import parse_number

DECIMAL = re.compile(r"[-+]?\s*[\d,]*\.(\d+)(?:e[-+]?\d+)?", re.IGNORECASE)


def _digits(text: str) -> int:
    """Significant digits of a plain decimal; 0 of anything else."""
    found = DECIMAL.fullmatch(text.strip())
    return len(re.sub(r"e.*|\D", "", text.lower()).lstrip("0")) if found else 0


def numbers_equal(gold: str, answer: str, g: Fraction, a: Fraction, percent: list[bool]) -> bool:
    """Exactly; a percentage may be meant by its number or by its value; float noise is forgiven, rounding is not."""
    if percent[0] != percent[1]:
        return a == g or (a / 100 == g if percent[1] else a == g / 100)
    if a == g:
        return True
    if _digits(answer) >= 12:
        places = len(DECIMAL.fullmatch(answer.strip())[1]) if "e" not in answer.lower() else 0  # type: ignore[index]
        ulp = Fraction(1, 10**places) if places else abs(g) / 10**11
        return abs(a - g) <= max(ulp if DECIMAL.fullmatch(gold.strip()) is None else 0, abs(g) / 10**15)
    return bool("." in gold and "/" in answer + _FRACTION.sub("/", answer) and _rounded(a, gold))


_FRACTION = re.compile(r"\\frac")


def _rounded(value: Fraction, gold: str) -> bool:
    """Whether a gold of at least three significant digits is the value, rounded."""
    found = DECIMAL.fullmatch(gold.strip())
    if found is None or _digits(gold) < 3 or "e" in gold.lower():
        return False
    number = parse_number(gold)
    return number is not None and abs(value - number) <= Fraction(1, 2 * 10 ** len(found[1]))


def _value(node: Node) -> Fraction | None:
    """The value of a constant to 60 digits."""
    if symbols(node):
        return None
    known = exact(node)
    return known if known is not None else approximate(node)


def is_decimal_of(answer: str, gold: Node) -> bool:
    """Whether a decimal of at least 12 significant digits is the gold, as far as it goes."""
    digits = _digits(answer)
    number = parse_number(answer) if digits >= 12 else None
    value = _value(gold) if number is not None else None
    if number is None or value is None:
        return False
    places = len(DECIMAL.fullmatch(answer.strip())[1])  # type: ignore[index]
    return abs(number - value) <= max(Fraction(1, 10**places), abs(value) / 10**15)


def rounds_to(answer: Node, gold: str) -> bool:
    value = _value(answer) if _digits(gold) >= 3 else None
    return value is not None and _rounded(value, gold)
