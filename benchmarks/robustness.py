"""Hostile sites: attacks against defences, with and without differential privacy.

None, one or two of ten sites send a false surrogate (tests/hostile_sites.py). Every row, over all
seeds: mean accuracy on real test data in %; the largest loss in points over the seeds, relative to
the honest sites alone (without attack: relative to the defence `none`); the share of test records
with the backdoor's trigger that are classified as its target; and how many hostile (caught) and
honest sites (accused) were suspected. Heads are in closed form with privacy, else trained with few
steps. Without sample data, only the digits run.

    python benchmarks/robustness.py --seeds 3
    python benchmarks/robustness.py --only "digits 0.1,pacs" --epsilons none --attacks "label swap
    x10" --dry-run
"""

from collections import defaultdict
from collections.abc import Iterator
from statistics import mean
from typing import Any

import torch
from rich.progress import track

from benchmarks.harness.options import described
from benchmarks.harness.results import kept_rows, report
from benchmarks.harness.samples import sample_folder, stored_features
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import AnySurrogate
from fedsurrogate.strategies.base.outcome import Learned
from fedsurrogate.strategies.fedpft.strategy import learn
from fedsurrogate.strategies.robustness.defence import defend_surrogates
from tests.hostile_sites import ATTACKS, Data, dirichlet, surrogate_of, trigger, uneven_digits

SITES = 10
DEFENCES = ("none", "harm")
COLUMNS = (
    "data, alpha",
    "epsilon",
    "attack",
    "hostile",
    "defence",
    "seeds",
    "accuracy %",
    "worst behind",
)
COLUMNS += ("triggered %", "caught", "accused")
STEPS = {"head.min-steps": 150, "head.epochs": 1, "fedpft.covariance": "diag"}
UNCAPPED = {"defence": "none", "max-share": 0.0}
PRIVATE = {"delta": 1e-5, "fedpft.covariance": "spherical"}
Split = tuple[list[Data], Data]
Cell = dict[str, Any]


def digits(alpha: float, seed: int) -> Split:
    return uneven_digits(alpha, seed, SITES)


def cifar(alpha: float, seed: int) -> Split:
    return dirichlet(*stored_features("cifar10"), alpha, seed, SITES), stored_features(
        "cifar10", "test"
    )


def pacs(alpha: float, seed: int) -> Split:
    """Half of the sites have photos, half have sketches."""
    parts: list[Data] = []
    for style in ("photo", "sketch"):
        parts += dirichlet(*stored_features(f"pacs-{style}"), alpha, seed, SITES // 2)
    tests = [stored_features(f"pacs-{style}", "test") for style in ("photo", "sketch")]
    # Hostile sites are the first two: one of each style.
    parts[1], parts[5] = parts[5], parts[1]
    return parts, (torch.cat([x for x, _ in tests]), torch.cat([y for _, y in tests]))


class Bench:
    """Results of one partition for each defence. A head of the same surrogates with the same
    weights is learned once.
    """

    def __init__(self, parts: list[Data], test: Data, settings: dict[str, Any]) -> None:
        self.parts, self.test, self.settings = parts, test, settings
        self.classes = tuple(str(index) for index in range(int(test[1].max()) + 1))
        self.run = parse_run(settings)
        self.good = [self.sent(site) for site in range(SITES)]
        self._heads: dict[Any, tuple[float, float]] = {}

    def sent(self, site: int, attack: str | None = None) -> AnySurrogate:
        lie = ATTACKS[attack] if attack else None
        return surrogate_of(self.parts[site], self.classes, "f" * 16, str(site), self.run, lie)

    def cell(self, sent: list[AnySurrogate], **chosen: Any) -> Cell:
        """Accuracy and success of the backdoor's trigger, in %, and the names of suspected sites."""
        run = parse_run(self.settings | chosen)
        defended = defend_surrogates(sent, run.defence, run.settings.max_share, self.classes)
        suspects = {suspect.site for suspect in defended.suspects}
        used = [
            (id(each), defended.capped.get(each.header.site, 1.0))
            for each in sent
            if each.header.site not in suspects
        ]
        key = defended.alike, tuple(used)
        if key not in self._heads:
            self._heads[key] = measured(
                learn(sent, run, "cpu", self.classes), self.classes, self.test
            )
        accuracy, backdoor = self._heads[key]
        return {"accuracy": accuracy, "backdoor": backdoor, "suspects": suspects}

    def cells(
        self, attacks: list[str], defences: list[str], numbers: list[int]
    ) -> Iterator[tuple[tuple[str, int, str], Cell, float]]:
        """Yield (attack, number of hostile sites, defence), the result, and the accuracy for
        comparison.
        """
        usual = self.cell(self.good, defence="none")
        for rule in defences:
            yield ("no attack", 0, rule), self.cell(self.good, defence=rule), usual["accuracy"]
        yield ("no attack", 0, "no cap"), self.cell(self.good, **UNCAPPED), usual["accuracy"]
        alone = {hostile: self.cell(self.good[hostile:], defence="none") for hostile in numbers}
        for hostile, cell in alone.items():
            yield ("honest rest", hostile, "none"), cell, cell["accuracy"]
        for attack in attacks:
            bad = [self.sent(site, attack) for site in range(2)]
            for hostile in alone:
                sent, rest = bad[:hostile] + self.good[hostile:], alone[hostile]["accuracy"]
                for rule in defences:
                    yield (attack, hostile, rule), self.cell(sent, defence=rule), rest
                if attack == "inflated count":
                    yield (attack, hostile, "no cap"), self.cell(sent, **UNCAPPED), rest


def measured(learned: Learned, classes: tuple[str, ...], test: Data) -> tuple[float, float]:
    features, labels = test
    marked, others = features + trigger(features), labels != 0
    right = learned.model.accuracy(features, classes, labels)[0]
    fooled = learned.model.accuracy(marked[others], classes, torch.zeros_like(labels)[others])[0]
    return 100 * right / len(labels), 100 * fooled / int(others.sum())


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--only", default="", help="data sets, as the table names them; rows of the others are kept"
    )
    parser.add_argument("--epsilons", default="none,8")
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="names, separated by commas")
    parser.add_argument("--defences", default=",".join(DEFENCES))
    parser.add_argument("--hostile", default="1,2", help="numbers of hostile sites, of 1 and 2")
    parser.add_argument("--dry-run", action="store_true", help="print rows and write no file")
    options = parser.parse_args()
    places: dict[str, Any] = {"digits 0.1": (digits, 0.1), "digits 0.5": (digits, 0.5)}
    if (sample_folder() / "features").exists():
        places |= {"cifar10 0.1": (cifar, 0.1), "cifar10 0.5": (cifar, 0.5), "pacs": (pacs, 100.0)}
    chosen = options.only.split(",") if options.only else list(places)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    every: dict[tuple[str, ...], list[tuple[Cell, float]]] = defaultdict(list)
    for place, seed in track(
        [(place, seed) for place in chosen for seed in seeds], description="partitions"
    ):
        make, alpha = places[place]
        parts, test = make(alpha, seed)
        for epsilon in options.epsilons.split(","):
            kind = STEPS if epsilon == "none" else PRIVATE | {"epsilon": float(epsilon)}
            bench = Bench(parts, test, {"seed": seed, "deadline": 60.0} | kind)
            numbers = [int(number) for number in options.hostile.split(",")]
            cells = bench.cells(options.attacks.split(","), options.defences.split(","), numbers)
            for (attack, hostile, rule), cell, rest in cells:
                every[place, epsilon, attack, str(hostile), rule].append((cell, rest))
    rows = [row(key, cells) for key, cells in every.items()]
    if options.dry_run:
        for each in rows:
            print(*each, sep="\t")
        return
    if options.only:
        rows = kept_rows("robustness", lambda old: old[0] in chosen) + rows
    report("robustness", f"hostile sites of {SITES}", COLUMNS, rows)


def row(key: tuple[str, ...], cells: list[tuple[Cell, float]]) -> tuple[Any, ...]:
    hostile = int(key[3])
    caught = [sum(int(site) < hostile for site in cell["suspects"]) for cell, _ in cells]
    accused = [sum(int(site) >= hostile for site in cell["suspects"]) for cell, _ in cells]
    middle, fooled = (
        round(mean(cell[name] for cell, _ in cells), 1) for name in ("accuracy", "backdoor")
    )
    behind = round(max(rest - cell["accuracy"] for cell, rest in cells), 1)
    return *key, len(cells), middle, behind, fooled, round(mean(caught), 2), round(mean(accused), 2)


if __name__ == "__main__":
    main()
