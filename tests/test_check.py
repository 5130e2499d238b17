"""What a run is refused for before it begins, or after its first rollout."""

import os
from types import SimpleNamespace

import pytest
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from qerl_pl.callbacks.check import StartCheck, check_monitors, check_writable, occupied
from qerl_pl.evaluation import metric_names
from tests.test_fit import rows, run

STEPS = ("--trainer.max_steps", "4", "--trainer.val_check_interval", "100")


def test_a_monitor_that_is_never_logged_ends_a_run_after_its_first_rollout(tmp_path):
    with pytest.raises(ValueError, match=r"monitor: 'reword' is never logged, .*\. Did you mean 'reward'\?"):
        run(tmp_path, *STEPS, "--checkpoint.monitor", "reword")
    assert len(rows(tmp_path)) == 16
    folder = tmp_path / "last"
    run(folder, *STEPS, "--checkpoint.monitor", "step_time/sync", "--checkpoint.every_n_train_steps", "2")


def test_monitors_by_hand():
    def trainer(name: str, *more: Callback) -> SimpleNamespace:
        return SimpleNamespace(callbacks=[ModelCheckpoint(monitor=name), *more])

    class Mine(Callback):
        """Of a user's, which may log anything."""

    check_monitors(trainer("step"), {"step", "epoch"}, of_validation=False)
    check_monitors(trainer("mine"), {"reward"}, of_validation=True)  # not of validation
    check_monitors(trainer("mine", Mine()), {"reward"}, of_validation=False)
    with pytest.raises(ValueError, match="monitor: 'mine'"):
        check_monitors(trainer("mine", StartCheck()), {"reward"}, of_validation=False)


def test_names_of_several_sets():
    names = metric_names("validation", ["easy", "hard"], 2)
    assert {"validation/easy/pass@1", "validation/hard/reward", "validation/pass@1"} <= names
    assert "validation/reward" not in names


@pytest.mark.parametrize("place", ["run", "dirpath"])
def test_two_runs_do_not_share_a_folder(tmp_path, place):
    """Numbered by what is there, runs that begin in the same second have the same number."""
    folder = tmp_path / "qerl" / "version_0" if place == "run" else tmp_path / "checkpoints"
    arguments = ["--trainer.logger.version", "0", "--trainer.max_steps", "1"]
    arguments += ["--checkpoint.dirpath", str(folder)] if place == "dirpath" else []
    [held] = occupied(folder)
    with pytest.raises(ValueError, match=rf"another run writes to {folder}: .*--trainer\.logger\.init_args\.name"):
        run(tmp_path, *arguments)
    assert not list(tmp_path.rglob("last.ckpt"))
    os.close(held)
    run(tmp_path, *arguments)
    [held] = occupied(folder)
    os.close(held)


def test_a_run_that_fails_lets_its_folder_go(tmp_path):
    check = StartCheck()
    check._hold([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ValueError, match="another run"):
        occupied(tmp_path / "b")
    check.on_exception(None, None, KeyboardInterrupt())
    for descriptor in (*occupied(tmp_path / "a"), *occupied(tmp_path / "b")):
        os.close(descriptor)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def unknown(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unknown)
    assert occupied(tmp_path) == ()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "version_0"):
        with pytest.raises(ValueError, match=r"cannot be written \(.*file: Not a directory\)"):
            check_writable(folder)
    check_writable(tmp_path / "new" / "version_0")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ValueError, match=r"cannot be written .*--trainer\.default_root_dir"):
        run(tmp_path, "--trainer.logger", "false", "--trainer.default_root_dir", str(tmp_path / "file"))
