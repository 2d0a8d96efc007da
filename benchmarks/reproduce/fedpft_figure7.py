"""FedPFT, figure 7: how well families of Gaussian mixtures model features. Accuracy of a head that is
trained on samples, against one on the real features, and the numbers of a family (equations 9 to 11).

    python benchmarks/reproduce/fedpft_figure7.py

All training features are in one place, and each class has as many samples as records, as in the paper;
the head is trained on them. The paper has Caltech101 with CLIP; default: the sample CIFAR-10 features next
to the checkout. The picture has accuracy by numbers, and two dimensions, drawn at random, of the real
features of a class and of samples of each family.
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.federation import Federation, load_seed, measure, released
from benchmarks.harness.options import arguments, settings_of
from benchmarks.harness.results import RESULTS, report
from benchmarks.harness.seeds import mean_and_deviation, over_seeds
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Surrogate
from fedsurrogate.strategies.fedpft.strategy import learn

# Gaussians of a class for each family; a full covariance of many columns takes long.
COUNTS = {"spherical": (1, 10, 50, 100), "diag": (1, 10, 50, 100), "full": (1, 5)}
PUBLISHED: dict[str, Any] = {
    "fedpft.samples-per-component": 1,
    "head.solver": "sampled",
    "features.power-transform": 1.0,
    "max-payload-mib": 256,
}
ROWS: dict[str, dict[str, Any] | None] = {"real features": None} | {
    f"{family} K={count}": {"fedpft.covariance": family, "fedpft.components": count}
    for family, counts in COUNTS.items()
    for count in counts
}
DRAWN = ("spherical K=1", "diag K=1", "diag K=10")
PAPER = "less than a point below real features from 10 to 50 Gaussians on; Caltech101, CLIP"


def numbers(family: str, count: int, classes: int, dimension: int) -> int:
    """Equations 9 to 11.

    Example:
        >>> numbers("spherical", 10, 2, 100), numbers("diag", 10, 2, 100), numbers("full", 1, 1, 3)
        (2040, 4020, 10)
    """
    d = dimension
    each = {"spherical": d + 2, "diag": 2 * d + 1, "full": 2 * d + (d * d - d) // 2 + 1}[family]
    return each * count * classes


def main() -> None:
    options = arguments(__doc__, "reproduce-fedpft-figure7").parse_args()
    settings, message = settings_of(options, {"dataset": "cifar10"})

    def one(seed: int, data: Federation, own: dict[str, Any] | None) -> float:
        published = own and PUBLISHED | own
        return measure(settings | {"seed": seed}, published, data).accuracy

    found = over_seeds(options.seeds, lambda seed: load_seed(settings, 1, seed), ROWS, one)
    data = load_seed(settings, 1, 0)
    sizes = len(data.classes), data.test.features.shape[1]
    real, rows = found["real features"], []
    for name, each in found.items():
        family, _, count = name.partition(" K=")
        apart = [own - best for own, best in zip(each, real, strict=True)]
        several = numbers(family, int(count), *sizes) if count else data.sizes[0] * sizes[1]
        rows.append((name, several, mean_and_deviation(each), round(sum(apart) / len(apart), 2)))
    columns = ("features", "numbers", "accuracy, %", "against real features")
    title = f"FedPFT figure 7, {options.seeds} seeds. {message}"
    report(options.name, title, columns, rows, paper=PAPER)
    plot(rows, settings, data, options.name)


def plot(
    rows: list[tuple[str, int, str, float]], settings: dict[str, Any], data: Federation, name: str
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for family in COUNTS:
        own = [row for row in rows if row[0].startswith(f"{family} ")]
        left.semilogx([row[1] for row in own], [row[3] for row in own], "o-", label=family)
    left.axhline(0, color="black", ls="--", lw=0.8, label="real features")
    left.set(xlabel="numbers of all classes", ylabel="accuracy against real features, points")
    left.legend(fontsize=8)
    left.grid(alpha=0.3)
    train = data.sites[0].train
    first, second = torch.randperm(
        train.features.shape[1], generator=torch.Generator().manual_seed(0)
    )[:2].tolist()
    sets = {"real": train.features[train.labels == 0]}
    for row in DRAWN:
        sets[row] = samples(settings | PUBLISHED | (ROWS[row] or {}), data)
    for label, each in sets.items():
        middle.scatter(each[:300, first], each[:300, second], s=4, alpha=0.5, label=label)
        right.hist(each[:, first].numpy(), bins=40, density=True, histtype="step", label=label)
    middle.set(title="two dimensions of a class", xlabel=f"{first}", ylabel=f"{second}")
    right.set(title="one of them", xlabel=f"{first}")
    right.legend(fontsize=8)
    figure.savefig(RESULTS / f"{name}.png", dpi=110)


def samples(settings: dict[str, Any], data: Federation) -> Tensor:
    """As many samples (n, d) of the first class as it has records."""
    run, train = parse_run(settings), data.sites[0].train
    sent = released(run, train.features, train.labels, data.classes)
    assert isinstance(sent, Surrogate)
    drawn, labels = learn([sent], run, "cpu", data.classes).source(0, len(train.labels))
    return drawn[labels == 0]


if __name__ == "__main__":
    main()
