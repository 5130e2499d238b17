"""The parser of the command line and of YAML files: what is wrong, in one line, with what was probably meant."""

import difflib
import inspect
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from qerl_pl.engine import ENGINES
from qerl_pl.module import adamw
from registry._import import import_path
from registry._registry import Registry
from registry.noise import SCHEDULES
from registry.prompts import PROMPTS
from registry.quantization import FORMATS
from registry.rewards import ANSWER_FORMATS, REWARDS

REGISTRIES = (FORMATS, SCHEDULES, REWARDS, ANSWER_FORMATS, PROMPTS, ENGINES)
PACKAGE = Path(__file__).parent
COMPONENTS: dict[str, Registry[Any]] = {
    "model.quantization": FORMATS,
    "model.noise": SCHEDULES,
    "data.answer_format": ANSWER_FORMATS,
    "data.train": PROMPTS,
    "data.engine": ENGINES,
}
"""Options that take one component, whose settings are options too."""
SOURCES = ("--data.train", "--data.validation", "--data.test")
EXTRAS = {"bitsandbytes": "bitsandbytes"}
"""Modules that a config may name and that only an extra brings."""


def _options(parser: LightningArgumentParser) -> set[str]:
    """Names of all options of a parser and of its subcommands."""
    names = {action.dest for action in parser._actions}
    for action in parser._actions:
        if isinstance(action.choices, dict):
            names |= {name for sub in action.choices.values() for name in _options(sub)}
    return names


def _component_options() -> set[str]:
    """Names of the settings of all that an option may be: ``model.noise.sigma``."""
    made: dict[str, list[Any]] = {key: [registry[name] for name in registry] for key, registry in COMPONENTS.items()}
    made["model.optimizer"] = [adamw]
    return {f"{key}.{name}" for key, several in made.items() for one in several for name in _parameters(one)}


def _parameters(made: Any) -> list[str]:
    """The names of a component's settings."""
    return [name for name in inspect.signature(made).parameters if name != "params"]  # what an optimizer is made over


def _meant(key: str, known: set[str]) -> str:
    """A question, or ""."""
    if key in known:
        return ""
    found = sorted(name for name in known if name.endswith(f".{key}") or name.startswith(f"{key}_"))
    found = found or difflib.get_close_matches(key, known, n=1)
    return f". Did you mean {' or '.join(map(repr, found))}?" if found else ""


def _accepted(path: str, message: str) -> str:
    """What the class at ``path`` takes, where ``message`` refuses a setting of it; or ""."""
    refused = re.search(r"Option '([\w.]+)' is not accepted", message)
    if refused is None:
        return ""
    try:
        names = _parameters(import_path(path))
    except (ValueError, TypeError):  # a class within a class, or one without a signature
        return ""
    meant = _meant(refused[1], set(names)) or "."
    return f"{meant} It takes {', '.join(names)}" if names else ""  # a base class has none, and its children may


TYPES = {
    "<class 'int'>": "a whole number", "<class 'float'>": "a number", "<class 'bool'>": "true or false",
    "<class 'str'>": "a text", "<class 'NoneType'>": "null", "<class 'torch.Tensor'>": "",
    "list[": "a list", "collections.abc.Iterable[": "a list", "dict[": "a mapping", "<class '": "a component",
}  # fmt: skip
"""Beginnings of Python's types in words that YAML has; a tensor it cannot have."""
_EXPECTED = re.compile(
    r'Parser key "(?P<key>[\w.]+)":\s*(?:- )?(?:Expected a (?P<one>.+)\. Got value: (?P<its>.*)'
    r"|Does not validate .*\n\s*Subtypes: \[(?P<several>.+)\]\n\s*Errors:\n"
    r"(?:\s*- Expected a .*\n)+\s*Given value type: .*\n\s*Given value: (?P<theirs>.*))"
)


def _in_words(types: str) -> list[str]:
    """Of types that commas separate; empty if one of them has no words."""
    found = []
    for one in re.split(r",\s*(?![^\[]*\])", types):
        if one.startswith("typing.Literal["):
            found.append(one[len("typing.Literal[") : -1].replace("'", ""))
        else:
            words = next((said for begin, said in TYPES.items() if one.startswith(begin)), None)
            if words is None:
                return []
            found.append(words)
    return list(dict.fromkeys(filter(None, found)))


def wrong_type(message: str) -> tuple[str, str] | None:
    """The key of a value that has the wrong type, and a sentence; None for other errors, and for types without words.

    Of all that jsonargparse tried, the last: the setting of a component comes after the components it might be of.
    """
    found = list(_EXPECTED.finditer(message))
    if not found:
        return None
    said = found[-1]
    kinds = _in_words(said["one"] or said["several"])
    if not kinds or said["one"] == "<class 'list'>":
        return None
    value = said["its"] if said["its"] is not None else said["theirs"]
    return said["key"], f"{value} must be {' or '.join(kinds)}"


def refusal(message: str) -> str | None:
    """What a component said of its settings, from jsonargparse's list of all that it tried; None if nothing did."""
    said = re.findall(r"^\s+- ((?!Not of type |Does not validate |Expected |Problem with ).+)", message, re.MULTILINE)
    return said[0] if len(said) == 1 and message.startswith("Does not validate against any of the Union") else None


def _holds_rows(path: Path) -> bool:
    """Whether a file has rows of data, and not a component and its settings."""
    if path.suffix == ".json" and path.is_file():
        return "class_path" not in path.read_text(errors="replace")
    return path.suffix in (".jsonl", ".parquet")


def with_recipes(args: Sequence[str]) -> list[str]:
    """``--config configs/NAME.yaml`` is that of the package where the current folder has no such file."""
    found = list(args)
    for i, arg in enumerate(args):
        option, equals, name = arg.partition("=") if arg.startswith(("-c=", "--config=")) else ("", "", arg)
        given = option or (i > 0 and args[i - 1] in ("-c", "--config"))
        if given and Path(name).parts[:1] == ("configs",) and not Path(name).exists() and (PACKAGE / name).is_file():
            found[i] = f"{option}{equals}{PACKAGE / name}"
    return found


class Parser(LightningArgumentParser):
    """Errors in one line, with what was probably meant."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$", re.IGNORECASE)  # also -1e-3
        self.file: Any = None

    def parse_args(self, args: Any = None, *more: Any, **kwargs: Any) -> Namespace:  # type: ignore[override]
        words = with_recipes(sys.argv[1:] if args is None else args)
        pairs = [*(word.partition("=")[::2] for word in words), *pairwise(words)]
        for option, value in pairs:  # jsonargparse would read settings of a source from the file
            if option in SOURCES and _holds_rows(Path(value)):
                name = option.removeprefix("--")
                self.error(f"{name}: {value} is no prompt source; give {option} file {option}.path {value}")
        return super().parse_args(words, *more, **kwargs)

    def parse_object(self, obj: Any, *args: Any, **kwargs: Any) -> Namespace:
        # jsonargparse writes into what it tries, and the next possibility would be given dicts as namespaces
        return super().parse_object(obj.clone() if isinstance(obj, Namespace) else obj, *args, **kwargs)

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Namespace:
        self.file = path
        return super().parse_path(path, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # of one possibility among several: the others are still to be tried
            super().error(message, ex)
        print("qerl-pl: error:", " ".join(self.explained(message).split()), file=sys.stderr)
        sys.exit(2)

    def explained(self, message: str) -> str:
        """jsonargparse's message, in words for users."""
        if message.startswith("Problems parsing config: ") and self.file is not None:
            cause = message.partition(": ")[2].replace('in "<unicode string>", ', "at ")
            return f"{self.file} is not YAML: {cause}"
        if message.startswith("Unexpected config:") and self.file is not None:
            return f"{self.file} holds no settings; give a YAML file of them, such as model: {{model: tiny}}"
        message = re.sub(r"\n\s*- Expected a path but .*", "", message)  # a file might have had the value
        message = re.sub(r"(callable class: Parser key (?s:.*))\. Got value: Namespace\(.*", r"\1", message)
        name = re.search(r"Not of type \w+Name: (unknown .*|\S.* is not available: .*)", message)
        where = re.search(r'Parser key "([\w.]+)"', message)
        if where is None:
            unknown = re.search(r"(?:[Oo]ption|[Kk]ey) '([\w.]+)'|--([\w.]+)", message)
            key = next(filter(None, unknown.groups())) if unknown else ""
            return message + (_meant(key, _options(self) | _component_options()) if key else "")
        if "got NestedArg(key=" in message:
            return f"{where[1]}: its settings need a class; give --{where[1]} too, such as torch.optim.AdamW"
        missing = re.search(rf"No module named '({'|'.join(EXTRAS)})'", message)
        class_ = re.findall(r"given class_path '([\w.]+)':((?:\n(?!\s*(?:- |Given value)).+)+)", message)
        paths = [path.rpartition(".")[2] for path, _ in class_[-1:]]
        wrong = wrong_type(message)
        if wrong is not None:
            inside = f"{wrong[0]}.".startswith(f"{where[1]}.")  # the key says the place too
            path = [wrong[0], *paths] if inside else [where[1], *paths, wrong[0]]
            return f"{': '.join(path)}: {wrong[1]}"
        if name:  # of all that jsonargparse tried, the registry's answer is the one that helps
            return f"{where[1]}: {name[1]}"
        if missing:
            return f"{where[1]}: {missing[1]} is not installed; pip install 'qerl-pl[{EXTRAS[missing[1]]}]'"
        if class_:  # a class was named: what else might have been there does not matter
            path, said = class_[-1]
            return f"{where[1]}: {paths[0]}:{said}{_accepted(path, said)}"
        if one := re.search(
            r"callable class: (Option .+ accepted)\. Got value: Namespace\(class_path='([\w.]+)'", message
        ):
            return f"{where[1]}: {one[2].rpartition('.')[2]}: {one[1]}{_accepted(one[2], one[1])}"
        if one := re.search(r"- Expected a <class 'list'>\. Got value: (.+)", message):
            return f"{where[1]}: {one[1]} must be a list" + (f": [{one[1]}]" if one[1] != "None" else "")
        if where[1] == "model.optimizer" and (one := re.search(r"Expected a dot import path string: (.+)", message)):
            return f"{where[1]}: {one[1]} must be an import path, such as torch.optim.AdamW"
        return message
