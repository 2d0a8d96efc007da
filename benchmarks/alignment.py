"""Features of sites aligned before they are learned from, beside the default, which aligns nothing.

SLOT-Align (Berardini, Pastore & Murino, ICML 2026, and the authors' code): a site sends the mean and the
Ledoit-Wolf covariance of its features; the coordinator returns the map to their Bures-Wasserstein
barycentre, weighted by records; each site moves its records, those of the test too, 0.4 of the way along
it, or the whole way. "by class" is the same between covariances within classes, and the mean moves by what
the site's class means differ from those of all sites in the same classes: another mix of classes moves
nothing. Each then sends what it sends without alignment.

    python benchmarks/alignment.py --seeds 3

Each site has images of its own kind, and another mix of classes: of each it keeps its share from
Dirichlet(alpha), over the largest share; "all" keeps every record. Tested on all test images of each kind,
moved as those of its site; the mean over kinds. PACS: photo and sketch. Digits: five devices of
`benchmarks/honest_hospitals.py`, 64 pixels. X-rays: four hospitals with plain, brighter, contrasted images
and another scanner. PACS and X-rays are in 256 columns of most variance of all training records; the
authors offer this too.
"""

from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

import numpy as np
import torch
from sklearn.covariance import LedoitWolf
from torch import Tensor

from benchmarks.harness.federation import Federation, joined, measure, site
from benchmarks.harness.options import arguments
from benchmarks.harness.results import report, stored
from benchmarks.harness.samples import BACKBONES, MOBILENET, stored_features
from benchmarks.harness.seeds import mean_and_deviation
from benchmarks.honest_hospitals import DEVICES, KINDS, xray_sites
from fedsurrogate.client_app.features.site_features import LabelledFeatures
from fedsurrogate.common.backbones.power_transform import raised, with_power
from tests.hostile_sites import uneven_digits

Data = tuple[Tensor, Tensor]
# Training and test records of each kind of image.
Kinds = list[tuple[Data, Data]]
# Means (n, d), covariances (n, d, d), and the means to which they move (n, d).
Moments = tuple[Tensor, Tensor, Tensor]
MOST_COLUMNS = 256
SHARES = {"": 0.4, ", the whole way": 1.0}
ALPHAS: tuple[float | None, ...] = (None, 0.5, 0.1)
SEEN = ("half as bright", "gamma", "blurred", "moved")
COLUMNS = ("data", "alpha", "alignment", "accuracy, %", "against none, points")


def whole(parts: Sequence[Data], classes: int) -> Moments:
    """SLOT-Align's moments: of all records of a site."""
    fitted = [LedoitWolf().fit(x.double().numpy()) for x, _ in parts]
    means = torch.stack([torch.from_numpy(each.location_) for each in fitted])
    records = torch.tensor([float(len(y)) for _, y in parts], dtype=torch.float64)
    centre = (records / records.sum()) @ means
    covariances = torch.stack([torch.from_numpy(each.covariance_) for each in fitted])
    return means, covariances, centre.expand_as(means)


def by_class(parts: Sequence[Data], classes: int) -> Moments:
    """Moments within classes, and means over the classes that a site has."""
    counts, sums = list[Tensor](), list[Tensor]()
    for x, y in parts:
        of_class = torch.nn.functional.one_hot(y, classes).double()
        counts.append(of_class.sum(0))
        sums.append(of_class.T @ x.double())
    n, s = torch.stack(counts), torch.stack(sums)
    own = s / n.clamp_min(1)[..., None]
    all_sites = s.sum(0) / n.sum(0).clamp_min(1)[:, None]
    covariances = [
        torch.from_numpy(LedoitWolf().fit((x.double() - own[at][y]).numpy()).covariance_)
        for at, (x, y) in enumerate(parts)
    ]
    shares = (n > 0).double() / (n > 0).sum(1, keepdim=True)
    means = (shares[..., None] * own).sum(1)
    return means, torch.stack(covariances), shares @ all_sites


MOMENTS: dict[str, Callable[[Sequence[Data], int], Moments]] = {
    "SLOT-Align": whole,
    "by class": by_class,
}


def moved(kinds: Kinds, moments: Moments) -> dict[str, Kinds]:
    """Records of each site along the map to the barycentre of all, by how far."""
    import ot

    means, covariances, centres = (each.numpy() for each in moments)
    records = np.array([float(len(train[1])) for train, _ in kinds])
    _, target = ot.gaussian.bures_wasserstein_barycenter(
        means, covariances, weights=records / records.sum()
    )
    found: dict[str, Kinds] = {ending: [] for ending in SHARES}
    for pair, *own, centre in zip(kinds, means, covariances, centres, strict=True):
        matrix, bias = ot.gaussian.bures_wasserstein_mapping(own[0], centre, own[1], target)
        for ending, share in SHARES.items():

            def along(data: Data, map_: Any = (matrix, bias, share)) -> Data:
                x = data[0].double().numpy()
                there = x @ map_[0].T + map_[1]
                return torch.from_numpy(x + map_[2] * (there - x)).float(), data[1]

            found[ending].append((along(pair[0]), along(pair[1])))
    return found


def thinned(data: Data, alpha: float | None, draw: torch.Generator) -> Data:
    """Of each class its share from Dirichlet(alpha), over the largest."""
    if alpha is None:
        return data
    x, y = data
    classes = int(y.max()) + 1
    torch.manual_seed(int(torch.randint(2**31, (), generator=draw)))
    shares = torch.distributions.Dirichlet(torch.full((classes,), alpha)).sample()
    kept = list[Tensor]()
    for label, share in enumerate((shares / shares.max()).tolist()):
        rows = (y == label).nonzero().squeeze(1)
        rows = rows[torch.randperm(len(rows), generator=draw)]
        kept.append(rows[: round(share * len(rows))])
    rows = torch.cat(kept)
    return x[rows], y[rows]


def pacs(seed: int, backbone: str) -> Kinds:
    """Photo and sketch."""
    styles = ("pacs-photo", "pacs-sketch")
    return [
        (stored_features(s, backbone=backbone), stored_features(s, "test", backbone))
        for s in styles
    ]


def digits(seed: int, backbone: str) -> Kinds:
    """Five devices; each has a fifth of the training images, and all test images."""
    parts, (x, y) = uneven_digits(100.0, seed, 1 + len(SEEN))
    found: Kinds = [(parts[0], (x, y))]
    for part, name in zip(parts[1:], SEEN, strict=True):

        def through(data: Data, name: str = name) -> Data:
            return DEVICES[name](data[0].reshape(-1, 1, 8, 8)).flatten(1), data[1]

        found.append((through(part), through((x, y))))
    return found


def xrays(seed: int, backbone: str) -> Kinds:
    """Four hospitals, each with its kind of image, by MobileNetV2."""
    sites, tests = xray_sites()
    return [(sites[at, kind], tests[kind]) for at, kind in enumerate(KINDS)]


SETS: dict[str, tuple[Callable[[int, str], Kinds], int]] = {
    "pacs": (pacs, 7),
    "digits": (digits, 10),
    "xrays": (xrays, 2),
}


def reduced(kinds: Kinds) -> Kinds:
    """In the directions of most variance of all training records; a site needs only sums for these."""
    every = torch.cat([x for (x, _), _ in kinds]).double()
    if every.shape[1] <= MOST_COLUMNS:
        return kinds
    mean = every.mean(0)
    basis = torch.linalg.svd(every - mean, full_matrices=False)[2][:MOST_COLUMNS].T

    def into(data: Data) -> Data:
        return ((data[0].double() - mean) @ basis).float(), data[1]

    return [(into(train), into(test)) for train, test in kinds]


def federation(kinds: Kinds, classes: int, power: float) -> Federation:
    """One site for each kind."""
    names = tuple(f"class {index}" for index in range(classes))
    tests = [LabelledFeatures(*test) for _, test in kinds]
    parts = [
        site(*train, test, names, with_power("a" * 16, power))
        for (train, _), test in zip(kinds, tests, strict=True)
    ]
    return Federation(parts, joined(tests))


def rows_of(name: str, alpha: float | None, seeds: int, backbone: str) -> list[tuple[Any, ...]]:
    """Rows of one set and one mix of classes."""
    load, classes = SETS[name]
    power = 1.0 if name == "digits" else 0.5
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        draw = torch.Generator().manual_seed(seed)
        kinds: Kinds = []
        for train, test in load(seed, backbone):
            x, y = thinned(train, alpha, draw)
            kinds.append(((raised(x, power), y), (raised(test[0], power), test[1])))
        kinds = reduced(kinds)
        aligned = {"none": kinds}
        for alignment, moments in MOMENTS.items():
            ways = moved(kinds, moments([train for train, _ in kinds], classes))
            aligned |= {alignment + ending: each for ending, each in ways.items()}
        base = {"seed": seed, "features.power-transform": power, "defence": "none"}
        for alignment, own in aligned.items():
            data = federation(own, classes, power)
            made = measure(base, {}, data).model
            assert made is not None
            right = [made.accuracy(x, data.classes, y) for _, (x, y) in own]
            found.setdefault(alignment, []).append(mean(100 * r / n for r, n in right))
            print(name, alpha, seed, alignment, found[alignment][-1], sep="\t", flush=True)
    share = "all" if alpha is None else alpha
    without = mean(found["none"])
    return [
        (name, share, alignment, mean_and_deviation(each), round(mean(each) - without, 2))
        for alignment, each in found.items()
    ]


def main() -> None:
    parser = arguments(__doc__, "alignment")
    parser.add_argument("--sets", nargs="*", choices=list(SETS), default=list(SETS))
    options = parser.parse_args()
    title = f"alignment, {BACKBONES[options.backbone].title}, {options.seeds} seeds"
    rows = [
        tuple(each) for each in stored(options.name).get("rows", []) if each[0] not in options.sets
    ]
    for name in options.sets:
        if name != "pacs" and options.backbone != MOBILENET:
            continue
        for alpha in ALPHAS:
            rows += rows_of(name, alpha, options.seeds, options.backbone)
            report(options.name, title, COLUMNS, rows)


if __name__ == "__main__":
    main()
