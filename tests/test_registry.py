"""Names of components: as Python sees them, and as plugins of other packages add them."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from registry._registry import Registry
from registry.noise import SCHEDULES, Linear


class Base:
    """A toy interface."""


@pytest.fixture
def shapes() -> Registry[Base]:
    shapes: Registry[Base] = Registry("shape", "qerl_pl.test_shapes")

    @shapes.register("square")
    class Square(Base):
        pass

    @shapes.register("circle")
    class Circle(Base):
        pass

    return shapes


def test_lookup(shapes: Registry[Base]) -> None:
    assert list(shapes) == ["circle", "square"]
    assert "circle" in shapes
    assert "cube" not in shapes
    assert shapes["circle"].__name__ == "Circle"
    assert shapes.name_of(shapes["circle"]) == "circle"
    assert shapes.name_of(int) is None


@pytest.mark.parametrize(
    ("name", "hint"),
    [("cirle", " Did you mean 'circle'?"), ("Square", " Did you mean 'square'?"), ("zzz", "")],
)
def test_unknown_name(shapes: Registry[Base], name: str, hint: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  compared below
        shapes[name]
    assert str(error.value) == (
        f"unknown shape {name!r}.{hint} Registered: circle, square; or give the import path of a class"
    )


def test_two_classes_of_one_name(shapes: Registry[Base]) -> None:
    first = shapes["square"]
    with pytest.raises(
        ValueError, match=r"shape 'square' is already .*Square; register test_registry\.Base under another"
    ):
        shapes.register("square")(Base)
    assert shapes["square"] is first


def test_a_class_defined_again_replaces_itself(shapes: Registry[Base]) -> None:
    """As when a cell of a notebook runs twice."""
    again = type("Base", (), {"__module__": Base.__module__, "__qualname__": Base.__qualname__})
    shapes.register("base")(Base)
    shapes.register("base")(again)
    assert shapes["base"] is again


def test_only_classes_are_registered(shapes: Registry[Base]) -> None:
    with pytest.raises(ValueError, match="shape 'one' must be a class, got 1"):
        shapes.register("one")(1)  # type: ignore[arg-type]


# ---- entry points ----------------------------------------------------------------------------------------------------


def install(folder: Path, package: str, group: str, entries: dict[str, str], code: str) -> None:
    """What pip leaves behind: a module, and metadata that announces the entries."""
    (folder / f"{package}.py").write_text(code)
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())])
    )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    loaded = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - loaded:
        del sys.modules[name]


def test_plugin(site: Path, shapes: Registry[Base], caplog: pytest.LogCaptureFixture) -> None:
    install(site, "good_shapes", "qerl_pl.test_shapes", {"cube": "good_shapes:Cube"}, "class Cube: pass")
    shapes.load_plugins()
    shapes.load_plugins()  # again, as when a process builds two CLIs
    assert (shapes["cube"].__module__, shapes["cube"].__name__) == ("good_shapes", "Cube")
    assert list(shapes) == ["circle", "cube", "square"]
    assert caplog.records == []


def test_plugin_for_a_real_interface(site: Path) -> None:
    code = "from registry.noise import NoiseSchedule\nclass Step(NoiseSchedule):\n    def level(self, k): return 1 / k"
    install(site, "step_noise", SCHEDULES.group, {"step": "step_noise:Step"}, code)
    SCHEDULES.load_plugins()
    try:
        assert SCHEDULES["step"](0.1, 0.1, 4).level(4) == 0.25  # type: ignore[call-arg]
    finally:
        del SCHEDULES._classes["step"]


@pytest.mark.parametrize(
    ("value", "code", "cause"),
    [
        ("bad_shapes:Cube", "import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("bad_shapes:Cube", "class Cub: pass", "AttributeError: module 'bad_shapes' has no attribute 'Cube'"),
        ("bad_shapes:Cube", "raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("bad_shapes:Cube", "Cube = 1", "ValueError: shape 'cube' must be a class, got 1; register the class itself"),
    ],
)
def test_broken_plugin(
    site: Path, shapes: Registry[Base], caplog: pytest.LogCaptureFixture, value: str, code: str, cause: str
) -> None:
    """It costs one line in the log and its own name, whose use says why; the others work."""
    install(site, "bad_shapes", "qerl_pl.test_shapes", {"cube": value}, code)
    with caplog.at_level(logging.WARNING):
        shapes.load_plugins()
    reason = f"its plugin {value} of bad_shapes failed to load: {cause}"
    assert [record.getMessage() for record in caplog.records] == [f"ignored shape 'cube': {reason}"]
    with pytest.raises(ValueError) as error:  # noqa: PT011  compared below
        shapes["cube"]
    assert str(error.value) == f"shape 'cube' is not available: {reason}"
    assert list(shapes) == ["circle", "square"]


def test_plugin_of_a_taken_name(site: Path, shapes: Registry[Base], caplog: pytest.LogCaptureFixture) -> None:
    first = shapes["circle"]
    install(site, "rival_shapes", "qerl_pl.test_shapes", {"circle": "rival_shapes:Round"}, "class Round: pass")
    shapes.load_plugins()
    assert shapes["circle"] is first
    (record,) = caplog.records
    assert record.getMessage().startswith("ignored shape 'circle': its plugin rival_shapes:Round of rival_shapes")
    assert record.getMessage().endswith(".Circle; register rival_shapes.Round under another name")


def test_write_spells_out_an_instance() -> None:
    assert SCHEDULES.write(Linear(sigma_end=0.002, num_stages=4)) == {
        "class_path": "registry.noise.schedules.Linear",
        "init_args": {"sigma_start": 0.01, "sigma_end": 0.002, "num_stages": 4},
    }
