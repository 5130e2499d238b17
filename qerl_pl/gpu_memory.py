"""What a run takes of a GPU, as it is measured; and how it is kept within a limit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from qerl_pl.memory import CONTEXT, GB


def limit_memory(size: int) -> None:
    """PyTorch's allocator raises an error rather than hold more than ``size`` bytes of the GPU, context included."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(size - CONTEXT, 0) / total))


class GPUMemory:
    """Peaks of each step; on a CPU it does nothing.

    A peak is the largest sum of tensors that were alive at a time: what PyTorch holds for reuse, and the CUDA context,
    are not counted. With ``limit_gb`` (1e9 bytes) PyTorch stays within it.
    """

    def __init__(self, limit_gb: float | None = None) -> None:
        self.limit = None if limit_gb is None else int(limit_gb * GB)
        self.peaks: dict[str, Tensor] = {}

    @contextmanager
    def update(self, device: torch.device, release: Callable[[], int]) -> Iterator[None]:
        """Around the update: ``release`` frees the sampler's keys and values and returns their bytes, which PyTorch
        still counts as allocated.
        """
        if device.type != "cuda":
            release()
            yield
            return
        rollout = torch.cuda.max_memory_allocated()
        released = release()
        if self.limit is not None:
            limit_memory(self.limit + released)
        torch.cuda.reset_peak_memory_stats()
        yield
        update = torch.cuda.max_memory_allocated() - released
        torch.cuda.reset_peak_memory_stats()
        if self.limit is not None:  # keys and values come back
            limit_memory(self.limit)
        peaks = {"rollout": rollout, "update": update, "peak": max(rollout, update)}
        self.peaks = {f"memory/{name}_gb": torch.tensor(size / GB) for name, size in peaks.items()}
