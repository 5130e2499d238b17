"""How long kernels take on the GPU, by CUDA's own events: no launch from Python is in it."""

from collections.abc import Callable

import torch


def captured(calls: list[Callable[[], object]]) -> Callable[[], None]:
    """``calls``, one after the other, as one CUDA graph. Each is made once before it, and compiled there."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def milliseconds(call: Callable[[], object], repeats: int, warm_up: int = 1) -> list[float]:
    """Of each call, the warm-up left out."""
    times = []
    for _ in range(warm_up + repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return times[warm_up:]
