"""math-verify, behind bounds: only in a process that can be killed."""

import logging
import re
import signal
from functools import lru_cache
from typing import Any

from registry.rewards.answers.compare import compare

MAX_CHARS = 300
MAX_NESTING = 15
_TOWER = re.compile(r"\^\s*[{(][^{}]*\^")
_RISKS = [
    ("digits", re.compile(r"\d{60}")),
    ("exponent", re.compile(r"\^\s*[{(]?\s*[-+]?\d{4}")),
    ("exponent", re.compile(r"e[+-]?\d{4}", re.IGNORECASE)),
    ("factorial", re.compile(r"[)}\]]\s*!|\d{3}\s*!|!\s*!")),
    ("tower", _TOWER),
    ("series", re.compile(r"\\(?:sum|prod)(?!.*\}\s*\^\s*(?:\{\s*)?(?:\d{1,3}\b|\\infty|[a-z]))")),
    ("code", re.compile(r"__|\blambda\b(?<!\\lambda)|[;`'\"@#~?]|\bimport\b|\beval\b|\bexec\b")),
    ("words", re.compile(r"(?<![\\a-zA-Z])(?!(?:sin|cos|tan|log|sqrt|exp|max|min|arc\w+|mod)\b)[a-zA-Z]{4,}")),
]
_MACROS = {
    "frac", "sqrt", "pi", "cdot", "times", "div", "pm", "mp", "infty", "sin", "cos", "tan", "cot", "sec", "csc",
    "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log", "ln", "lg", "exp", "sum", "prod", "int", "lim", "to",
    "binom", "cup", "cap", "setminus", "in", "le", "ge", "ne", "emptyset", "begin", "end", "overline", "vec", "hat",
    "bar", "lfloor", "rfloor", "lceil", "rceil", "lvert", "rvert", "mid", "bmod", "ldots", "dots", "cdots", "partial",
    "forall", "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "theta", "lambda", "mu", "nu", "rho",
    "sigma", "tau", "phi", "varphi", "omega", "Delta", "Omega", "Phi", "Gamma", "Lambda", "Sigma", "Theta", "eta",
    "zeta", "xi", "psi", "kappa", "chi", "ell", "mathbb", "circ", "prime", "angle", "triangle", "gcd", "lcm", "max",
    "min", "rightarrow",
}  # fmt: skip


def refusal(text: str) -> str | None:
    """Why a text does not reach the algebra system; None if it may."""
    if len(text) > MAX_CHARS:
        return "too long"
    unknown = [name for name in re.findall(r"\\([a-zA-Z]+)", text) if name not in _MACROS]
    if unknown:
        return "unknown command"
    depth = deepest = 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        deepest = max(deepest, depth)
        if depth < 0:
            return "brackets"
    if depth or deepest > MAX_NESTING:
        return "brackets"
    return next((name for name, pattern in _RISKS if pattern.search(text)), None)


def equivalent(gold: str, answer: str) -> bool:
    """Whether math-verify calls two normalised texts equal: both boxed, the gold first, nothing read in its place."""
    if refusal(gold) or refusal(answer):
        return False
    from math_verify import verify

    sides = [_parsed(gold), _parsed(answer)]
    try:
        return all(sides) and bool(
            verify(sides[0], sides[1], float_rounding=12, numeric_precision=30, strict=True, timeout_seconds=None)
        )
    except MemoryError:
        raise
    except Exception:  # whatever an algebra system trips over is not seen to be right
        return False


@lru_cache(4096)
def _parsed(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    config = (LatexExtractionConfig(boxed_match_priority=0),)
    boxed = f"$\\boxed{{{text}}}$"
    return list(
        parse(
            boxed,
            extraction_config=config,
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=None,
        )
    )


def warm_up() -> None:
    """Import what a case needs, and build the parser's tables."""
    logging.disable(logging.CRITICAL)
    compare(r"\frac{1}{2}", "x", equivalent)
    equivalent(r"\frac{x}{2}", r"\frac{1}{2}x")


class _Alarm(BaseException):
    """Not an Exception, or the algebra system would take it for one of its own."""


def case(arguments: list[Any]) -> list[object]:
    """``[gold, answer, seconds]`` -> ``[right, rule]``; the rule is ``alarm`` if it took longer.

    The library's own alarms are off: each would cancel this one. What does not hear it, the pool kills.
    """
    gold, answer, seconds = arguments
    rang = False

    def ring(*_: object) -> None:
        nonlocal rang
        rang = True
        raise _Alarm

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        outcome = compare(gold, answer, equivalent)
    except _Alarm:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return [False, "alarm"] if rang else list(outcome)
