"""RMSNorm weights trained beside the adapter: they reach the sampler under the noise, the checkpoint and the folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qerl_pl.lightning_cli import QeRLCLI
from qerl_pl.module import QeRLModule

CONFIG = Path(__file__).parents[1] / "configs" / "tiny.yaml"
NAMES = ["input_layernorm", "post_attention_layernorm", "norm"]
SMALL = [
    "--data.prompts_per_batch", "4", "--data.num_generations", "4", "--data.train.size", "64",
    "--data.max_completion_length", "16", "--data.validation", "null", "--trainer.val_check_interval", "100",
    "--trainer.enable_progress_bar", "false", "--model.optimizer.lr", "1e-2", "--model.proof_every", "2",
    "--model.noise", "constant", "--model.noise.sigma", "0.05", "--model.warmup", "0",
    "--model.trained_norms", str(NAMES),
]  # fmt: skip


def fit(folder: Path, steps: int, ckpt_path: str | None = None) -> QeRLCLI:
    arguments = ["--config", str(CONFIG), *SMALL, "--trainer.max_steps", "4", "--trainer.logger.save_dir", str(folder)]
    cli = QeRLCLI(args=arguments, run=False)
    completed = cli.datamodule.completed

    def interrupt(step: int) -> None:  # once the schedules know of all four
        completed(step)
        if step == steps - 1:
            cli.trainer.fit_loop.epoch_loop.max_steps = steps

    cli.datamodule.completed = interrupt
    cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=ckpt_path)
    return cli


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("norms")
    return fit(folder, 4), folder


def test_sampler_and_trainer_have_the_same_trained_norms(run: Any) -> None:
    cli, _ = run
    trained, engine = cli.model.policy.norm_parameters(), cli.datamodule.engine.norms()
    assert trained.keys() == engine.keys()
    for name, weight in trained.items():
        assert torch.equal(weight.detach(), engine[name])  # after fit the noise is taken back
        assert (weight - cli.model.policy._original[name]).abs().max() > 1e-3
    # The proofs compare log-probabilities of the two without noise.
    (sync,) = (c for c in cli.trainer.callbacks if type(c).__name__ == "AdapterSync")
    assert len(sync.differences) == 2 and max(sync.differences) < 1e-4


def test_they_are_saved(run: Any) -> None:
    cli, folder = run
    saved = load_file(next(folder.rglob("norms.safetensors")))
    trained = cli.model.policy.norm_parameters()
    assert saved.keys() == {f"{name}.weight" for name in trained}
    assert all(torch.equal(saved[f"{name}.weight"], weight.detach()) for name, weight in trained.items())


def test_resuming_goes_on_exactly(run: Any, tmp_path: Path) -> None:
    cli, _ = run
    fit(tmp_path / "parts", 2)
    resumed = fit(tmp_path / "resumed", 4, ckpt_path=str(next((tmp_path / "parts").rglob("last.ckpt"))))
    for name, tensor in cli.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_the_base_has_its_own_norms(run: Any) -> None:
    policy = run[0].model.policy
    tokens, lengths = torch.tensor([[5, 6, 7, 8]]), torch.tensor([4])
    mask = torch.tensor([[False, False, True, True]])
    trained = {name: weight.detach().clone() for name, weight in policy.norm_parameters().items()}
    with torch.no_grad():
        base, _ = policy(tokens, lengths, mask, adapter=False)
        assert all(torch.equal(weight, trained[name]) for name, weight in policy.norm_parameters().items())
        policy._set_norms(policy._original)
        with policy.peft.disable_adapter():
            plain, _ = policy(tokens, lengths, mask)
        policy._set_norms(trained)
        assert torch.equal(base, plain)
        assert not torch.allclose(policy(tokens, lengths, mask)[0], base)


def test_no_decay_for_norms(run: Any) -> None:
    groups = run[0].model._parameter_groups()
    assert [group.get("weight_decay") for group in groups] == [None, 0.0]
    assert len(groups[1]["params"]) == len(run[0].model.policy.norm_parameters())


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="noise_in_trainer with trained_norms"):
        QeRLModule(trained_norms=("norm",), noise_in_trainer=True)
