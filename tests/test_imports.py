"""Who may import whom. The rules keep each room of the house readable, and testable, without the others."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRAINING = {"qerl_pl", "lightning", "pytorch_lightning", "vllm", "transformers"}
HEAVY = {"vllm", "datasets", "llmcompressor", "transformers"}
PURE = tuple(f"qerl_pl.{name}" for name in ("types", "advantages", "fused", "logprobs", "losses"))


@dataclass(frozen=True)
class Import:
    module: str  # with the name taken from it: ``from torch import Tensor`` is torch.Tensor
    line: int
    lazy: bool  # inside a function, or for type checkers only: does not run when the module is imported

    def within(self, *modules: str) -> bool:
        return any(f"{self.module}.".startswith(f"{module}.") for module in modules)


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(path: str, source: str) -> Iterator[Import]:
    package = path.split("/")[:-1]

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        children: Iterable[ast.AST] = ast.iter_child_nodes(node)
        match node:
            case ast.Import():
                yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
            case ast.ImportFrom():
                above = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                yield from (Import(f"{base}.{alias.name}", node.lineno, lazy) for alias in node.names)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield Import(name, node.lineno, lazy)
            case ast.If() if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                for statement in node.body:
                    yield from walk(statement, lazy=True)
                children = node.orelse
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                lazy = True
        for child in children:
            yield from walk(child, lazy)

    yield from walk(ast.parse(source), lazy=False)


def broken_rule(path: str, imp: Import) -> str | None:
    name, top = module_name(path), imp.module.partition(".")[0]
    light = top in sys.stdlib_module_names or top == "torch"
    if path.startswith("registry/"):
        if top in TRAINING:
            return "registry knows nothing of the training system"
        reads_yaml = path == "registry/_registry.py" and top == "jsonargparse"
        kernel = path.endswith("_triton.py") and top == "triton"
        if not (imp.lazy or light or reads_yaml or kernel or top == "registry"):
            return "registry imports only torch and the standard library at module level, and Triton in kernels"
    if name in PURE and not (light or imp.within(*PURE)):
        return "types, advantages, fused, logprobs and losses import only torch and each other"
    if top == "vllm" and not path.startswith("qerl_pl/engine/"):
        return "only qerl_pl/engine/ imports vllm"
    if name == "qerl_pl.module" and imp.within("qerl_pl.datamodule"):
        return "module and datamodule meet through the trainer"
    if name == "qerl_pl.datamodule" and imp.within("qerl_pl.module"):
        return "module and datamodule meet through the trainer"
    if imp.within("qerl_pl.cli") and name not in ("qerl_pl.cli", "qerl_pl.__main__"):
        return "nothing imports the command line"
    if name == "qerl_pl.cli" and top in HEAVY and not imp.lazy:
        return "the command line imports heavy libraries where it uses them"
    return None


def violations(path: str, source: str) -> list[str]:
    found = ((imp, broken_rule(path, imp)) for imp in imports(path, source))
    return [f"{path}:{imp.line} imports {imp.module}: {rule}" for imp, rule in found if rule]


def sources() -> list[str]:
    return sorted(p.relative_to(ROOT).as_posix() for top in ("qerl_pl", "registry") for p in (ROOT / top).rglob("*.py"))


def test_every_file_keeps_the_rules() -> None:
    assert len(sources()) > 10  # the files were found
    assert [v for path in sources() for v in violations(path, (ROOT / path).read_text())] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("registry/rewards/x.py", "import qerl_pl"),
        ("registry/rewards/x.py", "def f():\n    import vllm"),
        ("registry/rewards/x.py", "def f():\n    from qerl_pl.types import Prompt"),
        ("registry/rewards/x.py", "import importlib\nimportlib.import_module('lightning.pytorch')"),
        ("registry/rewards/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers"),
        ("registry/rewards/x.py", "from typing import TYPE_CHECKING\nif not TYPE_CHECKING:\n    import numpy"),
        ("registry/prompts/x.py", "import datasets"),
        ("registry/prompts/x.py", "class A:\n    import datasets"),
        ("registry/prompts/x.py", "import jsonargparse"),
        ("qerl_pl/losses.py", "import numpy"),
        ("qerl_pl/losses.py", "def f():\n    import lightning"),
        ("qerl_pl/advantages.py", "from .rewards import run"),
        ("qerl_pl/types.py", "from qerl_pl import engine"),
        ("qerl_pl/policy.py", "def f():\n    import vllm.lora"),
        ("qerl_pl/module.py", "from qerl_pl.datamodule import RolloutDataModule"),
        ("qerl_pl/datamodule.py", "from . import module"),
        ("qerl_pl/callbacks/x.py", "from ..cli import main"),
        ("qerl_pl/cli.py", "try:\n    import vllm\nexcept ImportError:\n    pass"),
        ("qerl_pl/cli.py", "from transformers import AutoTokenizer"),
    ],
)
def test_a_broken_rule_is_found(path: str, source: str) -> None:
    [violation] = violations(path, source)
    assert violation.startswith(f"{path}:{len(source.splitlines()) if 'try' not in source else 2} imports ")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("registry/_registry.py", "from jsonargparse.typing import register_type"),
        ("registry/prompts/x.py", "def f():\n    import datasets"),
        ("registry/rewards/x.py", "import re\nfrom torch import Tensor\nfrom registry.rewards.base import Reward"),
        ("qerl_pl/losses.py", "import math\nfrom qerl_pl.types import RolloutBatch\nfrom . import logprobs"),
        ("qerl_pl/engine/vllm.py", "import vllm"),
        ("qerl_pl/module.py", "from qerl_pl.module_tools import x"),
        ("qerl_pl/__main__.py", "from qerl_pl.cli import main"),
        ("qerl_pl/cli.py", "import lightning\ndef f():\n    import datasets"),
        ("qerl_pl/cli.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers"),
    ],
)
def test_what_is_allowed_passes(path: str, source: str) -> None:
    assert violations(path, source) == []


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("registry.quantization", HEAVY | {"lightning"}),
        ("qerl_pl.types", HEAVY | {"lightning"}),
        ("qerl_pl.cli", HEAVY | {"lightning", "torch"}),  # seconds before --help could answer
    ],
)
def test_importing_stays_light(module: str, unwanted: set[str]) -> None:
    """Also through other modules, which the rules above cannot see."""
    code = f"import sys, {module}; print(*sorted({unwanted} & sys.modules.keys()))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert loaded.split() == []
