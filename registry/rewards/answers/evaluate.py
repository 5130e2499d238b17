"""Are two expressions equal? Exactly where both are rational, else by their values to 90 digits, with free symbols at
sampled points.

Sampling cannot prove an identity, but a difference that survives no sample of that precision is not one that an answer
key has. All growth is bounded beforehand: what would be too large raises ``TooLarge``.
"""

import random
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from registry.rewards.answers.expression import Node, Unreadable, parse, symbols

MAX_BITS = 200_000  # of an exact number
MAX_TERMS = 2_000
MAX_FACTORIAL = 2_000
PRECISION = (50, 100)  # decimal digits of the two evaluations
TOLERANCE = (40, 85)


class TooLarge(ValueError):
    """The value cannot be computed within bounds."""


class Undefined(ValueError):
    """The expression has no value: division by zero, infinity, or a function outside its domain."""


def exact(node: Node, values: Mapping[str, Fraction] = {}) -> Fraction | None:  # noqa: B006 never changed
    """The rational value of a tree; None if it is not rational, or not seen to be."""
    if node.op == "number":
        mantissa, _, power = node.name.lower().partition("e")
        if abs(int(power or 0)) * 4 > MAX_BITS or len(mantissa) * 4 > MAX_BITS:
            raise TooLarge(node.name)
        return Fraction(mantissa) * Fraction(10) ** int(power or 0)
    if node.op in ("symbol", "i"):
        return values.get(node.name or node.op)
    if node.op in ("sum", "prod"):
        return _series(node, values)
    if node.op == "mod":
        return _modulo(node, values)
    args = [exact(arg, values) for arg in node.args]
    if not args or any(arg is None for arg in args):
        return None
    return _apply(node.op, [arg for arg in args if arg is not None])


def _apply(op: str, args: list[Fraction]) -> Fraction | None:
    a, b = args[0], args[-1]
    if op in ("add", "sub", "mul", "div") and _bits(a) + _bits(b) > MAX_BITS:
        raise TooLarge(op)
    match op:
        case "add":
            return a + b
        case "sub":
            return a - b
        case "mul":
            return a * b
        case "div":
            if b == 0:
                raise Undefined("division by zero")
            return a / b
        case "neg":
            return -a
        case "abs":
            return abs(a)
        case "floor":
            return Fraction(a.__floor__())
        case "ceil":
            return Fraction(a.__ceil__())
        case "pow":
            return _power(a, b)
        case "root":
            return _root(a, b)
        case "factorial" if a.denominator == 1 and a >= 0:
            if a > MAX_FACTORIAL:
                raise TooLarge("factorial")
            return Fraction(_product(2, int(a)))
        case "binom" if a.denominator == b.denominator == 1 and 0 <= b <= a:
            if a > MAX_FACTORIAL:
                raise TooLarge("binomial")
            from math import comb

            return Fraction(comb(int(a), int(b)))
    return None


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _product(first: int, last: int) -> int:
    from math import prod

    return prod(range(first, last + 1))


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if base == 0 and exponent <= 0:
        raise Undefined("0 to no positive power")
    if exponent.denominator == 1:
        if base not in (0, 1, -1) and _bits(base) * abs(exponent) > MAX_BITS:
            raise TooLarge("power")
        return base ** (int(exponent) if abs(base) not in (0, 1) else int(exponent) % 2 if base else 1)
    root = _root(base, Fraction(exponent.denominator))
    return None if root is None else _power(root, Fraction(exponent.numerator))


def _root(value: Fraction, index: Fraction) -> Fraction | None:
    """The real root if it is rational."""
    n = int(index)
    if index.denominator != 1 or not 2 <= n <= 64 or _bits(value) > 4_000:
        return None
    if value < 0:
        inner = _root(-value, index) if n % 2 else None
        return None if inner is None else -inner
    parts = []
    for part in (value.numerator, value.denominator):
        low, high = 0, 1 << (part.bit_length() // n + 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if middle**n <= part else (low, middle - 1)
        if low**n != part:
            return None
        parts.append(low)
    return Fraction(*parts)


def _range(node: Node, values: Mapping[str, Fraction]) -> range | None:
    first, last = (exact(arg, values) for arg in node.args[1:3])
    if first is None or last is None or first.denominator != 1 or last.denominator != 1:
        return None
    if last - first > MAX_TERMS:
        raise TooLarge("series")
    return range(int(first), int(last) + 1)


def _series(node: Node, values: Mapping[str, Fraction]) -> Fraction | None:
    indices, index = _range(node, values), node.args[0].name or node.args[0].op
    if indices is None:
        return None
    total = Fraction(node.op == "prod")
    for k in indices:
        term = exact(node.args[3], {**values, index: Fraction(k)})
        if term is None:
            return None
        total = total + term if node.op == "sum" else total * term
        if _bits(total) > MAX_BITS:
            raise TooLarge("series")
    return total


def _modulo(node: Node, values: Mapping[str, Fraction]) -> Fraction | None:
    left, modulus = node.args[0], exact(node.args[1], values)
    if modulus is None or modulus <= 0 or modulus.denominator != 1:
        return None
    if left.op == "pow":  # 3^{10^{10}} mod 5 is small
        base, exponent = (exact(arg, values) for arg in left.args)
        if base is not None and exponent is not None and base.denominator == exponent.denominator == 1 <= exponent:
            return Fraction(pow(int(base), int(exponent), int(modulus)))
    value = exact(left, values)
    return None if value is None else value % modulus


def numeric(node: Node, values: Mapping[str, Any], mp: Any) -> Any:
    """The value of a tree as a number of the mpmath context ``mp``."""
    op = node.op
    if op == "number":
        mantissa, _, power = node.name.lower().partition("e")
        return mp.mpf(node.name) if len(mantissa) < 2_000 and len(power) < 6 else _raise(TooLarge("number"))
    if op == "symbol" or (op == "i" and "i" in values):
        return values[node.name or "i"]
    if op in ("pi", "e", "i"):
        return {"pi": +mp.pi, "e": +mp.e, "i": mp.j}[op]
    if op in ("sum", "prod"):
        indices, index = _range(node, {}), node.args[0].name or node.args[0].op
        if indices is None:
            raise Unreadable("a series without fixed ends")
        terms = [numeric(node.args[3], {**values, index: mp.mpf(k)}, mp) for k in indices]
        return mp.fsum(terms) if op == "sum" else mp.fprod(terms)
    if op in ("infty", "mod"):
        raise Undefined(op)
    args = [numeric(arg, values, mp) for arg in node.args]
    value = _numeric_apply(op, args, mp)
    if mp.isnan(value) or mp.isinf(value):
        raise Undefined(op)
    if value and abs(mp.mag(value)) > MAX_BITS:
        raise TooLarge(op)
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
            return a / b if b else _raise(Undefined("division by zero"))
        case "neg":
            return -a
        case "degrees":
            return a * mp.pi / 180
        case "pow":
            if not a and mp.re(b) <= 0:
                raise Undefined("0 to no positive power")
            if a and b and mp.mag(b) + mp.mag(mp.log(a) or 1) > 18:
                raise TooLarge("power")
            return a**b
        case "root":
            odd = b == int(mp.re(b)) and int(mp.re(b)) % 2 == 1
            return -mp.root(-a, int(b)) if odd and mp.im(a) == 0 and mp.re(a) < 0 else a ** (1 / b)
        case "factorial" | "binom":
            if abs(a) > MAX_FACTORIAL or abs(b) > MAX_FACTORIAL:
                raise TooLarge(op)
            return mp.factorial(a) if op == "factorial" else mp.binomial(a, b)
        case "log" | "ln" | "lg":
            base = b if len(args) == 2 else 10 if op == "lg" else mp.e
            if not a or base in (0, 1):
                raise Undefined("logarithm of 0")
            return mp.log(a) / mp.log(base)
        case "abs":
            return abs(a)
    if abs(a) > 2**17:
        raise TooLarge(op)
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
            except (Undefined, ZeroDivisionError):
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


def equal(left: Node, right: Node) -> bool:
    """Whether two trees have the same value; raises TooLarge, and Undefined where there is no value to compare."""
    names = sorted(symbols(left) | symbols(right))
    if not names:
        a, b = exact(left), exact(right)
        if a is not None and b is not None:
            return a == b
        found = _agree(left, right, {})
        if found is None:
            raise Undefined("no value")
        return found[0]
    results = [_agree(left, right, point) for point in _points(names)]
    defined = [found for found in results if found is not None]
    real = [same for same, both_real in defined if both_real]
    if len(real) >= 3:
        return all(real)
    positive = [found[0] for found in results[:6] if found is not None]
    if len(positive) < 3:
        raise Undefined("too few points have a value")
    return all(positive)


def approximate(node: Node) -> Fraction | None:
    """The value of a real constant to 50 digits; None if it has none."""
    mp = _context()
    with mp.workdps(PRECISION[0]):
        try:
            value = numeric(node, {}, mp)
        except (Undefined, ZeroDivisionError):
            return None
        if not _real(value, mp):
            return None
        return Fraction(mp.nstr(mp.re(value), 50))


@lru_cache(4096)
def tree(text: str) -> Node | None:
    """The tree of a normalised text, or None if it is not an expression."""
    try:
        return parse(text)
    except Unreadable:
        return None
