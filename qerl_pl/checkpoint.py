"""Hugging Face folders: find one, read its tensors, write it in a weight format."""

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl_pl import random_model
from qerl_pl.stored import StoredOtherwiseError, check_round_trip, stored_as
from registry.quantization import BF16, QuantFormat

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Linear layers that engines compute as one, and that therefore share a global scale."""

_PROJECTION = re.compile(rf"(.*\.layers\.\d+\..*\b(?:{'|'.join(PROJECTIONS)}))(?:\.(.+))?")
_SHARD_BYTES = 4 << 30
_UNQUANTIZED = (torch.bfloat16, torch.float16, torch.float32)


def resolve(model: str) -> Path:
    """The local folder of ``model``: ``tiny`` (the embedded one), ``random:SIZE`` (in BF16), a folder, or a name on the
    Hugging Face hub.
    """
    if model == "tiny":
        return Path(str(files("qerl_pl") / "assets" / "tiny"))
    if model.startswith(random_model.PREFIX):
        return prepare(model, BF16())
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model: {model!r} is a folder without config.json; name a Hugging Face model folder")
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ValueError(
            f"model: there is no folder {model!r}, and it is no hub name (owner/name); 'tiny' is the embedded model, "
            f"'{random_model.PREFIX}7B' one of random weights"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
    except Exception as error:  # the hub raises many kinds; to a user they are one
        raise ValueError(f"model: no folder {model!r} here, and the hub did not give it: {error}") from error


def resolve_option(model: str) -> Path:
    """``resolve`` for a command line: errors name ``--model``, not the ``model:`` of a config."""
    try:
        return resolve(model)
    except ValueError as error:
        raise ValueError(f"--{error}") from error


class Weights(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, each read from disk (or made, if the weights are random) when asked for."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        if random_model.is_random(folder):
            tensors = random_model.RandomTensors(folder)
            self._file: dict[str, Any] = dict.fromkeys(tensors.keys(), tensors)
            return
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        elif single.is_file():
            names = [single.name]
        else:
            raise ValueError(
                f"{folder}: neither model.safetensors nor model.safetensors.index.json; save the model as safetensors"
            )
        self._file = {}
        for name in names:
            try:
                handle = safe_open(folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"{folder / name} cannot be read ({error}); it may be incomplete: copy or download it again"
                ) from error
            self._file |= dict.fromkeys(handle.keys(), handle)

    def __getitem__(self, name: str) -> Tensor:
        return self._file[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the tensor."""
        return tuple(self._file[name].get_slice(name).get_shape())


def is_projection(module: str) -> bool:
    """Whether a module of this name carries the packed weights and the adapter."""
    return projection(module) == (module, "")


def projection(tensor: str) -> tuple[str, str] | None:
    """The projection that a tensor of a checkpoint belongs to, and its name there, which may have dots."""
    found = _PROJECTION.fullmatch(tensor)
    return None if found is None else (found[1], found[2] or "")


def prepare(model: str, quantization: QuantFormat, cache: Path | None = None) -> Path:
    """The folder of ``model`` in the layout of ``quantization``.

    A folder that is there already is used as it is. A BF16 model is rounded to nearest once, into the cache
    (``$QERL_PL_CACHE``, by default ``~/.cache/qerl_pl``); trainer and engine then read the same bytes.
    """
    cache = cache or Path(os.environ.get("QERL_PL_CACHE", Path.home() / ".cache" / "qerl_pl"))
    if model.startswith(random_model.PREFIX):
        size = model.removeprefix(random_model.PREFIX)
        config = random_model.config(size, quantization)
        target = cache / f"random-{size}-{config[random_model.MARK]}-{_key(config)}"
        return _make_once(target, lambda unfinished: random_model.write(size, quantization, unfinished))
    folder = resolve(model)
    config = json.loads((folder / "config.json").read_text())
    found, wanted = config.get("quantization_config"), quantization.config
    name = type(quantization).__name__.lower()
    if found is not None:
        if stored_as(found) != stored_as(wanted):
            raise StoredOtherwiseError(model, found, quantization)
        activations = [g for g in found.get("config_groups", {}).values() if g.get("input_activations")]
        if activations:
            raise ValueError(
                f"model: {model!r} also quantizes activations; use a weight-only checkpoint (llm-compressor: a scheme "
                "that ends in A16)"
            )
        return folder
    if wanted is None:
        return folder
    source = sorted(
        (f.name, f.stat().st_size, f.stat().st_mtime_ns)
        for f in folder.iterdir()
        if f.suffix in (".json", ".safetensors")
    )
    key = _key([str(folder.resolve()), source, wanted, *_code(quantization)])
    target = cache / f"{folder.resolve().name}-{name}-{key}"
    return _make_once(target, lambda unfinished: write(folder, config, quantization, unfinished))


def _code(quantization: QuantFormat) -> list[str]:
    """The files that define a format: one that was edited makes other bytes."""
    modules = [sys.modules.get(cls.__module__) for cls in type(quantization).__mro__ if issubclass(cls, QuantFormat)]
    files = [getattr(module, "__file__", None) for module in modules]
    return [Path(file).read_text() for file in dict.fromkeys(files) if file is not None]


def _key(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def _make_once(target: Path, make: Callable[[Path], None]) -> Path:
    """The folder ``target``, made if it is not there.

    It is made beside its place and renamed: another process sees all of it or nothing.
    """
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
        try:
            make(unfinished)
            readable(unfinished)
            unfinished.rename(target)
        except OSError:
            if not target.is_dir():  # somebody else was first otherwise
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return target


def write(folder: Path, config: dict[str, Any], quantization: QuantFormat, target: Path) -> None:
    """Quantize the model in ``folder`` by rounding to nearest and write it to ``target``, shard by shard."""
    weights = Weights(folder)
    shard: dict[str, Tensor] = {}
    index: dict[str, str] = {}

    def flush() -> None:
        from safetensors.torch import save_file

        name = f"model-{len(set(index.values())) + 1:05d}.safetensors"
        save_file(shard, target / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, name))
        shard.clear()

    for tensors in _quantized(folder, weights, quantization):
        shard.update(tensors)
        if sum(t.nbytes for t in shard.values()) > _SHARD_BYTES:
            flush()
    flush()
    size = sum(f.stat().st_size for f in target.glob("*.safetensors"))
    (target / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=1)
    )
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": quantization.config}, indent=1))
    copy_files(folder, target)


def readable(folder: Path) -> None:
    """Give a folder and its tensors the permissions of other files; safetensors and tempfile make them private."""
    mask = os.umask(0)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o666 & ~mask)


def copy_files(folder: Path, target: Path) -> None:
    """Tokenizer, chat template, generation config: all that describes a model beside its tensors."""
    for file in folder.iterdir():
        described = file.suffix in (".json", ".jinja", ".model", ".txt") and not file.name.endswith(".index.json")
        if file.is_file() and described and not (target / file.name).exists():
            shutil.copy(file, target)


def _quantized(folder: Path, weights: Weights, quantization: QuantFormat) -> Iterator[dict[str, Tensor]]:
    """The checkpoint's tensors with every projection in stored form; one fused group at a time."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    projections = {
        n.removesuffix(".weight") for n in weights if n.endswith(".weight") and is_projection(n.removesuffix(".weight"))
    }
    if not projections:
        raise ValueError(
            f"the checkpoint has none of the layers {', '.join(PROJECTIONS)}; its architecture is not supported"
        )
    checked = False
    for name in weights:
        module = name.removesuffix(".weight")
        if module not in projections:
            yield {name: weights[name]}
            continue
        parent, _, leaf = module.rpartition(".")
        group = next(g for g in FUSED if leaf in g)
        if leaf != group[0]:
            continue  # written with the first of its group
        members = [f"{parent}.{leaf}" for leaf in group if f"{parent}.{leaf}" in projections]
        dense = [weights[f"{m}.weight"].to(device) for m in members]
        for member, weight in zip(members, dense, strict=True):
            quantization.check(member, weight.shape[1])
            if not weight.isfinite().all():
                raise ValueError(
                    f"{folder}: {member}.weight has infinite numbers or NaN; copy or download the model again"
                )
        parts = quantization.quantize(dense)
        if not checked:  # one is enough to find a mistake, and costs next to nothing beside all that follow
            check_round_trip(members[0], dense[0], parts[0], quantization)
            checked = True
        for member, stored in zip(members, parts, strict=True):
            yield {f"{member}.{key}": tensor.cpu().contiguous() for key, tensor in stored.items()}


def stored_projection(
    weights: Weights, module: str, quantization: QuantFormat
) -> tuple[QuantFormat, dict[str, Tensor]]:
    """Format and stored tensors of one projection. A layer that the quantizer was told to ignore is found as BF16."""
    names = quantization.layout(1, quantization.group_size)
    missing = [n for n in names if f"{module}.{n}" not in weights]
    if missing and f"{module}.weight" in weights and (plain := weights[f"{module}.weight"]).dtype in _UNQUANTIZED:
        return BF16(), {"weight": plain.to(torch.bfloat16)}
    if missing:
        raise ValueError(f"the checkpoint lacks {', '.join(f'{module}.{n}' for n in missing)}")
    stored = {n: weights[f"{module}.{n}"] for n in names}
    if isinstance(quantization, BF16):
        stored = {"weight": stored["weight"].to(torch.bfloat16)}
    return quantization, stored
