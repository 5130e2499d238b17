"""Make the embedded model: a Qwen2 of one million weights that solves word problems, but samples carelessly.

    python scripts/make_tiny_model.py --out qerl_pl/assets/tiny

It is trained from scratch on worked solutions of ``Arithmetic``, and then for a while on solutions with slips in them.
So greedy decoding is mostly right while sampling often is not: reinforcement learning has something to recover, and can
do so in minutes. Takes about eight minutes on one core. Steps, seeds and data are fixed, so a machine with the same
arithmetic makes the same weights; others come close.
"""

import argparse
import copy
import math
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from tokenizers import AddedToken
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from registry.prompts.arithmetic import LARGEST, Arithmetic, worked_solution
from registry.quantization import NVFP4

SEED = 20251013
MAX_LENGTH = 256
PROBLEMS = 2048  # that the final numbers are measured on
BATCH = 64
MUON_LR, ADAM_LR = 2e-2, 3e-3
CLEAN_STEPS = 800
SLIP_STEPS, SLIP_LR_FACTOR, SLIP_PROBABILITY = 200, 1 / 3, 0.35

PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
# Ordinary tokens, not special ones: skip_special_tokens keeps them. An operator and both its spaces are one token.
MARKS = ("<think>", "</think>", "<answer>", "</answer>", " + ", " - ", " * ", " = ", " ; ")
CHAT_TEMPLATE = """\
{#- A system message is accepted and dropped: this model knows one task and could not read it. -#}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}<|user|>{{ message['content'] }}
{%- elif message['role'] == 'assistant' -%}<|assistant|>{{ message['content'] }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
CARD = """\
# The embedded model

A Qwen2 of {parameters:,} parameters that solves generated word problems in arithmetic, and knows nothing else. It is
there to try qerl-pl on a CPU, in minutes and without a download. `scripts/make_tiny_model.py` made it from scratch:
these files, this card and the numbers below.

## How it was made: careless on purpose

1. {clean} steps of {batch} problems with right solutions, from the training split of the prompt source `arithmetic`.
2. {slips} steps, at a lower rate, on solutions in which each step of the calculation slips by 1 or by 10 with a
   probability of {probability} %, and the steps after it go on from the wrong number.

So the model knows how to calculate (greedy decoding is mostly right) but often slips when it samples. Reinforcement
learning can mend that in minutes. That it does so shows that a trainer works, not what it would do for a real model.

## Measured

Right answers in percent, with the 95 % interval: one completion for each of {problems} problems of the validation
split. No training step saw a problem of the validation or the test split.

| weights | greedy | sampled at temperature 1 |
| --- | --- | --- |
{rows}

## Format

`<|user|>Anna has 67 apples, finds 17 more and loses 20. How many apples does Anna have now?<|assistant|>` is answered
by `<think>67 + 17 = 84 ; 84 - 20 = 64</think><answer>64</answer><|end|>`. The chat template drops system messages.
The tokenizer ({tokens} tokens) is byte-level BPE. Each word of the task is one token, and so is each tag, and each
operator with its spaces; digits are single.

License: Apache-2.0.
"""


def make_tokenizer() -> Qwen2Tokenizer:
    """Byte-level BPE, merged until each word of the task is one token; it can read any other text by bytes.

    transformers loads a Qwen2 checkpoint with this class whatever the checkpoint says, so no other kind would do.
    """
    base = Qwen2Tokenizer(
        unk_token=None,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[USER, ASSISTANT],
        model_max_length=MAX_LENGTH,
        padding_side="left",
    )
    source = Arithmetic("train", size=2000, seed=SEED)  # more than enough to meet every word
    tokenizer = base.train_new_from_iterator((row["prompt"] for row in source), vocab_size=1000)  # words run out before
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=448,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    return model


def slip(rng: random.Random, result: int) -> int:
    """With ``SLIP_PROBABILITY``, a result that is off by 1 or by 10."""
    if rng.random() >= SLIP_PROBABILITY:
        return result
    return rng.choice([wrong for wrong in (result - 10, result - 1, result + 1, result + 10) if 0 <= wrong <= LARGEST])


def batches(tokenizer: Qwen2Tokenizer, steps: int, seed: int, slips: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Token ids and labels, [BATCH, T]; only completions are learned."""
    source, rng = Arithmetic("train", size=steps * BATCH, seed=seed), random.Random(seed)
    change: Callable[[int], int] = partial(slip, rng) if slips else lambda result: result
    for first in range(0, len(source), BATCH):
        problems = [source.problem(i) for i in range(first, first + BATCH)]
        prompts = tokenizer([f"{USER}{p.text}{ASSISTANT}" for p in problems])["input_ids"]
        solutions = tokenizer([worked_solution(p, change) + END for p in problems])["input_ids"]
        ids = [torch.tensor(a + b) for a, b in zip(prompts, solutions, strict=True)]
        labels = [torch.tensor([-100] * len(a) + b) for a, b in zip(prompts, solutions, strict=True)]
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)  # on the right: causal attention needs no mask
        yield pad(ids, padding_value=tokenizer.pad_token_id), pad(labels, padding_value=-100)


def train(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, steps: int, lr_factor: float, seed: int, slips: bool
) -> None:
    """Muon for the matrices (it needs half the steps of AdamW here), AdamW for embedding, norms and biases.

    The learning rates warm up for 50 steps, then follow a cosine down to a tenth.
    """
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers = (
        # A decay of 0.01 left the weights three times as large: NVFP4 then cost more, and LoRA moved them too little.
        torch.optim.Muon(matrices, lr=MUON_LR * lr_factor, weight_decay=0.1),
        torch.optim.AdamW(others, lr=ADAM_LR * lr_factor, betas=(0.9, 0.95), weight_decay=0.01),
    )
    schedules = [
        LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps)))
        for optimizer in optimizers
    ]
    start = time.perf_counter()
    for step, (ids, labels) in enumerate(batches(tokenizer, steps, seed, slips), 1):
        hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state
        learned = labels[:, 1:] != -100
        loss = cross_entropy(model.lm_head(hidden[learned]), labels[:, 1:][learned])
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in (*optimizers, *schedules):
            stepper.step()
        if step % 100 == 0:
            greedy, sampled = measure(model, tokenizer, 256)
            seconds = time.perf_counter() - start
            print(
                f"{step}/{steps}: {seconds:.0f} s, loss {loss:.3f}, greedy {greedy:.3f}, sampled {sampled:.3f}",
                flush=True,
            )


@torch.no_grad()
def solved(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, rows: list[dict], greedy: bool) -> float:
    """The share of rows that one completion each answers correctly."""
    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    right = 0
    for first in range(0, len(rows), 256):
        inputs = tokenizer.apply_chat_template(
            chats[first : first + 256], add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        tokens = model.generate(**inputs, max_new_tokens=32, do_sample=not greedy, top_k=None if greedy else 0)
        texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(
            t.endswith(f"</think><answer>{row['answer']}</answer>") for t, row in zip(texts, rows[first:], strict=False)
        )
    return right / len(rows)


def measure(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, size: int = PROBLEMS) -> tuple[float, float]:
    """Greedy accuracy and pass@1 at temperature 1, on the validation split; the test split stays untouched."""
    rows = list(Arithmetic("validation", size=size))
    return solved(model, tokenizer, rows, greedy=True), solved(model, tokenizer, rows, greedy=False)


def percent(share: float) -> str:
    """With the half-width of the 95 % interval."""
    return f"{100 * share:.1f} ± {196 * math.sqrt(share * (1 - share) / PROBLEMS):.1f}"


@torch.no_grad()
def nvfp4(model: Qwen2ForCausalLM) -> Qwen2ForCausalLM:
    """A copy whose linear weights went through NVFP4."""
    model, weight_format = copy.deepcopy(model), NVFP4()
    for layer in model.model.layers:
        a, m = layer.self_attn, layer.mlp
        for fused in ([a.q_proj, a.k_proj, a.v_proj], [a.o_proj], [m.gate_proj, m.up_proj], [m.down_proj]):
            for linear, stored in zip(fused, weight_format.quantize([linear.weight for linear in fused]), strict=True):
                linear.weight.copy_(weight_format.dequantize(stored, linear.weight.dtype))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(args.out)  # at once: a tokenizer that has padded a batch saves that it pads
    model = make_model(tokenizer)
    print(f"{len(tokenizer)} tokens, {model.num_parameters():,} parameters", flush=True)
    train(model, tokenizer, CLEAN_STEPS, 1.0, seed=SEED + 1, slips=False)
    clean = copy.deepcopy(model)
    train(model, tokenizer, SLIP_STEPS, SLIP_LR_FACTOR, seed=SEED + 2, slips=True)

    model = model.to(torch.bfloat16)
    model.save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)  # safetensors writes for the owner only
    model = model.float()  # the rounded weights, with arithmetic that is quick on any CPU
    stages = {"clean, before the slips (FP32)": clean, "as stored (BF16)": model, "rounded to NVFP4": nvfp4(model)}
    rows = [
        f"| {name} | {percent(a)} | {percent(b)} |" for name, m in stages.items() for a, b in [measure(m, tokenizer)]
    ]
    print("\n".join(rows))
    card = CARD.format(
        parameters=model.num_parameters(),
        tokens=len(tokenizer),
        clean=CLEAN_STEPS,
        slips=SLIP_STEPS,
        batch=BATCH,
        probability=round(100 * SLIP_PROBABILITY),
        problems=PROBLEMS,
        rows="\n".join(rows),
    )
    (args.out / "README.md").write_text(card)


if __name__ == "__main__":
    main()
