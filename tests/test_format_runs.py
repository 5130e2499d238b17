"""Every format in a run, and every folder that ``prepare`` writes in Hugging Face's own loader."""

from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_pl.checkpoint import PROJECTIONS, Weights, is_projection, prepare, stored_projection
from qerl_pl.lightning_cli import QeRLCLI
from qerl_pl.stored import stored_as
from registry.quantization import BF16, FP8, MXFP4, NF4, NVFP4, Int4, Int8, QuantFormat
from tests.reference import qwen2, write_checkpoint

CONFIG = Path(__file__).parents[1] / "configs" / "tiny.yaml"
FORMATS = [NVFP4(), MXFP4(), NF4(), Int4(32), Int8(), FP8()]
NAMES = [type(f).__name__.lower() for f in FORMATS]


@pytest.mark.parametrize("format_", FORMATS, ids=NAMES)
def test_hugging_face_loads_what_prepare_writes(format_: QuantFormat, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes" if isinstance(format_, NF4) else "compressed_tensors")
    from transformers import AutoModelForCausalLM

    write_checkpoint(tmp_path / "model", qwen2(), BF16())
    folder = prepare(str(tmp_path / "model"), format_, tmp_path / "cache")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model(torch.tensor([[5, 9, 31]]))  # compressed-tensors decompresses here
    weights, compared = Weights(folder), 0
    for name, module in model.named_modules():
        if is_projection(name):
            found, stored = stored_projection(weights, name, format_)
            assert found is format_
            theirs = module.weight
            if isinstance(format_, NF4):
                from bitsandbytes.functional import dequantize_4bit

                theirs = dequantize_4bit(theirs.data, theirs.quant_state)
            assert theirs.dtype == torch.bfloat16
            assert torch.equal(theirs, format_.dequantize(stored, torch.bfloat16)), name
            compared += 1
    assert compared == 2 * len(PROJECTIONS)


@pytest.mark.parametrize("name", ["mxfp4", "nf4", "int4", "int8", "fp8"])
def test_fit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("QERL_PL_CACHE", str(tmp_path / "cache"))
    group = ["--model.quantization.group_size", "64"] if name == "int4" else []  # 448 inputs are no multiple of 128
    cli = QeRLCLI(
        args=[
            "--config", str(CONFIG), "--model.quantization", name, *group, "--trainer.logger.save_dir", str(tmp_path),
            "--trainer.max_steps", "2", "--trainer.limit_val_batches", "0", "--trainer.enable_progress_bar", "false",
            "--data.prompts_per_batch", "4", "--data.num_generations", "4", "--data.train.size", "64",
            "--model.noise", "none", "--data.engine.packed", "true",
        ],
        run=False,
    )  # fmt: skip
    cli.trainer.fit(cli.model, cli.datamodule)
    events = EventAccumulator(str(next(tmp_path.rglob("events.out*")).parent)).Reload()
    difference = [e.value for e in events.Scalars("sampling/logp_difference/max")]
    assert len(difference) == 2 and max(difference) < 1e-4
    moved = [n for n, t in cli.model.state_dict().items() if "lora_B" in n and t.abs().max() > 0]
    assert len(moved) == 5 * 7
    layer = cli.model.policy.peft.get_base_model().model.layers[0].mlp.down_proj.base_layer
    assert type(layer.quantization).__name__.lower() == name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "pack-quantized, 4-bit int groups of 128"),
        ({"group_size": 32}, "pack-quantized, 4-bit int groups of 32"),
        ({"num_bits": 8}, "pack-quantized, 8-bit int groups of 128"),
        ({"strategy": "channel", "group_size": None}, "pack-quantized, 4-bit int by channel"),
        ({"symmetric": False}, "pack-quantized, 4-bit int groups of 128 with zero points"),
        ({"actorder": "group"}, "pack-quantized, 4-bit int groups of 128 reordered"),
        ({"actorder": "static", "observer": "mse"}, "pack-quantized, 4-bit int groups of 128"),
    ],
)
def test_what_decides_how_integers_are_read(change: dict[str, Any], said: str) -> None:
    config: Any = Int4().config
    config["config_groups"]["group_0"]["weights"] |= change
    assert stored_as(config) == said


def test_other_descriptions() -> None:
    assert [stored_as(f.config) for f in (BF16(), FP8(), MXFP4(), NF4())] == [
        "unquantized weights",
        "float-quantized, 8-bit float by channel",
        "mxfp4-pack-quantized, 4-bit float groups of 32",
        "bitsandbytes nf4",
    ]
    nested: Any = NF4().config
    assert stored_as(nested | {"bnb_4bit_use_double_quant": True}) == "bitsandbytes nf4, scales quantized too"
    assert stored_as(nested | {"load_in_4bit": False, "load_in_8bit": True}) == "bitsandbytes int8"
    assert stored_as({"quant_method": "gptq", "bits": 4}) == "gptq"
    assert stored_as({"quant_method": "qerl_pl", "format": "ternary"}) == "ternary"


def test_settings_must_be_those_of_the_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    write_checkpoint(tmp_path / "model", qwen2(), Int4(32))
    assert prepare(str(tmp_path / "model"), Int4(32)) == tmp_path / "model"
    for other in (Int4(), Int8(32), NF4(), BF16()):
        with pytest.raises(ValueError, match=r"is stored as 'pack-quantized, 4-bit int groups of 32', which is not"):
            prepare(str(tmp_path / "model"), other)


def test_an_ignored_layer_is_bf16_and_half_a_layer_is_an_error(tmp_path: Path) -> None:
    """FP8's and NF4's tensors are named ``weight`` too."""
    for format_ in (FP8(), NF4()):
        pytest.importorskip("bitsandbytes" if isinstance(format_, NF4) else "compressed_tensors")
        folder = tmp_path / type(format_).__name__
        write_checkpoint(folder, qwen2(), format_)
        weights, name = Weights(folder), "model.layers.1.mlp.up_proj"
        scale = f"{name}.weight_scale" if isinstance(format_, FP8) else f"{name}.weight.absmax"
        del weights._file[scale]
        with pytest.raises(ValueError, match=f"the checkpoint lacks {scale}"):
            stored_projection(weights, name, format_)
        plain = torch.randn(4, 64)
        found, stored = stored_projection({f"{name}.weight": plain}, name, format_)  # type: ignore[arg-type]
        assert isinstance(found, BF16) and torch.equal(stored["weight"], plain.bfloat16())
