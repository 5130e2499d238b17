"""Rational values, exactly, within bounds of size."""

from collections.abc import Mapping
from fractions import Fraction
from math import comb, factorial
from types import MappingProxyType

from registry.rewards.answers.expression import Node

MAX_BITS = 200_000  # of a number
MAX_TERMS = 2_000
MAX_FACTORIAL = 2_000


class TooLargeError(ValueError):
    """The value cannot be computed within bounds."""


class UndefinedError(ValueError):
    """The expression has no value: division by zero, infinity, or a function outside its domain."""


def exact(node: Node, values: Mapping[str, Fraction] = MappingProxyType({})) -> Fraction | None:
    """The rational value of a tree; None if it is not rational, or not seen to be."""
    if node.op == "number":
        mantissa, _, power = node.name.lower().partition("e")
        if abs(int(power or 0)) * 4 > MAX_BITS or len(mantissa) * 4 > MAX_BITS:
            raise TooLargeError(node.name)
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
        raise TooLargeError(op)
    match op:
        case "add":
            return a + b
        case "sub":
            return a - b
        case "mul":
            return a * b
        case "div":
            if b == 0:
                raise UndefinedError("division by zero")
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
                raise TooLargeError("factorial")
            return Fraction(factorial(int(a)))
        case "binom" if a.denominator == b.denominator == 1 and 0 <= b <= a:
            if a > MAX_FACTORIAL:
                raise TooLargeError("binomial")
            return Fraction(comb(int(a), int(b)))
    return None


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if base == 0 and exponent <= 0:
        raise UndefinedError("0 to no positive power")
    if exponent.denominator == 1:
        if base not in (0, 1, -1) and _bits(base) * abs(exponent) > MAX_BITS:
            raise TooLargeError("power")
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


def integers(node: Node, values: Mapping[str, Fraction]) -> range | None:
    """The indices of a series; None if its ends are no known integers."""
    first, last = (exact(arg, values) for arg in node.args[1:3])
    if first is None or last is None or first.denominator != 1 or last.denominator != 1:
        return None
    if last - first > MAX_TERMS:
        raise TooLargeError("series")
    return range(int(first), int(last) + 1)


def _series(node: Node, values: Mapping[str, Fraction]) -> Fraction | None:
    indices, index = integers(node, values), node.args[0].name or node.args[0].op
    if indices is None:
        return None
    total = Fraction(node.op == "prod")
    for k in indices:
        term = exact(node.args[3], {**values, index: Fraction(k)})
        if term is None:
            return None
        total = total + term if node.op == "sum" else total * term
        if _bits(total) > MAX_BITS:
            raise TooLargeError("series")
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
