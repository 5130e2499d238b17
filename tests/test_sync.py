"""The proof that the sampler is the policy: what it measures, what it lets pass, what it stops."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qerl_pl.callbacks.noise import AdaptiveQuantizationNoise
from qerl_pl.callbacks.sync import AdapterSync, check_proof
from qerl_pl.engine import TransformersEngine
from qerl_pl.lightning_cli import QeRLCLI
from registry.noise import NoNoise

CONFIG = Path(__file__).parents[1] / "configs" / "tiny.yaml"
SMALL = [
    "--data.prompts_per_batch", "4", "--data.num_generations", "4", "--data.train.size", "64",
    "--data.max_completion_length", "16", "--data.validation", "null", "--trainer.val_check_interval", "100",
    "--trainer.enable_progress_bar", "false", "--model.optimizer.lr", "1e-2", "--model.proof_every", "2",
]  # fmt: skip


def fit(folder: Path, *args: str) -> QeRLCLI:
    cli = QeRLCLI(args=["--config", str(CONFIG), *SMALL, "--trainer.logger.save_dir", str(folder), *args], run=False)
    cli.trainer.fit(cli.model, cli.datamodule)
    return cli


@pytest.mark.parametrize("in_trainer", [False, True])
def test_a_proof_sees_clean_weights_and_the_adapter(tmp_path, in_trainer):
    """Strong noise is lifted for the proof, and comes back after it."""
    noise = ("--model.noise", "constant", "--model.noise.sigma", "1", "--model.noise_in_trainer", str(in_trainer))
    cli = fit(tmp_path, "--trainer.max_steps", "5", *noise)
    events = EventAccumulator(str(next(tmp_path.rglob("events.out*")).parent)).Reload()
    proofs = events.Scalars("sync/logp_difference")
    assert [e.step for e in proofs] == [s.step for s in events.Scalars("reward")][::2]
    assert 0 < max(e.value for e in proofs) < 1e-4
    rollouts = [e.value for e in events.Scalars("sampling/logp_difference/max")]
    assert max(rollouts) < 1e-3 if in_trainer else min(rollouts) > 0.1
    (sync,) = (c for c in cli.trainer.callbacks if isinstance(c, AdapterSync))
    assert sync.differences == pytest.approx([e.value for e in proofs])


def test_the_proof_changes_nothing(tmp_path):
    """The adapter is the same, bit for bit, however often it is proven."""
    runs = [fit(tmp_path / n, "--trainer.max_steps", "3", "--model.proof_every", n) for n in ("1", "3")]
    states = [run.model.state_dict() for run in runs]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_wrong_adapter_stops_the_run(tmp_path, monkeypatch):
    """Two layers' matrices are swapped on delivery, and read back as if they were right."""
    load = TransformersEngine.load_adapter
    swap = {"layers.1.": "layers.2.", "layers.2.": "layers.1."}

    def load_wrongly(self, tensors):
        self.told = {name: tensor.clone() for name, tensor in tensors.items()}
        pattern = "|".join(map(re.escape, swap))
        load(self, {name: tensors[re.sub(pattern, lambda m: swap[m[0]], name)] for name in tensors})

    monkeypatch.setattr(TransformersEngine, "load_adapter", load_wrongly)
    monkeypatch.setattr(TransformersEngine, "adapter", lambda self: self.told)
    with pytest.raises(RuntimeError, match=r"no longer samples from the policy: after the sync of rollout \d+ .*nats"):
        fit(tmp_path, "--trainer.max_steps", "40")


@pytest.mark.parametrize(
    ("earlier", "difference", "stops"),
    [
        ([], 0.49, False),
        ([], 0.51, True),
        ([1e-6], 0.049, False),  # less than 0.05 never stops a run
        ([1e-6], 0.051, True),
        ([0.02, 0.04, 9.0], 0.19, False),  # 5 × 0.04
        ([0.02, 0.04, 9.0], 0.21, True),
        ([0.01], float("nan"), True),
    ],
)
def test_limits(earlier, difference, stops):
    stopped = pytest.raises(RuntimeError, match=r"after the sync of rollout 7 .* by (0\.\d+|nan) nats")
    with stopped if stops else nullcontext():
        check_proof(difference, earlier, 7)


def test_earlier_proofs_survive_a_checkpoint():
    noise = AdaptiveQuantizationNoise(NoNoise(), ("input_layernorm",), False, 0)
    one, other = AdapterSync(noise), AdapterSync(noise)
    one.differences = [0.1, 0.2]
    other.load_state_dict(one.state_dict())
    assert other.differences == [0.1, 0.2]
    with pytest.raises(ValueError, match="proof_every: 0 must be at least 1"):
        AdapterSync(noise, every=0)


def test_the_noise_probe_fits_a_micro_batch():
    noise = AdaptiveQuantizationNoise(NoNoise(), ("input_layernorm",), False, 0)
    lengths = torch.tensor([300, 500, 200, 100, 100, 100, 100, 100, 4000])
    assert [noise._rows(lengths, budget) for budget in (16384, 4000, 3999, 1100, 400)] == [8, 8, 7, 2, 1]
    assert noise._rows(lengths[:3], 16384) == 3
