"""qerl-pl quantize on the embedded model: checkpoints, what the report says of them, and what is refused."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_pl.checkpoint import Weights, prepare, resolve
from qerl_pl.cli import main
from qerl_pl.engine.base import EngineSpec
from qerl_pl.engine.transformers import TransformersEngine
from qerl_pl.model import build_model
from qerl_pl.quantize import command
from qerl_pl.quantize.calibrated import calibrate
from qerl_pl.quantize.calibration import Source, conversation, draw
from qerl_pl.quantize.quality import Checkpoint, sampling_entropy, unquantized, weight_errors
from qerl_pl.seeds import derive_seed
from qerl_pl.types import Sampling
from registry.prompts.arithmetic import Arithmetic, worked_solution
from registry.quantization import BF16, NVFP4
from tests.reference import dequantize_nvfp4, llama, write_checkpoint

pytest.importorskip("llmcompressor", reason="needs llm-compressor: pip install 'qerl-pl[quantize]'")

TINY = resolve("tiny")
LENGTH, HELD_OUT, SAMPLES = 96, 4, 12
KEYS = ("weight_packed", "weight_scale", "weight_global_scale")
PROJECTIONS = [
    f"model.layers.{i}.{name}"
    for i in range(5)
    for name in (*(f"self_attn.{p}_proj" for p in "qkvo"), *(f"mlp.{p}_proj" for p in ("gate", "up", "down")))
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Problems of the embedded task with worked solutions, as the embedded model was trained on."""
    source = Arithmetic("train", size=200)
    path = tmp_path_factory.mktemp("texts") / "worked.jsonl"
    rows = [{"prompt": row["prompt"], "solution": worked_solution(source.problem(i))} for i, row in enumerate(source)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(texts: Path, **more: object) -> list[str]:
    given = {
        "model": "tiny", "algorithm": "rtn", "calibration": texts, "num_samples": SAMPLES, "max_length": LENGTH,
        "held_out": HELD_OUT, "sample_prompts": 6, "sample_tokens": 12,
    } | more  # fmt: skip
    return ["quantize", *(word for name, value in given.items() for word in (f"--{name}", str(value)))]


def run(words, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["qerl-pl"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    main(words)


@pytest.fixture(scope="module")
def made(texts, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        for algorithm in ("rtn", "gptq", "awq"):
            run(arguments(texts, algorithm=algorithm, output=folder / algorithm), patch)
    return {name: folder / name for name in ("rtn", "gptq", "awq")}


def dense(folder: Path) -> dict[str, torch.Tensor]:
    """Numbers of a checkpoint, FP32, by the tests' own dequantization."""
    weights = Weights(folder)
    found = {n: weights[n].float() for n in weights if n.rpartition(".")[2] not in KEYS}
    packed = {n.rpartition(".")[0] for n in weights} - {n.rpartition(".")[0] for n in found if "weight" in n}
    for name in packed:
        if f"{name}.weight_packed" in weights:
            found[f"{name}.weight"] = dequantize_nvfp4({k: weights[f"{name}.{k}"] for k in KEYS})
    return found


def reference(folder: Path) -> torch.nn.Module:
    """Hugging Face's model in FP64 with the numbers of a checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64, attn_implementation="eager")
    missing, unexpected = model.load_state_dict(dense(folder), strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    return model.eval()


@pytest.mark.parametrize("algorithm", ["rtn", "gptq", "awq"])
def test_a_checkpoint_that_fit_takes_as_it_is(made, algorithm):
    folder = made[algorithm]
    assert prepare(str(folder), NVFP4()) == folder
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


def dense_base() -> dict[str, torch.Tensor]:
    weights = Weights(TINY)
    return {n: weights[n].float() for n in weights}


def drawn(texts: Path):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    wanted = {"held_out": (HELD_OUT, LENGTH), "calibration": (SAMPLES, LENGTH)}
    return draw(tokenizer, Source(str(texts), 0), wanted)[0]


@pytest.mark.parametrize("algorithm", ["rtn", "awq"])
def test_the_report_is_what_an_independent_computation_gives(made, texts, algorithm):
    said = json.loads((made[algorithm] / "quality.json").read_text())["quality"]["held_out"]
    tokens = torch.tensor(drawn(texts)["held_out"].tokens)
    with torch.no_grad():
        p, q = (reference(f)(tokens).logits[:, :-1].log_softmax(-1) for f in (TINY, made[algorithm]))
    kl = (p.exp() * (p - q)).sum(-1).mean(-1)
    assert said["kl"]["value"] == pytest.approx(kl.mean().item(), rel=1e-4)
    assert said["kl_by_sequence"] == pytest.approx(kl.tolist(), rel=1e-3)
    half = 3.182446305284263 * kl.std().item() / math.sqrt(HELD_OUT)  # t for three degrees of freedom
    assert said["kl"]["high"] - said["kl"]["value"] == pytest.approx(half, rel=1e-3)
    for name, x in (("base", p), ("quantized", q)):
        nll = -x.gather(-1, tokens[:, 1:, None]).mean()
        assert said["perplexity"][name] == pytest.approx(math.exp(nll), rel=1e-5)
        assert said["entropy"][name] == pytest.approx(-(x.exp() * x).sum(-1).mean().item(), rel=1e-5)


def test_entropy_of_own_samples(made):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    prompts = [tokenizer(text)["input_ids"] for text in ("Tom has 3 apples.", "Ann reads 12 pages a day")]
    found = sampling_entropy(Checkpoint(made["gptq"], NVFP4()), prompts, 7, 5, "cpu", torch.float32)
    engine = TransformersEngine()
    engine.start(EngineSpec(made["gptq"], NVFP4(), 1, 1.0, ("q_proj",)))
    groups = engine.generate(prompts, Sampling(max_tokens=7), [derive_seed("entropy", 5, i) for i in range(2)])
    model = reference(made["gptq"])
    for prompt, (completion,), value in zip(prompts, groups, found, strict=True):
        own = completion.token_ids
        logp = model(torch.tensor([[*prompt, *own]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)  # [own, V]
        assert value == pytest.approx(-(logp.exp() * logp).sum(-1).mean().item(), rel=1e-4)


def test_weight_errors_of_rounding(made):
    said = json.loads((made["rtn"] / "quality.json").read_text())["quality"]["weight_error"]
    ours, base = dense(made["rtn"]), dense_base()
    for kind in ("q_proj", "o_proj", "down_proj"):
        names = [f"{n}.weight" for n in PROJECTIONS if n.endswith(kind)]
        expected = [((ours[n] - base[n]).norm() / base[n].norm()).item() for n in names]
        assert said[kind]["by_layer"] == pytest.approx(expected, rel=1e-5)
        assert said[kind]["mean"] == pytest.approx(sum(expected) / 5, rel=1e-5)


def test_weight_errors_with_folded_scales(tmp_path):
    """A checkpoint whose channel scales are known is compared as if they were taken out again."""
    from safetensors.torch import load_file, save_file

    base = write_checkpoint(tmp_path / "base", llama(), BF16())
    shutil.copytree(tmp_path / "base", tmp_path / "folded")
    tensors = load_file(tmp_path / "folded" / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    expected, block = {}, "model.layers.0"

    def scale(size: int) -> torch.Tensor:
        return 2.0 ** torch.randint(-1, 2, (size,), generator=generator)  # powers of two: exact in BF16

    behind = {"input_layernorm": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
              "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj"]}  # fmt: skip
    columns = {}
    for norm, modules in behind.items():
        s = scale(128)
        tensors[f"{block}.{norm}.weight"] /= s
        columns |= dict.fromkeys(modules, s)
    columns["mlp.down_proj"] = t = scale(192)
    rows = {"mlp.up_proj": t}
    for module, s in columns.items():
        tensors[f"{block}.{module}.weight"] *= s / rows.get(module, torch.ones(1)).unsqueeze(-1)
    groups = [list(v) for v in behind.values()] + [["mlp.down_proj"]]
    for group in groups:
        stored = NVFP4().quantize([tensors.pop(f"{block}.{m}.weight") for m in group])
        for module, part in zip(group, stored, strict=True):
            tensors |= {f"{block}.{module}.{key}": value.contiguous() for key, value in part.items()}
            seen = dequantize_nvfp4(part) / columns[module] * rows.get(module, torch.ones(1)).unsqueeze(-1)
            true = base[f"{block}.{module}.weight"]
            expected[module] = ((seen - true).norm() / true.norm()).item()
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "folded" / "model.safetensors")
    found = weight_errors(unquantized(tmp_path / "base"), Checkpoint(tmp_path / "folded", NVFP4()))
    for module, error in expected.items():
        fitted = module in ("mlp.up_proj", "mlp.down_proj")
        assert found[module.rpartition(".")[2]][0] == pytest.approx(error, rel=0.03 if fitted else 1e-5), module
        assert found[module.rpartition(".")[2]][1] == pytest.approx(0, abs=1e-6)  # the other layer was not touched


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
    with pytest.raises(ValueError, match=r"t\.txt has 8 of 3 × 4 = 12 tokens for calibration, after 3 tokens for held"):
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


def test_the_card_says_what_was_done(made, texts):
    both = json.loads((made["gptq"] / "quality.json").read_text())
    calibration, held = both["made"]["calibration"], both["made"]["held_out"]
    assert (calibration["sequences"], calibration["length"], calibration["tokens"]) == (SAMPLES, LENGTH, 1152)
    assert (held["sequences"], held["tokens"]) == (HELD_OUT, 384)
    # Counted again: whole texts in the shuffled order until each sequence is full.
    tokenizer, rows = AutoTokenizer.from_pretrained(TINY), [json.loads(line) for line in texts.open()]
    order, used = iter(Source(str(texts), 0).order), []
    for purpose in (HELD_OUT, SAMPLES):
        used.append(0)
        for _ in range(purpose):
            tokens = 0
            while tokens < LENGTH:
                row = rows[next(order)]
                chat = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["solution"]}]
                tokens += len(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False))
                used[-1] += 1
    assert [held["texts"], calibration["texts"]] == used
    assert calibration["positions"] == [used[0], sum(used)]
    sizes = both["made"]["bytes"]
    assert sizes["after"] == sum(f.stat().st_size for f in made["gptq"].glob("*.safetensors"))
    assert sizes["before"] == (TINY / "model.safetensors").stat().st_size
    text = (made["gptq"] / "README.md").read_text()
    for words in (
        "base_model: tiny", "GPTQ (arXiv 2210.17323)", f"{used[1]} texts", "12 sequences × 96 = 1,152 tokens of ",
        "llmcompressor 0.14", "nvfp4-pack-quantized, 4-bit float groups of 16", "gptq: dampening_frac", "--num_samples 12",
        f"{both['quality']['held_out']['kl']['value']:.4f} (",
    ):  # fmt: skip
        assert words in text, words
    assert (made["gptq"] / "quality.md").read_text().startswith("# nvfp4 of tiny\n")
    assert (made["gptq"] / "quality.png").stat().st_size > 10_000


def test_free_space_is_computed_to_the_byte_before_anything_starts(made):
    before, after = command.check_model("tiny", TINY, NVFP4())
    stored = sum(Weights(made["rtn"])[n].nbytes for n in Weights(made["rtn"]))
    assert (before, after) == ((TINY / "model.safetensors").stat().st_size, stored)


def test_a_report_on_a_checkpoint_that_is_there(made, texts, tmp_path, monkeypatch, capsys):
    shutil.copytree(made["awq"], tmp_path / "there")
    first = json.loads((tmp_path / "there" / "quality.json").read_text())
    run(arguments(texts, report=tmp_path / "there"), monkeypatch)
    again = json.loads((tmp_path / "there" / "quality.json").read_text())
    assert again == first
    (tmp_path / "there" / "quality.json").unlink()  # as of a checkpoint that others made
    run(arguments(texts, report=tmp_path / "there", held_out=20), monkeypatch)
    said = json.loads((tmp_path / "there" / "quality.json").read_text())["made"]
    assert said["algorithm"] == "not known" and "is not known" in said["held_out"]["why"]
    shutil.copy(made["awq"] / "quality.json", tmp_path / "there")
    with pytest.raises(SystemExit):
        run(arguments(texts, report=tmp_path / "there", held_out=5), monkeypatch)
    assert "--held_out 5 × 96 reaches into the texts" in capsys.readouterr().err


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


def _model(tmp_path, **changed):
    shutil.copytree(TINY, tmp_path / "model")
    config = json.loads((TINY / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | changed))
    return tmp_path / "model"


def refused(words, capsys, monkeypatch) -> str:
    monkeypatch.delenv("QERL_PL_DEBUG", raising=False)
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        run(words, monkeypatch)
    assert caught.value.code == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("qerl-pl: error:")]
    assert len(said) == 1
    return said[0]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"format": "nvpf4"}, "unknown quantization format 'nvpf4'. Did you mean 'nvfp4'?"),
        ({"format": "bf16"}, "--format bf16 is no quantization"),
        ({"format": "nf4", "algorithm": "awq"}, "compressed-tensors, and nf4 is none; use --algorithm rtn"),
        ({"algorithm": "gtpq"}, "unknown algorithm 'gtpq'. Did you mean 'gptq'?"),
        ({"num_samples": 4000, "algorithm": "awq"}, "calibration shorter than asked: "),
        ({"max_length": 512}, "--max_length 512 is more than the 256 tokens that the model knows"),
        ({"num_samples": 0}, "--num_samples 0 must be at least 2"),
        ({"format": "int4"}, "mlp.down_proj: input dimension 448 is not a multiple of 128"),
        ({"model": "./nowhere"}, "there is no folder './nowhere'"),
        ({"model": "random:tiny-test"}, "has random weights: nothing to calibrate"),
        ({"calibration": "nowhere.txt"}, "there is no file nowhere.txt"),
        ({"calibration": "gsm9k"}, "unknown prompt source 'gsm9k'. Did you mean 'gsm8k'?"),
        ({"report": "x"}, "give --output DIR, to quantize, or --report DIR"),
    ],
    ids=str,
)  # fmt: skip
def test_one_line(changed, expected, texts, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("QERL_PL_CACHE", str(tmp_path / "cache"))
    assert expected in refused(arguments(texts, **{"output": tmp_path / "out"} | changed), capsys, monkeypatch)
    assert not (tmp_path / "out").exists()


def test_models_that_are_refused(made, texts, tmp_path, capsys, monkeypatch):
    said = refused(arguments(texts, model=made["awq"], output=tmp_path / "out"), capsys, monkeypatch)
    assert "is quantized already (nvfp4-pack-quantized, 4-bit float groups of 16); name the BF16 model" in said
    other = _model(tmp_path, num_hidden_layers=6, model_type="phi3")
    said = refused(arguments(texts, model=other, output=tmp_path / "out"), capsys, monkeypatch)
    assert "(phi3): layer 5 lacks down_proj, gate_proj, k_proj" in said


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
    said = refused(arguments(texts, algorithm="gptq", output=tmp_path / "out"), capsys, monkeypatch)
    assert "pip install 'qerl-pl[quantize]', or use --algorithm rtn" in said


@pytest.mark.parametrize("name", ["mxfp4", "int8", "fp8"])
def test_formats_need_no_code_in_the_command(name, texts, tmp_path):
    """Config groups come from the format; what llm-compressor wrote is checked against its layout, tensor by tensor."""
    from registry.quantization import FORMATS

    (tmp_path / "out").mkdir()
    calibrate(TINY, FORMATS[name](), "gptq", drawn(texts)["calibration"].tokens[:4], tmp_path / "out", lambda text: None)
    assert prepare(str(tmp_path / "out"), FORMATS[name]()) == tmp_path / "out"
    assert max(e for kind in errors(tmp_path / "out", FORMATS[name]()).values() for e in kind) < 0.5


def errors(folder, quantization):
    return weight_errors(unquantized(TINY), Checkpoint(folder, quantization))


def test_a_format_beyond_compressed_tensors_is_rounded(texts, tmp_path, monkeypatch):
    run(arguments(texts, format="nf4", output=tmp_path / "out", sample_prompts=0), monkeypatch)
    from registry.quantization import NF4

    assert prepare(str(tmp_path / "out"), NF4()) == tmp_path / "out"
    assert "sampling_entropy" not in json.loads((tmp_path / "out" / "quality.json").read_text())["quality"]
