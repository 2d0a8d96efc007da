"""One Flower strategy per method: collection on one side, `learn` (no Flower types) on the other."""

from flwr.serverapp import Grid

from strategies.fedpft import FedPFT

STRATEGIES = {"fedpft": FedPFT}

__all__ = ["STRATEGIES", "FedPFT", "Grid"]
