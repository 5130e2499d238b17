"""qerl-pl quantize on the embedded model: checkpoints and runs that end early."""

import json
import shlex
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from qerl_pl.checkpoint import Weights, prepare
from qerl_pl.engine.base import EngineSpec
from qerl_pl.model import build_model
from qerl_pl.quantize import command, report
from qerl_pl.quantize.calibrated import _lean_attention, calibrate
from qerl_pl.quantize.quality import Checkpoint, unquantized, weight_errors
from qerl_pl.types import Sampling
from registry.quantization import NVFP4, Int4
from tests.quantized import (
    HELD_OUT,
    LENGTH,
    PROJECTIONS,
    TINY,
    arguments,
    dense,
    dense_base,
    drawn,
    reference,
    refused,
    run,
)

pytest.importorskip("llmcompressor", reason="needs llm-compressor: pip install 'qerl-pl[quantize]'")


@pytest.mark.parametrize("algorithm", ["rtn", "gptq", "awq"])
def test_a_checkpoint_that_fit_takes_as_it_is(made, algorithm):
    folder = made[algorithm]
    assert prepare(str(folder), NVFP4()) == folder
    assert len({file.stat().st_mode for file in folder.iterdir() if file.is_file()}) == 1  # tensors as all else
    weights, base = Weights(folder), Weights(TINY)
    assert {n.rpartition(".")[0] for n in weights if n.endswith(".weight_packed")} == set(PROJECTIONS)
    for layer in range(5):
        block = f"model.layers.{layer}"
        for group in ([f"self_attn.{p}_proj" for p in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]):
            assert len({weights[f"{block}.{name}.weight_global_scale"].item() for name in group}) == 1
    norms = [n for n in base if n.endswith("layernorm.weight")]
    assert all(torch.equal(weights[n], base[n]) for n in ("model.embed_tokens.weight", "model.norm.weight"))
    assert [torch.equal(weights[n], base[n]) for n in norms] == [algorithm != "awq"] * 10  # AWQ folds scales into them
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (folder / name).read_bytes() == (TINY / name).read_bytes()
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("quantization_config")["format"] == "nvfp4-pack-quantized"
    assert config == json.loads((TINY / "config.json").read_text())
    assert not [f for f in folder.parent.iterdir() if f.name.startswith(".")]


@pytest.mark.parametrize("algorithm", ["rtn", "gptq", "awq"])
def test_everybody_reads_the_same_numbers(made, algorithm):
    """The trainer, transformers with compressed-tensors, and an FP64 model by the tests' own dequantization."""
    ids = torch.tensor([AutoTokenizer.from_pretrained(TINY)("Tom has 3 apples and buys 14 more.")["input_ids"]])
    with torch.no_grad():
        expected = reference(made[algorithm])(ids).logits
        ours = build_model(made[algorithm], NVFP4(), torch.float32)(ids).logits
        theirs = AutoModelForCausalLM.from_pretrained(made[algorithm], dtype=torch.bfloat16)
        theirs(ids)  # decompresses
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=2e-4)
    for name, value in dense(made[algorithm]).items():
        assert torch.equal(theirs.get_parameter(name), value.bfloat16()), name


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None or torch.cuda.is_available(), reason="needs vLLM's CPU build")
def test_vllm_samples_with_the_folded_norms(made):
    from qerl_pl.engine.vllm import VLLMEngine

    prompt = AutoTokenizer.from_pretrained(TINY)("Tom has 3 apples and buys 14 more.")["input_ids"]
    engine = VLLMEngine(max_model_len=128, max_num_seqs=8, kv_cache_gb=0.05)
    engine.start(EngineSpec(made["awq"], NVFP4(), 8, 8.0, ("q_proj",)))
    ((completion, *_),) = engine.generate([prompt], Sampling(n=2, max_tokens=12), [3])
    engine.close()
    own = completion.token_ids
    with torch.no_grad():
        logp = reference(made["awq"])(torch.tensor([[*prompt, *own]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = logp.gather(-1, torch.tensor(own)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-4)


def test_rounding_is_what_fit_would_do(made, tmp_path):
    ours, theirs = Weights(made["rtn"]), Weights(prepare("tiny", NVFP4(), tmp_path))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n].view(torch.uint8), theirs[n].view(torch.uint8)) for n in ours)


def test_calibration_lowers_the_error_of_outputs(made, texts):
    """‖Y − Ŷ‖ of the first layer's projections behind a norm, on the very texts of the calibration."""
    chosen = drawn(texts)["calibration"].tokens
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64)
    inputs = {}
    first = model.model.layers[0]
    for name in ("input_layernorm", "post_attention_layernorm"):
        getattr(first, name).register_forward_hook(lambda _, __, out, name=name: inputs.update({name: out.detach()}))
    model(torch.tensor(chosen))
    base, numbers = dense_base(), {name: dense(folder) for name, folder in made.items()}

    def error(algorithm: str, norm: str, module: str) -> float:
        folded = numbers[algorithm][f"model.layers.0.{norm}.weight"] / base[f"model.layers.0.{norm}.weight"]
        seen = numbers[algorithm][f"model.layers.0.{module}.weight"].double() * folded.double()
        change = seen - base[f"model.layers.0.{module}.weight"].double()
        return (inputs[norm] @ change.T).norm().item()

    for module in ("q_proj", "k_proj", "v_proj"):
        rounded = error("rtn", "input_layernorm", f"self_attn.{module}")
        assert error("gptq", "input_layernorm", f"self_attn.{module}") < 0.9 * rounded, module
    assert error("gptq", "post_attention_layernorm", "mlp.gate_proj") < error(
        "rtn", "post_attention_layernorm", "mlp.gate_proj"
    )
    # AWQ looks at what comes out of the attention as a whole.
    outputs = {}
    first.self_attn.register_forward_hook(lambda _, __, out: outputs.update({"now": out[0].detach()}))
    model(torch.tensor(chosen))
    expected, changes = outputs["now"], {}
    for algorithm, found in numbers.items():
        with torch.no_grad():
            for name in ("input_layernorm", *(f"self_attn.{p}_proj" for p in "qkv")):
                first.get_submodule(name).weight.copy_(found[f"model.layers.0.{name}.weight"])
        model(torch.tensor(chosen))
        changes[algorithm] = (outputs["now"] - expected).norm().item()
    assert changes["awq"] < 0.97 * changes["rtn"], changes


@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
def test_no_attention_of_all_heads_is_kept(algorithm, texts, tmp_path, monkeypatch):
    """AWQ keeps what a block's attention returns for every sequence, with eager attention that is [heads, T, T] too."""
    returned, real = [], Qwen2Attention.forward

    def forward(self, *args, **kwargs):
        returned.append(real(self, *args, **kwargs))
        return returned[-1]

    monkeypatch.setattr(Qwen2Attention, "forward", forward)
    sequences = drawn(texts)["calibration"].tokens[:2]
    calibrate(TINY, NVFP4(), algorithm, sequences, tmp_path, lambda said: None)
    assert len(returned) >= 2 * 5
    assert all(weights is None for _, weights in returned)
    assert "eager" not in ALL_ATTENTION_FUNCTIONS


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_attention_that_the_kernel_does_not_compute(name):
    heads = torch.randn(1, 2, 3, 16)
    with _lean_attention(), pytest.raises(ValueError, match=f"Identity has {name}, .*--algorithm rtn"):
        ALL_ATTENTION_FUNCTIONS["eager"](torch.nn.Identity(), heads, heads, heads, None, **{name: 5.0})


def test_free_space_is_computed_to_the_byte_before_anything_starts(made):
    before, after = command.check_model("tiny", TINY, NVFP4())
    stored = sum(Weights(made["rtn"])[n].nbytes for n in Weights(made["rtn"]))
    assert (before, after) == ((TINY / "model.safetensors").stat().st_size, stored)


def test_an_interrupted_run_leaves_nothing(texts, tmp_path, monkeypatch):
    (tmp_path / ".out.unfinished").mkdir()  # of a run that was killed
    (tmp_path / ".out.unfinished" / "model-00001.safetensors").write_text("half")

    def write(folder, config, quantization, target):
        assert list(target.iterdir()) == []
        (target / "model-00001.safetensors").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "write", write)
    with pytest.raises(SystemExit) as caught:
        run(arguments(texts, output=tmp_path / "out"), monkeypatch)
    assert caught.value.code == 130
    assert list(tmp_path.iterdir()) == []


def stop(*_):
    raise KeyboardInterrupt


def test_an_interrupted_report_leaves_the_checkpoint(texts, tmp_path, monkeypatch, capsys):
    """And what is said then makes the report that would have been made."""
    words = arguments(texts, output=tmp_path / "out", sample_prompts=0, seed=3, num_samples=7)
    with monkeypatch.context() as patch:
        patch.setattr(report, "assess", stop)
        with pytest.raises(SystemExit):
            run(words, patch)
    assert prepare(str(tmp_path / "out"), NVFP4()) == tmp_path / "out"
    assert "no report yet" in (tmp_path / "out" / "README.md").read_text()
    said = capsys.readouterr().err.splitlines()[-1]
    about, _, command_ = said.partition(": ")
    assert about == f"stopped; the checkpoint in {tmp_path / 'out'} is complete, and this makes its report"
    again = shlex.split(command_)
    expected = {"model": "tiny", "report": tmp_path / "out", "calibration": texts, "max_length": LENGTH,
                "held_out": HELD_OUT, "sample_prompts": 0, "sample_tokens": 12, "seed": 3}  # fmt: skip
    assert again[:2] == ["qerl-pl", "quantize"]
    assert dict(zip(again[2::2], again[3::2], strict=True)) == {f"--{k}": str(v) for k, v in expected.items()}
    run(again[1:], monkeypatch)
    both = json.loads((tmp_path / "out" / "quality.json").read_text())
    assert both["made"]["algorithm"] == "rtn" and "perplexity" in (tmp_path / "out" / "README.md").read_text()
    before = {f: f.read_bytes() for f in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(report, "assess", stop)
    with pytest.raises(SystemExit):
        run(again[1:], monkeypatch)
    assert capsys.readouterr().err.splitlines()[-1] == f"stopped; {tmp_path / 'out'} is as it was"
    assert {f: f.read_bytes() for f in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("name", ["mxfp4", "int8", "fp8"])
def test_formats_need_no_code_in_the_command(name, texts, tmp_path):
    """Config groups come from the format; what llm-compressor wrote is checked against its layout, tensor by tensor."""
    from registry.quantization import FORMATS

    (tmp_path / "out").mkdir()
    tokens = drawn(texts)["calibration"].tokens[:4]
    calibrate(TINY, FORMATS[name](), "gptq", tokens, tmp_path / "out", lambda text: None)
    assert prepare(str(tmp_path / "out"), FORMATS[name]()) == tmp_path / "out"
    assert max(e for kind in errors(tmp_path / "out", FORMATS[name]()).values() for e in kind) < 0.5


def errors(folder, quantization):
    return weight_errors(unquantized(TINY), Checkpoint(folder, quantization))


def test_a_head_that_is_stored_although_it_is_tied(texts, tmp_path):
    from safetensors.torch import save_file

    shutil.copytree(TINY, tmp_path / "base")
    tensors = dict(Weights(TINY))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "out").mkdir()
    tokens = drawn(texts)["calibration"].tokens[:4]
    calibrate(tmp_path / "base", NVFP4(), "gptq", tokens, tmp_path / "out", lambda text: None)
    assert torch.equal(Weights(tmp_path / "out")["model.embed_tokens.weight"], tensors["lm_head.weight"])


def test_int4_in_groups_of_32(texts, tmp_path, monkeypatch):
    more = {"format": "int4", "group_size": 32, "algorithm": "awq", "num_samples": 4, "sample_prompts": 0}
    run(arguments(texts, output=tmp_path / "out", **more), monkeypatch)
    assert prepare(str(tmp_path / "out"), Int4(32)) == tmp_path / "out"
    assert (
        "--model.quantization int4 --model.quantization.group_size 32\n" in (tmp_path / "out" / "README.md").read_text()
    )


def test_int4_with_one_scale_an_output(texts, tmp_path, monkeypatch, capsys):
    """The advice of a report on it can be followed, and what is then run and said has the same setting."""
    given = {"format": "int4", "sample_prompts": 0, "group_size": "null"}
    with monkeypatch.context() as patch:
        patch.setattr(report, "assess", stop)
        with pytest.raises(SystemExit):
            run(arguments(texts, output=tmp_path / "out", **given), patch)
    assert prepare(str(tmp_path / "out"), Int4(None)) == tmp_path / "out"
    use = "--model.quantization int4 --model.quantization.group_size null\n"
    text = (tmp_path / "out" / "README.md").read_text()
    assert use in text
    words = shlex.split(text.partition("```bash\n")[2].splitlines()[0])
    (config,) = (words[i + 1] for i, word in enumerate(words) if word == "--config")  # the default data are a toy's
    assert (Path(__file__).parents[1] / config).is_file()
    again = shlex.split(capsys.readouterr().err.splitlines()[-1].partition(": ")[2])
    assert again[again.index("--group_size") + 1] == "null"
    said = refused(arguments(texts, report=tmp_path / "out", **given | {"group_size": 32}), capsys, monkeypatch)
    assert said.endswith("; give --format int4 and --group_size null")
    run(again[1:], monkeypatch)
    assert use in (tmp_path / "out" / "README.md").read_text()
    asked = []

    def test(words, run=subprocess.run, **how):
        if "qerl_pl" not in words:  # jsonargparse asks for sys.path
            return run(words, **how)
        asked.append(dict(zip(words[4::2], words[5::2], strict=True)).get("--model.quantization.group_size"))
        place = Path(words[words.index("--trainer.logger.save_dir") + 1]) / "results"
        place.mkdir()
        (place / "test.json").write_text("{}")
        return subprocess.CompletedProcess(words, len(asked) - 1, "enough")

    monkeypatch.setattr(subprocess, "run", test)
    (tmp_path / "task.yaml").write_text("data: {eval_samples: 1}")
    assert "enough" in refused([*again[1:], "--task", str(tmp_path / "task.yaml")], capsys, monkeypatch)
    assert asked == [None, "null"]


def test_a_group_size_that_is_none(texts, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(arguments(texts, output=tmp_path / "out", format="int4", group_size="all"), monkeypatch)
    assert "argument --group_size: 'all' must be a whole number or null" in capsys.readouterr().err


def test_a_format_beyond_compressed_tensors_is_rounded(texts, tmp_path, monkeypatch):
    run(arguments(texts, format="nf4", output=tmp_path / "out", sample_prompts=0), monkeypatch)
    from registry.quantization import NF4

    assert prepare(str(tmp_path / "out"), NF4()) == tmp_path / "out"
    assert "sampling_entropy" not in json.loads((tmp_path / "out" / "quality.json").read_text())["quality"]
