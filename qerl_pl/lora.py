"""PEFT's LoRA layer for frozen linears, with base and adapter in one operation."""

from typing import Any

from peft.tuners import lora
from torch import Tensor

from qerl_pl.packed import FrozenLinear, frozen_linear


class LoRALinear(lora.Linear):
    """What PEFT puts around a :class:`FrozenLinear`; parameters, names and files are PEFT's."""

    def forward(self, x: Tensor, up: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """x [..., in] -> [..., out]; with ``up`` the input is silu(x) · up."""
        base: Any = self.get_base_layer()
        if self.disable_adapters:
            return frozen_linear(x, base, up)
        a: Any = self.lora_A["default"].weight
        b: Any = self.lora_B["default"].weight
        return frozen_linear(x, base, up, a, b, self.scaling["default"])


CUSTOM: dict[Any, Any] = {FrozenLinear: LoRALinear}
"""For ``LoraConfig._register_custom_module``."""
