"""Models by shape alone, ``random:7B``: random weights, nothing downloaded. Speed and memory do not ask for others.

A folder of such a model has everything but tensors; each is made when it is asked for, from its name. So trainer and
engine have the same numbers if they make them on the same kind of device.
"""

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl_pl.seeds import derive_seed
from registry.quantization import FORMATS, QuantFormat

PREFIX, MARK = "random:", "random_weights"
_PROJECTION = re.compile(r"model\.layers\.\d+\.(\w+\.\w+_proj)\.(.+)")  # a stored tensor's name may have dots
STD = 0.02
"""Of embeddings, head and dequantized projections; Qwen2.5's initializer has the same."""

SHAPES: dict[str, dict[str, Any]] = {
    name: {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
        "vocab_size": vocabulary,
    }
    for name, hidden, ffn, layers, heads, kv_heads, tied, vocabulary in (
        ("0.5B", 896, 4864, 24, 14, 2, True, 151936),
        ("3B", 2048, 11008, 36, 16, 2, True, 151936),
        ("7B", 3584, 18944, 28, 28, 4, False, 152064),
        ("14B", 5120, 13824, 48, 40, 8, False, 152064),
        ("32B", 5120, 27648, 64, 40, 8, False, 152064),
        ("tiny-test", 128, 256, 2, 4, 2, False, 400),
    )
}
"""Qwen2.5's, and one for tests; 400 tokens hold those of the embedded tokenizer."""


def config(size: str, quantization: QuantFormat) -> dict[str, Any]:
    """``config.json`` of a model with this shape in this format."""
    if size not in SHAPES:
        raise ValueError(f"model: {PREFIX}{size} has no shape; choose {PREFIX} and one of {', '.join(SHAPES)}")
    name = FORMATS.name_of(type(quantization))
    if name is None:
        raise ValueError(f"model: {PREFIX}{size} needs a registered format, not {type(quantization).__name__}")
    if FORMATS[name]().config != quantization.config:
        raise ValueError(f"model: {PREFIX}{size} needs {name} as it is by default; leave its settings out")
    for module, (_, columns) in projections(SHAPES[size]).items():
        quantization.check(f"{PREFIX}{size}: {module}", columns)
    settings = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": STD,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "use_sliding_window": False,
        "use_cache": True,
        "dtype": "bfloat16",
        "eos_token_id": 0,  # the embedded tokenizer's
        "pad_token_id": 1,
        **SHAPES[size],
        MARK: name,
    }
    return settings if quantization.config is None else settings | {"quantization_config": quantization.config}


def write(size: str, quantization: QuantFormat, target: Path) -> None:
    """Fill the folder ``target``: configuration, and the embedded model's tokenizer with its chat template."""
    (target / "config.json").write_text(json.dumps(config(size, quantization), indent=1))
    tiny = Path(str(files("qerl_pl") / "assets" / "tiny"))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny / name, target)


def is_random(folder: Path) -> bool:
    """Whether the model in ``folder`` is one without tensors."""
    return MARK in json.loads((folder / "config.json").read_text())


class RandomTensors:
    """The tensors of a folder without any, by name; has what ``Weights`` asks of an open safetensors file."""

    def __init__(self, folder: Path) -> None:
        settings = json.loads((folder / "config.json").read_text())
        self.quantization = FORMATS[settings[MARK]]()
        if self.quantization.config != settings.get("quantization_config"):
            raise ValueError(f"{folder}: written by another version of {settings[MARK]}; delete it")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._layout = dict(_layout(settings, self.quantization))
        self._projections = projections(settings)

    def keys(self) -> Iterator[str]:
        return iter(self._layout)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._layout[name][0]

    def dtype(self, name: str) -> torch.dtype:
        return self._layout[name][1]

    def get_tensor(self, name: str) -> Tensor:
        """The tensor in its stored dtype, on the GPU if there is one."""
        shape, dtype = self._layout[name]
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self._draw(name, tensor)
        return tensor

    def _draw(self, name: str, target: Tensor) -> None:
        generator = torch.Generator(target.device).manual_seed(derive_seed("random model", name))
        projection = _PROJECTION.match(name)
        if name.endswith("norm.weight"):
            target.fill_(1)
        elif name.endswith(".bias"):
            target.zero_()
        elif projection is not None:
            module, key = projection.groups()
            self.quantization.fill_random(key, target, self._projections[module], STD, generator)
        else:
            target.normal_(0, STD, generator=generator)


def _layout(
    settings: Mapping[str, Any], quantization: QuantFormat
) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Name, shape and dtype of each tensor of a Qwen2 checkpoint."""
    hidden, vocabulary = settings["hidden_size"], settings["vocab_size"]
    yield "model.embed_tokens.weight", ((vocabulary, hidden), torch.bfloat16)
    for layer in range(settings["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in projections(settings).items():
            for key, stored in quantization.layout(rows, columns).items():
                yield f"{prefix}.{name}.{key}", stored
            if name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                yield f"{prefix}.{name}.bias", ((rows,), torch.bfloat16)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", ((hidden,), torch.bfloat16)
    yield "model.norm.weight", ((hidden,), torch.bfloat16)
    if not settings["tie_word_embeddings"]:
        yield "lm_head.weight", ((vocabulary, hidden), torch.bfloat16)


def projections(settings: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """(out, in) of the linear layers of a block, by module name."""
    hidden, ffn = settings["hidden_size"], settings["intermediate_size"]
    keys = hidden // settings["num_attention_heads"] * settings["num_key_value_heads"]
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }


def parameters(settings: Mapping[str, Any]) -> int:
    """Weights of all projections; embeddings, head, norms and biases are not counted."""
    return int(settings["num_hidden_layers"]) * sum(math.prod(shape) for shape in projections(settings).values())
