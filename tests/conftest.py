"""Skips tests that need hardware which is not there; what several files share and is slow to make."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """A file of texts to calibrate the embedded model on."""
    from tests.quantized import write_texts

    return write_texts(tmp_path_factory.mktemp("texts") / "worked.jsonl")


@pytest.fixture(scope="session")
def made(texts, tmp_path_factory) -> dict[str, Path]:
    """The embedded model as qerl-pl quantize makes it: algorithm -> folder."""
    from tests.quantized import quantize_tiny

    return quantize_tiny(texts, tmp_path_factory.mktemp("made"))
