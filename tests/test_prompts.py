"""What becomes of the rows of a source at the start of a run: dropped, counted, refused, and all of it said."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qerl_pl.chat import Chat
from qerl_pl.datamodule import RolloutDataModule
from qerl_pl.prompts import Prompts, contamination, problem
from qerl_pl.rewards import check_answer_format, shortfalls, unverifiable
from qerl_pl.types import Prompt
from registry.prompts import File
from registry.rewards import GSM8K, AnswerFormat, Boxed, Format, PythonReward, Reward, ThinkAnswer
from tests.chats import LLAMA3, QWEN3, REFUSING, tokenizer

Write = Callable[..., File]
OPENING = QWEN3.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")  # as Qwen3-Thinking, DeepSeek R1
DROPPING = QWEN3.replace("{%- for m in messages %}", "{%- for m in messages if m.role != 'system' %}")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(*rows: Any, name: str = "rows.jsonl", **settings: Any) -> File:
        path = tmp_path / name
        path.write_text(
            "\n".join(
                json.dumps(row if isinstance(row, dict) else {"prompt": row[0], "answer": row[1]}) for row in rows
            )
        )
        return File(str(path), **settings)

    return write


class Checked(GSM8K):
    """A verifier that knows which golds it cannot check."""

    def unverifiable(self, **columns: Any) -> list[int]:
        return [i for i, answer in enumerate(columns["answer"]) if not str(answer)[-1].isdigit()]


def module(
    train: File | None = None,
    *,
    validation: File | None = None,
    test: File | None = None,
    template: str = QWEN3,
    rewards: list[Reward] | None = None,
    answer_format: AnswerFormat | None = None,
    **settings: Any,
) -> tuple[RolloutDataModule, list[str]]:
    """A data module whose engine is a tokenizer, and the notes it will make."""
    data = RolloutDataModule(
        train=train,  # type: ignore[arg-type]
        validation=validation,
        test=test,
        engine=SimpleNamespace(tokenizer=tokenizer(template)),  # type: ignore[arg-type]
        rewards=rewards or [Checked()],  # type: ignore[arg-type]
        answer_format=answer_format or ThinkAnswer(),
        prompts_per_batch=1,
        **settings,
    )
    notes: list[str] = []
    data.collector.report = lambda phase, text: notes.append(text)
    return data, notes


def answers(prompts: Prompts) -> list[Any]:
    return [prompt.columns["answer"] for prompt in prompts]


# ---- lengths ---------------------------------------------------------------------------------------------------------


def test_too_long_prompts(write: Write) -> None:
    source = write(("a", "1"), ("b" * 300, "2"), ("c" * 301, "3"), ("d" * 2000, "4"))
    data, notes = module(source, answer_format=ThinkAnswer(""))
    longest = len(data.engine.tokenizer("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")["input_ids"]) - 1
    data.max_prompt_length = longest + 300
    assert answers(data.prompts("train")) == ["1", "2"]
    assert notes[0] == (
        f"train: 2 of 4 prompts are dropped as longer than max_prompt_length {longest + 300}; the longest has "
        f"{longest + 2000:,} tokens"
    )
    data.max_prompt_length = 5
    with pytest.raises(
        ValueError, match=f"all 4 prompts are longer than max_prompt_length 5; the shortest has {longest + 1}"
    ):
        data.prompts("train")


# ---- golds -----------------------------------------------------------------------------------------------------------

MIXED = (("a", "1"), ("b", "blue"), ("c", "3"), ("d", "red"), ("e", "green"), ("f", "pink"), ("g", "7"))


def test_golds_that_can_never_be_earned(write: Write) -> None:
    data, notes = module(write(*MIXED), validation=write(*MIXED[:2], name="v.jsonl"))
    assert answers(data.prompts("train")) == ["1", "3", "7"]
    assert notes == [
        "train: 4 of 7 gold answers can never be earned, as no reward can check them: dropped. 'blue', 'red', 'green'"
    ]
    assert answers(data.prompts("validation")) == ["1", "blue"]
    assert notes[1:] == [
        "validation: 1 of 2 gold answers can never be earned, as no reward can check them: counted as wrong. 'blue'"
    ]


def near(completions: list[str], meta: list[int]) -> list[float]:
    return [1.0 for _ in completions]


def test_a_column_that_one_split_lacks(write: Write) -> None:
    rewards = [Checked(), PythonReward(f"{__name__}.near")]
    held_out = {"own": write(("a", "1"), name="v.jsonl")}
    data, _ = module(
        write({"prompt": "a", "answer": "1", "meta": 1}), validation=held_out, test=held_out["own"], rewards=rewards
    )
    assert len(data.prompts("train")) == 1
    for split, name, place in (("validation", "own", "validation.own"), ("test", "", "test")):
        with pytest.raises(
            ValueError, match=rf"^data\.{place}: .*\.near needs meta, but there is only answer, .*each sp"
        ):
            data.prompts(split, name)


def test_they_may_be_kept(write: Write) -> None:
    data, notes = module(write(*MIXED), keep_unverifiable=True)
    assert len(data.prompts("train")) == 7
    assert "kept" in notes[0] and "dropped" not in notes[0]


def test_none_can_be_earned(write: Write) -> None:
    data, _ = module(write(("a", "blue"), ("b", "red")))
    with pytest.raises(
        ValueError, match=r"data\.train: no reward can check any of the 2 gold answers, such as 'blue'; choose"
    ):
        data.prompts("train")


def prompt(answer: Any = "4", text: str = "Hi", **columns: Any) -> Prompt:
    return Prompt([1], text, {"answer": answer, **columns})


class Words(Checked):
    """Checks what the other cannot."""

    def unverifiable(self, **columns: Any) -> list[int]:
        return [i for i, answer in enumerate(columns["answer"]) if answer != "blue"]


def test_unverifiable_by_all_rewards_of_correctness() -> None:
    prompts = [prompt("1"), prompt("blue"), prompt("red")]
    assert unverifiable([Checked(), Format()], prompts) == [1, 2]
    assert unverifiable([Checked(), Words()], prompts) == [2]
    assert unverifiable([Format()], prompts) == []
    assert unverifiable([Checked()], []) == []


# ---- prompt and rewards ----------------------------------------------------------------------------------------------


class OneDigit(ThinkAnswer):
    """Reads the first character only."""

    def extract(self, completion: str) -> str | None:
        return (super().extract(completion) or "")[:1] or None


def test_a_sample_of_rows_is_tried() -> None:
    few, many = [prompt("1")] * 20 + [prompt("12")] * 12, [prompt("1")] * 15 + [prompt("12")] * 17
    assert list(check_answer_format(OneDigit(), [GSM8K()], few)) == list(range(20, 32))
    with pytest.raises(
        ValueError, match=r"disagree \(17 of the first 32 prompts\): gsm8k gives 0\.0 .* gold answer is '12'"
    ):
        check_answer_format(OneDigit(), [GSM8K()], many)
    assert check_answer_format(OneDigit(), [GSM8K()], [prompt("1")] * 32 + [prompt("12")] * 99) == {}
    assert shortfalls(OneDigit(), [GSM8K()], few)[:20] == [""] * 20


def test_rows_of_the_sample_that_are_not_paid(write: Write) -> None:
    source = write(("a", "1"), ("b", "12"), ("c", "3"), ("d", "blue"))
    data, notes = module(source, answer_format=OneDigit())
    assert answers(data.prompts("train")) == ["1", "3"]
    assert notes[1].startswith(
        "train: a perfect completion is not paid for 1 of the first 3 prompts: dropped. Checked gives"
    )


@pytest.mark.parametrize(
    ("answer_format", "marker"),
    [(ThinkAnswer("Think, then answer."), "<answer>"), (Boxed("Use <answer>."), r"\\boxed")],
)
def test_a_system_prompt_that_asks_for_something_else(answer_format: AnswerFormat, marker: str) -> None:
    with pytest.raises(
        ValueError, match=f"looks for {marker}, which its system_prompt does not mention: '.*'; ask for"
    ):
        check_answer_format(answer_format, [GSM8K()], [prompt()])


@pytest.mark.parametrize(
    "answer_format", [ThinkAnswer("<answer>!"), Boxed(r"In \boxed{}!"), ThinkAnswer(" "), Boxed("")]
)
def test_system_prompts_that_fit(answer_format: AnswerFormat) -> None:
    assert check_answer_format(answer_format, [GSM8K()], [prompt()]) == {}


@pytest.mark.parametrize("answer_format", [ThinkAnswer(), Boxed()])
def test_the_own_prompt_of_each_format_fits(answer_format: AnswerFormat) -> None:
    assert answer_format.markers and all(marker in answer_format.system_prompt for marker in answer_format.markers)


def test_a_template_that_opens_think_itself(write: Write) -> None:
    """The completion then has no <think>, so the form that think_answer asks for cannot be earned."""
    source = write(("a", "1"), ("b", "2"))
    data, _ = module(source, template=OPENING, rewards=[GSM8K(), Format(weight=0.1)])
    with pytest.raises(
        ValueError, match=r"format gives 0\.0 instead of 1\.0 .* opens <think> itself; .* chat_template_args"
    ):
        data.prompts("train")
    for answer_format, rewards in ((ThinkAnswer(), [GSM8K()]), (Boxed(), [GSM8K(), Format()])):
        data, notes = module(source, template=OPENING, rewards=rewards, answer_format=answer_format)  # type: ignore[arg-type]
        assert len(data.prompts("train")) == 2 and notes == []


def test_template_arguments_reach_the_template(write: Write) -> None:
    source = write(("a", "1"))
    data, _ = module(source, chat_template_args={"enable_thinking": False})
    assert data.prompts("train")[0].text.endswith("<think>\n\n</think>\n\n")
    data, _ = module(source, chat_template_args={"enable_thinkin": False})
    with pytest.raises(ValueError, match="takes no 'enable_thinkin'"):
        data.prompts("train")


# ---- what the model is told ------------------------------------------------------------------------------------------

UNTOLD = "the prompts do not mention <answer>, where the answer is looked for"


def test_prompts_that_do_not_say_how_to_answer(write: Write) -> None:
    source = write(("a", "1"), ("b", "2"))
    data, notes = module(source, validation=source, template=DROPPING)
    data.prompts("train")
    data.prompts("validation")
    assert [note.partition(": ")[2].partition(":")[0] for note in notes] == [UNTOLD]  # once
    for settings in ({"answer_format": ThinkAnswer("")}, {"template": LLAMA3}):  # nothing to say is said on purpose
        data, notes = module(source, **settings)  # type: ignore[arg-type]
        data.prompts("train")
        assert notes == []


def test_rows_with_a_system_prompt(write: Write) -> None:
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "a"}]
    source = write({"prompt": own, "answer": "1"}, ("b", "2"), ("c", "3"))
    data, notes = module(source)
    assert "Mine." in data.prompts("train")[0].text
    assert notes[0] == "train: 1 of 3 rows bring a system prompt, which replaces that of the answer format"
    assert notes[1].startswith("train: 1 of 3 prompts do not mention <answer>")


def test_a_refused_system_role_is_said(write: Write) -> None:
    data, notes = module(write(("a", "1")), template=REFUSING)
    data.prompts("train")
    assert notes == [
        "train: the chat template refuses a system role; the system prompt stands at the head of the user's message"
    ]


def test_filters_are_said(write: Write) -> None:
    rows = [{"prompt": "a", "answer": str(level), "level": level} for level in range(1, 6)]
    source = write(*rows, where={"level": [3, 4, 5]})
    data, notes = module(source)
    assert answers(data.prompts("train")) == ["3", "4", "5"]
    assert notes == [f"train: 3 of 5 rows of {source.path} are {{level: [3, 4, 5]}}"]


# ---- contamination ---------------------------------------------------------------------------------------------------


def test_what_a_row_asks() -> None:
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": " What\n\nis  2?"}]
    assert problem({"prompt": chat}) == problem({"prompt": "What is\t2? "}) == "What is 2?"


def test_contamination() -> None:
    assert contamination(["a", "b"], ["c", "A"], "test") is None
    assert contamination(["a", "b" * 70], ["c", "b" * 70, "a"], "test") == (
        "2 of 3 problems of data.test are training problems too, so what it measures is partly memory: "
        f"{'b' * 57 + '...'!r}"
    )


def test_contamination_is_reported_at_the_start_of_training(write: Write) -> None:
    train = write(("What is 1?", "1"), ("What is 2?", "2"), ("What is blue?", "blue"))
    validation = write(("What\nis 2?", "2"), ("What is 3?", "3"), ("What is  blue?", "4"), name="v.jsonl")
    data, notes = module(train, validation=validation, test=write(("What is 5?", "5"), name="t.jsonl"))
    data.train_dataloader()
    assert notes[1:] == [  # the third of the training problems was dropped
        "1 of 3 problems of data.validation are training problems too, so what it measures is partly memory: "
        "'What is 2?'"
    ]


def test_a_test_set_that_cannot_be_read_does_not_stop_training(write: Write) -> None:
    data, notes = module(write(("a", "1")), test=File("nowhere.jsonl"))
    assert len(data.train_dataloader()) == 1
    assert notes[0].startswith("data.test cannot be read: there is no file nowhere.jsonl")


def test_drop_keeps_the_order(write: Write) -> None:
    prompts = Prompts(write(*MIXED), Chat(tokenizer(QWEN3), Boxed()), 10_000)
    prompts.drop([0, 5])
    assert answers(prompts) == ["blue", "3", "red", "green", "7"]
    assert prompts.problems == ["b", "c", "d", "e", "g"]
