"""``qerl-pl demo``: the main job in small, from pass@1 before to pass@1 after."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qerl_pl.callbacks import EvaluationResults
from qerl_pl.callbacks.adapter import run_folder
from qerl_pl.lightning_cli import QeRLCLI
from qerl_pl.statistics import Estimate

CONFIG = Path(__file__).parent / "configs" / "tiny.yaml"


@dataclass(frozen=True)
class Learned:
    """Pass@1 on the test prompts before and after training."""

    before: Estimate
    after: Estimate
    seconds: float  # of fit
    problems: int
    folder: Path  # of the run: curves, adapter, completions


def quiet_cli(args: Sequence[str]) -> QeRLCLI:
    """Trainer, module and data of the settings in ``args`` (as on the command line, without a command), whose
    evaluations print no tables.
    """
    cli = QeRLCLI(args=list(args), run=False)
    for callback in cli.trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, EvaluationResults):
            callback.quiet = True
    return cli


def learn(args: Sequence[str]) -> Learned:
    """Test, fit, test with the settings in ``args``."""
    cli = quiet_cli(args)
    trainer, module, data = cli.trainer, cli.model, cli.datamodule
    problems = sum(len(source) for source in data.sets("test").values())

    def test() -> Estimate:
        (results,) = trainer.test(module, data, verbose=False)
        return Estimate(results["test/pass@1"], results["test/pass@1_low"], results["test/pass@1_high"])

    before = test()
    print(f"before: pass@1 {before.value:.1%} ± {before.half_width:.1%} on {problems} held-out problems", flush=True)
    started = time.perf_counter()
    trainer.fit(module, data)
    seconds = time.perf_counter() - started
    after = test()
    print(f"after:  pass@1 {after.value:.1%} ± {after.half_width:.1%}", flush=True)
    return Learned(before, after, seconds, problems, run_folder(trainer))


def demo(args: Sequence[str] = ()) -> None:
    """Train the embedded model with ``configs/tiny.yaml``, which ``args`` override.

    Its test problems are met nowhere else: neither in training nor in a choice of settings.
    """
    print("qerl-pl demo: a model of 1.1 M parameters in NVFP4 learns arithmetic word problems by RL (LoRA, AQN).")
    learned = learn(["--config", str(CONFIG), *args])
    folder, before, after = learned.folder, learned.before, learned.after
    print(f"curves:  tensorboard --logdir {folder}")
    print(f"results: {folder / 'results' / 'test.json'} (after training)")
    print(f"samples: {folder / 'completions.jsonl'} (training), {folder / 'completions-test.jsonl'} (held-out)")
    print(
        f"demo: pass@1 {before.value:.3f} -> {after.value:.3f} "
        f"(95% {after.low:.3f}-{after.high:.3f}), {learned.seconds:.0f} s"
    )
