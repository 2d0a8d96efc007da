"""DP-CVAE, figure 2: the Wasserstein distance between real and synthetic records, and the parameters of
each generator.

    python benchmarks/reproduce/dpcvae_figure2.py

Distances: the digits at five sites, IID, no backbone, with epsilon 4 and without privacy; sliced, of order
2, from a site's records to as many synthetic ones, mean over sites. Parameters: of what a site trains, and
of what it sends, for the paper's 384 numbers of a small ViT and 11 classes. The row in closed form is a
linear decoder with Gaussian z and noise, that is probabilistic PCA (Tipping & Bishop 1999): FedPFT's low
rank. Records of the same site against each other give the distance that chance leaves.
"""

import re
from statistics import mean, pstdev
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.federation import Federation, federate, load_seed, released
from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.seeds import over_seeds
from fedsurrogate.client_app.methods.dpcvae.downstream import fidelity
from fedsurrogate.common.models.generators import (
    Generator,
    fresh_companion,
    fresh_generator,
    labels_like,
    scaled,
)
from fedsurrogate.common.run import parse_run
from fedsurrogate.strategies.fedpft.strategy import learn

SITES, EPSILON, PAPER = 5, 4.0, {"classes": 11, "dimension": 384}
BUDGET: dict[str, Any] = {"epsilon": EPSILON, "delta": 1e-5}
ROWS: dict[str, dict[str, Any]] = {
    "DP-CVAE, default": {"method": "dpcvae"},
    "DP-CVAE, three layers": {"method": "dpcvae", "dpcvae.hidden": 256, "dpcvae.latent": 100},
    "DP-CGAN": {"method": "dpcgan", "dpcvae.latent": 100},
    "linear decoder in closed form": {"fedpft.covariance": "lowrank", "fedpft.rank": 16},
}


def synthetic(settings: dict[str, Any], data: Federation, count: int) -> Tensor:
    """Records (count, d) of norm one from the generator that all sites learn together."""
    run = parse_run(data.named(settings))
    if run.plan.kind == "rounds":
        training = federate(run, data).training
        assert training is not None
        made = Generator(training.header(), training.config, training.model)
        labels = labels_like(made.shares, count)
        return scaled(made.draw(labels, torch.Generator().manual_seed(0)))
    sent = [released(run, s.train.features, s.train.labels, data.classes) for s in data.sites]
    return scaled(learn(sent, run, "cpu", data.classes).source(0, count)[0])


def apart(seed: int, data: Federation, settings: dict[str, Any] | None) -> float:
    """Mean over sites of the sliced distance; None: between the two halves of a site's records."""
    found = []
    whole = None
    if settings is not None:
        whole = synthetic({**settings, "seed": seed}, data, sum(data.sizes))
    for index, own in enumerate(data.sites):
        real, drawn = scaled(own.train.features), torch.Generator().manual_seed(index)
        order = torch.randperm(len(real), generator=drawn)
        half = len(real) // 2
        if whole is None:
            pair = real[order[:half]], real[order[half:]]
        else:
            pair = real[order[:half]], whole[torch.randperm(len(whole), generator=drawn)[:half]]
        found.append(fidelity(*pair, seed)["sliced"])
    return mean(found)


def spread(values: list[float]) -> str:
    """Mean and deviation with four digits: the distances are small."""
    return f"{mean(values):.4f} ± {pstdev(values):.4f}"


def parameters(settings: dict[str, Any]) -> tuple[int, int]:
    """Numbers that a site trains, and those of them that it sends."""
    run = parse_run({**settings, **BUDGET, "classes": ",".join(map(str, range(PAPER["classes"])))})
    own = (run.settings, run.method.adversarial, PAPER["classes"], PAPER["dimension"])
    sent = sum(each.numel() for each in fresh_generator(*own).parameters())
    return sent + sum(each.numel() for each in fresh_companion(*own).parameters()), sent


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--without", default="", help="no distances of rows whose name matches")
    options = parser.parse_args()
    left_out = re.compile(options.without or "(?!)")
    base: dict[str, Any] = {"partition": "iid"}
    jobs: dict[str, dict[str, Any] | None] = {"two halves of a site": None}
    for name, own in ROWS.items():
        if left_out.search(name):
            continue
        jobs |= {name: base | own, f"{name}, epsilon": base | own | BUDGET}
    found = over_seeds(options.seeds, lambda seed: load_seed(base, SITES, seed), jobs, apart)
    rows: list[tuple[Any, ...]] = [
        ("two halves of a site", "", spread(found["two halves of a site"]), "", "")
    ]
    for name, own in ROWS.items():
        sizes = parameters(own) if "method" in own else ("", "")
        for private, ending in (("", ""), (f"{EPSILON:g}", ", epsilon")):
            distance = spread(found[name + ending]) if name in found else ""
            rows.append((name, private, distance, *sizes))
    columns = ("generator", "epsilon", "distance", "parameters trained", "parameters sent")
    title = f"DP-CVAE figure 2, digits, {SITES} sites, IID, {options.seeds} seeds"
    report("reproduce-dpcvae-figure2", title, columns, rows)


if __name__ == "__main__":
    main()
