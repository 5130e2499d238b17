"""The adapter inside a running vLLM: written from, and read back as, PEFT's matrices."""

from collections.abc import Mapping

import torch
from torch import Tensor

from qerl_pl.engine.base import EngineSpec
from qerl_pl.engine.vllm_adapter import Slots


class AdapterSlots:
    """A and B of every target, under Hugging Face's names of the modules; B is held times alpha / rank."""

    def __init__(self, slots: Slots, spec: EngineSpec) -> None:
        self._spec, self._scaling = spec, spec.alpha / spec.rank
        self._names = [name for module in slots for name in _peft_names(module)]
        self._held_a, self._held_b = ([pair[i] for pair in slots.values()] for i in (0, 1))

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy matrices into the slots, all or none. Raises ValueError if names or shapes differ."""
        self._check(tensors)
        a, b = ([tensors[name].detach() for name in self._names[i::2]] for i in (0, 1))
        with torch.no_grad():  # few calls for hundreds of matrices
            torch._foreach_copy_(self._held_a, a)
            if self._scaling != 1:  # in FP32, and rounded once, by the copy
                b = list(torch._foreach_mul([t.float() for t in b], self._scaling))
            torch._foreach_copy_(self._held_b, b)

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        expected = set(self._names)
        missing, unexpected = sorted(expected - tensors.keys()), sorted(tensors.keys() - expected)
        if missing or unexpected:
            raise ValueError(
                f"the adapter does not match the engine (targets {', '.join(self._spec.targets)}): "
                f"{_some('missing', missing)}; {_some('unexpected', unexpected)}. "
                f"Names are those of a saved PEFT adapter, as {min(expected)}"
            )
        held = [slot for pair in zip(self._held_a, self._held_b, strict=True) for slot in pair]
        for name, slot in zip(self._names, held, strict=True):
            if tensors[name].shape != slot.shape:
                raise ValueError(
                    f"{name} is {list(tensors[name].shape)}, the engine has {list(slot.shape)} (rank "
                    f"{self._spec.rank}); start the engine with the policy's rank and base model"
                )

    def read(self) -> dict[str, Tensor]:
        """The matrices in FP32, B without alpha / rank."""
        a, b = ([torch.empty(t.shape, device=t.device) for t in held] for held in (self._held_a, self._held_b))
        torch._foreach_copy_(a, self._held_a)
        torch._foreach_copy_(b, self._held_b)
        if self._scaling != 1:
            torch._foreach_div_(b, self._scaling)
        matrices = [tensor for pair in zip(a, b, strict=True) for tensor in pair]
        return dict(zip(self._names, matrices, strict=True))

    def tensors(self) -> list[Tensor]:
        return [*self._held_a, *self._held_b]

    def version(self) -> int:
        """Grows with every write in place."""
        return sum(tensor._version for tensor in self.tensors())


def _peft_names(module: str) -> tuple[str, str]:
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


def _some(what: str, names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} {what}" + (f" ({shown})" if names else "")
