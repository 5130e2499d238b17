"""The memory plan: what a run takes on one GPU, computed from sizes before anything is allocated.

Bytes everywhere; GB is 1e9. The trainer's and engine's arithmetic is BF16. Norm weights, biases, token ids and
log-probabilities are left out: together below 1 % of the base.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qerl_pl.checkpoint import FUSED, PROJECTIONS

GB = 1e9
BF16 = 2
BLOCK = 16  # tokens of a block of the KV cache

# Estimates; everything else here is counted.
CONTEXT = int(0.6 * GB)  # of CUDA, cuBLAS and the kernels loaded
GRAPHS = int(0.3 * GB)  # about a dozen captured batch sizes
UNUSED = 0.03  # share of the device that is left to the allocator's gaps


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen or Llama style decoder."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool  # the head is the embedding

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "Shape":
        """From a Hugging Face ``config.json``."""
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        missing = [name for name in names if not config.get(name)]
        if missing:
            raise ValueError(f"config.json has no {', '.join(missing)}; the plan is for Qwen and Llama style decoders")
        layers, hidden, ffn, heads, vocab = (config[name] for name in names)
        return cls(
            layers, hidden, ffn, heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocab=vocab,
            tied=config.get("tie_word_embeddings", False),
        )  # fmt: skip

    @property
    def q(self) -> int:
        """Elements of a token's queries."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Elements of a token's keys, or values."""
        return self.kv_heads * self.head_dim

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(out, in) of the packed layers of a block."""
        h, f = self.hidden, self.ffn
        shapes = ((self.q, h), (self.kv, h), (self.kv, h), (h, self.q), (f, h), (f, h), (h, f))
        return dict(zip(PROJECTIONS, shapes, strict=True))


def weight_bytes(shape: Shape, bits_per_weight: float) -> int:
    """layers × Σ out·in × bits / 8, and embedding and head (one if tied) in BF16."""
    packed = shape.layers * sum(rows * columns for rows, columns in shape.projections.values())
    return int(packed * bits_per_weight / 8) + (1 if shape.tied else 2) * shape.vocab * shape.hidden * BF16


def adapter_size(shape: Shape, rank: int, targets: Sequence[str]) -> int:
    """Parameters of the adapter: layers × rank × Σ (in + out) of the targets."""
    return shape.layers * rank * sum(sum(shape.projections[name]) for name in targets)


def kv_bytes_per_token(shape: Shape) -> int:
    """A key and a value of each layer in BF16."""
    return 2 * shape.layers * shape.kv * BF16


def kv_blocks(prompt: int, completion: int, sequences: int, num_generations: int) -> int:
    """Blocks with which ``sequences`` run at once, in whole groups.

    The whole blocks of a prompt are shared by its siblings (prefix cache); what is left of it, and the completion, is
    each one's own.
    """
    own = -(-(min(prompt, BLOCK - 1) + completion) // BLOCK)
    return -(-sequences // num_generations) * (prompt // BLOCK) + sequences * own


def layer_bytes_per_token(shape: Shape, rank: int, targets: Sequence[str]) -> int:
    """What one layer saves of a token for backward.

    BF16: 2h inputs of the norms, 2h their outputs (shared by q, k, v and by gate, up), q, k, v after the rotation, the
    attention's output, gate and up (their product is computed again), x·A of each target. FP32: log-sum-exp of a head.
    """
    h, f = shape.hidden, shape.ffn
    return BF16 * (4 * h + 2 * shape.q + 2 * shape.kv + 2 * f + rank * len(targets)) + 4 * shape.heads


def activation_bytes(shape: Shape, tokens: int, recomputed: int, rank: int, targets: Sequence[str]) -> int:
    """The largest sum of activations of a micro-batch while the first ``recomputed`` layers are checkpointed.

    A checkpointed layer keeps its input (h in BF16) and is recomputed when backward reaches it: by then the layers
    after it are free again, so that one layer of the first is alive at a time. The last layer is the first that
    backward needs: recomputing it too saves nothing. On top, always: gradients of a layer's widest values (gate, up,
    their product and its gradient, and two of h), and three of h around the final norm.
    """
    whole = max(shape.layers - recomputed, 1)
    kept = whole * layer_bytes_per_token(shape, rank, targets) + recomputed * shape.hidden * BF16
    passing = BF16 * (4 * shape.ffn + 5 * shape.hidden)
    return tokens * (kept + passing)


def scratch_bytes(shape: Shape, bits_per_weight: float) -> int:
    """The largest layer, dense in BF16; layers that the engine fuses (gate, up) are one. Nothing for a BF16 base."""
    if bits_per_weight >= 8 * BF16:
        return 0
    sizes = {name: rows * columns for name, (rows, columns) in shape.projections.items()}
    return max(sum(sizes[name] for name in group) for group in FUSED) * BF16


def sampler_bytes(shape: Shape, bits_per_weight: float, adapter: int, copies: int = 1) -> int:
    """What the engine always takes: ``copies`` of the base, an adapter of so many parameters, context and graphs, one
    layer made dense.
    """
    base = copies * weight_bytes(shape, bits_per_weight)
    return base + BF16 * adapter + CONTEXT + GRAPHS + scratch_bytes(shape, bits_per_weight)


def engine_bytes(shape: Shape, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """The widest activations of the engine's largest batch (gate, up, product, two of h; BF16), and logits and
    log-probabilities of a token of each sequence (FP32).
    """
    return max_num_batched_tokens * BF16 * (3 * shape.ffn + 2 * shape.hidden) + max_num_seqs * shape.vocab * 8


@dataclass(frozen=True)
class Plan:
    """Bytes by purpose, and what follows: how much KV cache, how many layers to recompute."""

    device: int  # of the GPU
    layers: int
    release_kv: bool  # the KV cache is given back while the trainer works

    weights: int  # base, embedding and head: one copy, or as many as there are
    engine_adapter: int  # BF16
    adapter: int  # the trainer's, FP32
    optimizer: int
    fixed: int  # context and CUDA graphs
    scratch: int  # a layer made dense, by the trainer or for a prefill; the memory stays

    kv_cache: int
    kv_tokens: int  # that it holds
    kv_tokens_wanted: int
    engine_batch: int

    gradients: int  # FP32
    activations: int
    checkpointed_layers: int  # the first of them
    logits: int

    @property
    def resident(self) -> int:
        """Always there."""
        return self.weights + self.engine_adapter + self.adapter + self.optimizer + self.fixed + self.scratch

    @property
    def rollout(self) -> int:
        """Peak while sampling."""
        return self.resident + self.kv_cache + self.engine_batch

    @property
    def update(self) -> int:
        """Peak while training."""
        kept = 0 if self.release_kv else self.kv_cache
        return self.resident + kept + self.gradients + self.activations + self.logits

    @property
    def peak(self) -> int:
        return max(self.rollout, self.update)

    def table(self) -> str:
        """For the console, in GB."""
        kv = f"KV cache, {self.kv_tokens:,} of {self.kv_tokens_wanted:,} tokens wanted"
        recomputed = f"activations, {self.checkpointed_layers} of {self.layers} layers recomputed"
        rows = [
            ("base weights", self.weights),
            ("adapter in the engine", self.engine_adapter),
            ("adapter in the trainer", self.adapter),
            ("optimizer", self.optimizer),
            ("CUDA context and graphs", self.fixed),
            ("unpacked layer", self.scratch),
            ("= always", self.resident),
            (kv, self.kv_cache),
            ("engine's batch", self.engine_batch),
            ("= rollout", self.rollout),
            ("gradients", self.gradients),
            (recomputed, self.activations),
            ("logits", self.logits),
            ("= update, KV cache released" if self.release_kv else "= update, beside the KV cache", self.update),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}} {size / GB:7.2f}" for name, size in rows]
        title = f"memory plan, GB of {self.device / GB:.1f}"
        return "\n".join([title, *lines])


def plan_memory(
    config: Mapping[str, Any],
    *,
    device_bytes: int,
    bits_per_weight: float = 4.5,
    base_copies: int = 1,
    rank: int = 32,
    targets: Sequence[str] = PROJECTIONS,
    optimizer_bytes: float = 8,
    max_prompt_length: int = 1024,
    max_completion_length: int = 4096,
    num_generations: int = 8,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    tokens_per_micro_batch: int = 16384,
    logits_chunk: int = 1024,
    release_kv: bool = True,
) -> Plan:
    """The plan of a model with this ``config.json`` on a GPU of ``device_bytes``.

    The fewest layers are recomputed with which the update fits (beside the whole KV cache unless ``release_kv``); the
    KV cache is all that ``max_num_seqs`` sequences want, or what is left. ``optimizer_bytes`` a parameter: 8 for AdamW,
    2 for its 8-bit states. ValueError if even one sequence, or one micro-batch with all layers but the last recomputed,
    has no room.
    """
    shape = Shape.read(config)
    longest = max_prompt_length + max_completion_length
    tokens = max(tokens_per_micro_batch, longest)  # a longer completion is a micro-batch of its own
    trained = adapter_size(shape, rank, targets)
    weights = base_copies * weight_bytes(shape, bits_per_weight)
    scratch, logits = scratch_bytes(shape, bits_per_weight), logits_chunk * shape.vocab * 6  # BF16 and FP32
    resident = sampler_bytes(shape, bits_per_weight, trained, base_copies) + int((4 + optimizer_bytes) * trained)
    batch = engine_bytes(shape, max_num_batched_tokens, max_num_seqs)
    block = BLOCK * kv_bytes_per_token(shape)
    wanted = kv_blocks(max_prompt_length, max_completion_length, max_num_seqs, num_generations)
    least = -(-longest // BLOCK)
    usable = int((1 - UNUSED) * device_bytes)

    def update(recomputed: int) -> int:
        activations = activation_bytes(shape, tokens, recomputed, rank, targets)
        return resident + 4 * trained + activations + logits

    def shortage(phase: str, needed: int) -> ValueError:
        return ValueError(
            f"memory: {phase} needs {needed / GB:.2f} GB, {(needed - usable) / GB:.2f} GB more than the "
            f"{usable / GB:.2f} GB planned with ({1 - UNUSED:.0%} of the device). Lower "
            f"model.tokens_per_micro_batch ({tokens_per_micro_batch}; a micro-batch holds at least one sequence of "
            f"{longest} tokens), data.max_completion_length ({max_completion_length}) or the engine's max_num_seqs "
            f"({max_num_seqs}), or store the base in fewer bits than {bits_per_weight:g} (model.quantization)"
        )

    beside = 0 if release_kv else wanted * block
    fitting = (n for n in range(shape.layers) if update(n) + beside <= usable)
    recomputed = next(fitting, shape.layers - 1)
    if update(recomputed) > usable:
        raise shortage("the update, with all layers but the last recomputed,", update(recomputed))
    busy = resident + batch if release_kv else max(resident + batch, update(recomputed))
    blocks = min(wanted, (usable - busy) // block)
    if blocks < least:
        where = "a rollout" if release_kv else "the update beside the KV cache"
        raise shortage(f"{where} of one sequence", busy + least * block)
    return Plan(
        device=device_bytes,
        layers=shape.layers,
        release_kv=release_kv,
        weights=weights,
        engine_adapter=BF16 * trained,
        adapter=4 * trained,
        optimizer=int(optimizer_bytes * trained),
        fixed=CONTEXT + GRAPHS,
        scratch=scratch,
        kv_cache=blocks * block,
        kv_tokens=blocks * BLOCK,
        kv_tokens_wanted=wanted * BLOCK,
        engine_batch=batch,
        gradients=4 * trained,
        activations=activation_bytes(shape, tokens, recomputed, rank, targets),
        checkpointed_layers=recomputed,
        logits=logits,
    )
