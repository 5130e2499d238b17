"""The embedded model, as a user's transformers loads it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import qerl_pl
from registry.prompts import Arithmetic
from registry.prompts.arithmetic import worked_solution

FOLDER = Path(qerl_pl.__file__).parent / "assets" / "tiny"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER)


def chat(row: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["prompt"]}]


def test_size() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 8 * 2**20


def test_model_fits_every_format_and_engine(model: PreTrainedModel) -> None:
    assert model.dtype == torch.bfloat16
    assert type(model).__name__ == "Qwen2ForCausalLM"
    heads = model.config.num_attention_heads
    assert model.config.hidden_size // heads >= 32  # smaller heads crash some attention kernels
    linears = [module for module in model.model.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 7 * model.config.num_hidden_layers
    assert all(linear.in_features % 32 == 0 for linear in linears)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tokenizer_gives_back_every_text(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    assert tokenizer.is_fast
    assert len(tokenizer) == model.config.vocab_size
    source = Arithmetic("test", size=200)
    for i, row in enumerate(source):
        for text in (row["prompt"], worked_solution(source.problem(i))):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text
            assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
            # No piece of a word: all tokens are words (with the space before them), marks, or single characters.
            assert len(ids) == len(re.findall(r"</?[a-z]+>| [-+*=;] | ?[A-Za-z]+|[\d.,? ]", text))
    unknown = "Zoë ate ½ of it.\n"
    assert tokenizer.decode(tokenizer.encode(unknown)) == unknown


def test_tokens_of_a_solution(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer.tokenize("<think>67 + 17 = 84</think><answer>84</answer>")
    assert "|".join(tokens) == "<think>|6|7| + |1|7| = |8|4|</think>|<answer>|8|4|</answer>"
    assert not set(TAGS) & set(tokenizer.all_special_tokens)


def test_chat_template(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    messages = [
        {"role": "system", "content": "Think first."},
        {"role": "user", "content": "Anna has 2 pens."},
        {"role": "assistant", "content": "<answer>2</answer>"},
    ]
    render = tokenizer.apply_chat_template
    assert render(messages, tokenize=False) == "<|user|>Anna has 2 pens.<|assistant|><answer>2</answer><|end|>"
    assert render(messages[:2], tokenize=False, add_generation_prompt=True) == "<|user|>Anna has 2 pens.<|assistant|>"
    ids = render(messages[:2], add_generation_prompt=True, return_dict=False)
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<|assistant|>")
    assert tokenizer.eos_token == "<|end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


def test_greedy_answers_held_out_problems(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = list(Arithmetic("validation", size=20, seed=1))
    inputs = tokenizer.apply_chat_template(
        [chat(row) for row in rows], add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    tokens = model.generate(**inputs, max_new_tokens=32, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    assert (tokens == tokenizer.eos_token_id).any(-1).all()
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    answers = [re.fullmatch(r"<think>.+</think><answer>(\d+)</answer>", text) for text in texts]
    assert all(answers)
    assert sum(answer[1] == row["answer"] for answer, row in zip(answers, rows, strict=True)) >= 14
