"""Several processes, each with an engine of its own: what must be one over all of them."""

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import Tensor, distributed


class Replicas(DDPStrategy):
    """Processes with equal adapters that add up their gradients once for each optimizer step.

    Lightning's DDP would do so in every backward pass; but there is one for each micro-batch, and processes have
    different numbers of them.
    """

    def configure_ddp(self) -> None:
        """Nothing is wrapped."""

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if distributed.is_initialized():
            super().barrier(*args, **kwargs)


StrategyRegistry.register("replicas", Replicas, description="processes that add up their gradients once a step")


def world_size() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def total(values: Iterable[float], device: torch.device) -> list[float]:
    """Each number summed over all processes."""
    numbers = torch.tensor(list(values), dtype=torch.float64, device=device)
    if world_size() > 1:
        distributed.all_reduce(numbers)
    return [float(number) for number in numbers]


def gather(value: Any) -> list[Any]:
    """The value of each process, in order, in every process."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    distributed.all_gather_object(values, value)
    return values


def add_up_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Sum the gradients over all processes; every parameter has one."""
    if world_size() == 1:
        return
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    distributed.all_reduce(flat)
    parts: list[Tensor] = list(flat.split([grad.numel() for grad in grads]))
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(part.view_as(grad))
