"""PEFT's LoRA layer for frozen linears, with base and adapter in one operation."""

from typing import Any

from peft.tuners import lora
from torch import Tensor

from qerl_pl.packed import FrozenLinear, frozen_linear


class LoRALinear(lora.Linear):
    """What PEFT puts around a :class:`FrozenLinear`; parameters, names and files are PEFT's."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [..., in] -> [..., out]; a second tensor ``up`` makes the input silu(x) · up."""
        base: Any = self.get_base_layer()
        if self.disable_adapters:
            y: Tensor = base(x, *args)
            return y
        a, b = self.lora_A["default"].weight, self.lora_B["default"].weight
        return frozen_linear(x, base, *(args or (None,)), a, b, self.scaling["default"])


CUSTOM: dict[Any, Any] = {FrozenLinear: LoRALinear}
"""For ``LoraConfig._register_custom_module``."""
