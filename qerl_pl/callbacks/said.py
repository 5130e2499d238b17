"""What a run says of itself at its start and at its end."""

from pathlib import Path
from shlex import quote
from typing import Any

from lightning import Trainer


def beginning(trainer: Trainer, pl_module: Any) -> str:
    """Model and task, so that a default that was not meant is seen before hours have gone into it."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    source = data.sources["train"]
    origin = f" {source.origin}" if hasattr(source, "origin") else ""
    gone = f", {data.done} of them done" if data.done else ""
    return (
        f"model {pl_module.model} in {type(pl_module.quantization).__name__}, LoRA rank {pl_module.lora.rank}, "
        f"engine {type(data.engine).__name__}\n"
        f"{len(data.train_dataloader().prompts):,} training prompts of {type(source).__name__}{origin}: "
        f"{pl_module.total_rollouts:,} rollouts of {data.batch} prompts x {data.sampling.n} completions{gone}"
    )


def command(name: str, folder: Path, checkpoint: Path) -> str:
    """``qerl-pl fit`` or ``test`` with the settings that the run keeps in its folder and a checkpoint of it."""
    config = folder / "config.yaml"
    settings = quote(str(config)) if config.is_file() else "FILE"  # there is none where Python made the trainer
    return f"qerl-pl {name} --config {settings} --ckpt_path {quote(str(checkpoint))}"
