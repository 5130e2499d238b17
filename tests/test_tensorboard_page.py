"""docs/tensorboard.md has every tag that a run logs, and no other."""

import inspect
import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qerl_pl.callbacks.tensorboard import LAYOUT
from qerl_pl.gpu_memory import GPUMemory
from qerl_pl.lightning_cli import QeRLCLI
from registry.rewards import VERDICTS

ROOT = Path(__file__).parents[1]
ROWS = re.findall(r"^\| `([^`]+)` \|(.*)\|$", (ROOT / "docs" / "tensorboard.md").read_text(), flags=re.MULTILINE)
SETTINGS = {
    "data.prompts_per_batch": 4, "data.num_generations": 4, "data.train.size": 64, "data.max_completion_length": 24,
    "data.max_sampling_rounds": 2, "model.loss.beta": 0.01, "trainer.max_steps": 2, "trainer.val_check_interval": 2,
    "trainer.enable_progress_bar": "false",
    "data.validation": "{a: {class_path: arithmetic, init_args: {split: validation, size: 4}}}",
    "data.test": "{class_path: arithmetic, init_args: {split: test, size: 4}}",
}  # fmt: skip
ON_A_GPU = {"memory/rollout_gb", "memory/update_gb", "memory/peak_gb"}


def on_the_page(tag: str) -> str:
    """The name under which the page has a tag."""
    tag = re.sub(r"^(validation|test)/(a/)?", "validation/", tag).replace("@2", "@k")
    return (
        re.sub(rf"^rewards/\w+/({'|'.join(VERDICTS)})$", "rewards/<name>/<verdict>", tag)
        .replace("rewards/gsm8k/mean", "rewards/<name>/mean")
        .replace("rewards/format/mean", "rewards/<name>/mean")
    )


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("tags")
    words = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    config = ["--config", str(ROOT / "configs" / "tiny.yaml"), "--trainer.logger.save_dir", str(folder)]
    cli = QeRLCLI(args=[*config, *words], run=False)
    cli.trainer.fit(cli.model, cli.datamodule)
    cli.trainer.test(cli.model, cli.datamodule)
    events = EventAccumulator(str(next(folder.rglob("events.out*")).parent)).Reload()
    return set(events.Tags()["scalars"])


def test_the_page_has_every_tag_and_no_other(logged: set[str]) -> None:
    assert {"validation/a/pass@1", "validation/pass@1", "test/pass@1", "kl", "dynamic_sampling/rounds"} <= logged
    assert {on_the_page(tag) for tag in logged} - ON_A_GPU == {tag for tag, _ in ROWS} - ON_A_GPU
    assert len(ROWS) == len({tag for tag, _ in ROWS})


def test_those_of_a_gpu_are_there() -> None:
    assert {tag for tag, _ in ROWS if tag.startswith("memory/")} == ON_A_GPU
    source = inspect.getsource(GPUMemory.update)
    assert all(f'"{tag[7:-3]}": ' in source for tag in ON_A_GPU)


def test_every_row_has_its_four_cells() -> None:
    assert all(len(re.split(r"(?<!\\)\|", cells)) == 3 for _, cells in ROWS)


def test_the_one_screen_shows_what_is_logged(logged: set[str]) -> None:
    patterns = [pattern for charts in LAYOUT.values() for _, several in charts.values() for pattern in several]
    assert [pattern for pattern in patterns if not any(re.search(pattern, tag) for tag in logged)] == []
