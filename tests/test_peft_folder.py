"""Adapter folders that are damaged, empty, or of another model."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from qerl_pl.callbacks import EvaluationResults, results
from qerl_pl.checkpoint import resolve
from qerl_pl.peft_folder import adapter_settings, adapter_tensors

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"]}


def folder(path: Path, **changes: Any) -> Path:
    config = {name: value for name, value in (CONFIG | changes).items() if value is not ...}
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file({"lora_A": torch.ones(2, 2)}, path / "adapter_model.safetensors")
    return path


def test_settings(tmp_path: Path) -> None:
    assert adapter_settings(folder(tmp_path)) == {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"r": ...}, "has r None and lora_alpha 8, which must be a whole number from 1 and a number; save"),
        ({"r": 0}, "has r 0 and lora_alpha 8"),
        ({"r": "4"}, "has r '4' and lora_alpha 8"),
        ({"lora_alpha": ...}, "has r 4 and lora_alpha None"),
    ],
)
def test_settings_that_are_missing(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"adapter: .*adapter_config\.json {said}"):
        adapter_settings(folder(tmp_path, **changes))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{\n"r": 4,', r"json:2 is not JSON: Expecting property name .*; save"),
        (b"[]", r"json holds list, not settings of PEFT"),
        (b"\xff", r"json is no text in UTF-8"),
    ],
)
def test_settings_that_cannot_be_read(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"adapter_config\.{said}"):
        adapter_settings(tmp_path)


def test_tensors_that_cannot_be_read(tmp_path: Path) -> None:
    path = folder(tmp_path) / "adapter_model.safetensors"
    assert list(adapter_tensors(tmp_path)) == ["lora_A"]
    whole = path.read_bytes()
    for content in (whole[:-4], whole[:20], b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"adapter: .*adapter_model\.safetensors cannot be read \(.*; it may"):
            adapter_tensors(tmp_path)
    save_file({}, path)
    with pytest.raises(ValueError, match=r"\.safetensors holds no tensors; .*give none for the base alone"):
        adapter_tensors(tmp_path)


@pytest.mark.parametrize(
    ("base", "model", "noted"),
    [
        ("org/Small-3B", "org/Large-7B", True),
        ("org/Small-3B", "/models/Small-3B", False),
        ("/elsewhere/Small-3B/", "org/Small-3B", False),
        (str(resolve("tiny")), "tiny", False),  # as a run of it writes
        (..., "org/Large-7B", False),
        (None, "org/Large-7B", False),
        ("", "org/Large-7B", False),
    ],
)
def test_an_adapter_of_another_model_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    base: Any,
    model: str,
    noted: bool,
) -> None:
    monkeypatch.setattr(results, "deliver", lambda trainer, module: None)
    loaded: list[Any] = []
    module = SimpleNamespace(model=model, load_state_dict=loaded.append)
    callback = EvaluationResults(str(folder(tmp_path, base_model_name_or_path=base)))
    for first in (True, False):  # of several processes one says it
        callback.on_test_start(SimpleNamespace(is_global_zero=first), module)  # type: ignore[arg-type]
    said = f"adapter: {tmp_path} names {base} as its base model, but is evaluated on {model}\n"
    assert capsys.readouterr().err == (said if noted else "")
    assert [list(tensors) for tensors in loaded] == [["lora_A"]] * 2
