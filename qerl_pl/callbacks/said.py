"""What a run says of itself: at its start, at its end, and in the card of its adapter."""

from pathlib import Path
from shlex import quote
from typing import Any

from lightning import Trainer

from qerl_pl import __version__
from qerl_pl.random_model import PREFIX


def beginning(trainer: Trainer, pl_module: Any) -> str:
    """Model and task, so that a default that was not meant is seen before hours have gone into it."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    gone = f", {data.done} of them done" if data.done else ""
    return (
        f"model {pl_module.model} in {type(pl_module.quantization).__name__}, LoRA rank {pl_module.lora.rank}, "
        f"engine {type(data.engine).__name__}\n"
        f"{len(data.train_dataloader().prompts):,} training prompts of {_origin(data)}: "
        f"{pl_module.total_rollouts:,} rollouts of {data.batch} prompts x {data.sampling.n} completions{gone}"
    )


def _origin(data: Any) -> str:
    source = data.sources["train"]
    return f"{type(source).__name__} {getattr(source, 'origin', '')}".strip()


def command(name: str, folder: Path, checkpoint: Path) -> str:
    """``qerl-pl fit`` or ``test`` with the settings that the run keeps in its folder and a checkpoint of it."""
    config = folder / "config.yaml"
    settings = quote(str(config)) if config.is_file() else "FILE"  # there is none where Python made the trainer
    return f"qerl-pl {name} --config {settings} --ckpt_path {quote(str(checkpoint))}"


def _snippet(adapter: Path, collector: Any) -> str:
    """From the folder to an answer, with the system prompt of the training."""
    system = collector.answer_format.system_prompt
    messages = [{"role": "system", "content": system}] if system.strip() else []
    return f"""```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained({str(adapter)!r})
tokenizer = AutoTokenizer.from_pretrained(model.peft_config["default"].base_model_name_or_path)
chat = {[*messages, {"role": "user", "content": "What is 17 + 25?"}]!r}
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=512)[0]))
```"""


def card(trainer: Trainer, pl_module: Any, adapter: Path, checkpoint: Path) -> str:
    """README.md of the adapter as it is now; PEFT's own is a form with nothing filled in."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    model, lora, form = pl_module.model, pl_module.lora, type(pl_module.quantization).__name__
    on_hub = "/" in model and not Path(model).expanduser().is_dir()  # the hub refuses anything else as base_model
    settings = adapter.parent / "config.yaml"
    said = [
        "---\nlibrary_name: peft\npipeline_tag: text-generation",
        *([f"base_model: {model}"] if on_hub else []),
        f"tags:\n- lora\n- qerl-pl\n---\n\n# LoRA adapter of {model}\n",
        f"Trained by reinforcement learning with qerl-pl {__version__}.\n",
        f"- base: `{model}`, frozen, in {form}",
        f"- LoRA: rank {lora.rank}, alpha {lora.effective_alpha:g}, on {', '.join(lora.targets)}",
        f"- trained: {data.done:,} rollouts of {data.batch} prompts x {data.sampling.n} completions, "
        f"from {_origin(data)}",
        *([f"- settings: `{settings}`"] if settings.is_file() else []),
        "\nPaths are seen from where the run was started. Test the checkpoint that has this adapter:\n",
        f"```\n{command('test', adapter.parent, checkpoint)}\n```",
    ]
    if not model.startswith(PREFIX):  # of which there are no weights to load
        said.append(
            f"\nUse it with PEFT, on the base as it is stored. It was trained on the base in {form}, which answers a "
            "little differently; `qerl-pl test --adapter` measures it there.\n\n" + _snippet(adapter, data.collector)
        )
    if pl_module.trained_norms:
        said.append("\nPEFT loads no norms: `norms.safetensors` has those that were trained too.")
    return "\n".join(said) + "\n"
