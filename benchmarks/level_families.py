"""Families of generated classes under privacy: what tells them apart may be what a map before the clip
takes away.

    python benchmarks/level_families.py

Two classes, two sites with 1,500 records each, 2,000 others for tests, nothing set but the budget and
the classes. "before": the mean over a feature's own columns was taken away from 64 columns on. "now":
it keeps a small weight from 8 columns on, and the length from 16 on. "ranges": with
`features.ranges`. "centralized" is Opacus's DP-SGD of a logistic regression on all records, whose
columns are scaled by the same public ranges, then of norm one or not; of four pairs of steps and
rates the best on the test records, which favours it. Draws that the file has are kept.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks._private_peers import dp_sgd_opacus
from benchmarks.column_scales import ranges_of
from benchmarks.harness.federation import Federation, LabelledFeatures, measure, site
from benchmarks.harness.options import described
from benchmarks.harness.results import report, stored
from fedsurrogate.common.privacy.gaussian_mechanism import clip, weigh_mean_over_columns
from fedsurrogate.common.privacy.shares import ALL, REMOVED
from fedsurrogate.common.settings.heads import FEWEST_MAPPED
from fedsurrogate.common.surrogates.mixtures import in_frame, public_frame

NAME, TITLE = "level-families", "Accuracy % under privacy, two generated classes"
SITES, RECORDS, TESTS, CLASSES, DELTA = 2, 3000, 2000, ("a", "b"), 1e-5
EPSILONS, COLUMNS = (1.0, 2.0, 8.0), (8, 64, 192, 512)
ROWS = ("before", "now", "ranges", "centralized")
PEERS = ((10, 4.0), (20, 1.0), (20, 16.0), (40, 32.0))
# Signs of classes (n, 1), normal numbers (n, d) and random numbers that the family always has.
Family = Callable[[Tensor, Tensor, torch.Generator], Tensor]


def direction(columns: int, fixed: torch.Generator) -> Tensor:
    """Two deviations along a random direction (d,)."""
    return 2 * torch.nn.functional.normalize(torch.randn(columns, generator=fixed).double(), dim=0)


def level(signs: Tensor, normal: Tensor, fixed: torch.Generator) -> Tensor:
    """All columns of one class are one deviation higher."""
    return 5.5 + signs / 2 + normal


def far(signs: Tensor, normal: Tensor, fixed: torch.Generator) -> Tensor:
    """A direction, far from zero."""
    return 50 + signs * direction(normal.shape[1], fixed) + normal


def offsets(signs: Tensor, normal: Tensor, fixed: torch.Generator) -> Tensor:
    """A direction, and each column around a place of its own."""
    places = 5 * torch.randn(normal.shape[1], generator=fixed).double()
    return places + signs * direction(normal.shape[1], fixed) + normal


def scales(signs: Tensor, normal: Tensor, fixed: torch.Generator) -> Tensor:
    """A direction, and columns of scales from 0.1 to 10."""
    powers = 2 * torch.rand(normal.shape[1], generator=fixed).double() - 1
    return (signs * direction(normal.shape[1], fixed) + normal) * 10**powers


def heavy(signs: Tensor, normal: Tensor, fixed: torch.Generator) -> Tensor:
    """A direction, in numbers with tails of Student's t with three degrees of freedom."""
    squares = torch.distributions.Chi2(torch.tensor(3.0, dtype=torch.float64))
    with torch.random.fork_rng():
        torch.manual_seed(len(normal))
        tails = (squares.sample(normal.shape) / 3).sqrt()
    return 1.5 * signs * direction(normal.shape[1], fixed) + normal / tails


def variances(signs: Tensor, normal: Tensor, fixed: torch.Generator) -> Tensor:
    """Around zero, one class varies by half more."""
    return normal * (1.25 + signs / 4)


def contrast(signs: Tensor, normal: Tensor, fixed: torch.Generator) -> Tensor:
    """Around five, one class varies by half more."""
    return 5 + variances(signs, normal, fixed)


def sparse(signs: Tensor, normal: Tensor, fixed: torch.Generator) -> Tensor:
    """As after a ReLU that leaves a sixth of the numbers."""
    ways = direction(normal.shape[1], fixed)
    return (normal - 1 + 1.5 * signs * ways).clamp_min(0)


def correlated(signs: Tensor, normal: Tensor, fixed: torch.Generator) -> Tensor:
    """A direction, and five that columns vary along together."""
    columns = normal.shape[1]
    ways = torch.randn(5, columns, generator=fixed).double()
    apart = direction(columns, fixed)
    mixed = normal + normal[:, :5] @ ways
    return 3 + signs * apart + mixed


FAMILIES: dict[str, Family] = {
    "level": level,
    "offset of 50": far,
    "offsets by column": offsets,
    "scale by column": scales,
    "heavy tails": heavy,
    "unequal variances": variances,
    "unequal variances, offset": contrast,
    "sparse": sparse,
    "correlated": correlated,
}


def federation(family: str, columns: int, seed: int) -> Federation:
    """Two sites with records of a family."""
    drawn, fixed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(77)
    count = RECORDS + TESTS
    labels = torch.randint(2, (count,), generator=drawn)
    normal = torch.randn(count, columns, generator=drawn).double()
    features = FAMILIES[family](2.0 * labels[:, None] - 1, normal, fixed).float()
    test = LabelledFeatures(features[RECORDS:], labels[RECORDS:])
    parts = [(features[i:RECORDS:SITES], labels[i:RECORDS:SITES]) for i in range(SITES)]
    return Federation([site(x, y, test, CLASSES, "a" * 16) for x, y in parts], test)


def without_mean(data: Federation) -> Federation:
    """The same as an earlier version clipped it."""
    weight = REMOVED if data.test.features.shape[1] >= FEWEST_MAPPED else ALL

    def less(records: LabelledFeatures) -> LabelledFeatures:
        return LabelledFeatures(weigh_mean_over_columns(records.features, weight), records.labels)

    test = less(data.test)
    trains = [less(each.train) for each in data.sites]
    return Federation(
        [site(each.features, each.labels, test, CLASSES, "a" * 16) for each in trains], test
    )


def oracle(data: Federation, ranges: str, epsilon: float, seed: int) -> float:
    """Accuracy of the best central DP-SGD on columns in their public ranges."""
    x = torch.cat([each.train.features for each in data.sites])
    y = torch.cat([each.train.labels for each in data.sites])
    frame = public_frame(ranges, x.shape[1], True)
    accuracies = []
    for norm in (0.0, 1.0):
        train, test = (
            clip(in_frame(each, frame).double(), norm)[0] for each in (x, data.test.features)
        )
        given = (train, y, test, data.test.labels)
        accuracies += [dp_sgd_opacus(given, epsilon, seed, *each) for each in PEERS]
    return max(accuracies)


def cell(family: str, columns: int, epsilon: float, seed: int) -> list[float]:
    """The accuracies of ROWS in %."""
    data = federation(family, columns, seed)
    private: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA, "sites": SITES}
    every = torch.cat([*(each.train.features for each in data.sites), data.test.features])
    ranges = ranges_of(every)
    runs = (
        (without_mean(data), {"features.projection": ""}),
        (data, {}),
        (data, {"features.ranges": ranges}),
    )
    found = [
        measure({"seed": seed}, own.named(private | changed), own).accuracy for own, changed in runs
    ]
    return [*found, oracle(data, ranges, epsilon, seed)]


def main() -> None:
    options = described(__doc__)
    options.add_argument("--draws", type=int, default=3)
    options.add_argument("--families", nargs="+", default=list(FAMILIES))
    given = options.parse_args()
    torch.set_num_threads(1)
    kept: dict[str, list[list[float]]] = dict(stored(NAME).get("accuracy", {}))
    for family in given.families:
        for columns in COLUMNS:
            for epsilon in EPSILONS:
                values = kept.setdefault(f"{family}, {columns}, {epsilon:g}", [])
                for seed in range(len(values), given.draws):
                    found = cell(family, columns, epsilon, seed)
                    values.append([round(each, 2) for each in found])
            write(kept)


def write(kept: dict[str, list[list[float]]]) -> None:
    """Write the means over the draws that are there."""
    rows = []
    for family in FAMILIES:
        for columns in COLUMNS:
            cells = [kept.get(f"{family}, {columns}, {epsilon:g}") for epsilon in EPSILONS]
            if all(cells):
                means = (
                    statistics.mean(each) for own in cells for each in zip(*own or [], strict=True)
                )
                rows.append((family, columns, *(round(each, 1) for each in means)))
    heads = [f"{row}, epsilon {epsilon:g}" for epsilon in EPSILONS for row in ROWS]
    report(NAME, TITLE, ("classes differ by", "columns", *heads), rows, accuracy=kept)


if __name__ == "__main__":
    main()
