"""Chat templates: what stands in a prompt, and which tokens it becomes, for the families that people train."""

import importlib.util
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from qerl_pl.chat import Chat
from registry.rewards import Boxed, ThinkAnswer
from tests.chats import LLAMA3, QWEN3, QWEN25, REFUSING, tokenizer

ROW = {"prompt": "What is 2 + 2?", "answer": "4", "level": 1}
ASK = "Answer in <answer>."


def rendered(template: str, system: str = ASK, row: dict[str, Any] = ROW, **args: Any) -> str:
    """The text of a prompt, having checked that its tokens say the same."""
    made = tokenizer(template)
    prompt = Chat(made, ThinkAnswer(system), args)(row)
    assert made.decode(prompt.token_ids, clean_up_tokenization_spaces=False) == prompt.text
    return prompt.text


def test_qwen25() -> None:
    question = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(QWEN25) == f"<|im_start|>system\n{ASK}<|im_end|>\n{question}"
    # Nothing from us: the template's own default is the model's affair.
    assert rendered(QWEN25, system=" ") == f"<|im_start|>system\nYou are a default.<|im_end|>\n{question}"


def test_qwen3_thinking() -> None:
    text = f"<|im_start|>system\n{ASK}<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(QWEN3) == rendered(QWEN3, enable_thinking=True) == text
    assert rendered(QWEN3, enable_thinking=False) == text + "<think>\n\n</think>\n\n"
    assert rendered(QWEN3, system="") == text.split("<|im_end|>\n", 1)[1]


def test_llama3_starts_once() -> None:
    text = (
        f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday: 26 Jul 2024\n\n{ASK}<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhat is 2 + 2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert rendered(LLAMA3) == text
    made = tokenizer(LLAMA3)
    assert made(text)["input_ids"].count(made.bos_token_id) == 2  # what would happen
    ids = Chat(made, ThinkAnswer(ASK))(ROW).token_ids
    assert (ids[0], ids.count(made.bos_token_id)) == (made.bos_token_id, 1)


def test_no_prompt_changes_at_midnight() -> None:
    assert datetime.now().strftime("%d %b %Y") not in rendered(LLAMA3)
    assert "Today: 1 May 2025\n" in rendered(LLAMA3, date_string="1 May 2025")


def test_a_template_that_refuses_a_system_role() -> None:
    chat = Chat(tokenizer(REFUSING), ThinkAnswer(ASK))
    for _ in range(2):  # the second time it is known
        assert chat(ROW).text == (f"<|begin_of_text|><|start|>user\n{ASK}\n\nWhat is 2 + 2?<|end|>\n<|start|>model\n")
    assert chat.merges
    kept = Chat(tokenizer(REFUSING), ThinkAnswer(""))
    assert kept(ROW).text == "<|begin_of_text|><|start|>user\nWhat is 2 + 2?<|end|>\n<|start|>model\n"
    assert not kept.merges
    twice = {"prompt": [{"role": "user", "content": "?"}] * 2}
    for system, roles in (("", "user, user"), (ASK, "system, user, user")):
        with pytest.raises(ValueError, match=f"refuses messages of {roles}: .*; mend the data"):
            Chat(tokenizer(REFUSING), ThinkAnswer(system))(twice)
    with pytest.raises(ValueError, match="refuses messages of system, user, user: Roles must alternate"):
        chat(twice)


def test_messages_of_a_row() -> None:
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "2 + 2?"}]
    assert rendered(QWEN3, row={"prompt": own}) == (
        "<|im_start|>system\nMine.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    assert rendered(QWEN3, row={"prompt": turns}).count("<|im_start|>") == 5
    assert Chat(tokenizer(QWEN3), ThinkAnswer())(ROW).columns == {"answer": "4", "level": 1}


def test_mistakes() -> None:
    with pytest.raises(ValueError, match=r"no chat template; name an instruct model, or add chat_template\.jinja"):
        Chat(tokenizer(None), Boxed())
    for name in ("enable_thinkin", "messages", "add_generation_prompt"):
        with pytest.raises(ValueError, match=f"chat_template_args: the chat template of the model takes no '{name}'"):
            Chat(tokenizer(QWEN3), Boxed(), {name: False})


# ---- the templates of the models -------------------------------------------------------------------------------------

SPEC = importlib.util.find_spec("trl")
ORIGINALS = Path(SPEC.origin).parent / "chat_templates" if SPEC and SPEC.origin else None


@pytest.fixture
def original(request: pytest.FixtureRequest) -> str:
    path = ORIGINALS and ORIGINALS / f"{request.param}.jinja"
    if not path or not path.is_file():
        pytest.skip(f"TRL is not installed, or brings no template of {request.param}")
    return path.read_text()


@pytest.mark.parametrize(
    ("original", "head", "start"),
    [
        ("qwen2_5", f"<|im_start|>system\n{ASK}<|im_end|>\n", "<|im_start|>assistant\n"),
        ("qwen3", f"<|im_start|>system\n{ASK}<|im_end|>\n", "<|im_start|>assistant\n"),
        (
            "llama3",
            f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{ASK}<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "llama3_2",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
            f"Today Date: 26 Jul 2024\n\n{ASK}<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("gemma", f"<|begin_of_text|><start_of_turn>user\n{ASK}\n\nWhat", "<start_of_turn>model\n"),
    ],
    indirect=["original"],
)
def test_originals(original: str, head: str, start: str) -> None:
    text = rendered(original)
    assert text.startswith(head) and text.endswith(start)
    assert text.count(ASK) == text.count("What is 2 + 2?") == text.count(start) == 1
    assert text.count("<|begin_of_text|>") == ("<|begin_of_text|>" in head)


@pytest.mark.parametrize("original", ["qwen3"], indirect=True)
def test_original_without_thinking(original: str) -> None:
    assert rendered(original, enable_thinking=False) == rendered(original) + "<think>\n\n</think>\n\n"
