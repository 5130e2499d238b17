"""The transformers engine against Hugging Face + PEFT; its sampling against the distribution it should draw from."""

import pytest
import torch

from qerl_pl.engine import EngineSpec, TransformersEngine
from qerl_pl.engine.transformers import draw
from qerl_pl.noise import NormNoise
from qerl_pl.types import Sampling
from registry.quantization import BF16, NVFP4
from tests.reference import ALPHA, EOS, RANK, TARGETS, Reference, llama, qwen2, random_adapter, write_checkpoint

PROMPTS = [[2 + (7 * i + 3 * j) % 97 for j in range(5 + i)] for i in range(4)]
SAMPLING = Sampling(n=4, max_tokens=16)
SEEDS = [11, 12, 13, 14]


@pytest.fixture(
    scope="module",
    params=[(qwen2, NVFP4(), False), (qwen2, NVFP4(), True), (qwen2, BF16(), False), (llama, NVFP4(), False)],
    ids=["qwen2-nvfp4", "qwen2-nvfp4-packed", "qwen2-bf16", "llama-nvfp4"],
)
def case(request, tmp_path_factory):
    make, format_, packed = request.param
    folder = tmp_path_factory.mktemp("engine") / "model"
    reference = Reference(make(), write_checkpoint(folder, make(), format_))
    engine = TransformersEngine(packed=packed)
    engine.start(EngineSpec(folder, format_, RANK, ALPHA, TARGETS))
    return engine, reference


@torch.no_grad()
def test_logprobs_with_adapter_and_noise(case):
    engine, reference = case
    adapter = random_adapter(reference, 3)
    reference.set_adapter(adapter)
    engine.load_adapter(adapter)
    engine.refresh()
    clean = engine.generate(PROMPTS, SAMPLING, SEEDS)
    assert reference.worst(PROMPTS, clean) < 1e-4
    noise = NormNoise(engine.norms(), ("input_layernorm", "post_attention_layernorm"), seed=0)
    same = NormNoise(reference.norms, ("input_layernorm", "post_attention_layernorm"), seed=0)
    noise.apply(0.05, 1)
    noisy = engine.generate(PROMPTS, SAMPLING, SEEDS)
    assert reference.worst(PROMPTS, noisy) > 1e-2  # the reference has no noise yet
    same.apply(0.05, 1)
    assert reference.worst(PROMPTS, noisy) < 1e-4
    noise.restore()
    same.restore()
    again = engine.generate(PROMPTS, SAMPLING, SEEDS)
    assert [[c.token_ids for c in g] for g in again] == [[c.token_ids for c in g] for g in clean]


def test_temperature_and_top_p(case):
    engine, reference = case
    reference.set_adapter(engine.adapter())
    groups = engine.generate(PROMPTS, Sampling(n=3, max_tokens=12, temperature=0.7, top_p=0.8), SEEDS)
    assert reference.worst(PROMPTS, groups, temperature=0.7, top_p=0.8) < 1e-4


def test_greedy(case):
    engine, reference = case
    reference.set_adapter(engine.adapter())
    completion = engine.generate(PROMPTS[:1], Sampling(n=1, max_tokens=8, temperature=0.0), SEEDS[:1])[0][0]
    ids = list(PROMPTS[0])
    for token in completion.token_ids:
        assert token == int(reference.peft(torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)


def test_seeds_decide_and_siblings_differ(case):
    engine, _ = case
    first = engine.generate(PROMPTS, SAMPLING, SEEDS)
    again = engine.generate(PROMPTS, SAMPLING, SEEDS)
    other = engine.generate(PROMPTS, SAMPLING, [s + 1 for s in SEEDS])
    assert first == again
    assert first != other
    assert all(len({tuple(c.token_ids) for c in group}) == 4 for group in first)
    one_by_one = [engine.generate([p], SAMPLING, [s])[0] for p, s in zip(PROMPTS, SEEDS, strict=True)]
    assert [[c.token_ids for c in g] for g in one_by_one] == [[c.token_ids for c in g] for g in first]


def test_end_token_and_length_limit(case):
    engine, _ = case
    flat = [c for g in engine.generate(PROMPTS, Sampling(n=16, max_tokens=40), SEEDS) for c in g]
    ended = [c for c in flat if c.finished]
    assert ended and all(c.token_ids[-1] == EOS and EOS not in c.token_ids[:-1] for c in ended)
    assert all(len(c.token_ids) == 40 and EOS not in c.token_ids for c in flat if not c.finished)
    assert all(len(c.logprobs) == len(c.token_ids) for c in flat)
    assert all("<eos>" not in c.text for c in flat)


def test_batches_of_any_size_give_the_same(case):
    engine, _ = case
    whole = engine.generate(PROMPTS, SAMPLING, SEEDS)
    engine.max_batch = 8
    parts = engine.generate(PROMPTS, SAMPLING, SEEDS)
    engine.max_batch = 256
    assert [[c.token_ids for c in g] for g in parts] == [[c.token_ids for c in g] for g in whole]


def test_draw_follows_the_distribution():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0]).log().expand(40000, 5)
    uniform = torch.rand(40000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens, logprobs = draw(logits, uniform, Sampling())
    share = tokens.bincount(minlength=5) / 40000
    assert share.tolist() == pytest.approx([0.5, 0.25, 0.125, 0.125, 0.0], abs=0.01)
    assert logprobs[tokens == 1].exp().mean().item() == pytest.approx(0.25)
    # by hand: the distribution function is .5, .75, .875, 1, 1
    picked, _ = draw(logits[:5], torch.tensor([0.0, 0.499, 0.501, 0.8, 0.9999999999], dtype=torch.float64), Sampling())
    assert picked.tolist() == [0, 0, 1, 2, 3]
    # top-p 0.7 keeps the first two: 2/3 and 1/3
    _, kept = draw(logits[:2], torch.tensor([0.1, 0.9], dtype=torch.float64), Sampling(top_p=0.7))
    assert kept.exp().tolist() == pytest.approx([2 / 3, 1 / 3])


def test_not_started():
    with pytest.raises(RuntimeError, match="has not been started"):
        TransformersEngine().norms()
