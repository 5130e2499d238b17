"""The ladder: exact text, exact number, structure, values. What it cannot decide raises ``UndecidedError``."""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from registry.rewards.answers.decimals import DECIMAL, is_decimal_of, numbers_equal, rounds_to
from registry.rewards.answers.evaluate import equal, tree
from registry.rewards.answers.exact import TooLargeError, UndefinedError
from registry.rewards.answers.expression import Node, UnreadableError, symbols
from registry.rewards.answers.normalise import MAX_ANSWER, depth, normalise, squeezed
from registry.rewards.answers.structure import (
    INFINITE,
    Answer,
    Equation,
    Interval,
    Items,
    Matrix,
    Union,
    Value,
    is_name,
    read,
    sure,
)
from registry.rewards.answers.words import SAME, choice_letter, is_word, lead, letters, unit
from registry.rewards.numbers import parse_number

MAX_NESTING = 40


class UndecidedError(Exception):
    """The value of an expression is needed: of which texts."""


class Outcome(NamedTuple):
    """Whether an answer is right, and the rule that said so."""

    right: bool
    rule: str


Algebra = Callable[[str, str], bool]
"""Compares a gold with an answer, both normalised."""

normalised = lru_cache(8192)(normalise)
structure = lru_cache(8192)(read)
_number = lru_cache(8192)(parse_number)


def compare(gold: str, answer: str, algebra: Algebra | None = None) -> Outcome:
    """Whether ``answer`` says what ``gold`` says.

    Without ``algebra`` it takes microseconds, and raises UndecidedError where the value of an expression is needed.
    With it, it may take long: call it in a process that can be killed.
    """
    if len(gold) > MAX_ANSWER or len(answer) > MAX_ANSWER:
        return Outcome(False, "too long")
    if _differ(unit(gold), unit(answer)) or _differ(_half_of_day(gold), _half_of_day(answer)):
        return Outcome(False, "unit")
    g, a = normalised(gold), normalised(answer)
    if not g or not a:
        return Outcome(False, "empty")
    if squeezed(g) == squeezed(a):
        return Outcome(True, "text")
    if max(depth(g), depth(a)) > MAX_NESTING:
        return Outcome(False, "bounds")
    if g.lower() in ("yes", "no", "true", "false") and re.match(rf"{g}\s*[,;]", a, re.IGNORECASE):
        return Outcome(True, "word")  # Yes, because ...
    if (choice := choice_letter(g)) and choice <= "J" and squeezed(g).strip("()[]") == choice:
        return Outcome(choice == choice_letter(a), "choice")
    try:
        return _Comparison(algebra).answers(structure(g), structure(a))
    except TooLargeError:
        return Outcome(False, "bounds")
    except (UndefinedError, RecursionError):
        return Outcome(False, "undefined")


_HALF_OF_DAY = re.compile(r"\d(?:[\s~{}]|\\[,;: ]|\\(?:text|mathrm|mbox|textrm)\b)*([ap])\.?\s?m\b", re.IGNORECASE)


def _half_of_day(text: str) -> str:
    """``a`` or ``p`` if a time of day says so, else empty."""
    found = _HALF_OF_DAY.search(text)
    return found[1].lower() if found else ""


_PERCENT = re.compile(r"%|\bper\s?cent(?:age)?s?\b", re.IGNORECASE)
_CIRC = re.compile(r"\^\\circ(?![a-zA-Z])")
_FACTOR = re.compile(r"\d[})]*(?:\s*(?P<sign>!)|(?P<space>\s*)(?P<letters>[a-zA-Z]+))")
# After a number these are words or units; other short letters are factors: 7n and 6xy are no 7 and no 6.
_SHORT_WORDS = (
    "m s g h l f j k o mm cm dm km nm in ft yd mi sec secs min mins hr hrs mg kg lb lbs oz pt pts qt gal ml cl dl kl "
    "mph kph kmh rpm hz khz mhz kw kwh mw gb mb kb kj pa kpa ev usd eur gbp rs am pm st nd rd th deg rad sq cu day "
    "days yr yrs wk wks mo men boys girl boy cat cats dog dogs car cars cup cups box bag bags way pen pens row "
    "rows hour foot feet inch mile yard year week gram cent ways ride more less each per is of an at to as by if it "
    "no or and so we"
)
_AT_NUMBER = frozenset(_SHORT_WORDS.split())
_BASE = re.compile(r"\(?([0-9A-F]+)\)?\s*_\s*\{?\s*(\d+|[a-z]+)\s*\}?")
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
          "ten": "10", "twelve": "12", "sixteen": "16"}  # fmt: skip


_LETTER = r"(?:[A-Za-z]|\\(?!pi\b)[a-z]+)(?:_(?:\w|\{\s*\w+\s*\}))?'*"
_POINTS = r"(?:[A-Z]\s*){1,4}"
_ARGUMENTS = r"\((?:[^()]|\([^()]*\))*\)"
_LEFT, _RIGHT = r"(?:\||\\[lr]vert|\\[lr]?Vert|\\\|)\s*", r"\s*(?:\||\\[lr]vert|\\[lr]?Vert|\\\|)"
_QUANTITY = re.compile(  # which no value of its own letters solves for: f(2), but not x(x + 2)
    rf"[fghpqrFGHPQRETVSANC](?:_\{{?\w+\}}?)?'*(?:\s*\^\s*\{{?\s*-\s*1\s*\}}?)?\s*{_ARGUMENTS}"
    rf"|\\?(?:gcd|lcm|max|min|det|deg|dim|arg|Re|Im|Var|Cov)\s*(?:{_ARGUMENTS}|{_LETTER})"
    rf"|\\?(?:sin|cos|tan|cot|sec|csc)\s*(?:\^\s*\{{?\s*2\s*\}}?\s*)?\(?\s*"
    rf"(?:\\angle\s*{_POINTS}|{_LETTER}|{_POINTS})\s*\)?"
    rf"|m?\s*\\angle\s*{_LETTER}|m\s*\(?\s*\\angle\s*{_POINTS}\)?|\[\s*[A-Z](?:\s*[A-Z]){{2,}}\s*\]"
    rf"|{_LEFT}(?:[a-wzA-Z](?:_\{{?\w+\}}?)?|[A-Z]{{2}}|\\(?:vec|overline|mathbf)\s*\{{?\s*[A-Za-z]+\s*\}}?){_RIGHT}"
    rf"|[A-Za-z](?:_\{{?\s*\\?\w+\s*\}}?)|[A-Za-z][A-Za-z ]+\\(?:triangle|angle)\s*{_POINTS}"
    r"|\\(?:frac\s*\{\s*d[a-z]\s*\}\s*\{\s*d[a-z]\s*\}|(?:lim|int)(?![a-zA-Z])\s*_.*)"
)
_VECTORS = re.compile(r"\\vec\s*\{?\s*[a-z]\s*\}?\s*\\cdot\s*\\vec\s*\{?\s*[a-z]\s*\}?")
_PART = rf"(?:{_LETTER}|[A-Z]\s*[A-Z])"
_SUM = rf"{_PART}(?:\s*[-+]\s*{_PART})*"
_COMBINED = re.compile(rf"\\frac\s*\{{\s*{_SUM}\s*\}}\s*\{{\s*{_SUM}\s*\}}|{_PART}\s*/\s*{_PART}|(?P<sum>{_SUM})")
_NAMES = re.compile(_PART)


def _combines(side: str, asked: bool) -> bool:
    """Whether a side is a ratio or sum of names, each there once: m/n, m + n, but not x + 2.

    x + y = 5 is more likely a line than a value, and so is any sum that is asked for.
    """
    if _VECTORS.fullmatch(side):
        return True
    found = _COMBINED.fullmatch(side)
    if found is None:
        return False
    names = [re.sub(r"\s", "", name) for name in _NAMES.findall(side.replace(r"\frac", ""))]
    line = found["sum"] is not None and (asked or {"x", "y", "z"} >= set(names))
    return len(set(names)) == len(names) > 1 and not line and not {"e", "i"} >= set(names)


class _Comparison:
    def __init__(self, algebra: Algebra | None) -> None:
        self.algebra = algebra

    # ---- structures --------------------------------------------------------------------------------------------------

    def answers(self, gold: Answer, answer: Answer) -> Outcome:
        if isinstance(gold, Value) and isinstance(answer, Value):
            return self.values(gold.text, answer.text)
        if isinstance(gold, Equation) or isinstance(answer, Equation):
            return Outcome(self.equations(gold, answer), "equation")
        if isinstance(gold, Matrix) or isinstance(answer, Matrix):
            return Outcome(self.matrices(gold, answer), "matrix")
        if isinstance(gold, Interval | Union) or isinstance(answer, Interval | Union):
            return Outcome(self.intervals(gold, answer), "interval")
        if isinstance(gold, Items) and isinstance(answer, Items):
            return Outcome(self.items(gold, answer), gold.kind)
        return Outcome(self.alone(gold, answer), "structure")

    def same(self, gold: Answer, answer: Answer) -> bool:
        return self.answers(gold, answer).right

    def alone(self, gold: Answer, answer: Answer) -> bool:
        """A collection against a value: a ratio may be a fraction, and the empty set a word."""
        items, value = (gold, answer) if isinstance(gold, Items) else (answer, gold)
        assert isinstance(items, Items) and isinstance(value, Value)
        if items.kind == "ratio" and len(items.items) == 2:
            left, right = items.items
            assert isinstance(left, Value) and isinstance(right, Value)
            ratio = f"\\frac{{{left.text}}}{{{right.text}}}"
            return self.values(*((ratio, value.text) if items is gold else (value.text, ratio))).right
        return items.kind == "set" and not items.items and squeezed(value.text).lower() in SAME[0]

    def items(self, gold: Items, answer: Items) -> bool:
        kinds = {gold.kind, answer.kind}
        if "ratio" in kinds:
            return kinds == {"ratio"} and self.in_order(gold.items, answer.items)
        if kinds == {"tuple", "set"}:
            return False
        named = kinds == {"list", "tuple"} and any(isinstance(item, Equation) for item in gold.items)
        if named or gold.kind == "tuple" or (answer.kind == "tuple" and kinds == {"tuple"}):
            return self.in_order(gold.items, answer.items)
        return self.in_any_order(gold.items, answer.items, distinct="set" in kinds)

    def in_order(self, gold: Sequence[Answer], answer: Sequence[Answer]) -> bool:
        return len(gold) == len(answer) and all(self.same(g, a) for g, a in zip(gold, answer, strict=True))

    def in_any_order(self, gold: Sequence[Answer], answer: Sequence[Answer], distinct: bool = False) -> bool:
        if distinct:
            return all(any(self.same(g, a) for a in answer) for g in gold) and all(
                any(self.same(g, a) for g in gold) for a in answer
            )
        if len(gold) != len(answer):
            return False
        left = list(answer)
        for g in gold:
            found = next((i for i, a in enumerate(left) if self.same(g, a)), None)
            if found is None:
                return False
            left.pop(found)
        return True

    def matrices(self, gold: Answer, answer: Answer) -> bool:
        if not (isinstance(gold, Matrix) and isinstance(answer, Matrix)):
            matrix, other = (gold, answer) if isinstance(gold, Matrix) else (answer, gold)
            if not (isinstance(matrix, Matrix) and isinstance(other, Items) and other.kind == "tuple"):
                return False
            entries = [cell for row in matrix.rows for cell in row]
            if len(matrix.rows) > 1 and any(len(row) > 1 for row in matrix.rows):
                return False
            return self.in_order([Value(cell) for cell in entries], other.items)
        return [len(row) for row in gold.rows] == [len(row) for row in answer.rows] and all(
            self.values(g, a).right
            for grow, arow in zip(gold.rows, answer.rows, strict=True)
            for g, a in zip(grow, arow, strict=True)
        )

    def intervals(self, gold: Answer, answer: Answer) -> bool:
        gold, answer = sure(gold), sure(answer)
        if isinstance(gold, Union) and isinstance(answer, Union):
            return self.in_any_order(gold.parts, answer.parts)
        if not (isinstance(gold, Interval) and isinstance(answer, Interval)):
            return False
        if gold.name and answer.name and squeezed(gold.name) != squeezed(answer.name):
            return False
        return (
            gold.closed == answer.closed
            and self.values(gold.low, answer.low).right
            and self.values(gold.high, answer.high).right
        )

    # ---- equations ---------------------------------------------------------------------------------------------------

    def equations(self, gold: Answer, answer: Answer) -> bool:
        if isinstance(gold, Equation) and isinstance(answer, Equation):
            g, a = self.assigned(gold), self.assigned(answer)
            if g and a and squeezed(g[0]) == squeezed(a[0]):
                return self.same(g[1], a[1])
            if len(gold.sides) == len(answer.sides) == 2:
                return self.proportional(gold.sides, answer.sides)
            return False
        equation, other = (gold, answer) if isinstance(gold, Equation) else (answer, gold)
        assert isinstance(equation, Equation)
        value = self.assigned(equation) or self.measured(equation, asked=equation is gold) or self.computed(equation)
        if value is None:
            return False
        return self.same(value[1], other) if equation is gold else self.same(other, value[1])

    def assigned(self, equation: Equation) -> tuple[str, Answer] | None:
        """Name and value of ``x = 5``, ``5 = x`` or ``x = 2 + 3 = 5``; None of another equation."""
        sides = equation.sides
        name, rest = (sides[0], sides[1:]) if is_name(sides[0]) else (sides[-1], sides[:-1])
        if not is_name(name) or (len(rest) == 1 and is_word(rest[0])):
            return None
        if len(rest) > 1 and self.computed(Equation(rest)) is None:
            return None
        return name, structure(rest[-1])

    def measured(self, equation: Equation, asked: bool) -> tuple[str, Answer] | None:
        """Quantity and value of ``f(2) = 5`` or ``m + n = 100 + 13 = 113``. A sum that is asked for is an equation."""
        rest = equation.sides
        while rest and (is_name(rest[0]) or _QUANTITY.fullmatch(rest[0]) or _combines(rest[0], asked)):
            rest = rest[1:]
        if not rest or len(rest) == len(equation.sides) or (len(rest) > 1 and self.computed(Equation(rest)) is None):
            return None
        return equation.sides[0], structure(rest[-1])

    def computed(self, equation: Equation) -> tuple[str, Answer] | None:
        """The last side of ``2 + 3 = 5`` if all sides are equal, so that ``0 = 7`` is not 7."""
        self.undecided(*equation.sides)
        sides = [tree(side) for side in equation.sides]
        if any(side is None for side in sides):
            return None
        first, *rest = [side for side in sides if side is not None]
        return ("", structure(equation.sides[-1])) if all(equal(first, side) for side in rest) else None

    def proportional(self, gold: tuple[str, ...], answer: tuple[str, ...]) -> bool:
        """Whether left minus right of one equation is a multiple of that of the other."""
        self.undecided(*gold, *answer)
        sides = [tree(side) for side in (*gold, *answer)]
        if any(side is None for side in sides):
            left, right = squeezed(gold[0]) == squeezed(answer[0]), squeezed(gold[1]) == squeezed(answer[1])
            return (left and self.values(gold[1], answer[1]).right) or (right and self.values(gold[0], answer[0]).right)
        a, b, c, d = (side for side in sides if side is not None)
        g, h = Node("sub", (a, b)), Node("sub", (c, d))
        if symbols(g) != symbols(h) or not symbols(g):
            return False
        at = {name: Node("number", name=str(3 + 2 * i) + ".37") for i, name in enumerate(sorted(symbols(g)))}
        try:  # g(x) h(p) = h(x) g(p) for all x and one p
            return equal(Node("mul", (g, _at(h, at))), Node("mul", (h, _at(g, at)))) and not (
                equal(_at(g, at), _ZERO) or equal(_at(h, at), _ZERO)
            )
        except (UndefinedError, UnreadableError):
            return False

    # ---- values ------------------------------------------------------------------------------------------------------

    def values(self, gold: str, answer: str) -> Outcome:
        g, a = squeezed(gold), squeezed(answer)
        if g == a:
            return Outcome(True, "text")
        if g in INFINITE or a in INFINITE:
            return Outcome(INFINITE.get(g, 0) == INFINITE.get(a, 0), "infinity")
        if any(g.lower() in same and a.lower() in same for same in SAME):
            return Outcome(True, "word")
        if (based := _BASE.fullmatch(g)) or _BASE.fullmatch(a):
            return Outcome(self.based(based, g, a), "base")
        percent = [bool(_PERCENT.search(text)) for text in (gold, answer)]
        degrees = [bool(_CIRC.search(text)) for text in (gold, answer)]
        numbers = [None if _product(x) else _number(_CIRC.sub("", x)) for x in (gold, answer)]
        if numbers[0] is not None and numbers[1] is not None:
            if _differ(lead(gold), lead(answer)):
                return Outcome(False, "word")  # June 20 is not July 20
            return Outcome(numbers_equal(gold, answer, numbers[0], numbers[1], percent), "number")
        words = [text for text in (gold, answer) if is_word(text)]
        if len(words) == 2 or (words and not (words[0].isalpha() and len(words[0]) <= 4)):  # xy may be x times y
            return Outcome(len(words) == 2 and letters(gold) == letters(answer), "word")
        return self.expressions(*(_expression(*x) for x in zip((gold, answer), numbers, degrees, percent, strict=True)))

    def based(self, found: re.Match[str] | None, gold: str, answer: str) -> bool:
        """The same digits; a base that is written must be the same."""
        if found is None:
            return False
        other = _BASE.fullmatch(answer)
        if other is None:
            return answer == found[1]
        return other[1] == found[1] and _BASES.get(other[2], other[2]) == _BASES.get(found[2], found[2])

    def expressions(self, gold: str, answer: str) -> Outcome:
        self.undecided(gold, answer)
        left, right = tree(gold), tree(answer)
        if left is None or right is None:
            return self.ask(gold, answer)
        if is_decimal_of(answer, left):
            return Outcome(True, "decimal")
        if "." in gold and rounds_to(right, gold):
            return Outcome(True, "rounded gold")
        try:
            return Outcome(equal(left, right), "value")
        except UnreadableError:
            return self.ask(gold, answer)
        except ArithmeticError as error:
            raise UndefinedError(str(error)) from error

    def ask(self, gold: str, answer: str) -> Outcome:
        assert self.algebra is not None
        return Outcome(self.algebra(gold, answer), "algebra")

    def undecided(self, *texts: str) -> None:
        """Leave values of expressions to a process that may take its time."""
        if self.algebra is None:
            raise UndecidedError(*texts)


def _differ(left: str, right: str) -> bool:
    return bool(left and right and left != right)


def _product(text: str) -> bool:
    """Whether letters or a sign after a number are factors of it: no words, no units."""
    found = _FACTOR.search(text)
    if found is None or found["sign"]:
        return found is not None
    after = found["letters"]
    if len(after) == 1 and after.isupper():  # 5 N, 5 V, 20 C, but 2R and 5M
        return after not in "NVCAWJFKLH"
    if len(after) > 4 or after.lower() in _AT_NUMBER or (len(after) == 1 and found.end() < len(text)):
        return False
    plural = len(after) == 4 and after.endswith("s")
    return len(after) < 3 or not (found["space"] or plural) or not re.search("[aeiou]", after.lower())


_ZERO = Node("number", name="0")


def _at(node: Node, values: dict[str, Node]) -> Node:
    if node.op == "symbol":
        return values.get(node.name, node)
    return Node(node.op, tuple(_at(arg, values) for arg in node.args), node.name)


def _expression(text: str, number: Fraction | None, degrees: bool, percent: bool) -> str:
    """A value as an expression: of a number the number, so that words and units around it go."""
    if number is not None and not DECIMAL.fullmatch(text):
        text = f"({number.numerator})/({number.denominator})" if number.denominator > 1 else str(number.numerator)
        text = f"({text})^\\circ" if degrees else text
    return f"({_PERCENT.sub('', text)})/100" if percent else text
