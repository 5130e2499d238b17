"""The memory plan, against numbers computed by hand from the published sizes of Qwen2.5."""

import contextlib
import io
import json
import math
import re
from pathlib import Path

import pytest

from qerl_pl import memory
from qerl_pl.checkpoint import PROJECTIONS, prepare
from qerl_pl.memory import (
    GB,
    Shape,
    activation_bytes,
    adapter_size,
    engine_bytes,
    kv_blocks,
    kv_bytes_per_token,
    layer_bytes_per_token,
    plan_memory,
    scratch_bytes,
    weight_bytes,
)
from qerl_pl.random_model import RandomTensors
from registry.quantization import FORMATS

DOCS = Path(__file__).parents[1] / "docs" / "memory.md"


def qwen(layers, hidden, ffn, heads, kv_heads, tied=False):
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": 152064, "tie_word_embeddings": tied,
    }  # fmt: skip


CONFIGS = {
    "7B": qwen(28, 3584, 18944, 28, 4),
    "14B": qwen(48, 5120, 13824, 40, 8),
    "32B": qwen(64, 5120, 27648, 40, 8),
}
SHAPES = {name: Shape.read(config) for name, config in CONFIGS.items()}
SMALL = {"tokens_per_micro_batch": 5120, "max_num_seqs": 64, "optimizer_bytes": 2}


@pytest.mark.parametrize(
    ("model", "block", "embedding", "paper"),
    [
        # q and o, k and v, gate, up and down; the last column is Table 3 of the paper, in GB.
        ("7B", 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944, 152064 * 3584, 5.9),
        ("14B", 2 * 5120 * 5120 + 2 * 5120 * 1024 + 3 * 5120 * 13824, 152064 * 5120, 10.6),
        ("32B", 2 * 5120 * 5120 + 2 * 5120 * 1024 + 3 * 5120 * 27648, 152064 * 5120, 20.7),
    ],
)
def test_weights(model, block, embedding, paper):
    layers = CONFIGS[model]["num_hidden_layers"]
    stored = weight_bytes(SHAPES[model], 4.5)
    assert stored == layers * block * 4.5 / 8 + 2 * 2 * embedding
    assert stored / GB == pytest.approx(paper, abs=0.06)
    assert weight_bytes(SHAPES[model], 16.0) == 2 * (layers * block + 2 * embedding)


@pytest.mark.parametrize(("model", "billions"), [("7B", 7.62), ("14B", 14.77), ("32B", 32.76)])
def test_weights_are_those_of_the_model_card(model, billions):
    assert weight_bytes(SHAPES[model], 16.0) / 2e9 == pytest.approx(billions, abs=0.01)


def test_a_tied_head_is_stored_once():
    one, two = (weight_bytes(Shape.read(qwen(24, 896, 4864, 14, 2, tied)), 4.5) for tied in (True, False))
    assert two - one == 152064 * 896 * 2


def test_defaults_of_a_config():
    config = CONFIGS["7B"] | {"num_key_value_heads": None}
    assert (Shape.read(config).kv_heads, Shape.read(config).head_dim) == (28, 128)
    assert Shape.read(config | {"head_dim": 64}).head_dim == 64  # Qwen3 gives it
    with pytest.raises(ValueError, match="no intermediate_size; the plan is for Qwen and Llama"):
        Shape.read({k: v for k, v in config.items() if k != "intermediate_size"})


def test_adapter():
    # in + out of q, k, v, o, gate, up, down, times rank and layers; PEFT prints the same two numbers.
    sums = 7168 + 4096 + 4096 + 7168 + 22528 + 22528 + 22528
    assert adapter_size(SHAPES["7B"], 32, PROJECTIONS) == 28 * 32 * sums == 80_740_352
    sums = 10240 + 6144 + 6144 + 10240 + 18944 + 18944 + 18944
    assert adapter_size(SHAPES["14B"], 32, PROJECTIONS) == 48 * 32 * sums == 137_625_600
    assert adapter_size(SHAPES["14B"], 16, ("q_proj", "v_proj")) == 48 * 16 * (10240 + 6144)


def test_kv_cache():
    assert kv_bytes_per_token(SHAPES["7B"]) == 2 * 28 * 4 * 128 * 2 == 57_344
    assert kv_bytes_per_token(SHAPES["14B"]) == 2 * 48 * 8 * 128 * 2 == 196_608
    # 8 prompts of 64 blocks; 64 sequences of up to 15 tokens left of the prompt and 4,096 more: 257 blocks.
    assert kv_blocks(1024, 4096, 64, 8) == 8 * 64 + 64 * 257
    assert kv_blocks(1024, 4096, 9, 8) == 2 * 64 + 9 * 257  # the ninth begins a group
    assert kv_blocks(10, 6, 1, 8) == 1


def test_activations():
    # 4·3584 + 2·3584 + 2·512 + 2·18944 + 7·32 = 60,640 elements; with h = 5120 it is the same, by chance.
    one7, one14 = (layer_bytes_per_token(SHAPES[m], 32, PROJECTIONS) for m in ("7B", "14B"))
    assert (one7, one14) == (2 * 60_640 + 4 * 28, 2 * 60_640 + 4 * 40)
    passing = 2 * (4 * 18944 + 5 * 3584)  # 187,392

    def activations(recomputed):
        return activation_bytes(SHAPES["7B"], 1000, recomputed, 32, PROJECTIONS)

    assert activations(0) == 1000 * (28 * one7 + passing)
    assert activations(1) == 1000 * (27 * one7 + 2 * 3584 + passing)
    assert activations(27) == 1000 * (one7 + 27 * 2 * 3584 + passing)
    assert activations(28) == activations(27) + 1000 * 2 * 3584  # the last layer is needed at once: nothing is saved


def test_the_rest():
    assert scratch_bytes(SHAPES["14B"], 4.5) == 2 * (2 * 13824) * 5120  # gate and up
    assert scratch_bytes(SHAPES["14B"], 16.0) == 0
    assert engine_bytes(SHAPES["7B"], 8192, 64) == 8192 * 2 * (3 * 18944 + 2 * 3584) + 64 * 152064 * 8


def test_a_whole_plan():
    """14B on a GPU of 24 GB."""
    plan = plan_memory(CONFIGS["14B"], device_bytes=24 * 10**9, **SMALL)
    trained = 137_625_600
    weights, fixed, gate_up = 10_546_053_120, 900_000_000, 2 * 27648 * 5120
    assert plan.resident == weights + fixed + gate_up + trained * (2 + 4 + 2)
    layer, entry, passing = 121_440, 2 * 5120, 2 * (4 * 13824 + 5 * 5120)
    outside = plan.resident + 4 * trained + 1024 * 152064 * 6
    peaks = [outside + 5120 * ((48 - n) * layer + n * entry + passing) for n in range(48)]
    assert peaks[39] <= 0.97 * 24e9 < peaks[38]
    assert (plan.checkpointed_layers, plan.update) == (39, peaks[39])
    batch = 8192 * 2 * (3 * 13824 + 2 * 5120) + 64 * 152064 * 8
    blocks = int((0.97 * 24e9 - plan.resident - batch) / (16 * 196_608))
    assert (plan.kv_tokens, plan.kv_tokens_wanted) == (16 * blocks, 16 * 16_960)
    assert plan.kv_cache == blocks * 16 * 196_608
    assert plan.rollout == plan.resident + batch + plan.kv_cache
    assert plan.peak == max(plan.rollout, plan.update) <= 24e9


def test_both_at_once():
    """A KV cache that stays leaves less for the update."""
    apart, beside = (plan_memory(CONFIGS["14B"], device_bytes=80 * 10**9, release_kv=r, **SMALL) for r in (True, False))
    assert apart.kv_tokens == beside.kv_tokens == 271_360  # all that is wanted
    assert apart.checkpointed_layers == 0 < beside.checkpointed_layers < 48
    one_less = 5120 * (121_440 - 2 * 5120)  # what recomputing one layer saves
    assert beside.update <= 0.97 * 80e9 < beside.update + one_less
    assert beside.update - beside.activations == apart.update - apart.activations + apart.kv_cache
    small = plan_memory(CONFIGS["14B"], device_bytes=24 * 10**9, release_kv=False, **SMALL)
    assert small.checkpointed_layers == 47  # and the KV cache gets what is left
    assert 0.97 * 24e9 - 16 * 196_608 < small.update <= 0.97 * 24e9


def test_two_copies_of_the_base():
    one, two = (plan_memory(CONFIGS["7B"], device_bytes=80 * 10**9, base_copies=n) for n in (1, 2))
    assert two.resident - one.resident == 5_850_464_256


def test_exact_fit(monkeypatch):
    """One byte decides between two numbers of layers, between two of blocks, and between a plan and a refusal."""
    monkeypatch.setattr(memory, "UNUSED", 0.0)
    plan = plan_memory(CONFIGS["7B"], device_bytes=40 * 10**9)
    assert 0 < plan.checkpointed_layers < 28
    again = plan_memory(CONFIGS["7B"], device_bytes=plan.update)
    less = plan_memory(CONFIGS["7B"], device_bytes=plan.update - 1)
    assert (again.checkpointed_layers, less.checkpointed_layers) == (
        plan.checkpointed_layers,
        plan.checkpointed_layers + 1,
    )
    again = plan_memory(CONFIGS["7B"], device_bytes=plan.rollout)
    less = plan_memory(CONFIGS["7B"], device_bytes=plan.rollout - 1)
    assert (again.kv_tokens, less.kv_tokens) == (plan.kv_tokens, plan.kv_tokens - 16)
    whole = activation_bytes(SHAPES["7B"], 16384, 27, 32, PROJECTIONS)
    least = plan.update - plan.activations + whole
    assert plan_memory(CONFIGS["7B"], device_bytes=least).checkpointed_layers == 27
    with pytest.raises(
        ValueError, match=r"the update, with all layers but the last recomputed, needs 17\.\d+ GB, 0\.00 GB more"
    ):
        plan_memory(CONFIGS["7B"], device_bytes=least - 1)


def test_refusal_names_the_settings():
    with pytest.raises(ValueError, match="memory: ") as error:
        plan_memory(CONFIGS["32B"], device_bytes=24 * 10**9, **SMALL)
    for part in (
        "the update, with all layers but the last recomputed, needs 31.89 GB, 8.61 GB more than the 23.28 GB",
        "model.tokens_per_micro_batch (5120; a micro-batch holds at least one sequence of 5120 tokens)",
        "data.max_completion_length (4096)", "max_num_seqs (64)", "fewer bits than 4.5 (model.quantization)",
    ):  # fmt: skip
        assert part in str(error.value)
    with pytest.raises(ValueError, match="a rollout of one sequence needs"):
        plan_memory(CONFIGS["7B"], device_bytes=20 * 10**9, **SMALL | {"max_num_seqs": 10_000})


def test_a_sequence_longer_than_the_micro_batch_counts():
    one, two = (plan_memory(CONFIGS["7B"], device_bytes=80 * 10**9, tokens_per_micro_batch=n) for n in (1, 5120))
    assert one.activations == two.activations


def test_the_docs_show_what_the_code_computes():
    text = DOCS.read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    example, table = re.findall(r"^```text\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {})
    assert example == out.getvalue()
    assert table == plan_memory(CONFIGS["14B"], device_bytes=24 * 10**9, **SMALL).table() + "\n"


@pytest.mark.parametrize("form", list(FORMATS))
def test_the_planned_base_is_what_a_checkpoint_holds(form, tmp_path):
    """Of 7B in every format; norms, biases and constants are below a thousandth."""
    folder = prepare("random:7B", FORMATS[form](), tmp_path)
    tensors = RandomTensors(folder)
    names = tensors.keys()
    stored = sum(math.prod(tensors.shape(name)) * tensors.dtype(name).itemsize for name in names)
    shape = Shape.read(json.loads((folder / "config.json").read_text()))
    assert weight_bytes(shape, FORMATS[form]().bits_per_weight) == pytest.approx(stored, rel=1e-3)
