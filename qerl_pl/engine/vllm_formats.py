"""How the base reaches vLLM: packed, for its own kernels, or dense, in the numbers that the trainer computes with."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from qerl_pl.checkpoint import Weights, projection, stored_projection
from qerl_pl.engine.base import EngineSpec
from qerl_pl.random_model import is_random

_LOADERS, _NAME = "vllm.model_executor.model_loader", "qerl_pl"


def load_settings(spec: EngineSpec, dense: bool) -> dict[str, Any]:
    """Settings of ``vllm.LLM`` for the checkpoint of ``spec``; ValueError if vLLM cannot sample from it packed.

    With ``dense`` vLLM is told of no quantization and gets dense weights: no format needs a kernel there, and those
    that vLLM computes as one are the trainer's, part by part.
    """
    if not dense and _library(spec) == "bitsandbytes":
        _register(_bitsandbytes_loader(spec), "bitsandbytes")  # vLLM chooses it by this name
        return {}
    if not dense and not is_random(spec.folder):
        return {}
    _register(_loader(spec, dense), _NAME)
    return {"load_format": _NAME} | ({"hf_overrides": {"quantization_config": None}} if dense else {})


@contextmanager
def own_loaders() -> Iterator[None]:
    """While an engine is built: what ``load_settings`` registers is for this one alone."""
    from vllm.model_executor import model_loader

    with patch.dict(model_loader._LOAD_FORMAT_TO_MODEL_LOADER):
        yield


def _library(spec: EngineSpec) -> str | None:
    """Whose checkpoints vLLM reads in this format; None for unquantized ones."""
    config = spec.quantization.config
    library = None if config is None else str(config.get("quant_method"))
    instead = (
        "set engine.dense: true (the engine then samples from dense weights and takes the memory of bf16), another "
        "quantization (nvfp4, mxfp4, int4, int8, fp8), or engine: transformers"
    )
    if library == "bitsandbytes" and find_spec(f"{_LOADERS}.bitsandbytes_loader") is None:
        raise ValueError(f"quantization: nf4 is bitsandbytes', which this release of vLLM no longer has; {instead}")
    if library not in (None, "compressed-tensors", "bitsandbytes"):
        raise ValueError(f"quantization: vLLM has no kernel for {type(spec.quantization).__name__}; {instead}")
    return library


def tensors(spec: EngineSpec, dense: bool) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint by name; with ``dense`` each projection as one weight in the dtype of the arithmetic."""
    weights, seen = Weights(spec.folder), set()
    for name in weights:
        module, key = projection(name) or ("", "bias")
        if not dense or key == "bias":
            yield name, weights[name]
        elif module not in seen:
            seen.add(module)
            format_, stored = stored_projection(weights, module, spec.quantization)
            on_device = {part: tensor.to(spec.device) for part, tensor in stored.items()}
            yield f"{module}.weight", format_.dequantize(on_device, getattr(torch, spec.dtype))


def _register(loader: type, name: str) -> None:
    from vllm.model_executor.model_loader import register_model_loader

    register_model_loader(name)(loader)


def _loader(spec: EngineSpec, dense: bool) -> type:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    base: Any = BaseModelLoader

    class Loader(base):  # type: ignore[misc]
        def download_model(self, model_config: Any) -> None:
            """The folder is there."""

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            loaded = model.load_weights(tensors(spec, dense))  # type: ignore[operator]
            missing = sorted({name for name, _ in model.named_parameters()} - loaded)
            if missing and (dense or spec.quantization.config is None):
                raise ValueError(f"{spec.folder} lacks {', '.join(missing[:3])} ({len(missing)} in all)")

    return Loader


def _bitsandbytes_loader(spec: EngineSpec) -> type:
    """vLLM's, but for the tensors' source: those of a random model are in no file."""
    from vllm.model_executor.model_loader.bitsandbytes_loader import BitsAndBytesModelLoader

    base: Any = BitsAndBytesModelLoader

    class Loader(base):  # type: ignore[misc]
        def _prepare_weights(self, *_: Any) -> tuple[list[str], bool]:
            return [], True

        def _hf_weight_iter(self, *_: Any) -> Iterator[tuple[str, str, Tensor]]:
            for name, tensor in tensors(spec, dense=False):
                yield name, self.weight_mapper(name), tensor

    return Loader
