"""What is measured: a model of random weights, on the device that is there."""

from dataclasses import replace

from qerl_pl.bench.results import device
from qerl_pl.checkpoint import PROJECTIONS, prepare
from qerl_pl.engine.base import EngineSpec
from qerl_pl.memory import Shape, kv_bytes_per_token
from qerl_pl.random_model import PREFIX
from registry.quantization import FORMATS


def random_spec(model: str, format: str, rank: int, max_length: int, sequences: int = 0) -> EngineSpec:
    """A shape (``7B``) in a format, with a KV cache for so many sequences of ``max_length`` tokens.

    Without ``sequences`` the size of the cache is the engine's affair.
    """
    where, dtype = device()
    quantization = FORMATS[format]()
    folder = prepare(PREFIX + model, quantization)
    spec = EngineSpec(folder, quantization, rank, float(rank), PROJECTIONS, dtype, where, max_length)
    if not sequences:
        return spec
    # Each sequence is rounded up to blocks; on the CPU keys and values are FP32.
    token = kv_bytes_per_token(Shape.read(spec.config)) * (2 if where == "cpu" else 1)
    return replace(spec, kv_cache_bytes=sequences * (max_length + 128) * token)
