"""How a checkpoint is stored, which registered format reads it, and whether a format gives back what it took."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from registry.quantization import FORMATS, QuantFormat


class StoredOtherwiseError(ValueError):
    """A checkpoint that has another format than the one asked for."""

    def __init__(self, model: str, found: Mapping[str, Any], asked: QuantFormat) -> None:
        self.found, self.fits = stored_as(found), fitting(found)
        super().__init__(
            f"model: {model!r} is stored as {self.found!r}, which is not quantization: {type(asked).__name__.lower()} "
            f"({stored_as(asked.config)!r}); {self.fix('set model.quantization: {}', 'model.quantization.{}: {}')}"
        )

    def fix(self, name: str, setting: str) -> str:
        """What to do, with a format's name and its settings as they are written where the error is read."""
        if self.fits is None:
            return f"no registered format reads it ({', '.join(FORMATS)}); name the BF16 model that it came from"
        chosen, settings = self.fits
        said = [setting.format(key, "null" if value is None else value) for key, value in settings.items()]
        return " and ".join([name.format(chosen), *said])


def fitting(found: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Name and settings of the registered format whose checkpoints say ``found``; None if there is none."""
    groups = found.get("config_groups", {}).values()
    if any(group.get("input_activations") for group in groups):  # refused, whatever its weights are
        return None
    sizes = {(group.get("weights") or {}).get("group_size") for group in groups}
    for name in FORMATS:
        parameters = inspect.signature(FORMATS[name]).parameters
        chosen = [{}, *({"group_size": size} for size in sizes if "group_size" in parameters)]
        for settings in chosen:
            try:
                config = FORMATS[name](**settings).config
                if config is not None and stored_as(config) == stored_as(found):
                    return name, settings
            except Exception:  # one that must be told more, or that refuses this size; from a plugin anything can come
                continue
    return None


def stored_as(config: Mapping[str, Any] | None) -> str:
    """What of a ``quantization_config`` decides how tensors are read, in words; compared, and shown in errors."""
    if config is None:
        return "unquantized weights"
    if config.get("quant_method") == "bitsandbytes":
        kind = config.get("bnb_4bit_quant_type", "fp4") if config.get("load_in_4bit") else "int8"
        return f"bitsandbytes {kind}" + (", scales quantized too" if config.get("bnb_4bit_use_double_quant") else "")
    weights = [group.get("weights") or {} for group in config.get("config_groups", {}).values()]
    return ", ".join(
        [config.get("format") or config.get("quant_method") or "?", *sorted({_numbers(w) for w in weights})]
    )


def _numbers(weights: Mapping[str, Any]) -> str:
    said = [f"{weights.get('num_bits')}-bit {weights.get('type')}"]
    said.append(f"groups of {weights['group_size']}" if weights.get("group_size") else f"by {weights.get('strategy')}")
    if not weights.get("symmetric", True):
        said.append("with zero points")
    if weights.get("actorder") == "group":
        said.append("reordered")
    return " ".join(said)


def check_round_trip(name: str, weight: Tensor, stored: Mapping[str, Tensor], quantization: QuantFormat) -> None:
    """ValueError if what a format made of ``weight`` is not about that weight again: a user's own may be wrong.

    A format that rounds to nearest is nearer than zeros are, whose relative error is 1.
    """
    for dtype in (torch.bfloat16, torch.float32):
        if fault := _fault(quantization.dequantize(stored, dtype), weight.float(), dtype):
            raise ValueError(
                f"quantization: what {type(quantization).__name__}.dequantize makes of {name}, quantized by itself, "
                f"{fault}; mend quantize or dequantize"
            )


def _fault(dense: Tensor, weight: Tensor, dtype: torch.dtype) -> str:
    if dense.dtype != dtype:
        return f"is of {dense.dtype}, not of the dtype asked for, {dtype}"
    if dense.shape != weight.shape:
        return f"has the shape {tuple(dense.shape)}, not that of the weight, {tuple(weight.shape)}"
    if not dense.isfinite().all():
        return "has infinite numbers or NaN"
    norm, error = weight.norm(), (dense.to(weight) - weight).norm()  # a user's own may compute on the CPU
    if error >= norm > 0:
        return f"has a relative error of {error / norm:.3g}; it must be below 1, that of zeros"
    return ""
