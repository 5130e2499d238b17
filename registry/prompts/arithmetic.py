"""Generated word problems in arithmetic: the task of the embedded model, and one that needs no download."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from registry.prompts.base import PROMPTS, PromptSource

SPLITS = ("train", "validation", "test")
LEVELS = (1, 2, 3)
LARGEST = 99
"""All numbers of a problem and of its solution lie in 0..99."""

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Greta", "Hugo")
ITEMS = ("apples", "books", "cards", "coins", "pens", "shells", "stamps", "stones")
CONTAINERS = ("bags", "boxes", "jars")
VERBS = {"+": ("buys", "finds", "gets", "wins"), "-": ("donates", "drops", "loses", "sells")}
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}


@dataclass(frozen=True)
class Problem:
    """A number, what happens to it, and the words around it."""

    level: int
    text: str
    start: int
    steps: tuple[tuple[str, int], ...]  # (operation, operand), applied from left to right

    def values(self) -> list[int]:
        """The start and the result of each step."""
        return list(accumulate(self.steps, lambda value, step: OPERATIONS[step[0]](value, step[1]), initial=self.start))


def draw_problem(rng: random.Random, level: int) -> Problem:
    """A random problem of one step + or - (level 1), two such steps (2), or a times table and one such step (3)."""
    signs = [rng.choice("+-") for _ in range(2 if level == 2 else 1)]
    name, items, container = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(CONTAINERS)
    verbs = [rng.choice(VERBS[sign]) for sign in signs]
    while True:  # until all results are in range
        start, operands = rng.randint(2, LARGEST), [rng.randint(2, LARGEST) for _ in signs]
        steps, has = list(zip(signs, operands, strict=True)), f"{start} {items}"
        if level == 3:
            start, each = rng.randint(2, 9), rng.randint(2, 9)
            steps, has = [("*", each), *steps], f"{start} {container} of {each} {items}"
        events = [f"{verb} {operand}" for verb, operand in zip(verbs, operands, strict=True)]
        events = [f"{event} more" if sign == "+" else event for event, sign in zip(events, signs, strict=True)]
        story = f"{name} has {has}{', ' if level == 2 else ' and '}{' and '.join(events)}."
        problem = Problem(level, f"{story} How many {items} does {name} have now?", start, tuple(steps))
        if all(0 <= value <= LARGEST for value in problem.values()):
            return problem


def worked_solution(problem: Problem, slip: Callable[[int], int] = lambda result: result) -> str:
    """The completion to learn, such as ``<think>67 + 17 = 84 ; 84 - 20 = 64</think><answer>64</answer>``.

    ``slip`` may change the result of a step; the steps after it go on from there.
    """
    value, lines = problem.start, []
    for operation, operand in problem.steps:
        result = slip(OPERATIONS[operation](value, operand))
        lines.append(f"{value} {operation} {operand} = {result}")
        value = result
    return f"<think>{' ; '.join(lines)}</think><answer>{value}</answer>"


def split_of(problem: Problem) -> str:
    """The split a problem belongs to: 10 % test, 10 % validation, 80 % train.

    A hash of the calculation alone decides, so no two splits share a calculation in other words, let alone a prompt.
    """
    calculation = str(problem.start) + "".join(f"{operation}{operand}" for operation, operand in problem.steps)
    bucket = int.from_bytes(hashlib.sha256(calculation.encode()).digest()[:8], "big") % 10
    return {0: "test", 1: "validation"}.get(bucket, "train")


@PROMPTS.register("arithmetic")
class Arithmetic(PromptSource):
    """Word problems such as "Anna has 67 apples, finds 17 more and loses 20. How many apples does Anna have now?".

    A row is ``{"prompt": str, "answer": "64", "level": 2}``, made when it is read, from split, seed, index and levels.
    Rows of different splits never share a prompt; within a split a row may recur by chance.

    Args:
        split: train, validation or test.
        size: Number of rows.
        seed: Another seed gives other rows of the same split.
        levels: Equally likely levels: 1 (one step + or -), 2 (two steps), 3 (times table, then + or -). Default: all.

    Raises:
        ValueError: if there is no such split or level.
    """

    origin = "(generated word problems)"

    def __init__(self, split: str = "train", size: int = 4096, seed: int = 0, levels: list[int] | None = None) -> None:
        if split not in SPLITS:
            raise ValueError(f"arithmetic has no split {split!r}; use one of {', '.join(SPLITS)}")
        self.levels = list(LEVELS) if levels is None else list(levels)
        if not self.levels or not set(self.levels) <= set(LEVELS):
            raise ValueError(f"levels {levels} should be a non-empty list of some of {list(LEVELS)}")
        self.split, self.size, self.seed = split, size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        problem = self.problem(index)
        return {"prompt": problem.text, "answer": str(problem.values()[-1]), "level": problem.level}

    def problem(self, index: int) -> Problem:
        """The problem behind row ``index``, for its worked solution."""
        index = range(self.size)[index]  # IndexError beyond the end
        rng = random.Random(
            f"{self.split}/{self.seed}/{index}"
        )  # seeded by the SHA-512 of this text: the same anywhere
        level = rng.choice(self.levels)
        while split_of(problem := draw_problem(rng, level)) != self.split:
            pass
        return problem
