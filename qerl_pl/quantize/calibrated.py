"""GPTQ and AWQ by llm-compressor, one decoder layer after another, into a folder of the project."""

import contextlib
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from qerl_pl.checkpoint import Weights, copy_files, is_projection, projection
from qerl_pl.stored import stored_as
from registry.quantization import QuantFormat

Say = Callable[[str], None]
ALGORITHMS = ("awq", "gptq", "rtn")
TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 16384}
"""Of one forward pass of a layer; a longer sequence is a batch of its own. With fewer a GPU waits for launches: AWQ
makes some hundred passes a layer and batch.
"""
_KNOWN = ("No accelerator available", "Overriding weight observer")
"""Beginnings of warnings that say nothing new: the device is printed, and both observers take the extreme weights."""


def settings(algorithm: str) -> dict[str, Any]:
    """What the card says of an algorithm, and what its modifier is given."""
    known: dict[str, dict[str, Any]] = {
        "awq": {"duo_scaling": True, "n_grid": 20},
        "gptq": {"block_size": 128, "dampening_frac": 0.01, "actorder": "static"},
        "rtn": {},
    }
    return known[algorithm]


def check_algorithm(quantization: QuantFormat, name: str, algorithm: str) -> None:
    """ValueError unless llm-compressor is installed and knows the format; rounding needs neither.

    It is looked for, not imported: that takes seconds, and the texts are checked in less.
    """
    if algorithm == "rtn":
        return
    config = quantization.config or {}
    if config.get("quant_method") != "compressed-tensors":
        raise ValueError(
            f"--algorithm {algorithm}: llm-compressor calibrates formats of compressed-tensors, and {name} is none; "
            "use --algorithm rtn"
        )
    if find_spec("llmcompressor") is None:
        raise _unusable(algorithm, "is not installed")


def import_llmcompressor(algorithm: str) -> None:
    """ImportError, with what to do, if it is installed but broken."""
    os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "ERROR")  # it logs while it is imported
    try:
        import llmcompressor  # noqa: F401
    except ImportError as error:
        raise _unusable(algorithm, f"cannot be imported ({error})") from error


def _unusable(algorithm: str, why: str) -> ImportError:
    fix = "pip install 'qerl-pl[quantize]', or use --algorithm rtn"
    return ImportError(f"--algorithm {algorithm} needs llm-compressor, which {why}; {fix}")


def recipe(quantization: QuantFormat, algorithm: str, ignore: Sequence[str]) -> list[Any]:
    """The modifiers of llm-compressor for the format's own ``quantization_config``."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    config = quantization.config
    assert config is not None
    scheme = {"config_groups": config["config_groups"], "ignore": sorted({*config.get("ignore", []), *ignore})}
    if algorithm == "gptq":
        return [GPTQModifier(**scheme, **settings("gptq"))]
    return [AWQModifier(**settings("awq")), QuantizationModifier(**scheme)]


def calibrate(
    folder: Path,
    quantization: QuantFormat,
    algorithm: str,
    sequences: Sequence[Sequence[int]],
    target: Path,
    say: Say,
) -> list[str]:
    """Quantize the BF16 model in ``folder`` into the empty folder ``target``; return what llm-compressor warned of.

    sequences: [N][length] token ids. Only one decoder layer at a time is on the GPU, if there is one.
    """  # fmt: skip
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with _quiet() as said, _lean_attention():
        from llmcompressor.entrypoints.oneshot import oneshot
        from torch import nn
        from torch.utils.data import DataLoader
        from transformers import AutoModelForCausalLM, GenerationConfig

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        others = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and not is_projection(n)]
        modifiers = recipe(quantization, algorithm, others)
        rows = [{"input_ids": torch.tensor(s)} for s in sequences]
        at_once = TOKENS_AT_ONCE["cuda" if torch.cuda.is_available() else "cpu"]
        loader: Any = DataLoader(rows, batch_size=max(1, at_once // len(sequences[0])))  # type: ignore[arg-type]
        layers = model.config.num_hidden_layers
        oneshot(
            model=model, recipe=[*modifiers, _progress(layers, say)], dataset=loader, pipeline="sequential",
            sequential_targets=[type(model.model.layers[0]).__name__],
        )  # fmt: skip
        model.generation_config = GenerationConfig()  # the folder's own is copied; transformers may refuse to write it
        model.save_pretrained(target, save_compressed=True, max_shard_size="4GB")
    written = json.loads((target / "config.json").read_text())["quantization_config"]
    (target / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": written}, indent=1))
    copy_files(folder, target)
    check_stored(folder, target, quantization, written)
    return said


def check_stored(folder: Path, target: Path, quantization: QuantFormat, written: dict[str, Any]) -> None:
    """That llm-compressor wrote the format, tensor by tensor, and kept everything else."""
    assert stored_as(written) == stored_as(quantization.config), (written, quantization.config)
    weights, base = Weights(target), Weights(folder)
    found: dict[str, dict[str, Any]] = {}
    for name in weights:
        module, key = projection(name) or ("", "")
        if key not in ("", "bias"):
            found.setdefault(module, {})[key] = weights[name]
    for module, stored in found.items():
        layout = quantization.layout(*base[f"{module}.weight"].shape)
        assert {k: (tuple(t.shape), t.dtype) for k, t in stored.items()} == layout, (module, layout)
    kept = [{n for n in w if (projection(n) or ("", "bias"))[1] == "bias"} for w in (base, weights)]
    tied = json.loads((target / "config.json").read_text()).get("tie_word_embeddings")
    needless = {n for n in base if n.endswith("inv_freq") or (tied and n == "lm_head.weight")}
    assert kept[0] - needless == kept[1] - needless, "tensors were lost or made up"


def _progress(layers: int, say: Say) -> Any:
    """A modifier that changes nothing and says how far calibration is."""
    from llmcompressor.modifiers import Modifier

    started = time.perf_counter()
    done = 0

    class Progress(Modifier):  # type: ignore[misc]
        def on_initialize(self, state: Any, **kwargs: Any) -> bool:
            return True

        def on_sequential_epoch_end(self, state: Any, event: Any, modules: Any, **kwargs: Any) -> None:
            nonlocal done
            if any(hasattr(m, "quantization_scheme") for m in modules):  # embeddings and norms come by themselves
                done += 1
                taken = time.perf_counter() - started
                left = taken / done * (layers - done)
                say(f"layer {done} of {layers}, {_clock(taken)} so far, {_clock(left)} left")

    return Progress()


@contextlib.contextmanager
def _lean_attention() -> Iterator[None]:
    """What llm-compressor calls eager attention is PyTorch's own kernel, with the same mask.

    It asks for eager attention so that there is a mask. But that returns the attention of all heads, and AWQ keeps what
    a block's attention returns for every calibration sequence: 30 GB for 256 of 2,048 tokens and 14 heads.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(module: Any, *args: Any, **kwargs: Any) -> Any:
        for name in ("softcap", "s_aux"):  # of Gemma 2 and GPT-OSS; the kernel would leave it out
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{type(module).__name__} has {name}, with which it is not calibrated; use --algorithm rtn"
                )
        return sdpa_attention_forward(module, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["eager"] = attention
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["eager"]


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"


@contextlib.contextmanager
def _quiet() -> Iterator[list[str]]:
    """Without the log and the bars of llm-compressor; collects its warnings, such as layers that GPTQ had to round."""
    import transformers
    from llmcompressor.core import reset_session
    from llmcompressor.logger import LoggerConfig, configure_logger
    from llmcompressor.pipelines.cache import IntermediatesCache
    from loguru import logger
    from tqdm import tqdm
    from tqdm.asyncio import tqdm_asyncio

    said: list[str] = []

    def keep(message: Any) -> None:
        text = " ".join(message.record["message"].split())
        if message.record["level"].name in ("WARNING", "ERROR") and not text.startswith(_KNOWN) and text not in said:
            said.append(text)

    def silent(init: Any) -> Any:
        return lambda self, *args, **kwargs: init(self, *args, **(kwargs | {"disable": True}))

    configure_logger(LoggerConfig(console_log_level=None))
    sink = logger.add(keep, level="WARNING")
    verbosity, tracer = transformers.logging.get_verbosity(), logging.getLogger("torch.fx._symbolic_trace")
    transformers.logging.set_verbosity_error()
    level = tracer.level
    tracer.setLevel(logging.ERROR)
    with contextlib.ExitStack() as stack:
        stack.callback(reset_session)
        stack.callback(logger.remove, sink)
        stack.callback(transformers.logging.set_verbosity, verbosity)
        stack.callback(tracer.setLevel, level)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for cls in (tqdm, tqdm_asyncio):
            stack.enter_context(mock.patch.object(cls, "__init__", silent(cls.__init__)))
        if not torch.cuda.is_available():  # AWQ pins memory for a device that must then exist
            stack.enter_context(mock.patch.object(IntermediatesCache, "pin_memory"))
        yield said
