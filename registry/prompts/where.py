"""Conditions on the columns of a row, as they stand in a config."""

import math
from collections.abc import Mapping
from typing import Any


def _number(value: Any) -> float:
    """``value`` as a number; NaN, which no comparison holds for, if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def checked(where: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """``where`` itself; ValueError if a condition is neither a value, a list of some, nor a range of numbers."""
    for name, wanted in (where or {}).items():
        if wanted is None or wanted == []:
            raise ValueError(f"where: {name}: {wanted} keeps no row; give a value, a list, or {{min: ..., max: ...}}")
        if isinstance(wanted, Mapping):
            bad = wanted.keys() - {"min", "max"} or [k for k, v in wanted.items() if math.isnan(_number(v))]
            if bad or not wanted:
                raise ValueError(
                    f"where: {name}: {dict(wanted)} is no range; write {{min: 0.1, max: 0.9}}, both numbers, or one"
                )
    return dict(where) if where else None


def _same(value: Any, wanted: Any) -> bool:
    return bool(value == wanted or _number(value) == _number(wanted))


def matches(value: Any, wanted: Any) -> bool:
    """Whether the value of a column, or one entry of a column of lists, is what a condition wants.

    A number may be written as text in the data, or in the condition.
    """
    if isinstance(value, list | tuple):
        return any(matches(entry, wanted) for entry in value)
    if isinstance(wanted, Mapping):
        return _number(wanted.get("min", -math.inf)) <= _number(value) <= _number(wanted.get("max", math.inf))
    return any(_same(value, one) for one in (wanted if isinstance(wanted, list | tuple) else [wanted]))
