"""What vLLM is told of a format, and what it gets. Runs of it: test_vllm_engine.py, gpu/test_formats.py."""

from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_pl.checkpoint import Weights, prepare
from qerl_pl.engine import vllm_formats
from qerl_pl.engine.base import CannotShareError, EngineSpec
from qerl_pl.engine.vllm_shared import linear_weights
from registry.quantization import BF16, NF4, NVFP4, Int4, QuantFormat
from tests.reference import TARGETS, qwen2, write_checkpoint


def spec(folder: Path, quantization: QuantFormat) -> EngineSpec:
    return EngineSpec(folder, quantization, 8, 16.0, TARGETS)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """Loaders by the name that vLLM knows them by."""
    found: dict[str, type] = {}
    monkeypatch.setattr(vllm_formats, "_register", lambda loader, name: found.update({name: loader}))
    monkeypatch.setattr(vllm_formats, "_loader", lambda spec, dense: ("ours", dense))
    monkeypatch.setattr(vllm_formats, "_bitsandbytes_loader", lambda spec: "bitsandbytes'")
    monkeypatch.setattr(vllm_formats, "find_spec", lambda name: name)
    return found


def test_settings(registered: dict[str, Any], tmp_path: Path) -> None:
    ours, overridden = {"load_format": "qerl_pl"}, {"hf_overrides": {"quantization_config": None}}
    for quantization in (BF16(), NVFP4(), Int4(32)):
        write_checkpoint(tmp_path / type(quantization).__name__, qwen2(), quantization)
        assert vllm_formats.load_settings(spec(tmp_path / type(quantization).__name__, quantization), dense=False) == {}
        assert not registered  # vLLM reads the folder by itself
    folder = prepare("random:tiny-test", Int4(), tmp_path)
    assert vllm_formats.load_settings(spec(folder, Int4()), dense=False) == ours
    assert registered == {"qerl_pl": ("ours", False)}
    assert vllm_formats.load_settings(spec(folder, Int4()), dense=True) == ours | overridden
    assert registered == {"qerl_pl": ("ours", True)}
    assert vllm_formats.load_settings(spec(folder, NF4()), dense=False) == {}
    assert registered["bitsandbytes"] == "bitsandbytes'"


class Unknown(BF16):
    """A user's."""

    @property
    def config(self) -> dict[str, Any]:
        return {"quant_method": "qerl_pl", "format": "unknown"}


def test_what_vllm_cannot_sample_packed(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    instead = r"set engine\.dense: true .* another quantization \(nvfp4, .*, or engine: transformers"
    with pytest.raises(ValueError, match=f"quantization: vLLM has no kernel for Unknown; {instead}"):
        vllm_formats.load_settings(spec(tmp_path, Unknown()), dense=False)
    monkeypatch.setattr(vllm_formats, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"nf4 is bitsandbytes', which this release of vLLM no longer has; {instead}"):
        vllm_formats.load_settings(spec(tmp_path, NF4()), dense=False)
    assert vllm_formats.load_settings(spec(tmp_path, NF4()), dense=True)["load_format"] == "qerl_pl"


def test_tensors(tmp_path: Path) -> None:
    """Stored, or each projection dense; what belongs to no projection, and biases, as they are."""
    dense = write_checkpoint(tmp_path / "model", qwen2(), NVFP4())
    weights = Weights(tmp_path / "model")
    stored = dict(vllm_formats.tensors(spec(tmp_path / "model", NVFP4()), dense=False))
    assert stored.keys() == set(weights)
    assert all(torch.equal(tensor.view(torch.uint8), weights[n].view(torch.uint8)) for n, tensor in stored.items())
    made = dict(vllm_formats.tensors(spec(tmp_path / "model", NVFP4()), dense=True))
    assert made.keys() == dense.keys()
    assert all(torch.equal(made[name].float(), dense[name]) for name in dense)


def test_a_weight_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    write_checkpoint(tmp_path / "model", qwen2(), BF16())

    class Model(torch.nn.Linear):
        def load_weights(self, weights: Any) -> set[str]:
            return {name for name, _ in weights} | {"bias"}

    loader: Any = vllm_formats._loader(spec(tmp_path / "model", BF16()), dense=True)
    with pytest.raises(ValueError, match=r"model lacks weight \(1 in all\)"):
        loader(None).load_weights(Model(2, 2), None)


def test_packed_integers_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    layer: Any = torch.nn.Module()
    layer.quant_method, layer.output_partition_sizes, layer.input_size_per_partition = None, [4], 8
    layer.weight_packed = torch.zeros(4, 1)
    model = torch.nn.ModuleDict({"o_proj": layer})
    from qerl_pl.engine import vllm_compat

    manager = type("Manager", (), {"packed_modules_mapping": {}})
    monkeypatch.setattr(vllm_compat, "lora_manager", lambda llm: manager)
    monkeypatch.setattr(vllm_compat, "model", lambda llm: model)
    with pytest.raises(CannotShareError, match=r"vLLM holds \.o_proj in a layout that the trainer does not read"):
        list(linear_weights(None))
