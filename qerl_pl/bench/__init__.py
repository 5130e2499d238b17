"""``qerl-pl bench``: speed and memory by model shape, beside the libraries that people would use otherwise."""
