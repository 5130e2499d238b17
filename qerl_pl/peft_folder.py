"""PEFT's adapter folders, read without PEFT."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from registry.prompts.files import read_text

UNSUPPORTED = (
    "use_rslora", "use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform",
    "fan_in_fan_out", "lora_bias", "trainable_token_indices",
)  # fmt: skip
"""Settings of PEFT that change what an adapter computes, and that must be off."""


def _config(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise ValueError(f"adapter: there is no {path}; name a PEFT folder, such as adapter/ of a run, or none")
    try:
        config = json.loads(read_text(str(path)))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"adapter: {path}:{error.lineno} is not JSON: {error.msg}; save the adapter again, or copy it"
        ) from None
    if not isinstance(config, dict):
        raise ValueError(f"adapter: {path} holds {type(config).__name__}, not settings of PEFT; save the adapter again")
    return path, config


def adapter_settings(folder: Path) -> dict[str, Any]:
    """rank, alpha and targets of a PEFT folder. ValueError for a kind of adapter that engines are not given."""
    path, config = _config(folder)
    extra = [key for key in UNSUPPORTED if config.get(key)]
    extra += [f"bias {config['bias']}"] if config.get("bias", "none") != "none" else []
    targets = config.get("target_modules")
    if config.get("peft_type") != "LORA" or extra or not isinstance(targets, list):
        raise ValueError(
            f"adapter: {folder} is {config.get('peft_type')} with {', '.join(extra) or f'target_modules {targets!r}'}; "
            "only plain LoRA with a list of target_modules can be evaluated"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise ValueError(
            f"adapter: {path} has r {rank!r} and lora_alpha {alpha!r}, which must be a whole number from 1 and a "
            "number; save the adapter again with PEFT"
        )
    return {"rank": rank, "alpha": float(alpha), "targets": sorted(targets)}


def other_base(folder: Path, model: str) -> str | None:
    """What to say of an adapter that names another base model than the one it is put on. A model may have moved, so
    only the last parts of the names are compared; None if they are equal, and where the adapter names none.
    """
    base = _config(folder)[1].get("base_model_name_or_path")
    if not isinstance(base, str) or Path(base).name in ("", Path(model).name):
        return None
    return f"adapter: {folder} names {base} as its base model, but is evaluated on {model}"


def adapter_tensors(folder: Path) -> dict[str, Tensor]:
    """The matrices of a PEFT folder, under their saved names."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise ValueError(f"adapter: there is no {path}; save the adapter as safetensors")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"adapter: {path} cannot be read ({error}); it may be incomplete: copy or download it again"
        ) from error
    if not tensors:
        raise ValueError(f"adapter: {path} holds no tensors; save the adapter again, or give none for the base alone")
    return tensors
