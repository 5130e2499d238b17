"""Whole runs of ``qerl-pl`` on the embedded model: what they write, where they go on, what they refuse."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from qerl_pl.callbacks import AdapterFolder
from qerl_pl.evaluation import metric_names
from qerl_pl.lightning_cli import QeRLCLI
from qerl_pl.rollouts import Report, say_notes

CONFIG = Path(__file__).parents[1] / "configs" / "tiny.yaml"
SMALL = [
    "--data.prompts_per_batch", "4", "--data.num_generations", "4", "--data.validation.size", "16",
    "--data.test.size", "16", "--data.train.size", "64", "--trainer.enable_progress_bar", "false",
]  # fmt: skip


def run(folder: Path, *args: str, report: Report = say_notes) -> QeRLCLI:
    cli = QeRLCLI(args=["--config", str(CONFIG), *SMALL, "--trainer.logger.save_dir", str(folder), *args], run=False)
    cli.datamodule.collector.report = report
    cli.trainer.fit(cli.model, cli.datamodule)
    return cli


def adapter(cli: QeRLCLI) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in cli.model.state_dict().items()}


def rows(folder: Path, name: str = "completions.jsonl") -> list[dict]:
    (path,) = folder.rglob(name)
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    arguments = ("--trainer.max_steps", "6", "--trainer.val_check_interval", "3", "--model.noise.num_stages", "2")
    return run(folder, *arguments), folder


def test_the_adapter_was_trained_and_delivered(finished):
    cli, _ = finished
    moved = [n for n, t in adapter(cli).items() if "lora_B" in n and t.abs().max() > 0]
    assert len(moved) == 5 * 7
    held = cli.datamodule.engine.adapter()
    assert all(torch.equal(held[n], t) for n, t in adapter(cli).items())


def test_the_adapters_card_leads_to_an_answer(finished, capsys):
    _, folder = finished
    (card,) = folder.rglob("adapter/README.md")
    exec(card.read_text().partition("```python\n")[2].partition("```")[0], {})
    answer = capsys.readouterr().out
    assert "What is 17 + 25?" in answer
    assert len(answer.rpartition("<|assistant|>")[2]) > 10


def test_noise_came_in_stages_and_went_away(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cli, folder = finished
    events = EventAccumulator(str(next(folder.rglob("events.out*")).parent)).Reload()
    read = lambda name: [e.value for e in events.Scalars(name)]  # noqa: E731
    # Three stages over six steps: none, 1e-2, 5e-4.
    assert read("noise/sigma") == pytest.approx([0, 0, 1e-2, 1e-2, 5e-4, 5e-4])
    assert read("noise/realised_sigma") == pytest.approx([0, 0, 1e-2, 1e-2, 5e-4, 5e-4], rel=0.1)
    assert read("noise/modules") == [0, 0, 10, 10, 10, 10]
    assert [v > 0 for v in read("noise/kl")] == [False, False, True, True, True, True]
    # Without noise the sampler is the trainer, up to rounding; with noise it is not.
    difference = read("sampling/logp_difference/max")
    assert max(difference[:2]) < 1e-4 < min(difference[2:4])
    assert read("policy/ratio") == pytest.approx([1.0] * 6)
    assert len(read("validation/pass@1")) == 2
    norms = cli.datamodule.engine.norms()
    assert all(torch.equal(w, cli.model.policy.norms()[n]) for n, w in norms.items())


def test_checkpoint_holds_no_base(finished):
    _, folder = finished
    path = next(folder.rglob("last.ckpt"))
    state = torch.load(path, weights_only=False)
    assert all("lora_" in name for name in state["state_dict"])
    assert state["RolloutDataModule"] == {
        "rollouts": 6,
        "prompts": 24,
    }  # the end of the run, though checkpoints are made every 50
    assert path.stat().st_size < 4 * 4 * sum(
        t.numel() for t in state["state_dict"].values()
    )  # weights, two moments, little else


def test_one_checkpoint_is_left(finished):
    """Lightning saves at the end of a run that it has not saved before, and numbers a file that it did not write."""
    _, folder = finished
    assert [path.name for path in folder.rglob("*.ckpt")] == ["last.ckpt"]


def test_saved_adapter_gives_the_policys_numbers(finished):
    from peft import PeftModel

    from qerl_pl.checkpoint import prepare
    from qerl_pl.model import build_model
    from registry.quantization import NVFP4

    cli, folder = finished
    base = build_model(prepare("tiny", NVFP4()), NVFP4(), torch.float32, dense=True)
    loaded = PeftModel.from_pretrained(base, next(folder.rglob("adapter")))
    tokens = torch.tensor([[5, 9, 31, 7, 60, 2, 44, 3]])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    with torch.no_grad():
        expected = loaded(tokens).logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0]
        ours, _ = cli.model.policy(tokens, torch.tensor([8]), mask)
    torch.testing.assert_close(ours[0, 1:], expected, atol=1e-4, rtol=0)


def test_the_card_of_the_adapter_is_true(finished):
    import yaml

    cli, folder = finished
    (card,) = folder.rglob("adapter/README.md")
    _, head, text = card.read_text().split("---\n")
    assert yaml.safe_load(head) == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["lora", "qerl-pl"],
    }
    assert "More Information" not in text
    assert "\n- base: `tiny`, frozen, in NVFP4\n" in text
    assert "\n- LoRA: rank 16, alpha 32, on q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj\n" in text
    assert "\n- trained: 6 rollouts of 4 prompts x 4 completions, from Arithmetic (generated word problems)\n" in text
    assert (
        f"\n- settings: `{card.parents[1] / 'config.yaml'}`\n" in text and (card.parents[1] / "config.yaml").is_file()
    )
    follow(text.split("```")[1])
    (result,) = folder.rglob("results/test.json")
    assert json.loads(result.read_text())["settings"]["policy"].startswith("checkpoint ")
    made: dict = {}
    exec(text.split("```python")[1].split("```")[0], made)
    loaded = {n.replace(".default.", "."): t for n, t in made["model"].state_dict().items() if "lora_" in n}
    ours = adapter(cli)
    assert loaded.keys() == ours.keys() and all(torch.equal(loaded[n], t) for n, t in ours.items())


def test_names_of_metrics_are_those_that_are_logged(finished):
    cli, _ = finished
    logged = {name for name in cli.trainer.callback_metrics if name.startswith("validation/")}
    assert logged == metric_names("validation", cli.datamodule.sets("validation"), 2)


def test_completions_table(finished):
    _, folder = finished
    table = rows(folder)
    assert len(table) == 6 * 16
    assert [r["step"] for r in table[::16]] == list(range(6))
    for row in table:
        assert row["reward"] == pytest.approx(row["rewards"]["gsm8k"] + 0.1 * row["rewards"]["format"])
        right = f"<answer>{row['data/answer']}</answer>" in row["completion"]
        assert row["rewards"]["gsm8k"] == float(right)
    for start in range(0, len(table), 4):
        group = table[start : start + 4]
        assert len({r["prompt"] for r in group}) == 1
        assert sum(r["advantage"] for r in group) == pytest.approx(0, abs=1e-4)
    prompts = [r["prompt"] for r in table[::4]]
    assert len(set(prompts)) == len(prompts)  # no prompt twice in an epoch
    held_out = rows(folder, "completions-validation.jsonl")
    assert len(held_out) == 2 * 16 * 2
    assert [r["rollouts"] for r in held_out[::32]] == [3, 6]
    assert not any("step" in r for r in held_out)


def test_a_fast_dev_run_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cli = run(tmp_path, "--trainer.fast_dev_run", "true", "--data.eval_batch", "8")
    cli.trainer.test(cli.model, cli.datamodule)
    assert not list(tmp_path.iterdir())
    assert "| test |        8 |" in capsys.readouterr().out  # the table of one batch


@pytest.mark.parametrize(
    ("stop", "epoch", "rounds"),
    [(3, 64, 1), (4, 16, 1), (3, 64, 3)],
    ids=["middle of an epoch", "end of an epoch", "dynamic sampling"],
)
def test_resuming_goes_on_exactly(tmp_path, stop, epoch, rounds):
    arguments = ("--trainer.max_steps", "6", "--trainer.val_check_interval", "100", "--data.train.size", str(epoch),
                 "--model.loss.num_iterations", "1", "--model.noise.num_stages", "2",
                 "--data.max_sampling_rounds", str(rounds))  # fmt: skip
    whole = adapter(run(tmp_path / "whole", *arguments))
    interrupted = QeRLCLI(
        args=["--config", str(CONFIG), *SMALL, "--trainer.logger.save_dir", str(tmp_path / "parts"), *arguments],
        run=False,
    )
    limit = interrupted.datamodule.completed

    def interrupt(step: int) -> None:
        limit(step)
        if step == stop - 1:
            interrupted.trainer.should_stop = True
            interrupted.trainer.fit_loop.epoch_loop.max_steps = stop

    interrupted.datamodule.completed = interrupt
    interrupted.trainer.fit(interrupted.model, interrupted.datamodule)
    assert len(rows(tmp_path / "parts")) == stop * 16
    path = next((tmp_path / "parts").rglob("last.ckpt"))
    resumed = QeRLCLI(
        args=["--config", str(CONFIG), *SMALL, "--trainer.logger.save_dir", str(tmp_path / "resumed"), *arguments],
        run=False,
    )
    resumed.trainer.fit(resumed.model, resumed.datamodule, ckpt_path=path)
    assert [r["step"] for r in rows(tmp_path / "resumed")[::16]] == list(range(stop, 6))
    together = rows(tmp_path / "parts") + rows(tmp_path / "resumed")
    assert together == rows(tmp_path / "whole")
    assert all(torch.equal(t, whole[n]) for n, t in adapter(resumed).items())


def test_several_updates_of_one_batch(tmp_path):
    passes = ("--model.loss.num_iterations", "2", "--model.loss.num_minibatches", "2", "--model.noise", "none")
    told: list[tuple[str, str]] = []
    cli = run(tmp_path, "--trainer.max_steps", "8", "--trainer.val_check_interval", "100", *passes,
              "--model.tokens_per_micro_batch", "256", report=lambda *words: told.append(words))  # fmt: skip
    assert cli.trainer.global_step == 8
    assert cli.model.total_rollouts == 2
    assert len(rows(tmp_path)) == 2 * 16
    # Of each rollout batch 16 completions are scored, and learnt from twice; each count rises from 0 to its end.
    # What the proof of the sync scores is not counted.
    for phase, total in (("score", 16), ("update", 32)):
        words = [text.split("/") for name, text in told if name == phase]
        assert {end for _, end in words} == {f"{total} completions"}
        counts = [int(count) for count, _ in words]
        half = counts.index(total) + 1
        for step in (counts[:half], counts[half:]):
            assert step[0] == 0 and step[-1] == total and step == sorted(set(step)) and len(step) > 2


def follow(line: str, *more: str) -> str:
    """Run the command that a line ends with, in another folder; what it said."""
    words = shlex.split(line[line.index("qerl-pl ") :])
    done = subprocess.run(
        [sys.executable, "-m", "qerl_pl", *words[1:], *more], capture_output=True, text=True, timeout=120, check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(CONFIG.parents[1])}, cwd="/",
    )  # fmt: skip
    return done.stderr


def stopped_by(number: signal.Signals, folder: Path) -> tuple[int, str]:
    """Exit status of a run that was sent a signal after its first rollout, and what it said."""
    command = [sys.executable, "-m", "qerl_pl", "fit", "--config", str(CONFIG), *SMALL, "--trainer.max_steps", "1000"]
    process = subprocess.Popen(
        [*command, "--trainer.logger.save_dir", str(folder)], cwd=CONFIG.parents[1], text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not list(folder.rglob("completions.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    return process.returncode, errors


def test_a_run_without_a_judge_is_refused_before_it_begins(tmp_path):
    with pytest.raises(ValueError, match="none of them checks correctness"):
        run(tmp_path, "--data.rewards", "[format]", "--trainer.max_steps", "2", "--trainer.val_check_interval", "1")
    assert not list(tmp_path.rglob("completions.jsonl"))


def test_checkpoints_where_a_rollout_has_several_updates(tmp_path):
    """5 is no multiple of 3, and so is none of the counts of updates after a rollout."""
    arguments = ("--model.loss.num_iterations", "3", "--trainer.max_steps", "9", "--trainer.val_check_interval", "100")
    run(tmp_path, *arguments, "--checkpoint.every_n_train_steps", "5", "--checkpoint.save_top_k", "-1")
    assert sorted(path.name for path in tmp_path.rglob("*.ckpt")) == ["last.ckpt", "step-step=6.ckpt"]


@pytest.mark.parametrize("fault", ["weights", "disk"])
def test_a_spoiled_end_leaves_the_last_checkpoint(tmp_path, capsys, fault):
    def save(path):
        raise OSError("No space left on device")

    trainer = SimpleNamespace(
        global_step=4, fast_dev_run=False, checkpoint_callback=ModelCheckpoint(tmp_path), checkpoint_callbacks=[],
        logger=None, default_root_dir=tmp_path, save_checkpoint=save,
    )  # fmt: skip
    weights = {"a": torch.tensor([1.0, math.nan if fault == "weights" else 2.0])}
    module = SimpleNamespace(updates_per_rollout=2, state_dict=lambda: weights)
    folder = AdapterFolder()
    folder._training = True
    (tmp_path / "last.ckpt").write_text("of the rollout before")
    folder.on_exception(trainer, module, RuntimeError("the cause"))
    said = capsys.readouterr().err
    assert ("could not be saved: No space left on device" in said) == (fault == "disk")
    assert f"go on from there: qerl-pl fit --config FILE --ckpt_path {tmp_path / 'last.ckpt'}" in said


def test_a_preempted_run_is_no_finished_one(tmp_path):
    status, errors = stopped_by(signal.SIGTERM, tmp_path)
    assert status == 143
    assert "stopped; go on from there: qerl-pl fit " in errors
    assert list(tmp_path.rglob("last.ckpt"))


def test_ctrl_c_leaves_a_checkpoint(tmp_path):
    status, errors = stopped_by(signal.SIGINT, tmp_path)
    assert status == 1
    [checkpoint] = tmp_path.rglob("last.ckpt")
    assert f"this run writes to {checkpoint.parents[1]}\n" in errors
    assert "model tiny in NVFP4, LoRA rank 16, engine TransformersEngine\n" in errors
    assert "64 training prompts of Arithmetic (generated word problems): 1,000 rollouts of 4 prompts x 4 " in errors
    state = torch.load(next(tmp_path.rglob("last.ckpt")), weights_only=False)
    done = state["RolloutDataModule"]["rollouts"]
    assert done >= 1 and state["global_step"] == done
    assert list(tmp_path.rglob("adapter_model.safetensors"))
    told = [line for line in errors.splitlines() if line.startswith("stopped; go on from there: qerl-pl fit ")]
    settings = ["--trainer.max_steps", str(done + 2), "--data.num_generations", "2", "--model.optimizer.lr", "1e-6"]
    went_on = follow(told[0], *settings, "--trainer.enable_progress_bar", "true", "--trainer.val_check_interval", "1")
    assert "qerl-pl: data.num_generations: 4 in the run that it goes on from, 2 now\n" in went_on
    lr = "qerl-pl: model.optimizer.init_args.lr: 0.001 in the run that it goes on from, 1e-06 now; the checkpoint's "
    assert lr in went_on
    assert f"after rollout {done + 2}/{done + 2}  validation/pass@1 0." in went_on
    assert f": {done + 2} rollouts of 4 prompts x 2 completions, {done} of them done\n" in went_on
    assert "not resumable" not in went_on and "dirpath has changed" not in went_on
    last_line = went_on.splitlines()[-1]
    [resumed] = {path.parents[1] for path in tmp_path.rglob("last.ckpt")} - {checkpoint.parents[1]}
    assert last_line.startswith(f"adapter: {resumed / 'adapter'} (a PEFT folder); test it: qerl-pl test ")
    follow(last_line)
    (result,) = tmp_path.rglob("results/test.json")
    assert json.loads(result.read_text())["settings"]["policy"] == f"checkpoint {resumed / 'checkpoints' / 'last.ckpt'}"
    steps = sorted(
        {json.loads(line)["step"] for p in tmp_path.rglob("completions.jsonl") for line in p.read_text().splitlines()}
    )
    assert steps == list(range(done + 2))
