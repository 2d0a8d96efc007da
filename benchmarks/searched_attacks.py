"""The worst that hostile sites do to `fedpft`, found by a search.

The attacker knows the surrogates of all honest sites and the defence. Every hostile site claims all
classes, with data like everybody's, and then moves class means (or single components), counts and
covariances. The search halves: a coarse grid of directions, steps and counts on one seed, then
variants of its three worst lies (steps between, counts, covariances, one class, a part of the
components) on each held-out seed. A row gives, over the held-out seeds: accuracy of the honest sites
alone in %; the largest loss in points behind them, its mean, the loss by the same lie without a
defence, the lie; in how many seeds all hostile sites, and any honest site, were suspected then; and
how many lies were tried. Rows without hostile sites: the loss against defence "none", the worst
partition first, and in how many partitions any site was suspected. Features of CIFAR-10 and PACS go
through a public random projection to 64 dimensions. Heads are in closed form, or trained on few
samples for ten components. The file is of one run: it is written anew after every row.

`--by-hospital` tells every lie of that file on the held-out seeds again, and measures what each honest
hospital loses of test records like its own (its classes, and its style in PACS): the largest loss of
one hospital, and the second largest, which is what the defence limits. The last columns are of the seed
with the largest loss: in all test records, and as much of it as is in shared kinds: a class (in PACS of
one style) of which two honest sites have ten records. In others one honest hospital, or none, stands
against a false one: no rule without trusted data tells which is which.

`--shared` searches for the lie that costs most in shared kinds, and tests these alone, on the first
seeds that have 50 such test records.

    python benchmarks/searched_attacks.py
    python benchmarks/searched_attacks.py --by-hospital
    python benchmarks/searched_attacks.py --only "digits 0.5" --dry-run
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.results import stored as stored_rows
from benchmarks.harness.samples import sample_folder, stored_features
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.covariances import LowRank
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, SumsSurrogate
from fedsurrogate.strategies.fedpft.strategy import learn
from tests.hostile_sites import Data, dirichlet, surrogate_of, uneven_digits

# The coarse grid, and its steps with several components or privacy, whose learning takes longer.
STEPS, FEW_STEPS = (0.3, 0.7, 1.4, 2.5), (0.7, 1.8)
COUNTS = (1, 10)
# Factors of a step between those of the grid, and the lies that are varied.
BETWEEN, BEST = (0.7, 1.3), 3
SEARCHED, HELD_OUT, HONEST = 0, range(10, 16), range(10, 30)
# Columns and seed of the public projection; records that are used of a stored set.
COLUMNS_KEPT, PUBLIC_SEED, RECORDS = 64, 17, 2000
DIRECTIONS = ("nearest", "away", "random", "middle", "next class")
COVARIANCES = ("narrow", "wide", "along")
PARTS = ("a third", "mirrored")
COLUMNS = ("data", "sites", "hostile", "epsilon", "components", "seeds", "honest alone %")
COLUMNS += ("same lie, none", "worst loss", "mean loss", "lie", "named", "accused", "lies tried")
BY_HOSPITAL = (*COLUMNS[:6], "one hospital", "second hospital", "mean of one", "mean of second")
BY_HOSPITAL += ("all records", "of kinds at two honest sites")
# Records of a class, and in PACS of a style, with which a site knows a kind; and fewest test records of
# shared kinds of a seed that is used.
KNOWN, TESTED = 10, 50
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

    @classmethod
    def read(cls, words: str) -> "Lie":
        """The lie that these words say."""
        way, counts, *extra = words.split(", ")
        direction, _, step = way.rpartition(" ")
        more = dict(each.split(" ", 1) for each in extra)
        return cls(direction, float(step), int(counts.removeprefix("counts x")), **more)


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
        last = max(int(labels.max()) for _, labels in parts)
        self.classes = tuple(str(index) for index in range(last + 1))
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
        right = found.model.accuracy(self.test[0], self.classes, self.test[1])[0]
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

    def right(self, sent: Sequence[AnySurrogate], rule: str) -> Tensor:
        """Whether each test record is placed right, (n,)."""
        head = learn(sent, self.runs[rule], "cpu", self.classes).model
        names = torch.tensor([int(name) for name in head.header.classes])
        return (names[head.scores(self.test[0]).argmax(1)] == self.test[1]).double()

    def lost(self, lie: Lie) -> Tensor:
        """Which test records (n,) a lie turns wrong: 1, or right: -1."""
        told = [*self.good, *(with_lie(each, lie) for each in self.bad)]
        return self.right(self.good, "none") - self.right(told, "auto")

    def worst(self, lies: Sequence[Lie], rule: str) -> list[tuple[float, Lie, set[str]]]:
        """The lies by their loss, the largest first, and who was suspected."""
        found = [(*self.loss(lie, rule), lie) for lie in dict.fromkeys(lies)]
        found.sort(key=lambda each: -each[0])
        return [(loss, lie, named) for loss, named, lie in found]


def variants(lie: Lie, several: bool) -> list[Lie]:
    """A lie, and others that differ from it in one thing."""
    more = [replace(lie, step=factor * lie.step) for factor in BETWEEN]
    more += [replace(lie, counts=3), replace(lie, classes="one")]
    more += [replace(lie, covariance=each) for each in COVARIANCES]
    return [lie, *more, *(replace(lie, part=each) for each in PARTS if several)]


def digits(alpha: float, seed: int, sites: int) -> tuple[list[Data], Data]:
    return uneven_digits(alpha, seed, sites)


def stored(name: str, split: str = "train") -> Data:
    """Features of a stored set after the public projection."""
    features, labels = stored_features(name, split)
    generator = torch.Generator().manual_seed(PUBLIC_SEED)
    columns = torch.randn(features.shape[1], COLUMNS_KEPT, generator=generator)
    rows = torch.randperm(len(labels), generator=generator)[:RECORDS]
    return features[rows].float() @ columns / COLUMNS_KEPT**0.5, labels[rows]


def cifar(alpha: float, seed: int, sites: int) -> tuple[list[Data], Data]:
    return dirichlet(*stored("cifar10"), alpha, seed, sites), stored("cifar10", "test")


def pacs(alpha: float, seed: int, sites: int) -> tuple[list[Data], Data]:
    """Half of the sites have photos, half have sketches."""
    half = sites // 2
    parts = dirichlet(*stored("pacs-photo"), alpha, seed, sites - half)
    parts += dirichlet(*stored("pacs-sketch"), alpha, seed, half)
    tests = [stored(f"pacs-{style}", "test") for style in ("photo", "sketch")]
    return parts, (torch.cat([x for x, _ in tests]), torch.cat([y for _, y in tests]))


PLACES: dict[str, tuple[Callable[[float, int, int], tuple[list[Data], Data]], float]] = {
    "digits even": (digits, 100.0),
    "digits 0.5": (digits, 0.5),
    "digits 0.1": (digits, 0.1),
    "cifar10 0.5": (cifar, 0.5),
    "cifar10 0.1": (cifar, 0.1),
    "pacs": (pacs, 100.0),
}


# What is measured: data, sites/hostile ones, epsilon, components.
PLAN = (
    *(
        ("digits 0.5", f"{n}/{k}", "none", "1")
        for n, k in ((3, 1), (4, 1), (5, 1), (10, 1), (10, 2))
    ),
    *(("digits 0.1", f"{n}/0", "none", "1") for n in (3, 4, 5, 10)),
    *(("digits 0.1", f"{n}/{k}", "none", "1") for n, k in ((4, 1), (10, 1))),
    *(("pacs", f"{n}/0", "none", "1") for n in (3, 4, 5, 10)),
    *(("pacs", f"{n}/1", "none", "1") for n in (4, 10)),
    *(("cifar10 0.5", f"{n}/1", "none", "1") for n in (4, 10)),
    *(("cifar10 0.1", f"{n}/0", "none", "1") for n in (4, 10)),
    *(("digits 0.5", f"{n}/{k}", "8", "1") for n, k in ((3, 1), (4, 1), (5, 1), (10, 1), (10, 2))),
    *(("digits 0.5", f"{n}/{k}", "1", "1") for n, k in ((3, 1), (4, 1), (5, 1), (10, 1), (10, 2))),
    *(
        ("digits 0.5", f"{n}/{k}", "none", "10")
        for n, k in ((4, 1), (10, 1), (3, 1), (5, 1), (10, 2))
    ),
    *(("digits 0.5", f"{n}/0", "none", "10") for n in (4, 10)),
)


def records_of_kind(place: str, parts: Sequence[Data], test: Data) -> tuple[Tensor, Tensor]:
    """For each site and test record the site's records of the same kind, (S, n): a class, in PACS of the
    site's style; and the test records of that kind, (n,).
    """
    labels, count = test[1], len(parts)
    styles = torch.zeros(len(labels))
    if place == "pacs":
        styles[len(stored("pacs-photo", "test")[1]) :] = 1
    own = torch.stack([torch.bincount(y, minlength=int(labels.max()) + 1) for _, y in parts])
    sketches = torch.tensor([place == "pacs" and i >= count - count // 2 for i in range(count)])
    like = styles == sketches[:, None].float()
    same = (labels == labels[:, None]) & (styles == styles[:, None])
    return torch.where(like, own[:, labels], 0).double(), same.sum(1).double()


def in_shared_kinds(records: Tensor) -> Tensor:
    """The test records (n,) of whose kind two sites have enough, of `records_of_kind` of honest sites."""
    return (records >= KNOWN).sum(0) >= 2


def by_hospital(row: Sequence[Any]) -> tuple[Any, ...]:
    """What hospitals lose by the lie of a row, over its seeds."""
    place, count, hostile, epsilon, components = row[:5]
    make, alpha = PLACES[place]
    lie, found = Lie.read(row[COLUMNS.index("lie")]), []
    for seed in HELD_OUT:
        parts, test = make(alpha, seed, count)
        own = Federation(parts, test, hostile, {"seed": seed} | kind_of(epsilon, components))
        lost, (records, tested) = 100 * own.lost(lie), records_of_kind(place, parts, test)
        mine = records[: count - hostile]
        each = sorted((float(lost @ (w / tested) / (w / tested).sum()) for w in mine), reverse=True)
        shared = in_shared_kinds(mine).double()
        found.append((*each[:2], float(lost.mean()), float((lost * shared).mean())))
    first, second = (max(each[at] for each in found) for at in (0, 1))
    means = (mean(each[at] for each in found) for at in (0, 1))
    every, shared = max(each[2:] for each in found)
    numbers = (first, second, *means, every, shared)
    return (*row[:5], len(found), *(round(each, 1) for each in numbers))


def kind_of(epsilon: str, components: str) -> dict[str, Any]:
    """Settings of a row."""
    if epsilon == "none":
        return SETTINGS[components]
    return {"epsilon": float(epsilon), "delta": 1e-5, "fedpft.covariance": "spherical"}


def row_of(
    place: str, count: int, hostile: int, epsilon: str, components: str, shared: bool
) -> tuple[Any, ...]:
    """The row of one kind of federation.

    Args:
        place: the data.
        count: of sites.
        hostile: how many of them lie.
        epsilon: or "none".
        components: of a mixture.
        shared: whether only records of shared kinds are tested.
    """
    make, alpha = PLACES[place]
    kind, several = kind_of(epsilon, components), components != "1"

    def data(seed: int) -> tuple[list[Data], Data]:
        parts, (x, y) = make(alpha, seed, count)
        if not shared:
            return parts, (x, y)
        of_kind = records_of_kind(place, parts, (x, y))[0][: count - hostile]
        return parts, (x[tested := in_shared_kinds(of_kind)], y[tested])

    def federation(seed: int) -> Federation:
        return Federation(*data(seed), hostile, {"seed": seed} | kind)

    seeds = HELD_OUT if hostile else (HONEST[:4] if several or place == "pacs" else HONEST)
    searched = SEARCHED
    if shared:
        enough = (seed for seed in itertools.count() if len(data(seed)[1][1]) >= TESTED)
        searched, *seeds = itertools.islice(enough, 1 + len(seeds))
    head = (place, count, hostile, epsilon, components, len(seeds))
    if not hostile:
        lost, alone, accused = [], [], 0
        for seed in seeds:
            own = federation(seed)
            accuracy, suspects = own.accuracy(own.good, "auto")
            lost.append(own.alone - accuracy)
            alone.append(own.alone)
            accused += bool(suspects)
        losses = (0.0, round(max(lost), 1), round(mean(lost), 1), "")
        return (*head, round(mean(alone), 1), *losses, "", accused, 0)
    steps = FEW_STEPS if several or epsilon != "none" else STEPS
    grid = [Lie(*each) for each in itertools.product(DIRECTIONS, steps, COUNTS)]
    best = federation(searched).worst(grid, "auto")[:BEST]
    lies = [more for _, lie, _ in best for more in variants(lie, several)]
    held_out = [federation(seed) for seed in seeds]
    found = [each.worst(lies, "auto")[0] for each in held_out]
    top = max(range(len(found)), key=lambda index: found[index][0])
    loss, lie, _ = found[top]
    names = {f"z{index}" for index in range(hostile)}
    named = sum(names <= suspects for _, _, suspects in found)
    accused = sum(any(name[0] == "h" for name in suspects) for _, _, suspects in found)
    losses = (round(held_out[top].loss(lie, "none")[0], 1), round(loss, 1))
    means = (round(mean(each[0] for each in found), 1), str(lie), named, accused)
    tried = len(grid) + len(seeds) * len(set(lies))
    return (*head, round(mean(each.alone for each in held_out), 1), *losses, *means, tried)


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--only", default="", help="data, as the table names them")
    parser.add_argument("--name", default="searched-attacks", help="of the file of results")
    parser.add_argument("--dry-run", action="store_true", help="print rows and write no file")
    parser.add_argument("--by-hospital", action="store_true", help="what each hospital loses")
    parser.add_argument("--shared", action="store_true", help="what shared kinds lose")
    options = parser.parse_args()
    if options.by_hospital:
        kept = [row for row in stored_rows(options.name)["rows"] if row[COLUMNS.index("lie")]]
        rows = list[tuple[Any, ...]]()
        for row in kept:
            if not options.only or row[0] == options.only:
                rows.append(by_hospital(row))
                print(*rows[-1], sep="\t", flush=True)
        if not options.dry_run:
            title = "what honest hospitals lose by those lies, of records like their own"
            report("searched-attacks-by-hospital", title, BY_HOSPITAL, rows)
        return
    have = (sample_folder() / "features").exists()
    rows = list[tuple[Any, ...]]()
    name = f"{options.name}-shared" if options.shared else options.name
    title = "worst loss that a search finds" + " in shared kinds" * options.shared
    notes = {} if options.shared else SEEDS
    for place, sites, epsilon, components in PLAN:
        count, hostile = map(int, sites.split("/"))
        chosen = not options.only or place == options.only
        chosen &= not options.shared or (hostile > 0 and epsilon == "none")
        if chosen and (place.startswith("digits") or have):
            rows.append(row_of(place, count, hostile, epsilon, components, options.shared))
            print(*rows[-1], sep="\t", flush=True)
            if not options.dry_run:
                report(name, title, COLUMNS, rows, **notes)


# What was chosen and measured on which seeds.
SEEDS = {
    "grid searched on seed": SEARCHED,
    "variants searched and measured on seeds": list(HELD_OUT),
    "honest partitions": f"seeds {HONEST[0]} to {HONEST[-1]}; the first 4 with PACS or 10 components",
}


if __name__ == "__main__":
    main()
