"""vLLM over a model of random weights (``random:7B``): it gets the numbers that the trainer's ``Weights`` have."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from qerl_pl.random_model import RandomTensors, is_random


def load_format(folder: Path) -> dict[str, str]:
    """Settings of ``vllm.LLM`` for the model in ``folder``."""
    return {"load_format": "dummy"} if is_random(folder) else {}


@contextmanager
def random_weights(folder: Path) -> Iterator[None]:
    """While a model without tensors is built: vLLM's dummy loader, which fills floats alone and scales with both signs,
    fills everything as it would be loaded. For other models nothing changes.
    """
    if not is_random(folder):
        yield
        return
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    tensors = RandomTensors(folder)

    def load_weights(loader: Any, model: nn.Module, *_: Any) -> None:
        fill(model, tensors)

    with patch.object(DummyModelLoader, "load_weights", load_weights):
        yield


def fill(model: nn.Module, tensors: RandomTensors) -> None:
    """Write every tensor of the checkpoint into the fused layers of ``model``, which vLLM has not processed yet."""
    names = set(tensors.keys())
    filled = set()
    for module_name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            for name, view in _parts(model, module, module_name, key, parameter.data):
                if name in names:  # scales of the KV cache are not in a checkpoint
                    rows = tensors.shape(name)[0]
                    view[rows:].zero_()  # a vocabulary is padded
                    tensors.fill(name, view[:rows])
                    filled.add(name)
    if missing := sorted(names - filled):
        raise ValueError(
            f"{type(model).__name__} of this vLLM has no place for {', '.join(missing[:3])} ({len(missing)} in all)"
        )


def _parts(model: Any, module: Any, name: str, key: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Names in a checkpoint of what one parameter holds, and where: q, k and v are one layer in vLLM."""
    parent, _, leaf = name.rpartition(".")
    members = model.packed_modules_mapping.get(leaf)
    if members is None:
        yield f"{name}.{key}", tensor
        return
    rows = [1] * len(members) if len(tensor) == len(members) else list(module.output_sizes)
    for member, view in zip(members, tensor.split(rows), strict=True):
        yield f"{parent}.{member}.{key}", view
