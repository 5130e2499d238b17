"""PEFT's adapter folders, read without PEFT."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

UNSUPPORTED = (
    "use_rslora", "use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform",
    "fan_in_fan_out", "lora_bias", "trainable_token_indices",
)  # fmt: skip
"""Settings of PEFT that change what an adapter computes, and that must be off."""


def adapter_settings(folder: Path) -> dict[str, Any]:
    """rank, alpha and targets of a PEFT folder. ValueError for a kind of adapter that engines are not given."""
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise ValueError(f"adapter: there is no {path}; name a PEFT folder, such as adapter/ of a run, or none")
    config = json.loads(path.read_text())
    extra = [key for key in UNSUPPORTED if config.get(key)]
    extra += [f"bias {config['bias']}"] if config.get("bias", "none") != "none" else []
    targets = config.get("target_modules")
    if config.get("peft_type") != "LORA" or extra or not isinstance(targets, list):
        raise ValueError(
            f"adapter: {folder} is {config.get('peft_type')} with {', '.join(extra) or f'target_modules {targets!r}'}; "
            "only plain LoRA with a list of target_modules can be evaluated"
        )
    return {"rank": config["r"], "alpha": float(config["lora_alpha"]), "targets": sorted(targets)}


def adapter_tensors(folder: Path) -> dict[str, Tensor]:
    """The matrices of a PEFT folder, under their saved names."""
    from safetensors.torch import load_file

    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise ValueError(f"adapter: there is no {path}; save the adapter as safetensors")
    return load_file(path)
