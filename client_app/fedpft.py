"""FedPFT at a site: features in, mixtures out. Runs in a notebook as well; Flower is not needed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from common.config import RunConfig, run_digest
from common.mixtures import Mixtures, MixtureSettings, fit
from common.surrogates import Header, Surrogate


def make_surrogate(
    features: Tensor,
    labels: Tensor,
    classes: Sequence[str],
    fingerprint: str,
    site: str,
    config: RunConfig,
    max_components: int = 0,
    max_rank: int = 0,
) -> Surrogate:
    """Fit the mixtures this site releases.

    features (n, d), labels (n,) indices into `classes`. A site may lower components and rank for its own bandwidth
    (`max_components`, `max_rank`; 0 means as the run says). Only classes the site has are released: their presence and
    their counts are visible to the coordinator. Source: FedPFT, algorithm 1, lines 1 to 8.
    """
    present = torch.bincount(labels, minlength=len(classes)).nonzero().squeeze(1)
    settings = MixtureSettings(
        family=config.fedpft.covariance,
        components=min(config.fedpft.components, max_components or config.fedpft.components),
        rank=min(config.fedpft.rank, max_rank or config.fedpft.rank),
        samples_per_component=config.fedpft.samples_per_component,
    )
    seed = hashlib.sha256(f"{config.seed}\0{site}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "little") >> 1)
    mixtures = _fit(features, torch.searchsorted(present, labels), len(present), settings, generator)
    header = Header(config.method, run_digest(config), site, fingerprint, tuple(classes[i] for i in present.tolist()))
    return Surrogate(header, mixtures.to("cpu"))


def _fit(features: Tensor, labels: Tensor, classes: int, settings: MixtureSettings, generator: torch.Generator) -> Mixtures:
    """Fit on one processor thread: sums then do not depend on the machine's load, and simulated sites do not fight."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return fit(features.float(), labels, classes, settings, generator)
    finally:
        torch.set_num_threads(threads)
