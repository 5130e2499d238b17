"""qerl-pl quantize --report on checkpoints that are there, with other settings than they were made with."""

import json
import shutil

import pytest

from qerl_pl.checkpoint import Weights
from qerl_pl.quantize.card import beside
from tests.quantized import TINY, arguments, refused, run

pytest.importorskip("llmcompressor", reason="needs llm-compressor: pip install 'qerl-pl[quantize]'")


@pytest.fixture(autouse=True)
def there(made, tmp_path, monkeypatch):
    """A copy of the checkpoint made by GPTQ."""
    monkeypatch.setenv("QERL_PL_CACHE", str(tmp_path / "cache"))
    shutil.copytree(made["gptq"], tmp_path / "there")
    return tmp_path / "there"


def read(folder) -> tuple[dict, str, str]:
    both = json.loads((folder / "quality.json").read_text())
    return both, (folder / "README.md").read_text(), (folder / "quality.md").read_text()


def test_another_base_is_named(there, texts, tmp_path, monkeypatch, capsys):
    """It is what KL and perplexity are beside; what the checkpoint was made from stays what it was."""
    from safetensors.torch import save_file

    shutil.copytree(TINY, tmp_path / "tuned")
    tensors = {n: w * 1.01 if n.endswith("o_proj.weight") else w for n, w in Weights(TINY).items()}
    save_file(tensors, tmp_path / "tuned" / "model.safetensors", metadata={"format": "pt"})
    before, *_ = read(there)
    run(arguments(texts, report=there, model=tmp_path / "tuned", sample_prompts=0), monkeypatch)
    both, card, table = read(there)
    assert both["quality"]["held_out"]["perplexity"]["base"] != before["quality"]["held_out"]["perplexity"]["base"]
    assert table.startswith(f"# nvfp4 of tiny beside {tmp_path / 'tuned'}\n") and table in capsys.readouterr().out
    assert "base_model: tiny\n" in card and f"\n## Quality, beside {tmp_path / 'tuned'}\n" in card
    assert both["made"]["model"] == "tiny"
    run(arguments(texts, report=there, sample_prompts=0), monkeypatch)
    _, card, table = read(there)
    assert table.startswith("# nvfp4 of tiny\n") and "\n## Quality\n" in card and "tuned" not in card + table


def test_another_base_of_a_checkpoint_that_others_made(there, texts, tmp_path, monkeypatch):
    """What it was made from is not known: the base given last is as good as the one before."""
    shutil.copytree(TINY, tmp_path / "same")
    (there / "quality.json").unlink()
    for model in ("tiny", tmp_path / "same"):
        run(arguments(texts, report=there, model=model, held_out=20, sample_prompts=0), monkeypatch)
        assert (there / "quality.md").read_text().startswith(f"# nvfp4 of {model}\n")


@pytest.mark.parametrize(
    ("of", "given", "said"),
    [
        ("m", "./m", ""),
        ("m/", "m", ""),
        ("m", "{}/m", ""),
        ("m", "link", ""),
        ("m", "n", "beside n"),
        ("owner/name", "owner/name", ""),
        ("owner/name", "Owner/name", "beside Owner/name"),
        ("tiny", "tiny", ""),
        ("tiny", "./tiny", "beside ./tiny"),  # the embedded model and a folder
    ],
)
def test_a_base_by_two_names(of, given, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("m", "n", "tiny"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("m")
    assert beside({"model": of}, {"base": given.format(tmp_path)}) == said


@pytest.mark.parametrize("seed", [0, 5])
def test_rounding_used_no_texts(seed, made, texts, tmp_path, monkeypatch):
    """No text can have calibrated it, whichever are drawn."""
    shutil.copytree(made["rtn"], tmp_path / "rounded")
    run(arguments(texts, report=tmp_path / "rounded", sample_prompts=0, seed=seed), monkeypatch)
    for text in read(tmp_path / "rounded")[1:]:
        assert "rounding calibrates on none" in text and "not known" not in text
    assert "rounding calibrates on none" in (made["rtn"] / "README.md").read_text()


def test_both_seeds_are_said(there, texts, monkeypatch):
    """That of the texts it was calibrated on, and that of the report."""
    run(arguments(texts, report=there, seed=5, sample_prompts=0), monkeypatch)
    both, card, table = read(there)
    assert (both["made"]["calibration"]["seed"], both["made"]["held_out"]["seed"]) == (0, 5)
    (calibration,) = [line for line in card.splitlines() if line.startswith("| calibration ")]
    assert calibration.rstrip(" |").endswith(" texts in the order of seed 0")
    for text in (card, table):
        (said,) = [line for line in text.splitlines() if line.startswith("Held-out text: ")]
        assert "Order of texts, and samples, by seed 5. " in said
    assert "seed 5" not in card.partition("## Quality")[0]


@pytest.mark.parametrize(("size", "said"), [(32, "32"), ("null", "null")])
def test_the_group_size_is_that_of_the_checkpoint(size, said, texts, tmp_path, monkeypatch, capsys):
    out, given = tmp_path / "out", {"format": "int4", "sample_prompts": 0}
    run(arguments(texts, output=out, group_size=size, **given), monkeypatch)
    before = read(out)
    run(arguments(texts, report=out, **given), monkeypatch)
    assert read(out) == before
    asked = refused(arguments(texts, report=out, group_size=64, **given), capsys, monkeypatch)
    assert asked.endswith(f"which is not --format int4; give --format int4 and --group_size {said}")


def test_a_folder_that_is_not_quantized(texts, tmp_path, monkeypatch, capsys):
    """It is not rounded first: there would be nothing to report on."""
    shutil.copytree(TINY, tmp_path / "plain")
    said = refused(arguments(texts, report=tmp_path / "plain"), capsys, monkeypatch)
    assert said.endswith(
        f"--report {tmp_path / 'plain'} is not quantized; name a checkpoint of nvfp4, or make one with --output"
    )
    assert not (tmp_path / "cache").exists()
