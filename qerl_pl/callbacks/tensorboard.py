"""The TensorBoard page that answers: is it learning, is it exploring, is the sampler in step with the trainer?"""

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

LAYOUT = {
    "1 Is it learning?": {
        "held-out pass@1": ["Multiline", ["^validation/(.*/)?pass@1$"]],
        "training reward": ["Multiline", ["^reward$"]],
        "rewards by name": ["Multiline", ["rewards/.*/mean"]],
    },
    "2 Is it exploring?": {
        "entropy (nats per token)": ["Multiline", ["^entropy$"]],
        "noise σ": ["Multiline", ["noise/sigma", "noise/realised_sigma"]],
        "groups without spread": ["Multiline", ["frac_reward_zero_std"]],
    },
    "3 Is the sampler in step with the trainer?": {
        "|Δ log p|, engine against trainer": ["Multiline", ["sampling/logp_difference/mean", "sync/logp_difference"]],
        "KL per token: sampler; of it noise, and kernels": [
            "Multiline",
            ["sampling/kl", "noise/kl", "sampling/kl_kernels"],
        ],
        "clipped tokens": ["Multiline", ["clip_ratio/.*"]],
    },
    "4 What does it cost?": {
        "seconds a step": ["Multiline", ["step_time/.*"]],
        "tokens per second": ["Multiline", ["tokens_per_second/.*"]],
        "completion length": ["Multiline", ["completions/mean_length"]],
    },
}


class OneScreen(Callback):
    """Lays out the custom-scalars page."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.logger, TensorBoardLogger):
            trainer.logger.experiment.add_custom_scalars(LAYOUT)
