"""What a config may say where a component is wanted: in a plain parser, and in a LightningCLI."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser, Namespace

from registry.noise import Constant, Exponential, Linear, NoiseSchedule, NoNoise, ScheduleName
from registry.prompts.base import PromptsName, PromptSource
from registry.prompts.dataset import File
from registry.rewards import (
    GSM8K,
    REWARDS,
    AnswerFormat,
    AnswerFormatName,
    Boxed,
    Format,
    PythonReward,
    Reward,
    RewardName,
    ThinkAnswer,
)


class Ours(NoiseSchedule):
    """A user's own schedule, not registered."""

    def __init__(self, height: float = 0.5) -> None:
        super().__init__()
        self.height = height

    def level(self, k: int) -> float:
        return self.height


def some_reward(completions: list[str]) -> list[float]:
    return [0.0 for _ in completions]


class Toy:
    """Takes one component of each kind, and rewards in a list."""

    def __init__(
        self,
        noise: NoiseSchedule | ScheduleName = Exponential(),
        answer_format: AnswerFormat | AnswerFormatName = ThinkAnswer(),
        prompts: PromptSource | PromptsName = File(path="a.jsonl"),
        rewards: list[RewardName | Reward] = [GSM8K(), Format(weight=0.1)],  # noqa: B006
    ) -> None:
        self.noise, self.answer_format, self.prompts, self.rewards = noise, answer_format, prompts, rewards


def parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Toy, "toy")
    return parser


def instantiate(config: Namespace) -> Namespace:
    new = hasattr(ArgumentParser, "instantiate")  # since 4.49, which deprecated the other
    return parser().instantiate(config) if new else parser().instantiate_classes(config)


def toy(*args: str) -> Toy:
    """The toy that the arguments describe, having checked that the printed config describes the same."""
    config = parser().parse_args(list(args))
    printed = parser().dump(config)
    again = parser().parse_string(printed)
    assert parser().dump(again) == printed
    made, remade = (instantiate(c).toy for c in (config, again))
    assert describe(made) == describe(remade)
    return made


def describe(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [describe(v) for v in value]
    if type(value).__module__.startswith(("registry", __name__)):
        return {"class": type(value).__name__} | {k: describe(v) for k, v in vars(value).items() if k != "_call"}
    return value


LINEAR = {"class": "Linear", "sigma_start": 0.02, "sigma_end": 5e-4, "num_stages": 10}


@pytest.mark.parametrize(
    "args",
    [
        ["--toy.noise=linear", "--toy.noise.sigma_start=0.02"],
        ["--toy.noise=Linear", "--toy.noise.sigma_start=0.02"],
        ["--toy.noise=registry.noise.Linear", "--toy.noise.sigma_start=0.02"],
        ["--toy.noise={class_path: linear, init_args: {sigma_start: 0.02}}"],
        ["--toy.noise={class_path: Linear, init_args: {sigma_start: 0.02}}"],
        ["--toy.noise={class_path: registry.noise.schedules.Linear, init_args: {sigma_start: 0.02}}"],
        ["--toy.noise={class_path: linear}", "--toy.noise.init_args.sigma_start=0.02"],
        ["--toy.noise={class_path: linear, init_args: {sigma_start: 1}}", "--toy.noise.sigma_start=0.02"],
        ["--toy.noise.sigma_start=1", "--toy.noise=linear", "--toy.noise.sigma_start=0.02"],
        ["--toy.noise=constant", "--toy.noise=linear", "--toy.noise.sigma_start=0.02"],
        ["--toy.noise=constant", "--toy.noise.sigma=1", "--toy.noise=linear", "--toy.noise.sigma_start=0.02"],
        ["--toy.noise={class_path: linear, init_args: }", "--toy.noise.sigma_start=0.02"],
    ],
)
def test_ways_to_say_linear(args: list[str]) -> None:
    assert describe(toy(*args).noise) == LINEAR


def test_a_users_own_class() -> None:
    noise = toy(f"--toy.noise={__name__}.Ours", "--toy.noise.height=0.25").noise
    assert describe(noise) == {
        "class": "Ours",
        "sigma_start": 1e-2,
        "sigma_end": 5e-4,
        "num_stages": 10,
        "height": 0.25,
    }


def test_defaults_are_spelled_out() -> None:
    made = toy()
    assert describe(made.noise) == describe(Exponential())
    assert describe(made.rewards) == [{"class": "GSM8K", "weight": 1.0}, {"class": "Format", "weight": 0.1}]
    printed = yaml.safe_load(parser().dump(parser().parse_args([])))["toy"]
    assert printed["noise"]["init_args"] == {"sigma_start": 0.01, "sigma_end": 0.0005, "num_stages": 10}
    assert printed["rewards"] == [
        {"class_path": "registry.rewards.gsm8k.GSM8K", "init_args": {"weight": 1.0}},
        {"class_path": "registry.rewards.format.Format", "init_args": {"weight": 0.1}},
    ]


def test_list_of_rewards() -> None:
    rewards = [
        "gsm8k",
        {"class_path": "format", "init_args": {"weight": 0.1}},
        {"class_path": "Format", "init_args": {"weight": 0.2}},
        {"class_path": "python", "init_args": {"function": f"{__name__}.some_reward"}},
        "registry.rewards.GSM8K",
    ]
    made = toy(f"--toy.rewards={rewards}").rewards
    assert [(type(r), r.weight) for r in made] == [
        (GSM8K, 1.0), (Format, 0.1), (Format, 0.2), (PythonReward, 1.0), (GSM8K, 1.0),
    ]  # fmt: skip
    assert [r.weight for r in toy("--toy.rewards=[format,gsm8k]", "--toy.rewards.weight=0.3").rewards] == [1.0, 0.3]
    assert [r.name for r in toy("--toy.rewards+=format").rewards] == ["gsm8k", "format", "format"]


def test_every_reward_can_be_a_default_in_a_list() -> None:
    for reward in (GSM8K(weight=2.0), Format(weight=3.0), PythonReward(f"{__name__}.some_reward", weight=4.0)):
        written = REWARDS.write(reward)
        assert written["init_args"]["weight"] == reward.weight
        again = type(reward)(**written["init_args"])
        assert describe(again) == describe(reward)


def test_other_components() -> None:
    made = toy("--toy.answer_format=boxed", "--toy.prompts=file", "--toy.prompts.path=b.jsonl", "--toy.noise=none")
    assert (type(made.answer_format), type(made.noise)) == (Boxed, NoNoise)
    assert (type(made.prompts), made.prompts.path) == (File, "b.jsonl")  # type: ignore[attr-defined]
    made = toy("--toy.answer_format.system_prompt=Mine", "--toy.prompts=hub", "--toy.prompts.name=openai/gsm8k")
    assert made.answer_format.system_prompt == "Mine"
    assert made.prompts.name == "openai/gsm8k"  # type: ignore[attr-defined]


def test_a_file_of_the_same_name_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linear").write_text("{")
    (tmp_path / "format").mkdir()
    made = toy("--toy.noise=linear", "--toy.rewards=[format]")
    assert (type(made.noise), type(made.rewards[0])) == (Linear, Format)


# A later config: a name starts from the defaults of its class, whatever an earlier config said of another class.
@pytest.mark.parametrize(
    ("later", "expected"),
    [
        ("noise: linear", {**LINEAR, "sigma_start": 0.01}),
        ("noise: {class_path: linear, init_args: {sigma_start: 0.02}}", LINEAR),
        ("noise: {class_path: constant}", describe(Constant())),
        ("noise: {class_path: constant, init_args: {sigma: 0.3}}", describe(Constant(0.3))),
        ("noise: none", describe(NoNoise())),
        ("noise: {init_args: {sigma_end: 0.001}}", describe(Exponential(0.07, 0.001, 5))),
    ],
)
@pytest.mark.parametrize("how", ["config", "argument"])
@pytest.mark.parametrize("earlier", ["exponential", "registry.noise.Exponential"])
def test_configs_over_configs(tmp_path: Path, earlier: str, later: str, how: str, expected: dict[str, Any]) -> None:
    (tmp_path / "a.yaml").write_text(
        f"toy: {{noise: {{class_path: {earlier}, init_args: {{sigma_start: 0.07, num_stages: 5}}}}}}"
    )
    (tmp_path / "b.yaml").write_text(f"toy: {{{later}}}")
    override = f"--config={tmp_path / 'b.yaml'}" if how == "config" else f"--toy.noise={later.removeprefix('noise: ')}"
    assert describe(toy(f"--config={tmp_path / 'a.yaml'}", override).noise) == expected


@pytest.mark.parametrize(
    ("arg", "messages"),
    [
        ("--toy.noise=expnential", ["unknown noise schedule 'expnential'. Did you mean 'exponential'? Reg"]),
        ("--toy.noise={class_path: lineer}", ["unknown noise schedule 'lineer'. Did you mean 'linear'?"]),
        ("--toy.noise={class_path: linear, init_args: {sigma_strt: 1}}", ["sigma_strt"]),
        ("--toy.noise={class_path: linear, init_arg: {sigma_start: 1}}", ["init_arg"]),
        ("--toy.noise={class_path: linear, init_args: {num_stages: many}}", ["num_stages", "many"]),
        ("--toy.noise=no_such_module.Noise", ["No module named 'no_such_module'"]),
        ("--toy.noise=registry.rewards.GSM8K", ["does not correspond to a subclass of NoiseSchedule"]),
        ("--toy.noise=null", ["expected the name of a noise schedule (constant, cosine,"]),
        ("--toy.rewards=[gsm8k, formt]", ["unknown reward 'formt'. Did you mean 'format'?"]),
        ("--toy.rewards=[{class_path: format, init_args: {wait: 1}}]", ["wait"]),
        ("--toy.rewards=gsm8k", ["gsm8k"]),
        ("--toy.prompts=fil", ["unknown prompt source 'fil'. Did you mean 'file'?"]),
        ("--toy.answer_format=box", ["unknown answer format 'box'. Did you mean 'boxed'?"]),
    ],
)  # fmt: skip
def test_mistakes(arg: str, messages: list[str]) -> None:
    with pytest.raises(Exception) as error:  # noqa: PT011  jsonargparse's own, which is no ValueError
        parser().parse_args([arg])
    for message in messages:
        assert message in str(error.value)


# ---- LightningCLI ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cli() -> Any:
    from lightning import LightningDataModule, LightningModule
    from lightning.pytorch.cli import LightningCLI

    class Model(LightningModule):
        def __init__(self, noise: NoiseSchedule | ScheduleName = Exponential()) -> None:
            super().__init__()
            self.noise = noise

    class Data(LightningDataModule):
        def __init__(
            self,
            rewards: list[RewardName | Reward] = [GSM8K(), Format(weight=0.1)],  # noqa: B006
            answer_format: AnswerFormat | AnswerFormatName = ThinkAnswer(),
        ) -> None:
            super().__init__()
            self.rewards, self.answer_format = rewards, answer_format

    def build(*args: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["toy", *args])
            patch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 calls what 5.0 will remove
            return LightningCLI(Model, Data, run=False, seed_everything_default=0)

    return build


def test_lightning_cli(cli: Any) -> None:
    made = cli(
        "--model.noise=linear",
        "--model.noise.sigma_start=0.02",
        "--data.rewards=[gsm8k, {class_path: format, init_args: {weight: 0.2}}]",
        "--data.answer_format=boxed",
    )
    assert describe(made.model.noise) == LINEAR
    assert [(type(r), r.weight) for r in made.datamodule.rewards] == [(GSM8K, 1.0), (Format, 0.2)]
    assert type(made.datamodule.answer_format) is Boxed


def test_lightning_cli_prints_what_it_reads(cli: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*args: str) -> str:
        with pytest.raises(SystemExit):
            cli(*args, "--print_config")
        return capsys.readouterr().out

    first = printed("--model.noise=constant", "--model.noise.sigma=0.3")
    config = tmp_path / "config.yaml"
    config.write_text(first)
    assert printed(f"--config={config}") == first
    assert "Unable to serialize" not in first
    made = cli(f"--config={config}", "--data.rewards+=format")
    assert describe(made.model.noise) == describe(Constant(0.3))
    assert [(type(r), r.weight) for r in made.datamodule.rewards] == [(GSM8K, 1.0), (Format, 0.1), (Format, 1.0)]


def test_names_cost_no_heavy_import() -> None:
    """Listing the components must not load what only running them needs."""
    code = (
        "import sys, registry.rewards, registry.noise, registry.prompts.dataset\n"
        "print([name for name in ('datasets', 'pyarrow', 'torch', 'lightning') if name in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent
    )
    assert out.stdout.strip() == "[]"
