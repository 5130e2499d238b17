"""Completions -> rewards."""

import inspect
import math
import reprlib
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import registry
from qerl_pl.types import Completion, Prompt
from registry.rewards import VERDICTS, AnswerFormat, Reward, checked_scores, gold_answer

COMPUTED = ("prompts", "completions", "extracted", "well_formed", "completion_ids", "finished")
"""What rewards receive besides the columns of the data, which must not have these names."""

OURS = (Path(__file__).parent, Path(registry.__file__).parent)
"""Code that is not the user's."""

SAMPLE = 32
"""How many prompts the check at the start of a run tries; trying all would take minutes on a large set."""


def reward_keys(rewards: Sequence[Reward]) -> list[str]:
    """The names of the rewards; those after the first of the same name are numbered: ``format``, ``format_2``."""
    keys: list[str] = []
    for reward in rewards:
        key, n = reward.name, 1
        while key in keys:
            n += 1
            key = f"{reward.name}_{n}"
        keys.append(key)
    return keys


def check_signature(reward: Reward) -> None:
    """ValueError unless ``score`` can call the reward; columns that only it knows of are taken to be in the data."""
    signature = inspect.signature(reward)
    names, first = list(signature.parameters), list(COMPUTED[:2])
    needed = [
        p.name
        for i, p in enumerate(signature.parameters.values())
        if p.default is p.empty and (p.kind is p.KEYWORD_ONLY or (i > 1 and p.kind is p.POSITIONAL_OR_KEYWORD))
    ]
    try:
        signature.bind(*first, **dict.fromkeys((*COMPUTED[2:], *needed)))
        if any(name in first and first.index(name) != i for i, name in enumerate(names)):
            raise TypeError("prompts come first, then completions")
    except TypeError as error:
        raise ValueError(
            f"reward {reward.name}: __call__{signature} cannot be given prompts and completions by place and the "
            f"columns by name ({error}); write def __call__(self, prompts, completions, **columns), or give a function "
            "that names what it reads to the reward python"
        ) from error


def _scores(key: str, reward: Reward, texts: Sequence[str], columns: dict[str, list[Any]]) -> Any:
    """What the reward returns; ValueError with its name, the completion and the cause where a user's code raises."""

    def call(rows: range) -> Any:
        part = {name: [values[i] for i in rows] for name, values in columns.items()}
        return reward(part.pop("prompts"), [texts[i] for i in rows], **part)

    rows = range(len(texts))
    try:
        return call(rows)
    except Exception as error:
        theirs = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not any(folder in Path(frame.filename).parents for folder in OURS)
        ]
        if isinstance(error, ValueError | ImportError | OSError) and not theirs:
            raise
        files = [frame for frame in theirs if frame.filename == theirs[0].filename]  # not the libraries that it calls
        line = f" ({Path(files[-1].filename).name}, line {files[-1].lineno})" if files else ""
        row = _failing(call, rows, error)
        which = f"{len(texts)} completions" if row is None else f"completion {row}, {reprlib.repr(texts[row])}"
        raise ValueError(
            f"reward {key} failed on {which}: {type(error).__name__}: {error}{line}; mend it there, or let it return "
            "None to abstain; QERL_PL_DEBUG=1 shows the traceback"
        ) from error


def _failing(call: Callable[[range], Any], rows: range, error: Exception) -> int | None:
    """The first row that fails alone and in the same way, found by halves: one more pass over the rows at most. None if
    none does.
    """

    def fails(rows: range) -> bool:
        try:
            call(rows)
        except Exception as other:  # of a user's code
            return (type(other), str(other)) == (type(error), str(error))
        return False

    while len(rows) > 1:
        half = rows[: len(rows) // 2]
        rows = half if fails(half) else rows[len(half) :]
    return rows[0] if fails(rows) else None


def _columns(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """The columns of all rows; None where a row lacks one."""
    names = list(dict.fromkeys(name for prompt in prompts for name in prompt.columns))
    taken = [name for name in names if name in (*COMPUTED, "self")]
    if taken:
        raise ValueError(
            f"the data has columns named {taken}, which rewards receive from the trainer; rename them in the data"
        )
    return {name: [prompt.columns.get(name) for prompt in prompts] for name in names}


def score(
    rewards: Sequence[Reward], answer_format: AnswerFormat, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> tuple[dict[str, list[float | None]], list[float]]:
    """What each reward gives each completion (None: it abstains), and the weighted sums (NaN where all abstain).

    ``prompts[i]`` is the prompt of ``completions[i]``. Each completion is parsed once, here.
    """
    if not rewards:
        raise ValueError("there are no rewards, so nothing can be learned; set rewards: [gsm8k]")
    if len(prompts) != len(completions):
        raise ValueError(
            f"{len(prompts)} prompts for {len(completions)} completions; give the prompt of each completion"
        )
    texts = [completion.text for completion in completions]
    columns: dict[str, list[Any]] = {
        **_columns(prompts),
        "prompts": [prompt.text for prompt in prompts],
        "extracted": [answer_format.extract(text) for text in texts],
        "well_formed": [answer_format.well_formed(text) for text in texts],
        "completion_ids": [completion.token_ids for completion in completions],
        "finished": [completion.finished for completion in completions],
    }
    parts = {
        key: checked_scores(f"reward {key}", _scores(key, reward, texts, columns), len(texts))
        for key, reward in zip(reward_keys(rewards), rewards, strict=True)
    }
    totals = []
    for scores in zip(*parts.values(), strict=True):
        pairs = zip(rewards, scores, strict=True)  # of weight 0: only logged
        given = [reward.weight * value for reward, value in pairs if reward.weight and value is not None]
        totals.append(sum(given) if given else math.nan)
    return parts, totals


def verdict_rates(rewards: Sequence[Reward]) -> dict[str, float]:
    """``<reward>/<verdict>``: the fraction of the completions of the last ``score`` with that verdict."""
    return {
        f"{key}/{name}": sum(verdict.verdict == name for verdict in reward.verdicts) / len(reward.verdicts)
        for key, reward in zip(reward_keys(rewards), rewards, strict=True)
        if reward.verdicts
        for name in VERDICTS
    }


def shortfalls(answer_format: AnswerFormat, rewards: Sequence[Reward], prompts: Sequence[Prompt]) -> list[str]:
    """For each prompt, why a perfect completion, as the answer format renders it, does not earn the full reward, or "".

    Where the prompt has opened ``<think>`` (as templates of thinking models do), a completion goes on from there.
    """
    texts = []
    for prompt in prompts:
        text = answer_format.render("The reasoning.", gold_answer(prompt.columns.get("answer", "42")))
        texts.append(text.removeprefix("<think>") if prompt.text.rstrip().endswith("<think>") else text)
    parts, _ = score(rewards, answer_format, prompts, [Completion([], [], text, True) for text in texts])
    reasons = [""] * len(prompts)
    for reward, (key, values) in zip(rewards, parts.items(), strict=True):
        for i, value in enumerate(values):
            if reward.maximum is None or value == reward.maximum or reasons[i]:
                continue
            got = "abstains on" if value is None else f"gives {value} instead of {reward.maximum} to"
            reasons[i] = (
                f"{key} {got} the perfect completion {texts[i]!r}, from which {type(answer_format).__name__} reads "
                f"{answer_format.extract(texts[i])!r}; the gold answer is {prompts[i].columns.get('answer')!r}"
            )
    return reasons


def check_answer_format(
    answer_format: AnswerFormat, rewards: Sequence[Reward], prompts: Sequence[Prompt]
) -> dict[int, str]:
    """Which of the first ``SAMPLE`` prompts a perfect completion earns less than the full reward for, and why.

    Raises:
        ValueError: if these are more than half, or if the system prompt does not mention what the answer format looks
            for. It would mean that the prompt asks for something that the rewards do not read, so that a whole run
            could earn 0.
    """
    system = answer_format.system_prompt
    missing = [marker for marker in answer_format.markers if system.strip() and marker not in system]
    if missing:
        raise ValueError(
            f"answer_format: {type(answer_format).__name__} looks for {' and '.join(missing)}, which its system_prompt "
            f"does not mention: {system!r}; ask for it there, choose another answer format, or leave system_prompt "
            "empty if the data asks for it"
        )
    sample = prompts[:SAMPLE]
    failing = {i: why for i, why in enumerate(shortfalls(answer_format, rewards, sample)) if why}
    if len(failing) > len(sample) / 2:
        many = f" ({len(failing)} of the first {len(sample)} prompts)" if len(sample) > 1 else ""
        first = next(iter(failing.values()))
        hint = ""
        if all(prompts[i].text.rstrip().endswith("<think>") for i in failing):
            hint = " The chat template opens <think> itself; where it can be told not to, set chat_template_args."
        raise ValueError(
            f"prompt and rewards disagree{many}: {first}. Choose an answer format and rewards that fit the data.{hint}"
        )
    return failing


def unverifiable(rewards: Sequence[Reward], prompts: Sequence[Prompt]) -> list[int]:
    """The prompts whose gold no reward of correctness can check, so that no completion can ever be right."""
    checks = [reward for reward in rewards if reward.correctness]
    if not checks or not prompts:
        return []
    columns = _columns(prompts)
    found = [set(reward.unverifiable(**columns)) for reward in checks]
    return sorted(set.intersection(*found))
