"""The worst that hostile sites do to `fedpft`, found by a search.

The attacker knows the surrogates of all honest sites and the defence. Every hostile site claims all
classes, with data like everybody's, and then moves class means (or single components), counts and
covariances. Directions, steps, counts and classes are searched on a grid, then covariances and parts
of a class at the best of these. Rows, over all seeds: accuracy of the honest sites alone in %; the
largest loss in points, and its mean over the seeds, for defence "none" and for the one that is
measured; the lie of the largest loss; in how many of the seeds' worst lies all hostile sites, and
any honest site, were suspected. Rows without hostile sites: the loss against `none`, and the share
of partitions in which any site was suspected. Rows of the last
result that are not measured again are kept. Heads are in closed form, or trained on few samples
for ten components. Without sample data, only the digits run.

    python benchmarks/searched_attacks.py --seeds 3
    python benchmarks/searched_attacks.py --only "digits 0.5" --sites 3,4 --epsilons none --dry-run
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.options import described
from benchmarks.harness.results import kept_rows, report
from benchmarks.harness.samples import sample_folder, stored_features
from common.run import Run, parse_run
from common.surrogates.shared_covariances import LowRank
from common.surrogates.surrogates import AnySurrogate, SumsSurrogate
from strategies.fedpft.learn import learn
from tests.hostile_sites import Data, dirichlet, surrogate_of, uneven_digits

STEPS = (0.3, 0.5, 0.7, 1.0, 1.4, 1.8, 2.5, 3.0)
COUNTS = (1, 3, 10)
DIRECTIONS = ("nearest", "away", "random", "middle", "next class")
COVARIANCES = ("narrow", "wide", "along")
PARTS = ("a third", "mirrored")
COLUMNS = ("data", "sites", "hostile", "epsilon", "components", "seeds", "honest alone %")
COLUMNS += ("worst loss, none", "worst loss", "mean loss", "lie", "named", "accused")
SETTINGS: dict[str, dict[str, Any]] = {
    "1": {},
    "10": {"fedpft.components": 10, "fedpft.samples-per-component": 3, "head.min-steps": 60}
    | {"head.epochs": 1, "head.max-samples": 2000},
}


@dataclass(frozen=True)
class Lie:
    """What the hostile sites change. The step is in distances to the nearest other class."""

    direction: str
    step: float
    counts: int
    classes: str = "all"
    covariance: str = "own"
    part: str = "all"

    def __str__(self) -> str:
        words = [f"{self.direction} {self.step:g}", f"counts x{self.counts}"]
        extra = {"classes": self.classes, "covariance": self.covariance, "part": self.part}
        return ", ".join(words + [f"{k} {v}" for k, v in extra.items() if v not in ("all", "own")])


def ways(centres: Tensor, direction: str) -> Tensor:
    """Displacements (C, d) of class means (C, d) for a step of one."""
    apart = torch.cdist(centres, centres).fill_diagonal_(torch.inf)
    near, other = apart.min(1)
    match direction:
        case "nearest":
            return centres[other] - centres
        case "away":
            return centres - centres[other]
        case "middle":
            return centres.mean(0) - centres
        case "next class":
            return centres.roll(-1, 0) - centres
        case _:
            drawn = torch.randn(centres.shape, generator=torch.Generator().manual_seed(5))
            return drawn / drawn.norm(dim=1, keepdim=True) * near[:, None]


def with_lie(sent: AnySurrogate, lie: Lie) -> AnySurrogate:
    """A surrogate of data like everybody's, changed as the lie says."""
    if isinstance(sent, SumsSurrogate):
        return _told_sums(sent, lie)
    table, classes = sent.mixtures, len(sent.header.classes)
    centres = torch.zeros(classes, sent.dimension).index_add_(
        0, table.labels, table.weights[:, None] * table.means
    )
    moves = lie.step * ways(centres, lie.direction)
    if lie.classes == "one":
        moves[1:] = 0
    shift = moves[table.labels]
    index = (
        torch.arange(len(table.labels))
        - (table.components.cumsum(0) - table.components)[table.labels]
    )
    if lie.part == "a third":
        shift = torch.where(index[:, None] % 3 == 0, shift, 0.0)
    elif lie.part == "mirrored":
        shift = torch.where(index[:, None] % 2 == 0, shift, -shift)
    covariance: Any = table.covariance
    if lie.covariance in ("narrow", "wide"):
        covariance = covariance.scaled(0.2 if lie.covariance == "narrow" else 5.0)
    elif lie.covariance == "along" and isinstance(covariance, LowRank):
        # All variance that the dimensions have, along the lines between classes.
        lines = torch.linalg.svd(centres - centres.mean(0), full_matrices=False)[2]
        factor = lines[: covariance.factor.shape[1]].T
        total = covariance.variances_per_dimension()[0]
        factor = factor * (total / factor.square().sum(1).clamp_min(1e-9)).sqrt()[:, None]
        covariance = LowRank(factor, 0.01 * covariance.variances)
    mixtures = replace(
        table, counts=table.counts * lie.counts, means=table.means + shift, covariance=covariance
    )
    return replace(sent, mixtures=mixtures)


def _told_sums(sent: SumsSurrogate, lie: Lie) -> SumsSurrogate:
    sums = sent.sums
    known = sums.counts.clamp_min(1)[:, None]
    moves = lie.step * ways(sums.sums / known, lie.direction)
    if lie.classes == "one":
        moves[1:] = 0
    factor = {"narrow": 0.2, "wide": 5.0}.get(lie.covariance, 1.0)
    squares = None if sums.squares is None else factor * lie.counts * sums.squares
    moved = lie.counts * (sums.sums + known * moves)
    return replace(
        sent, sums=replace(sums, counts=lie.counts * sums.counts, sums=moved, squares=squares)
    )


class Federation:
    """Honest sites, and what hostile ones send in their midst.

    Args:
        parts: data of all sites; the last ones are hostile.
        test: data.
        hostile: number of hostile sites.
        settings: of the run.
    """

    def __init__(
        self, parts: list[Data], test: Data, hostile: int, settings: dict[str, Any]
    ) -> None:
        self.test, self.hostile = test, hostile
        self.classes = tuple(str(index) for index in range(int(test[1].max()) + 1))
        self.runs = {
            rule: parse_run(settings | {"defence": rule, "deadline": 60.0})
            for rule in ("none", "auto")
        }
        honest = parts[: len(parts) - hostile]
        self.good = [self._sent(part, f"h{i}") for i, part in enumerate(honest)]
        x, y = (torch.cat(each) for each in zip(*parts, strict=True))
        size = sorted(len(labels) for _, labels in parts)[len(parts) // 2]
        self.bad = []
        for index in range(hostile):
            rows = torch.randperm(len(y), generator=torch.Generator().manual_seed(index))[:size]
            self.bad.append(self._sent((x[rows], y[rows]), f"z{index}"))
        self.alone = self.accuracy(self.good, "none")[0]

    def _sent(self, data: Data, name: str) -> AnySurrogate:
        return surrogate_of(data, self.classes, "f" * 16, name, self.runs["none"])

    def accuracy(self, sent: Sequence[AnySurrogate], rule: str) -> tuple[float, set[str]]:
        """Accuracy in %, and the names of suspects."""
        run: Run = self.runs[rule]
        found = learn(sent, run, "cpu", self.classes)
        right = found.head.accuracy(self.test[0], self.classes, self.test[1])[0]
        return 100 * right / len(self.test[1]), {each.site for each in found.defended.suspects}

    def loss(self, lie: Lie, rule: str) -> tuple[float, set[str]]:
        """Points behind the honest sites alone, and suspects."""
        try:
            accuracy, named = self.accuracy(
                [*self.good, *(with_lie(b, lie) for b in self.bad)], rule
            )
        except Exception as error:
            return 100.0, {f"({type(error).__name__})"}
        return self.alone - accuracy, named

    def search(self, rule: str, several: bool) -> tuple[float, Lie, set[str]]:
        """The worst loss, its lie, and who was suspected then."""
        grid = [Lie(*each) for each in itertools.product(DIRECTIONS, STEPS, COUNTS)]
        found = [(*self.loss(lie, rule), lie) for lie in grid]
        for _ in range(2):
            best = max(found, key=lambda each: each[0])[2]
            more = [replace(best, covariance=each) for each in COVARIANCES]
            more += [replace(best, classes="one")]
            more += [replace(best, part=each) for each in PARTS if several]
            found += [(*self.loss(lie, rule), lie) for lie in more if lie != best]
        loss, named, lie = max(found, key=lambda each: each[0])
        return loss, lie, named


def digits(alpha: float, seed: int, sites: int) -> tuple[list[Data], Data]:
    return uneven_digits(alpha, seed, sites)


def cifar(alpha: float, seed: int, sites: int) -> tuple[list[Data], Data]:
    return dirichlet(*stored_features("cifar10"), alpha, seed, sites), stored_features(
        "cifar10", "test"
    )


def pacs(alpha: float, seed: int, sites: int) -> tuple[list[Data], Data]:
    """Half of the sites have photos, half have sketches."""
    half = sites // 2
    parts = dirichlet(*stored_features("pacs-photo"), alpha, seed, sites - half)
    parts += dirichlet(*stored_features("pacs-sketch"), alpha, seed, half)
    tests = [stored_features(f"pacs-{style}", "test") for style in ("photo", "sketch")]
    return parts, (torch.cat([x for x, _ in tests]), torch.cat([y for _, y in tests]))


PLACES: dict[str, tuple[Callable[[float, int, int], tuple[list[Data], Data]], float]] = {
    "digits even": (digits, 100.0),
    "digits 0.5": (digits, 0.5),
    "digits 0.1": (digits, 0.1),
    "cifar10 0.5": (cifar, 0.5),
    "cifar10 0.1": (cifar, 0.1),
    "pacs": (pacs, 100.0),
}


def rows_of(
    place: str, sites: int, hostile: int, epsilon: str, components: str, seeds: Sequence[int]
) -> Iterator[tuple[Any, ...]]:
    """The row of one federation over all seeds."""
    make, alpha = PLACES[place]
    kind = SETTINGS[components]
    if epsilon != "none":
        kind = {"epsilon": float(epsilon), "delta": 1e-5, "fedpft.covariance": "spherical"}
    alone, plain, worst, lies, named, accused = [], [], [], [], [], []
    for seed in seeds:
        parts, test = make(alpha, seed, sites)
        own = Federation(parts, test, hostile, {"seed": seed} | kind)
        alone.append(own.alone)
        if not hostile:
            accuracy, suspects = own.accuracy(own.good, "auto")
            plain.append(0.0)
            worst.append(own.alone - accuracy)
            lies.append("")
        else:
            plain.append(own.search("none", components != "1")[0])
            loss, lie, suspects = own.search("auto", components != "1")
            worst.append(loss)
            lies.append(str(lie))
        named.append({f"z{index}" for index in range(hostile)} <= suspects)
        accused.append(any(name[0] == "h" for name in suspects))
    top = worst.index(max(worst))
    head = (place, sites, hostile, epsilon, components, len(seeds), round(mean(alone), 1))
    losses = (round(max(plain), 1), round(max(worst), 1), round(mean(worst), 1), lies[top])
    yield *head, *losses, sum(named) if hostile else "", sum(accused)


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", default="", help="data, as the table names them")
    parser.add_argument("--sites", default="3/1,4/1,5/1,10/1,10/2", help="sites/hostile ones")
    parser.add_argument("--epsilons", default="none,8,1")
    parser.add_argument("--components", default="1,10")
    parser.add_argument("--name", default="searched-attacks", help="of the file of results")
    parser.add_argument("--dry-run", action="store_true", help="print rows and write no file")
    options = parser.parse_args()
    have = (sample_folder() / "features").exists()
    places = options.only.split(",") if options.only else list(PLACES)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    rows = []
    for place, sites, epsilon, components in itertools.product(
        places,
        options.sites.split(","),
        options.epsilons.split(","),
        options.components.split(","),
    ):
        if (place.startswith("digits") or have) and (epsilon == "none" or components == "1"):
            count, _, hostile = sites.partition("/")
            for row in rows_of(place, int(count), int(hostile or 0), epsilon, components, seeds):
                print(*row, sep="\t", flush=True)
                rows.append(row)
    if not options.dry_run:
        new = {row[:5] for row in rows}
        rows = kept_rows(options.name, lambda old: tuple(old[:5]) in new) + rows
        report(options.name, "worst loss that a search finds", COLUMNS, rows)


if __name__ == "__main__":
    main()
