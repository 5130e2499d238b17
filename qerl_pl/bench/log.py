"""What a run of ``fit`` has logged."""

from pathlib import Path


def series(folder: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar that TensorBoard's log in ``folder`` has: name -> (step, value), none left out."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}
