"""DP-CVAE's dimension of z, beside the same linear Gaussian decoder in closed form.

Features of CIFAR-10 by EfficientNet-Lite0, 10 sites, Dirichlet 0.3, without privacy and with epsilon 1.
Each row is a shared head: of synthetic embeddings, or of FedPFT's low-rank Gaussians, which are
probabilistic PCA, a linear decoder with Gaussian z (Tipping & Bishop 1999), with as many columns. "alone" and
"mixed" are means over sites on their own test records, "all" is on all test records.

    python benchmarks/dpcvae_latent.py
"""

from itertools import product
from typing import Any

from benchmarks.dpcvae_downstream import CLASSES, DELTA, measured_scores
from benchmarks.harness.federation import load_seed
from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.samples import BACKBONES, feature_settings
from benchmarks.harness.seeds import mean_and_deviation
from fedsurrogate.common.run import parse_run

SITES, SIZES, EPSILONS = 10, (2, 8, 16, 32, 64), (0.0, 1.0)
ROWS: dict[str, dict[str, Any]] = {
    **{f"DP-CVAE, {n}": {"method": "dpcvae", "dpcvae.latent": n} for n in SIZES},
    **{f"closed form, {n}": {"fedpft.covariance": "lowrank", "fedpft.rank": n} for n in SIZES},
}
KINDS = {"alone, %": "accuracy-synthetic", "mixed, %": "accuracy-mixed", "all, %": "all"}


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--backbone", choices=list(BACKBONES), default="lite0")
    options = parser.parse_args()
    base = feature_settings("cifar10", options.backbone, partition="dirichlet", alpha=0.3)
    base |= {"classes": CLASSES}
    found: dict[tuple[str, float], list[dict[str, float]]] = {}
    for seed in range(options.seeds):
        data = load_seed(base, SITES, seed)
        for (name, own), epsilon in product(ROWS.items(), EPSILONS):
            budget = {"epsilon": epsilon, "delta": DELTA} if epsilon else {}
            run = parse_run(base | {"seed": seed} | own | budget)
            found.setdefault((name, epsilon), []).append(measured_scores(run, data))
            # After each row, so that an interrupted run keeps what it has.
            write(found, BACKBONES[options.backbone].title)


def write(found: dict[tuple[str, float], list[dict[str, float]]], backbone: str) -> None:
    """Print and store the table of the results so far."""
    rows = [
        (
            name,
            f"{epsilon:g}" if epsilon else "none",
            *(mean_and_deviation([one[kind] for one in each]) for kind in KINDS.values()),
            round(sum(one["bytes"] for one in each) / len(each), 2),
            len(each),
        )
        for (name, epsilon), each in found.items()
    ]
    columns = ("generator, dimension of z", "epsilon", *KINDS, "MB sent", "seeds")
    title = f"DP-CVAE by dimension of z, features of CIFAR-10 by {backbone}, {SITES} sites, Dirichlet 0.3"
    report("dpcvae-latent", f"{title}, delta {DELTA:g}", columns, rows)


if __name__ == "__main__":
    main()
