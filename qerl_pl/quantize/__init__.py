"""``qerl-pl quantize``: calibrated checkpoints, and what quantization did to the model."""
