"""What qerl-pl quantize reads, and what it refuses."""

import json
import shutil
import sys

import pytest
import torch

from qerl_pl.quantize.calibration import Source, conversation, draw
from registry.quantization import BF16
from tests.quantized import (
    TINY,
    arguments,
    refused,
)
from tests.reference import llama, write_checkpoint

pytest.importorskip("llmcompressor", reason="needs llm-compressor: pip install 'qerl-pl[quantize]'")


class Words:
    """A tokenizer of which each word is a token, its number."""

    chat_template = "{{ messages }}"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [int(word) for word in text.split()]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, strftime_now):
        return " ".join(m["content"] for m in messages) + " 0" * add_generation_prompt


def test_sequences_by_hand(tmp_path, monkeypatch):
    (tmp_path / "t.txt").write_text("1 2 3 4 5\n\n6 7\n\n1 2 3 4 5\n\n8 9 10\n\n11\n\n12 13 14\n")
    monkeypatch.setattr(torch, "randperm", lambda n, generator: torch.arange(n))
    source = Source(str(tmp_path / "t.txt"), 0)
    sequences, contents = draw(Words(), source, {"held_out": (1, 3), "calibration": (2, 4)})
    # 4 5 is dropped; the third text is the first again; 6 7 8 9 10 loses its 10, and 11 starts the last one
    assert sequences["held_out"].tokens == [[1, 2, 3]] and sequences["held_out"].texts == (0, 1)
    assert sequences["calibration"].tokens == [[6, 7, 8, 9], [11, 12, 13, 14]]
    assert (sequences["calibration"].texts, sequences["calibration"].used) == ((1, 6), 4)
    assert contents["held_out"] == ["1 2 3 4 5"]
    with pytest.raises(ValueError, match=r"it has 8 of 3 × 4 = 12 tokens for calibration, after 3 tokens for held"):
        draw(Words(), source, {"held_out": (1, 3), "calibration": (3, 4)})


def test_the_order_depends_on_the_seed(texts):
    orders = [Source(str(texts), seed).order for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2] and sorted(orders[2]) == list(range(200))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "a b"}, "a b"),
        ({"question": "q", "answer": "long #### 1"}, [("user", "q"), ("assistant", "long #### 1")]),
        ({"problem": "q", "answer": "1", "solution": "so 1"}, [("user", "q"), ("assistant", "so 1")]),
        (
            {"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            [("system", "s"), ("user", "q"), ("assistant", "a")],
        ),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
            [("user", "q"), ("assistant", "a")],
        ),
    ],
)
def test_layouts_of_rows(row, expected):
    found = conversation(row, "here")
    assert (found if isinstance(found, str) else [(m["role"], m["content"]) for m in found]) == expected


def _model(tmp_path, **changed):
    shutil.copytree(TINY, tmp_path / "model")
    config = json.loads((TINY / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | changed))
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"format": "nvpf4"}, "unknown quantization format 'nvpf4'. Did you mean 'nvfp4'?"),
        ({"group_size": 32}, "--group_size 32: nvfp4 leaves no choice; remove it"),
        ({"format": "bf16"}, "--format bf16 is no quantization"),
        ({"format": "nf4", "algorithm": "awq"}, "compressed-tensors, and nf4 is none; use --algorithm rtn"),
        ({"algorithm": "gtpq"}, "unknown algorithm 'gtpq'. Did you mean 'gptq'?"),
        ({"num_samples": 4000, "algorithm": "awq"}, "worked.jsonl: it has "),
        ({"max_length": 512}, "--max_length 512 is more than the 256 tokens that the model knows"),
        ({"num_samples": 0}, "--num_samples 0 must be at least 2"),
        ({"sample_prompts": 1}, "--sample_prompts 1 must be 0, or at least 2 for an interval"),
        ({"sample_tokens": 0}, "--sample_tokens 0 must be at least 1"),
        ({"seed": -1}, "--seed -1 must be at least 0"),
        ({"format": "torch.nn.Linear"}, "--format torch.nn.Linear is no subclass of QuantFormat"),
        ({"format": "torch.nn.Lineal"}, "--format torch.nn.Lineal: module 'torch.nn' has no attribute 'Lineal'"),
        ({"format": ".my.Format"}, "--format .my.Format: it must have the form package.module.name"),
        ({"format": "int4"}, "mlp.down_proj: input dimension 448 is not a multiple of 128"),
        ({"model": "./nowhere"}, "error: --model: there is no folder './nowhere'"),
        ({"model": "random:tiny-test"}, "has random weights: nothing to calibrate"),
        ({"calibration": "nowhere.txt"}, "--calibration nowhere.txt: there is no file nowhere.txt"),
        ({"calibration": "gsm9k"}, "--calibration gsm9k: unknown prompt source 'gsm9k'. Did you mean 'gsm8k'?"),
        ({"task": "nowhere.yaml"}, "--task nowhere.yaml: there is no such file"),
        ({"report": "x"}, "give one of --output DIR, to quantize, and --report DIR"),
    ],
    ids=str,
)  # fmt: skip
def test_one_line(changed, expected, texts, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("QERL_PL_CACHE", str(tmp_path / "cache"))
    assert expected in refused(arguments(texts, **{"output": tmp_path / "out"} | changed), capsys, monkeypatch)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("t.txt", b"abc \xff\xfe", "t.txt is no text in UTF-8 (byte 0xff at 4); convert it, or name another file"),
        ("t.jsonl", b'{"text": "\xe9"}', "t.jsonl is no text in UTF-8 (byte 0xe9 at 10); convert it"),
        ("t.parquet", b"", "t.parquet cannot be read as parquet (Parquet file size is 0 bytes); it may be incomplete"),
        ("t.parquet", b"PAR1" + bytes(40), "t.parquet cannot be read as parquet (Parquet magic bytes not found"),
        ("t.parquet", bytes(20) + b"\x08\0\0\0PAR1", "t.parquet cannot be read as parquet (Couldn't deserialize"),
    ],
)
def test_files_that_cannot_be_read(file, content, expected, texts, tmp_path, capsys, monkeypatch):
    (tmp_path / file).write_bytes(content)
    words = arguments(texts, calibration=tmp_path / file, output=tmp_path / "out")
    assert expected in refused(words, capsys, monkeypatch)


@pytest.mark.parametrize(("name", "said"), [("me/mine", "me/mine"), ("gsm8k", "openai/gsm8k")])
def test_a_data_set_that_cannot_be_reached(name, said, texts, tmp_path, capsys, monkeypatch):
    import datasets

    def load_dataset(name, *args, **more):
        raise ConnectionError(f"Couldn't reach {name!r} on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    answer = refused(arguments(texts, calibration=name, output=tmp_path / "out"), capsys, monkeypatch)
    expected = f"--calibration {name}: cannot be reached (Couldn't reach {said!r} on the Hub); download it"
    assert answer.endswith(f"{expected}, or give a .jsonl, .json, .parquet or .txt file of its texts")


def test_models_that_are_refused(made, texts, tmp_path, capsys, monkeypatch):
    said = refused(arguments(texts, model=made["awq"], output=tmp_path / "out"), capsys, monkeypatch)
    assert "is quantized already (nvfp4-pack-quantized, 4-bit float groups of 16); name the BF16 model" in said
    other = _model(tmp_path, num_hidden_layers=6, model_type="phi3")
    said = refused(arguments(texts, model=other, output=tmp_path / "out"), capsys, monkeypatch)
    assert "(phi3): layer 5 lacks down_proj, gate_proj, k_proj" in said


def test_a_report_on_another_base(made, texts, tmp_path, capsys, monkeypatch):
    write_checkpoint(tmp_path / "other", llama(), BF16())
    given = arguments(texts, report=made["rtn"], model=tmp_path / "other")
    said = refused([a for a in given if a != "--output"], capsys, monkeypatch)
    assert "is not the base of --report" in said and "their sizes differ" in said


@pytest.mark.parametrize("more", [{}, {"group_size": 32}, {"task": "configs/tiny.yaml"}], ids=str)
def test_a_report_on_another_format(more, made, texts, capsys, monkeypatch):
    """Also where the base cannot have it: inputs of 448 are no multiple of 128."""
    said = refused(arguments(texts, report=made["rtn"], format="int4", **more), capsys, monkeypatch)
    assert said.endswith("4-bit float groups of 16', which is not --format int4; give --format nvfp4")


def test_places_that_are_refused(texts, tmp_path, capsys, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("")
    said = refused(arguments(texts, output=tmp_path / "there"), capsys, monkeypatch)
    assert "there is there and not empty; name another folder" in said
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    said = refused(arguments(texts, output=tmp_path / "out"), capsys, monkeypatch)
    assert "the checkpoint takes 0.00 GB" in said and "has 0.00 GB free; make room" in said


def test_llm_compressor_is_missing(texts, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "llmcompressor", None)
    words = arguments(texts, algorithm="gptq", output=tmp_path / "out", calibration="nowhere.txt")
    said = refused(words, capsys, monkeypatch)
    assert "llm-compressor, which is not installed; pip install 'qerl-pl[quantize]', or use --algorithm rtn" in said


def test_texts_are_checked_before_llm_compressor_is_imported(texts, tmp_path, capsys, monkeypatch):
    """Which takes seconds; a broken one is still answered before anything is written."""
    (tmp_path / "llmcompressor").mkdir()
    (tmp_path / "llmcompressor" / "__init__.py").write_text("raise ImportError('half of it is missing')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in sys.modules if n.partition(".")[0] == "llmcompressor"]:
        monkeypatch.delitem(sys.modules, name)
    words = arguments(texts, algorithm="gptq", output=tmp_path / "out")
    assert "there is no file nowhere.txt" in refused([*words, "--calibration", "nowhere.txt"], capsys, monkeypatch)
    said = refused(words, capsys, monkeypatch)
    assert "which cannot be imported (half of it is missing); pip install 'qerl-pl[quantize]'" in said
    assert not (tmp_path / "out").exists()
