"""Gaussian noise on RMSNorm weights (paper Eq. 9-12), written in place and taken back exactly."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from qerl_pl.seeds import derive_seed


@dataclass(frozen=True)
class Applied:
    """What one application did."""

    modules: int  # norms that changed
    sigma: float  # requested standard deviation
    realised: float  # standard deviation of (weight − clean weight) over all of them


class NormNoise:
    """Noise on the live norm weights of one model.

    ``norms`` maps module names to FP32 weights [H]; those whose last name part is in ``which`` get noise. Equal seed,
    step and module name give equal noise, in the engine and the trainer, on every rank and after a restart.
    """

    def __init__(self, norms: Mapping[str, Tensor], which: Sequence[str], seed: int) -> None:
        self.live = {name: weight for name, weight in norms.items() if name.rpartition(".")[2] in which}
        if not self.live:
            raise ValueError(
                f"noise touches no module: none of {len(norms)} norms is named {', '.join(which)}; "
                f"found: {_kinds(norms)}"
            )
        wrong = [name for name, weight in self.live.items() if weight.dtype != torch.float32]
        if wrong:
            raise ValueError(
                f"{wrong[0]}: its weight is {self.live[wrong[0]].dtype}, which rounds small noise away; it must be FP32"
            )
        self.clean = {name: weight.detach().clone() for name, weight in self.live.items()}
        self.seed = seed

    @torch.no_grad()
    def apply(self, sigma: float, step: int) -> Applied:
        """Set every weight to clean + σ·z, z from N(0, 1); what was there before does not matter."""
        if not (isinstance(sigma, Real) and 0 <= sigma < math.inf):  # a schedule may be the user's
            raise ValueError(f"noise: the schedule gave sigma {sigma!r} for step {step}; give a number from 0 on")
        if sigma == 0:
            self.restore()
            return Applied(0, 0.0, 0.0)
        draws = []  # on the CPU: the same on every device
        for name, clean in self.clean.items():
            generator = torch.Generator().manual_seed(derive_seed(self.seed, step, name))
            draws.append(torch.randn(clean.shape, generator=generator))
        live: list[Tensor] = list(self.live.values())
        base: list[Tensor] = list(self.clean.values())
        sizes = [z.numel() for z in draws]
        z = list(torch.cat([z.flatten() for z in draws]).to(live[0].device).split(sizes))
        # All norms in one call each: there are hundreds, and this is between every two steps.
        torch._foreach_copy_(live, torch._foreach_add(base, z, alpha=sigma))
        norms = torch.stack(torch._foreach_norm(torch._foreach_sub(live, base)))
        return Applied(len(live), sigma, float(norms.double().square().sum() / sum(sizes)) ** 0.5)

    @torch.no_grad()
    def rebase(self, clean: Mapping[str, Tensor]) -> None:
        """From the next ``apply`` or ``restore`` on these are the clean weights of their norms."""
        for name, weight in clean.items():
            if name in self.clean:
                self.clean[name].copy_(weight)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the clean weights back, bit for bit."""
        torch._foreach_copy_(list(self.live.values()), list(self.clean.values()))


def _kinds(norms: Mapping[str, Tensor]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in norms})) or "no norms at all"
