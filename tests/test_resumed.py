"""What a resumed run is told."""

import zipfile

import pytest
import yaml

from qerl_pl.resumed import changed_settings, check_checkpoint


def test_settings_that_differ(tmp_path):
    before = {
        "model": {"optimizer": {"init_args": {"lr": 0.1}}, "warmup": 0.1, "gone": 1},
        "data": {"rewards": [{"a": 1}], "train": {}},
        "ckpt_path": None,
    }
    now = {
        "model": {"optimizer": {"init_args": {"lr": 0.2}}, "warmup": 0.2},
        "data": {"rewards": [{"a": 2}], "train": {}},
        "ckpt_path": "last",
    }
    checkpoint = tmp_path / "checkpoints" / "last.ckpt"
    assert changed_settings(checkpoint, yaml.safe_dump(now)) == []  # Python made that run: nothing is known
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(before, sort_keys=False))
    assert changed_settings(checkpoint, yaml.safe_dump(now, sort_keys=False)) == [
        "model.optimizer.init_args.lr: 0.1 in the run that it goes on from, 0.2 now; the checkpoint's goes on",
        "model.warmup: 0.1 in the run that it goes on from, 0.2 now",
        "model.gone: 1 in the run that it goes on from, None now",
        "data.rewards: [{'a': 1}] in the run that it goes on from, [{'a': 2}] now",
    ]
    assert changed_settings(checkpoint, yaml.safe_dump(before)) == []


def test_a_checkpoint_must_be_complete(tmp_path):
    with zipfile.ZipFile(tmp_path / "whole.ckpt", "w") as archive:
        archive.writestr("data", "1" * 10_000)
    check_checkpoint(tmp_path / "whole.ckpt")
    (tmp_path / "half.ckpt").write_bytes((tmp_path / "whole.ckpt").read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"half\.ckpt is no checkpoint, or an incomplete one"):
        check_checkpoint(tmp_path / "half.ckpt")
    with pytest.raises(ValueError, match="is a folder; name a checkpoint in it"):
        check_checkpoint(tmp_path)
