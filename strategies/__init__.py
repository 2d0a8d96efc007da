"""One Flower strategy per way to run: collection on one side, `learn` (no Flower types) on the other."""

from flwr.serverapp import Grid

from common.config import RunConfig
from common.sections import GENERATIVE, IN_ROUNDS
from strategies.chain import Chain
from strategies.dpcvae import DPCVAE
from strategies.federation import Federation
from strategies.fedlap import FedLAP
from strategies.fedpft import FedPFT
from strategies.one_shot import Local, OneShot
from strategies.rounds import Updates


def strategy_of(config: RunConfig) -> type[Federation]:
    """The strategy of a run's method."""
    if config.method in IN_ROUNDS:
        return Updates
    if config.method == "fedlap":
        return FedLAP
    if config.method in GENERATIVE:
        return DPCVAE
    if config.method == "local":
        return Local
    if config.method == "kd" or (config.method == "fedpft" and config.fedpft.topology == "chain"):
        return Chain
    return FedPFT if config.method == "fedpft" else OneShot


__all__ = ["DPCVAE", "Chain", "FedLAP", "FedPFT", "Federation", "Grid", "Local", "OneShot", "Updates", "strategy_of"]
