"""``qerl-pl demo``: the main job in small, from pass@1 before to pass@1 after."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qerl_pl.callbacks.adapter import run_folder
from qerl_pl.lightning_cli import QeRLCLI

CONFIG = Path(__file__).parent / "configs" / "tiny.yaml"


@dataclass(frozen=True)
class Learned:
    """Pass@1 on the test prompts before and after training, each with the half width of its 95 % interval."""

    before: tuple[float, float]
    after: tuple[float, float]
    seconds: float  # of fit
    problems: int
    folder: Path  # of the run: curves, adapter, completions


def learn(args: Sequence[str]) -> Learned:
    """Test, fit, test with the settings in ``args`` (as on the command line, without a command)."""
    cli = QeRLCLI(args=list(args), run=False)
    trainer, module, data = cli.trainer, cli.model, cli.datamodule

    problems = sum(len(source) for source in data.sets("test").values())

    def test() -> tuple[float, float]:
        (results,) = trainer.test(module, data, verbose=False)
        return results["test/pass@1"], (results["test/pass@1_high"] - results["test/pass@1_low"]) / 2

    before = test()
    print(f"before: pass@1 {before[0]:.1%} ± {before[1]:.1%} on {problems} held-out problems", flush=True)
    started = time.perf_counter()
    trainer.fit(module, data)
    seconds = time.perf_counter() - started
    after = test()
    print(f"after:  pass@1 {after[0]:.1%} ± {after[1]:.1%}", flush=True)
    return Learned(before, after, seconds, problems, run_folder(trainer))


def demo(args: Sequence[str] = ()) -> None:
    """Train the embedded model with ``configs/tiny.yaml``, which ``args`` override.

    Its test problems are met nowhere else: neither in training nor in a choice of settings.
    """
    print("qerl-pl demo: a model of 1.1 M parameters in NVFP4 learns arithmetic word problems by RL (LoRA, AQN).")
    learned = learn(["--config", str(CONFIG), *args])
    folder, (after, width) = learned.folder, learned.after
    print(f"curves:  tensorboard --logdir {folder}")
    print(f"adapter: {folder / 'adapter'} (a PEFT folder)")
    print(f"samples: {folder / 'completions.jsonl'} (training), {folder / 'completions-test.jsonl'} (held-out)")
    print(
        f"demo: pass@1 {learned.before[0]:.3f} -> {after:.3f} "
        f"(95% {after - width:.3f}-{after + width:.3f}), {learned.seconds:.0f} s"
    )
