"""Norm noise: what it changes, how much, and that it goes away."""

import pytest
import torch

from qerl_pl.noise import NormNoise

WHICH = ("input_layernorm", "post_attention_layernorm")


def norms(layers=4, width=512, dtype=torch.float32):
    names = [f"model.layers.{i}.{kind}" for i in range(layers) for kind in WHICH] + ["model.norm"]
    generator = torch.Generator().manual_seed(0)
    return {name: (1 + 0.2 * torch.randn(width, generator=generator)).to(dtype) for name in names}


@pytest.mark.parametrize("sigma", [1e-2, 1e-3, 5e-4])
def test_size_and_exact_restoration(sigma):
    live = norms()
    clean = {n: w.clone() for n, w in live.items()}
    noise = NormNoise(live, WHICH, seed=0)
    applied = noise.apply(sigma, step=3)
    assert applied.modules == 8 and applied.sigma == sigma
    drawn = torch.cat([live[n] - clean[n] for n in live if n != "model.norm"])
    assert applied.realised == pytest.approx(float(drawn.square().mean().sqrt()), rel=1e-5)
    assert applied.realised == pytest.approx(sigma, rel=0.05)  # 4,096 draws: 1.1 % standard error
    assert torch.equal(live["model.norm"], clean["model.norm"])
    noise.apply(sigma, step=4)
    noise.restore()
    assert all(torch.equal(live[n], clean[n]) for n in live)


@pytest.mark.parametrize("sigma", [float("nan"), float("inf"), -1e-3, None])
def test_a_schedule_must_give_a_size(sigma):
    live = norms()
    clean = {n: w.clone() for n, w in live.items()}
    with pytest.raises(ValueError, match=rf"noise: the schedule gave sigma {sigma} for step 2; give a number from 0"):
        NormNoise(live, WHICH, seed=0).apply(sigma, step=2)
    assert all(torch.equal(live[n], clean[n]) for n in live)


def test_noise_replaces_noise_and_does_not_add_up():
    live = norms()
    noise = NormNoise(live, WHICH, seed=0)
    noise.apply(1e-2, 1)
    first = {n: w.clone() for n, w in live.items()}
    for step in range(2, 50):
        noise.apply(1e-2, step)
    noise.apply(1e-2, 1)
    assert all(torch.equal(live[n], first[n]) for n in live)


def test_seed_step_and_module_decide():
    def draw(seed, step, name):
        live = norms()
        clean = live[name].clone()
        NormNoise(live, WHICH, seed).apply(1e-2, step)
        return live[name] - clean

    one, other = "model.layers.0.input_layernorm", "model.layers.1.input_layernorm"
    torch.manual_seed(1)
    base = draw(0, 5, one)
    torch.manual_seed(2)  # the global generator plays no part
    assert torch.equal(base, draw(0, 5, one))
    different = (draw(1, 5, one), draw(0, 6, one), draw(0, 5, other))
    assert all(abs(float(torch.corrcoef(torch.stack([base, d]))[0, 1])) < 0.2 for d in different)


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    NormNoise(norms(), WHICH, 0).apply(1e-2, 0)
    assert torch.equal(before, torch.get_rng_state())


def test_no_module_is_an_error():
    with pytest.raises(
        ValueError, match=r"noise touches no module: none of 9 norms is named ln_1; found: input_layernorm, norm"
    ):
        NormNoise(norms(), ("ln_1",), 0)


def test_bf16_norms_are_refused():
    # In BF16 a weight in [1, 2) keeps nothing of σ = 5e-4.
    weight = torch.full((4096,), 1.5, dtype=torch.bfloat16)
    assert (weight + 5e-4 * torch.randn(4096).bfloat16() != weight).float().mean() < 0.01
    with pytest.raises(ValueError, match=r"torch\.bfloat16, which rounds small noise away"):
        NormNoise(norms(dtype=torch.bfloat16), WHICH, 0)


def test_zero_restores():
    live = norms()
    clean = {n: w.clone() for n, w in live.items()}
    noise = NormNoise(live, WHICH, 0)
    noise.apply(0.1, 0)
    assert noise.apply(0.0, 1).modules == 0
    assert all(torch.equal(live[n], clean[n]) for n in live)
