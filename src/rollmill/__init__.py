"""rollmill: train language models with reinforcement learning, on a laptop or a cluster."""

__version__ = "0.1.0"
