"""``qerl-pl demo``: the main job in small, from pass@1 before to pass@1 after."""

import time
from collections.abc import Sequence
from pathlib import Path

from qerl_pl.callbacks.adapter import run_folder
from qerl_pl.lightning_cli import QeRLCLI


def demo(args: Sequence[str] = ()) -> tuple[float, float]:
    """Train with ``configs/tiny.yaml`` (``args`` override it) and return held-out pass@1 before and after.

    The test problems are met nowhere else: neither by training nor by a choice of settings.
    """
    config = Path(__file__).parent / "configs" / "tiny.yaml"
    cli = QeRLCLI(args=["--config", str(config), *args], run=False)
    trainer, module, data = cli.trainer, cli.model, cli.datamodule
    print("qerl-pl demo: a 1.1 M parameter model in NVFP4 learns arithmetic word problems by RL; LoRA, adaptive quantization noise.")
    before, before_width = _pass_rate(trainer.test(module, data, verbose=False))
    print(f"before: pass@1 {before:.1%} ± {before_width:.1%} on {len(data.sources['test'])} held-out problems at T = 1")
    started = time.perf_counter()
    trainer.fit(module, data)
    seconds = time.perf_counter() - started
    if trainer.interrupted:
        raise SystemExit(130)
    after, width = _pass_rate(trainer.test(module, data, verbose=False))
    print(f"after:  pass@1 {after:.1%} ± {width:.1%}")
    folder = run_folder(trainer)
    print(f"curves:  tensorboard --logdir {folder}")
    print(f"adapter: {folder / 'adapter'} (a PEFT folder)")
    print(f"samples: {folder / 'completions.jsonl'}, {folder / 'completions-test.jsonl'}")
    print(f"demo: pass@1 {before:.3f} -> {after:.3f} (95% {after - width:.3f}-{after + width:.3f}), {seconds:.0f} s")
    return before, after


def _pass_rate(results: list[dict[str, float]]) -> tuple[float, float]:
    return float(results[0]["test/pass@1"]), float(results[0]["test/pass@1_half_width"])
