"""What a config may say where evaluation prompts are wanted: one source, or several by name."""

from pathlib import Path
from typing import Any

import pytest

from registry.prompts import Arithmetic, File, PromptSource


def describe(source: PromptSource) -> dict[str, Any]:
    return {"class": type(source)} | vars(source)


SETS = (
    "{easy: {class_path: arithmetic, init_args: {split: test, levels: [1]}}, "
    "mine: {class_path: file, init_args: {path: a.jsonl}}}"
)


@pytest.fixture
def sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    from qerl_pl.lightning_cli import QeRLCLI

    def read(*args: str, configs: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
        files = [tmp_path / f"{i}.yaml" for i in range(len(configs))]
        for file, text in zip(files, configs, strict=True):
            file.write_text(f"data:\n  test: {text}\n")
        given = [*(f"--config={file}" for file in files), *args]
        found = QeRLCLI(args=given, run=False).datamodule.sets("test")
        with pytest.raises(SystemExit):
            QeRLCLI(args=[*given, "--print_config"], run=False)
        (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)  # and what is printed reads as the same
        again = QeRLCLI(args=["--config", str(tmp_path / "printed.yaml")], run=False).datamodule.sets("test")
        described = {name: describe(source) for name, source in found.items()}
        assert described == {name: describe(source) for name, source in again.items()}
        return described

    return read


@pytest.mark.parametrize(
    "earlier", [(), ("{class_path: arithmetic, init_args: {split: validation}}",), ("{a: arithmetic}",)]
)
def test_several_sources_replace_what_was_there(sources: Any, earlier: tuple[str, ...]) -> None:
    expected = {"easy": describe(Arithmetic("test", levels=[1])), "mine": describe(File("a.jsonl"))}
    assert sources(configs=(*earlier, SETS)) == expected
    assert sources("--data.test", SETS, configs=earlier) == expected
    expected["mine"]["limit"] = 5
    assert sources("--data.test.mine.limit", "5", configs=(*earlier, SETS)) == expected


def test_one_source_has_no_name(sources: Any) -> None:
    assert sources("--data.test", "file", "--data.test.path", "a.jsonl") == {"": describe(File("a.jsonl"))}
    assert sources("--data.test.size", "16") == {"": describe(Arithmetic("test", 16))}
    assert sources("--data.test", "null") == {}


def test_the_example_of_the_docs(sources: Any) -> None:
    import textwrap

    page = (Path(__file__).parents[1] / "docs" / "evaluation.md").read_text()
    text = page.partition("```yaml\ndata:\n  test:\n")[2].partition("```")[0]
    found = sources("--data.test.amc.limit", "20", configs=("\n" + textwrap.indent(text, "  "),))
    assert {name: (row["name"], row["limit"]) for name, row in found.items()} == {
        "gsm8k": ("openai/gsm8k", None), "amc": ("math-ai/amc23", 20),
    }  # fmt: skip
