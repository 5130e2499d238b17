"""What ``qerl-pl`` does where nobody reads its output any more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qerl_pl.cli import _run

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("arguments", "unbuffered"), [(["--help"], ""), (["--help"], "1"), (["--version"], ""), (["verify", "--help"], "")]
)
def test_output_that_nobody_reads(arguments, unbuffered):
    """As in ``qerl-pl --help | head -1``: it ends as other tools do, without a word."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "qerl_pl", *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered}, cwd=ROOT,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(("error", "status"), [("ValueError('useful')", 2), ("KeyboardInterrupt", 130)])
def test_an_error_after_output_that_nobody_reads(error, status):
    """The error and its status are told all the same; without a file behind the output nothing is asked of it."""
    program = f"import sys\nfrom qerl_pl.cli import _run\ndef fail():\n print('x')\n raise {error}\n"
    reader, writer = os.pipe()
    os.close(reader)
    for before in ("", "sys.stdout = None\n", "import io; sys.stdout = io.StringIO()\n"):
        done = subprocess.run(
            [sys.executable, "-c", f"{program}{before}_run(fail)"], stdout=writer, stderr=subprocess.PIPE, text=True,
            check=False, env=os.environ | {"PYTHONUNBUFFERED": ""}, cwd=ROOT,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (status, "qerl-pl: error: useful\n" if status == 2 else "")
    os.close(writer)


def test_a_broken_pipe_that_is_not_the_output(capsys):
    def fail() -> None:
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(SystemExit) as caught:
        _run(fail)
    assert caught.value.code == 2
    assert "error: [Errno 32] Broken pipe" in capsys.readouterr().err
