"""Are two expressions equal? Exactly where both are rational, else by their values to 90 digits, with free symbols at
sampled points.

Sampling cannot prove an identity, but a difference that survives no sample of that precision is not one that an answer
key has. All growth is bounded beforehand: what would be too large raises ``TooLargeError``.
"""

import random
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from registry.rewards.answers.exact import MAX_BITS, MAX_FACTORIAL, TooLargeError, UndefinedError, exact, integers
from registry.rewards.answers.expression import Node, UnreadableError, parse, symbols

MAX_STEPS = 60_000  # of all evaluations
PRECISION = (50, 100)  # decimal digits of the two evaluations
TOLERANCE = (40, 85)


def numeric(node: Node, values: Mapping[str, Any], mp: Any) -> Any:
    """The value of a tree as a number of the mpmath context ``mp``."""
    op = node.op
    if op == "number":
        mantissa, _, power = node.name.lower().partition("e")
        return mp.mpf(node.name) if len(mantissa) < 2_000 and len(power) < 6 else _raise(TooLargeError("number"))
    if op == "symbol" or (op == "i" and "i" in values):
        return values[node.name or "i"]
    if op in ("pi", "e", "i"):
        return {"pi": +mp.pi, "e": +mp.e, "i": mp.j}[op]
    if op in ("sum", "prod"):
        indices, index = integers(node, {}), node.args[0].name or node.args[0].op
        if indices is None:
            raise UnreadableError("a series without fixed ends")
        terms = [numeric(node.args[3], {**values, index: mp.mpf(k)}, mp) for k in indices]
        return mp.fsum(terms) if op == "sum" else mp.fprod(terms)
    if op in ("infty", "mod"):
        raise UndefinedError(op)
    args = [numeric(arg, values, mp) for arg in node.args]
    try:
        value = _numeric_apply(op, args, mp)
    except (TooLargeError, UndefinedError):
        raise
    except (ValueError, TypeError, OverflowError) as error:  # a pole, or a function that takes no complex number
        raise UndefinedError(op) from error
    if mp.isnan(value) or mp.isinf(value):
        raise UndefinedError(op)
    if value and abs(mp.mag(value)) > MAX_BITS:
        raise TooLargeError(op)
    return value


def _raise(error: Exception) -> Any:
    raise error


def _numeric_apply(op: str, args: list[Any], mp: Any) -> Any:
    a, b = args[0], args[-1]
    match op:
        case "add":
            return a + b
        case "sub":
            return a - b
        case "mul":
            return a * b
        case "div":
            return a / b if b else _raise(UndefinedError("division by zero"))
        case "neg":
            return -a
        case "degrees":
            return a * mp.pi / 180
        case "pow":
            if not a and mp.re(b) <= 0:
                raise UndefinedError("0 to no positive power")
            if a and b and mp.mag(b) + mp.mag(mp.log(a) or 1) > 18:
                raise TooLargeError("power")
            return a**b
        case "root":
            odd = b == int(mp.re(b)) and int(mp.re(b)) % 2 == 1
            return -mp.root(-a, int(b)) if odd and mp.im(a) == 0 and mp.re(a) < 0 else a ** (1 / b)
        case "factorial" | "binom":
            if abs(a) > MAX_FACTORIAL or abs(b) > MAX_FACTORIAL:
                raise TooLargeError(op)
            return mp.factorial(a) if op == "factorial" else mp.binomial(a, b)
        case "log" | "ln" | "lg":
            base = b if len(args) == 2 else 10 if op == "lg" else mp.e
            if not a or base in (0, 1):
                raise UndefinedError("logarithm of 0")
            return mp.log(a) / mp.log(base)
        case "abs":
            return abs(a)
    if abs(a) > 2**17:
        raise TooLargeError(op)
    function = {"arcsin": "asin", "arccos": "acos", "arctan": "atan"}.get(op, op)
    return getattr(mp, function)(a)


def _close(a: Any, b: Any, digits: int, mp: Any) -> bool:
    """Equal but for the last digits; beside an exact 0 a value counts as it is."""
    scale = max(abs(a), abs(b)) if a and b else 1
    return bool(abs(a - b) <= mp.mpf(10) ** -digits * scale)


def _real(value: Any, mp: Any) -> bool:
    return bool(abs(mp.im(value)) <= abs(value) * mp.mpf(10) ** -30)


@lru_cache(1)
def _context() -> Any:
    """A context of our own: the precision of the global one belongs to others."""
    from mpmath import MPContext

    return MPContext()


def _agree(left: Node, right: Node, point: Mapping[str, Fraction]) -> tuple[bool, bool] | None:
    """Whether the values at a point agree, and whether both are real; None if one has no value there."""
    mp = _context()
    real = True
    for digits, tolerance in zip(PRECISION, TOLERANCE, strict=True):
        with mp.workdps(digits):
            at = {name: mp.mpf(value.numerator) / value.denominator for name, value in point.items()}
            try:
                a, b = numeric(left, at, mp), numeric(right, at, mp)
            except (UndefinedError, ZeroDivisionError):
                return None
            real = _real(a, mp) and _real(b, mp)
            if not _close(a, b, tolerance, mp):
                return False, real
    return True, real


def _points(names: list[str]) -> list[dict[str, Fraction]]:
    """Six points with positive coordinates (a symbol is a length or a count more often than not), three with signs."""
    chance = random.Random(0)
    points = [{name: Fraction(chance.randint(100, 9_000), 1009) for name in names} for _ in range(9)]
    for i, point in enumerate(points[6:]):
        for j, name in enumerate(names):
            point[name] *= -1 if (i + j) % 2 == 0 else 1
    return points


def _cost(node: Node) -> int:
    """Steps that an evaluation takes, about: ends that depend on an outer index count as 50 terms."""
    if node.op not in ("sum", "prod"):
        return 1 + sum(_cost(arg) for arg in node.args)
    indices = integers(node, {})
    return (50 if indices is None else len(indices)) * _cost(node.args[3]) + 1


def equal(left: Node, right: Node) -> bool:
    """Whether two trees have the same value.

    Raises TooLargeError, and UndefinedError where there is no value to compare.
    """
    names = sorted(symbols(left) | symbols(right))
    if (_cost(left) + _cost(right)) * (9 if names else 1) > MAX_STEPS:
        raise TooLargeError("series")
    if not names:
        a, b = exact(left), exact(right)
        if a is not None and b is not None:
            return a == b
        found = _agree(left, right, {})
        if found is None:
            raise UndefinedError("no value")
        return found[0]
    results = [_agree(left, right, point) for point in _points(names)]
    defined = [found for found in results if found is not None]
    real = [same for same, both_real in defined if both_real]
    if len(real) >= 3:
        return all(real)
    positive = [found[0] for found in results[:6] if found is not None]
    if len(positive) < 3:
        raise UndefinedError("too few points have a value")
    return all(positive)


def approximate(node: Node) -> Fraction | None:
    """The value of a real constant to 50 digits; None if it has none."""
    mp = _context()
    with mp.workdps(PRECISION[0]):
        try:
            value = numeric(node, {}, mp)
        except (UndefinedError, ZeroDivisionError):
            return None
        if not _real(value, mp):
            return None
        return Fraction(mp.nstr(mp.re(value), 50))


@lru_cache(4096)
def tree(text: str) -> Node | None:
    """The tree of a normalised text, or None if it is not an expression."""
    try:
        return parse(text)
    except UnreadableError:
        return None
