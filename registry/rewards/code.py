"""Reward for a program that passes its tests."""

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from registry.rewards.base import REWARDS, Reward, Verdict
from registry.rewards.workers import shared_pool


def read_tests(value: Any) -> dict[str, list[Any]] | None:
    """Tests as the sandbox takes them; None if there are none.

    ``value`` is a list of statements such as ``assert add(1, 2) == 3``, one string of such statements, or ``{"inputs":
    [...], "outputs": [...]}`` for programs that read standard input; the two last may be JSON.
    """
    if isinstance(value, str):
        try:
            loaded = json.loads(value)
        except ValueError:
            loaded = None
        value = loaded if isinstance(loaded, dict | list) else [value] if value.strip() else []
    if isinstance(value, dict):
        inputs, outputs = value.get("inputs"), value.get("outputs")
        if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) and inputs):
            return None
        return {"inputs": inputs, "outputs": outputs}
    if isinstance(value, list) and value and all(isinstance(test, str) and test.strip() for test in value):
        return {"asserts": value}
    return None


@REWARDS.register("code")
class Code(Reward):
    """1 if the program passes all tests of its row, else 0; it abstains on rows without tests.

    The program is what the answer format extracted (``code_block``). Each runs in a process of its own with limits of
    time and memory, without network: docs/rewards.md says what is guaranteed.

    Args:
        tests: the column with the tests.
        weight: of the reward in the sum.
        workers: programs that run at once.
        timeout: seconds of one program with all its tests.
        memory: GiB of one program.
    """

    maximum: ClassVar[float | None] = None
    correctness: ClassVar[bool] = True

    def __init__(
        self, tests: str = "tests", weight: float = 1.0, workers: int = 2, timeout: float = 10.0, memory: float = 1.0
    ) -> None:
        super().__init__(weight)
        self.tests, self.workers, self.timeout, self.memory = tests, workers, timeout, memory
        self._pool = shared_pool("registry.rewards.sandbox:case", workers, timeout, memory, fresh=True)

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | None]:
        tests, programs = [read_tests(value) for value in self._tests(columns)], columns["extracted"]
        found = [
            Verdict(None, "unverifiable_gold", program, "tests", 0.0)
            if test is None
            else Verdict(0.0, "no_answer", None, "tests", 0.0)
            for test, program in zip(tests, programs, strict=True)
        ]
        run = [i for i, test in enumerate(tests) if test is not None and programs[i] is not None]
        results = self._pool.run([{"program": programs[i], "tests": tests[i]} for i in run])
        for i, (status, failure, ms) in zip(run, results, strict=True):
            name = status if status != "ok" else "wrong" if failure else "correct"
            found[i] = Verdict(float(name == "correct"), name, programs[i], failure or "tests", ms)
        self.verdicts = found
        return [result.reward for result in found]

    def unverifiable(self, **columns: Sequence[Any]) -> list[int]:
        """Rows without tests that can be read."""
        return [i for i, value in enumerate(self._tests(columns)) if read_tests(value) is None]

    def _tests(self, columns: dict[str, Sequence[Any]]) -> Sequence[Any]:
        if self.tests not in columns:
            raise ValueError(
                f"code needs the column {self.tests!r}, the data has {sorted(columns)}; map it with columns: "
                f"{{{self.tests}: ...}}, or name it with tests: ..."
            )
        return columns[self.tests]
