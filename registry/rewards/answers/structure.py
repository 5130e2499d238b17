"""What kind of answer a normalised text is: list, set, tuple or interval, inequality, equation, matrix, or a value."""

import re
from dataclasses import dataclass

from registry.rewards.answers.normalise import closing, split
from registry.rewards.numbers import parse_number

MAX_ITEMS = 50


@dataclass(frozen=True)
class Value:
    """One expression, word or number."""

    text: str


@dataclass(frozen=True)
class Equation:
    """Sides of an equation, left to right."""

    sides: tuple[str, ...]


@dataclass(frozen=True)
class Items:
    """``list`` (written without brackets), ``set``, ``tuple`` (ordered) or ``ratio``."""

    kind: str
    items: tuple["Answer", ...]


@dataclass(frozen=True)
class Interval:
    """From ``low`` to ``high``; ``closed`` tells of both ends."""

    low: str
    high: str
    closed: tuple[bool, bool]
    sure: bool = True  # (1, 2) may be an interval or a pair
    name: str = ""  # of the variable in an inequality


@dataclass(frozen=True)
class Union:
    """Intervals and sets in no order."""

    parts: tuple["Answer", ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of entries."""

    rows: tuple[tuple[str, ...], ...]


Answer = Value | Equation | Items | Interval | Union | Matrix

INFINITE = {r"\infty": 1, r"+\infty": 1, r"-\infty": -1}
_AND = re.compile(r"\s*(?:,(?:\s*(?:and|or)\b)?|;|\s(?:and|or)\s)\s*")
_OR = re.compile(r"\s*(?:,\s*(?:or\b)?|;|\s(?:or|and)\s|\\lor\s)\s*")
_CUP = re.compile(r"\s*\\cup(?![a-zA-Z])\s*")
_RELATION = re.compile(r"\s*(\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|\\ne(?![a-zA-Z])|<|>)\s*")
_EQUALS = re.compile(r"\s*=\s*")
_NAME = re.compile(
    r"[A-Za-z](?:_\{?\w+\}?)?'*(?:\s*\(\s*[a-z]\s*(?:,\s*[a-z]\s*)*\))?|\\[a-z]+|[A-Za-z][A-Za-z ]+"
    r"|\\(?:angle|overline|vec|triangle|bar)\s*\{?\s*[A-Za-z]+\s*\}?|P\s*\([^()=]*\)|\(\s*[a-z](?:\s*,\s*[a-z])*\s*\)"
    r"|\|\s*[A-Z]{2}\s*\|"
)
_REALS = {"R", "allrealnumbers", "allreals", "realnumbers"}
_SUCH_THAT = re.compile(r"\s*(?:\\mid(?![a-zA-Z])|\||:)\s*")
_IN = re.compile(r"(?:[A-Za-z](?:_\{?\w+\}?)?|\\[a-z]+)\s*\\in(?![a-zA-Z])\s*")
_PM = re.compile(r"\\(pm|mp)(?![a-zA-Z])")
_MATRIX = re.compile(r"\\begin\s*\{([pbvBV]?matrix|array)\}\s*(?:\{[lcr|]*\})?(.*?)\\end\s*\{\1\}", re.DOTALL)
_COLON = re.compile(r"\s*(?::|\\colon)\s*")


def is_name(text: str) -> bool:
    """Whether a text names a quantity, as the left side of an assignment does."""
    return _NAME.fullmatch(text) is not None and text not in (r"\pi", "e", "i", r"\infty")


def read(text: str) -> Answer:
    """The structure of a normalised text; texts of no known structure are a Value."""
    if parse_number(text) is not None and "=" not in text:
        return Value(text)
    if member := _IN.match(text):
        text = text[member.end() :]
    if _MATRIX.fullmatch(text):
        return _matrix(text)
    parts = split(text, _CUP)
    if len(parts) > 1:
        return _union([read(part) for part in parts[:MAX_ITEMS]])
    return _listed(text) or _bracketed(text) or _relation(text) or _value(text)


def _union(parts: list[Answer]) -> Answer:
    if all(isinstance(part, Items) and part.kind == "set" for part in parts):
        return Items("set", tuple(item for part in parts if isinstance(part, Items) for item in part.items))
    return Union(tuple(sure(part) for part in parts))


def sure(answer: Answer) -> Answer:
    """A pair, or the name of the reals, where only an interval makes sense."""
    if isinstance(answer, Value) and answer.text.replace(" ", "") in _REALS:
        return Interval(r"-\infty", r"\infty", (False, False))
    if isinstance(answer, Items) and answer.kind == "tuple" and len(answer.items) == 2:
        low, high = answer.items
        if isinstance(low, Value) and isinstance(high, Value):
            return Interval(low.text, high.text, (False, False))
    return answer


def _listed(text: str) -> Answer | None:
    parts = split(text, _AND)
    if len(parts) < 2 or len(parts) > MAX_ITEMS or not all(parts):
        return None
    if re.search(r"[a-zA-Z]{4}", text) and not re.search(r"[\d\\,]", text):
        return Value(text)  # prose
    relations = [split(part, _RELATION) for part in parts]
    if all(len(sides) > 1 for sides in relations) and " and " not in text:
        return Union(tuple(read(part) for part in parts))
    sides = split(parts[0], _EQUALS)
    if len(sides) == 2 and is_name(sides[0]) and not any("=" in part for part in parts[1:]):
        parts[0] = sides[1]  # n = 2, 3, 4
    return Items("list", tuple(read(part) for part in parts))


def _bracketed(text: str) -> Answer | None:
    if text.startswith(r"\{") and text.endswith(r"\}") and closing(text, 1) == len(text) - 1:
        inner = text[2:-2].strip()
        parts = split(inner, _AND) if inner else []
        builder = split(inner, _SUCH_THAT)
        if len(builder) == 2:
            condition = read(builder[1]) if is_name(builder[0]) or _IN.match(builder[0]) else Value(text)
            return condition if isinstance(condition, Interval | Union) else Value(text)
        if len(parts) > MAX_ITEMS or not all(parts):
            return Value(text)
        return Items("set", tuple(read(part) for part in parts))
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]" or closing(text, 0) != len(text) - 1:
        return None
    inner = text[1:-1].strip()
    parts = split(inner, _AND)
    if len(parts) == 1:
        return read(inner) if inner else None
    if len(parts) > MAX_ITEMS or not all(parts):
        return None
    if len(parts) == 2:
        endless = parts[0].replace(" ", "") in INFINITE or parts[1].replace(" ", "") in INFINITE
        if text[0] + text[-1] != "()" or endless:
            return Interval(parts[0], parts[1], (text[0] == "[", text[-1] == "]"), text[0] + text[-1] != "[]")
    return Items("tuple", tuple(read(part) for part in parts))


def _relation(text: str) -> Answer | None:
    sides = split(text, _RELATION)
    signs = [found[1] for found in _RELATION.finditer(text)]
    if len(sides) == len(signs) + 1 and signs:
        turned = [_TURN.get(sign, sign) for sign in signs]
        if len(signs) == 1 and all(sides):
            return _half_line(sides, signs[0])
        if len(signs) == 2 and all(sides):
            if set(signs) <= {">", r"\ge"}:
                sides, signs = sides[::-1], turned[::-1]
            if set(signs) <= {"<", r"\le"}:
                return Interval(sides[0], sides[2], (signs[0] != "<", signs[1] != "<"), name=sides[1])
        return Value(text)
    sides = split(text, _EQUALS)
    if len(sides) > 1 and all(sides):
        return Equation(tuple(sides))
    return None


_TURN = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}


def _half_line(sides: list[str], sign: str) -> Answer:
    left, right = sides
    if is_name(right) and not is_name(left):
        left, right, sign = right, left, _TURN.get(sign, sign)
    if not is_name(left):
        return Value(f"{left}{sign}{right}")
    if sign == r"\ne":
        return Union(
            (
                Interval(r"-\infty", right, (False, False), name=left),
                Interval(right, r"\infty", (False, False), name=left),
            )
        )
    if sign in ("<", r"\le"):
        return Interval(r"-\infty", right, (False, sign != "<"), name=left)
    return Interval(right, r"\infty", (sign != ">", False), name=left)


def _value(text: str) -> Answer:
    if _PM.search(text):
        if len(_PM.findall(text)) > 4:
            return Value(text)
        upper = _PM.sub(lambda m: "+" if m[1] == "pm" else "-", text)
        lower = _PM.sub(lambda m: "-" if m[1] == "pm" else "+", text)
        return Items("list", (Value(upper.strip().removeprefix("+").strip()), Value(lower.strip())))
    parts = split(text, _COLON)
    if len(parts) > 1 and all(parts) and len(parts) <= MAX_ITEMS and not re.search(r"[a-zA-Z]{3}", parts[0]):
        return Items("ratio", tuple(Value(part) for part in parts))
    return Value(text)


def _matrix(text: str) -> Answer:
    found = _MATRIX.fullmatch(text)
    assert found is not None
    rows = [row for row in re.split(r"\\\\|\\cr(?![a-zA-Z])", found[2]) if row.strip()]
    if len(rows) > MAX_ITEMS:
        return Value(text)
    return Matrix(tuple(tuple(cell.strip() for cell in row.split("&")) for row in rows))
