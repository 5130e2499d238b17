"""A plain Python function as a reward."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from registry._import import ImportPathError, import_path
from registry.rewards.base import REWARDS, Reward, checked_scores


def _load(path: str) -> Callable[..., Any]:
    fix = "give the import path of a function on the Python path, as in function: my_package.my_module.my_reward"
    try:
        function = import_path(path)
    except ImportPathError as error:
        raise ValueError(f"reward function {path!r} cannot be imported ({error}); {fix}") from error
    if not callable(function):
        raise ValueError(f"reward function {path!r} is a {type(function).__name__}; {fix}")
    return function  # type: ignore[no-any-return]


@REWARDS.register("python")
class PythonReward(Reward):
    """``function`` is the import path of ``f(prompts, completions, **columns) -> list[float | None]``; it names the
    metric.

    Arguments are passed by name, and only those that the function accepts, so that ``def f(completions, answer)`` will
    do.
    """

    def __init__(self, function: str, weight: float = 1.0) -> None:
        self.function = function
        super().__init__(weight)
        self._call = _load(function)

    @property
    def name(self) -> str:
        return self.function.rpartition(".")[2]

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | None]:
        given = {"prompts": prompts, "completions": completions, **columns}
        parameters = inspect.signature(self._call).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            names = {p.name for p in parameters}
            missing = [
                p.name
                for p in parameters
                if p.default is p.empty and p.kind is not p.VAR_POSITIONAL and p.name not in given
            ]
            if missing:
                raise ValueError(
                    f"{self.function} needs {', '.join(missing)}, but there is only {', '.join(sorted(given))}; "
                    "rename its arguments, map data with columns, or name a source with them; each split has its own"
                )
            given = {name: values for name, values in given.items() if name in names}
        return checked_scores(self.function, self._call(**given), len(completions))
