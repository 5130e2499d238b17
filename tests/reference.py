"""Small random checkpoints, and what Hugging Face and PEFT make of them: the references of the tests.

They are built from the stored checkpoint by a dequantization of their own, so nothing is compared with itself.
"""

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from qerl_pl.types import Completion
from registry.quantization import NF4, NVFP4, QuantFormat

RANK, ALPHA = 8, 16.0
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
VOCAB, EOS, MAX_LEN = 100, 1, 256


def write_checkpoint(
    folder: Path, config: Any, quantization: QuantFormat, second_eos: int | None = None
) -> dict[str, Tensor]:
    """A random checkpoint with tokenizer in ``folder``; returns the numbers that it stands for, FP32, by Hugging
    Face's names. ``second_eos`` also ends a completion, as in chat models: in generation_config.json alone.
    """
    torch.manual_seed(0)
    config.update({"vocab_size": VOCAB, "eos_token_id": EOS, "bos_token_id": 0, "pad_token_id": None})
    config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    weights = {}
    for name, value in AutoModelForCausalLM.from_config(config).state_dict().items():
        noise = torch.randn(value.shape)
        if not (config.tie_word_embeddings and name == "lm_head.weight"):
            weights[name] = (1 + 0.2 * noise if "norm" in name else 0.15 * noise).bfloat16()
    stored, dense = dict(weights), {name: value.float() for name, value in weights.items()}
    if quantization.config is not None:
        for layer in range(config.num_hidden_layers):
            for group in FUSED:
                block = "self_attn" if group[0] in ("q_proj", "o_proj") else "mlp"
                names = [f"model.layers.{layer}.{block}.{member}" for member in group]
                parts = quantization.quantize([stored.pop(f"{name}.weight") for name in names])
                for name, part in zip(names, parts, strict=True):
                    stored |= {f"{name}.{key}": value.contiguous() for key, value in part.items()}
                    dense[f"{name}.weight"] = dequantize(quantization, part)
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads(config.to_json_string(use_diff=False)) | {"dtype": "bfloat16"}
    if quantization.config is not None:
        written["quantization_config"] = quantization.config
    (folder / "config.json").write_text(json.dumps(written))
    words = {"<unk>": 0, "<eos>": EOS} | {f"w{i}": i for i in range(2, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>").save_pretrained(folder)
    if second_eos is not None:
        generation = {"eos_token_id": [EOS, second_eos]}
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return dense


def dequantize(quantization: QuantFormat, part: dict[str, Tensor]) -> Tensor:
    """The FP32 weight by the library that defines the format; NVFP4's here, so that most tests need no library."""
    if isinstance(quantization, NVFP4):
        return dequantize_nvfp4(part)
    if isinstance(quantization, NF4):
        from bitsandbytes.functional import QuantState, dequantize_4bit

        state = QuantState.from_dict({k: v for k, v in part.items() if k != "weight"}, torch.device("cpu"))
        state.dtype = torch.float32
        return dequantize_4bit(part["weight"], state)
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    assert quantization.config is not None
    scheme = QuantizationConfig.model_validate(quantization.config).config_groups["group_0"]
    wide = {k: t.float() if k == "weight_scale" and t.is_floating_point() else t for k, t in part.items()}
    compressor: Any = BaseCompressor.load_from_registry(quantization.config["format"])
    return compressor.decompress(wide, scheme)["weight"].float()


def dequantize_nvfp4(part: dict[str, Tensor]) -> Tensor:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    packed = part["weight_packed"].long()
    codes = torch.stack([packed % 16, packed // 16], -1).flatten(1)
    return values[codes] * (part["weight_scale"].float() / part["weight_global_scale"]).repeat_interleave(16, dim=1)


class Reference:
    """Hugging Face's model with PEFT's adapter."""

    def __init__(self, config: Any, dense: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        missing, unexpected = model.load_state_dict(dense, strict=False)
        assert missing == ["lm_head.weight"] * config.tie_word_embeddings
        assert not unexpected
        self.peft = (
            get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS))).to(dtype).eval()
        )
        self.norms = {
            n: m.weight for n, m in self.peft.base_model.model.named_modules() if type(m).__name__.endswith("RMSNorm")
        }
        self.lora = {n.replace(".default", ""): p for n, p in self.peft.named_parameters() if "lora_" in n}

    @torch.no_grad()
    def set_adapter(self, tensors: dict[str, Tensor]) -> None:
        assert tensors.keys() == self.lora.keys()
        for name, value in tensors.items():
            self.lora[name].copy_(value)

    @torch.no_grad()
    def logprobs(
        self, prompt: list[int], completion: list[int], temperature: float = 1.0, top_p: float = 1.0
    ) -> Tensor:
        logits = self.peft(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float() / temperature
        ranked, order = logits.softmax(-1).sort(-1, descending=True)
        outside = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, ranked.cumsum(-1) - ranked >= top_p)
        kept = logits.masked_fill(outside, -torch.inf).log_softmax(-1)
        return kept.gather(-1, torch.tensor(completion)[:, None])[:, 0]

    def worst(self, prompts: list[list[int]], groups: list[list[Completion]], **how: float) -> float:
        """The largest difference of a log-probability."""
        return max(
            (torch.tensor(c.logprobs) - self.logprobs(prompt, c.token_ids, **how)).abs().max().item()
            for prompt, group in zip(prompts, groups, strict=True)
            for c in group
        )


def random_adapter(reference: Reference, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.1 * torch.randn(p.shape, generator=generator) for name, p in sorted(reference.lora.items())}


def qwen2(**more: Any) -> Qwen2Config:
    return Qwen2Config(**small(), tie_word_embeddings=True, **more)


def small() -> dict[str, Any]:
    return {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": MAX_LEN, "vocab_size": VOCAB}  # fmt: skip


def llama(**more: Any) -> LlamaConfig:
    return LlamaConfig(**small(), tie_word_embeddings=False, **more)
