"""The worst of many attacks by hostile sites, for methods with rounds and with heads.

The attacker knows all honest replies of a round and the defence, and tries every attack of a grid:
scale and sign, the opposite of the honest mean, random directions, training on shifted labels,
steps at the edge of the bound, small steps within what honest sites differ by, and a small steady
drift. He claims ten times the records of the largest site. The search halves: the whole grid on one
seed with one hostile site of four, then its three worst attacks, the first in several strengths,
with every number of sites on held-out seeds.

A row gives, over the held-out seeds, accuracy in %: of all sites when honest (under the default
defence, and without one), and of the honest sites alone; the attack that costs most, the accuracy
under it, the mean loss against the honest sites alone and that of the worst seed; in how many seeds
all hostile sites were found and any honest one accused, under it and without an attack; and how many
runs the search took. Rows with "0 of" are without attack. The file is written after every row;
rows of methods that are not named stay as they were.

    python benchmarks/searched_attacks_rounds.py
    python benchmarks/searched_attacks_rounds.py --methods scaffold --dry-run
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.federation import Federation, site
from benchmarks.harness.options import described
from benchmarks.harness.results import kept_rows, report
from fedsurrogate.client_app.features.site_features import LabelledFeatures
from fedsurrogate.client_app.governance.release import site_function
from fedsurrogate.client_app.methods.job import Job, MethodOutput
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.models.parameters import Parameters, by_name, flat
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import Synthetic
from fedsurrogate.common.wire.records import Info
from fedsurrogate.strategies import stored_strategy, strategy_of
from fedsurrogate.strategies.base.collection import Unrecorded
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedavg import with_memory
from tests.hostile_sites import shifted, uneven_digits

COLUMNS = (
    *("method", "data, alpha", "epsilon", "hostile", "seeds", "honest %", "without defence %"),
    *(
        "honest rest %",
        "worst attack",
        "accuracy %",
        "loss",
        "worst seed",
        "found in",
        "accused in",
    ),
    *("accused without attack in", "attacks tried"),
)
FEW: dict[str, Any] = {"head.min-steps": 100, "head.epochs": 2}
METHODS: dict[str, dict[str, Any]] = {
    "average": FEW,
    "fedavg": {"fedavg.rounds": 5},
    "scaffold": {"fedavg.rounds": 3},
    "fedyogi": {"fedavg.rounds": 3},
    "fedprox": {"fedavg.rounds": 3},
    "dpcvae": {"dpcvae.rounds": 4, "dpcvae.local-epochs": 2},
    "fedlap": {
        "fedlap.rounds": 3,
        "fedlap.model": "linear",
        "fedlap.image-steps": 20,
        "fedlap.images-per-class": 2,
        "fedlap.descent": "annealed",
    },
    "dp-fedavg": {"fedavg.rounds": 2, "epsilon": 8.0, "delta": 1e-5},
}
# Methods whose runs are short: all numbers of sites, several strengths, and honest partitions. The
# slowest has one held-out seed, and is not measured on data of another spread.
SHORT, LONGEST = ("average",), ("dp-fedavg",)
WITH_HONEST = (*SHORT, "fedavg")
ALPHAS, SEARCHED, HELD_OUT, HONEST = ("0.1", "100"), 100, (101, 102), range(200, 208)
BEST, SEARCHED_WITH = 3, "1 of 4"
# Hostile sites of all.
SITES = {
    "1 of 3": (1, 3),
    "1 of 4": (1, 4),
    "1 of 5": (1, 5),
    "1 of 10": (1, 10),
    "2 of 10": (2, 10),
}
# Of methods whose runs are long.
LONG_SITES = ("1 of 3", "1 of 4", "1 of 5", "1 of 10")
CLAIMED = 10
Reply = Parameters | Synthetic


def usual(honest: Tensor) -> Tensor:
    """The median length of honest replies."""
    return honest.norm(dim=1).median()


def unit(direction: Tensor) -> Tensor:
    return direction / direction.norm().clamp_min(1e-30)


def random_unit(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return unit(torch.randn(like.shape, generator=generator, dtype=like.dtype))


def edge(honest: Tensor, times: float) -> Tensor:
    """The centre, moved against the honest mean by some median distances."""
    centre = honest.median(0).values
    far = (honest - centre).norm(dim=1).median()
    return centre - times * far * unit(honest.mean(0))


def drift(honest: Tensor, own: Tensor, number: int) -> Tensor:
    """Half of the usual length in one direction in all rounds, besides the honest reply."""
    return own + 0.5 * usual(honest) * random_unit(own, 1)


def usual_random(honest: Tensor, own: Tensor, seed: int) -> Tensor:
    """Random numbers, each of the size that it has at honest sites."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(own.shape, generator=generator, dtype=own.dtype)
    return drawn * honest.square().mean(0).sqrt().to(own.dtype)


# By name: strengths, and a function from the replies of honest sites as rows (H, P), the hostile
# site's own honest reply and that for shifted labels (P,), the round and a strength to what it sends
# (P,).
ATTACKS: Mapping[str, tuple[tuple[float, ...], Callable[..., Tensor]]] = {
    "own x": (
        (-1e4, -10, -1, 10, 1e4),
        lambda honest, own, lie, number, times: times * own,
    ),
    "against the mean, lengths x": (
        (0.5, 1, 2),
        lambda honest, own, lie, number, times: -times * usual(honest) * unit(honest.mean(0)),
    ),
    "random, lengths x": (
        (1, 10),
        lambda honest, own, lie, number, times: times * usual(honest) * random_unit(own, number),
    ),
    "random, usual sizes x": (
        (1, 2),
        lambda honest, own, lie, number, times: times * usual_random(honest, own, number),
    ),
    "shifted labels x": ((1, 3), lambda honest, own, lie, number, times: times * lie),
    "edge of the bound x": (
        (1, 2),
        lambda honest, own, lie, number, times: edge(honest, times),
    ),
    "mean less deviations x": (
        (1.5,),
        lambda honest, own, lie, number, times: honest.mean(0) - times * honest.std(0),
    ),
    "drift x": (
        (1,),
        lambda honest, own, lie, number, times: own + times * (drift(honest, own, number) - own),
    ),
    # The bias of the first class. It is in no grid, because of four sites it changes nothing; with
    # heads it is tried on all numbers of sites.
    "first number x": (
        (),
        lambda honest, own, lie, number, times: own + times * (torch.arange(len(own)) == 0),
    ),
}
HEADS = ("average",)
# Times the strength that was worst in the grid.
STRONGER = (0.7, 1.0, 1.5)


@dataclass(frozen=True)
class Attacked:
    """An attack of some strength on updates, heads and images."""

    name: str
    strength: float

    def __str__(self) -> str:
        return f"{self.name} {self.strength:g}"

    def variants(self) -> list["Attacked"]:
        """Of other strengths."""
        return [replace(self, strength=factor * self.strength) for factor in STRONGER]


def all_attacks() -> list[Attacked]:
    """All attacks."""
    return [Attacked(name, times) for name, (many, _) in ATTACKS.items() for times in many]


@dataclass
class Result:
    """Accuracy in percent, and the sites that were suspected in any round."""

    accuracy: float
    suspects: set[str]


class Bench:
    """Sites under one method.

    Args:
        data: of all sites.
        settings: of the run.
        hostile: how many of the sites, the first ones, may be hostile.
    """

    def __init__(self, data: Federation, settings: Mapping[str, Any], hostile: int) -> None:
        self.data, self.hostile = data, hostile
        self.run = parse_run(data.named(dict(settings)))

    @cached_property
    def rest(self) -> float:
        """Accuracy of the honest sites alone."""
        return self.result(None, start=self.hostile, defence="none").accuracy

    def loss(self, attack: Attacked) -> tuple[float, Result]:
        """Points behind the honest sites alone."""
        try:
            found = self.result(attack)
        except Exception as error:
            found = Result(0.0, {type(error).__name__})
        return self.rest - found.accuracy, found

    @cached_property
    def once(self) -> tuple[list[Any], list[Any]]:
        """What all sites send in a run of one round, and what hostile ones send for other labels."""
        with tempfile.TemporaryDirectory() as folder:
            tasks = self._tasks(self.run, folder)
            made = [site_function(self.run.plan.combination)(job).payload for job in tasks]
            strategy = stored_strategy(self.run)(self.run, Unrecorded())
            lies = [self._lie(job).payload for job in tasks[: self.hostile]]
            return [strategy.unpack(each) for each in made], [strategy.unpack(lie) for lie in lies]

    def result(self, attack: Attacked | None, start: int = 0, defence: str = "") -> Result:
        """One run, with the sites from `start` on; with "screen" where that is defined, unless asked."""
        own = "screen" if "screen" in self.run.plan.defences.available else "auto"
        defence = defence or own
        run = Run.resolve(self.run.settings.model_copy(update={"defence": defence}))
        if run.plan.kind != "rounds":
            sent, lies = self.once
            strategy = stored_strategy(run)(run, Unrecorded())
            given = self._attacked(sent, lies, attack, 1)[start:]
            learned = strategy.learn(strategy.in_one_frame(given), self.data.classes)
            found = {suspect.site for suspect in learned.defended.suspects}
            return Result(self.data.judge(learned.model), found)
        with tempfile.TemporaryDirectory() as folder:
            return self._in_rounds(run, self._tasks(run, folder)[start:], attack)

    def _tasks(self, run: Run, folder: str) -> list[Job]:
        node = NodeConfig(state_dir=folder)
        return [Job(run, node, str(index), own) for index, own in enumerate(self.data.sites)]

    def _in_rounds(self, run: Run, tasks: Sequence[Job], attack: Attacked | None) -> Result:
        first, found = self.data.sites[0], set[str]()
        # Another strategy class for each method.
        strategy: Any = strategy_of(run.plan)(run, Unrecorded())
        dimension = first.train.features.shape[1]
        training = with_memory(Training.begin(run, self.data.classes, first.fingerprint, dimension))
        while training.round < run.rounds:
            reported: Info = {"round": training.round + 1, "lineage": training.lineage}
            reported["confirmed"] = training.round
            question = training.payload()
            asked = [replace(job, payload=question, info=reported) for job in tasks]
            made = [site_function(run.plan.combination)(job) for job in asked]
            for each in made:
                for file, content in each.keep.items():
                    replace_file(file, content)
            sent = [strategy.parse(each.payload, training) for each in made]
            if attack is not None and (training.round or run.plan.messages.first is None):
                lies = [
                    strategy.parse(self._lie(job).payload, training)
                    for job in asked[: self.hostile]
                ]
                sent = self._attacked(sent, lies, attack, training.round + 1)
            defended = strategy.defend(training, sent)
            found |= {suspect.site for suspect in defended.suspects}
            strategy.absorb(training, defended.kept)
        return Result(self.data.judge(strategy.classifier(training)), found)

    def _lie(self, job: Job) -> MethodOutput:
        """What the site would send if all its labels were those of the next class."""
        train = job.found.train
        turned = shifted(train.features, train.labels, len(self.data.classes))[1]
        own = replace(job.found, train=replace(train, labels=turned))
        return site_function(job.run.plan.combination)(replace(job, found=own))

    def _attacked(
        self, sent: list[Any], lies: list[Any], attack: Attacked | None, number: int
    ) -> list[Any]:
        """The replies of a round, those of the hostile sites replaced."""
        if attack is None:
            return sent
        honest = sent[self.hostile :]
        records = CLAIMED * max(each.records for each in honest)
        # The attacker compares with honest replies of the same form as its own.
        rows = [vector(each) for each in honest]
        forged = []
        for own, lie in zip(sent[: self.hostile], lies, strict=True):
            alike = [row for row in rows if len(row) == len(vector(own))] or [vector(own)] * 2
            false = vector(lie) if len(vector(lie)) == len(vector(own)) else -vector(own)
            made = ATTACKS[attack.name][1]
            value = made(torch.stack(alike), vector(own), false, number, attack.strength)
            forged.append(with_vector(own, value, records))
        return forged + honest


def bench_of(method: str, alpha: str, seed: int, sites: str) -> Bench:
    """The digits at sites by a Dirichlet distribution."""
    hostile, count = SITES[sites]
    data = federation(alpha, seed, count)
    settings = {"method": method, "seed": seed, "deadline": 60.0} | METHODS[method]
    return Bench(data, settings, hostile)


def vector(reply: Reply) -> Tensor:
    """All numbers of a reply."""
    return flat(reply.tensors) if isinstance(reply, Parameters) else flat({"": reply.values})


def with_vector(reply: Reply, value: Tensor, records: int) -> Reply:
    """The reply with other numbers, and records unless privacy hides them."""
    records = records if reply.records else 0
    if isinstance(reply, Synthetic):
        values = value.reshape(reply.values.shape).float().clamp(-1e4, 1e4)
        return replace(reply, values=values, records=records)
    shapes = {name: tuple(tensor.shape) for name, tensor in reply.tensors.items()}
    tensors = {name: part.float() for name, part in by_name(value, shapes).items()}
    if "deviation" in tensors:
        tensors["deviation"] = tensors["deviation"].clamp_min(0)
    return replace(reply, tensors=tensors, records=records)


def federation(alpha: str, seed: int, sites: int) -> Federation:
    """Digits at sites by a Dirichlet distribution."""
    parts, (features, labels) = uneven_digits(float(alpha), seed, sites)
    classes, test = tuple(str(i) for i in range(10)), LabelledFeatures(features, labels)
    return Federation([site(x, y, test, classes, "f" * 16) for x, y in parts], test)


def rows_of(method: str, alpha: str) -> Iterator[tuple[Any, ...]]:
    """The rows of a method on data of one spread: the search, and honest sites."""
    slow = method not in SHORT
    seeds = HELD_OUT[:1] if method in LONGEST else HELD_OUT
    grid = all_attacks()[:: 2 if method in LONGEST else 1]
    bench = bench_of(method, alpha, SEARCHED, SEARCHED_WITH)
    best = sorted(grid, key=lambda attack: -bench.loss(attack)[0])[:BEST]
    # In the long ones, the worst of the grid as it is.
    tried = best if slow else [*best[0].variants(), *best[1:]]
    if method in HEADS:
        tried.append(Attacked("first number x", 1e6))
    for sites in SITES if not slow else LONG_SITES:
        yield _row(method, alpha, sites, seeds, tried, len(grid))
    if alpha == ALPHAS[0] and method in WITH_HONEST:
        for sites in ("1 of 4", "1 of 10"):
            yield _honest_row(method, alpha, sites)


def _row(
    method: str,
    alpha: str,
    sites: str,
    seeds: Sequence[int],
    tried: Sequence[Attacked],
    before: int,
) -> tuple[Any, ...]:
    """The worst of some attacks with these sites."""
    benches = [bench_of(method, alpha, seed, sites) for seed in seeds]
    under = {attack: [bench.loss(attack) for bench in benches] for attack in tried}
    worst = max(tried, key=lambda attack: mean(loss for loss, _ in under[attack]))
    plain = [bench.result(None) for bench in benches]
    without = [bench.result(None, defence="none").accuracy for bench in benches]
    names = {str(index) for index in range(SITES[sites][0])}
    losses, results = zip(*under[worst], strict=True)
    epsilon = f"{METHODS[method].get('epsilon', 'none')}"
    averages = (
        mean(each.accuracy for each in plain),
        mean(without),
        mean(bench.rest for bench in benches),
    )
    return (
        *(method, f"digits {alpha}", epsilon, sites, len(seeds)),
        *(round(each, 1) for each in averages),
        *(str(worst), round(mean(each.accuracy for each in results), 1)),
        *(round(mean(losses), 1), round(max(losses), 1)),
        sum(names <= each.suspects for each in results),
        sum(bool(each.suspects - names) for each in results),
        sum(bool(each.suspects) for each in plain),
        before + len(seeds) * len(tried),
    )


def _honest_row(method: str, alpha: str, sites: str) -> tuple[Any, ...]:
    """What the defence costs where no site is hostile."""
    benches = [bench_of(method, alpha, seed, sites) for seed in HONEST]
    found = [bench.result(None) for bench in benches]
    without = [bench.result(None, defence="none").accuracy for bench in benches]
    lost = [plain - each.accuracy for plain, each in zip(without, found, strict=True)]
    accused = sum(bool(each.suspects) for each in found)
    reached = round(mean(each.accuracy for each in found), 1)
    return (
        *(method, f"digits {alpha}", "none", f"0 of {SITES[sites][1]}", len(HONEST), reached),
        *(round(mean(without), 1), round(mean(without), 1), "no attack", reached),
        *(round(mean(lost), 1), round(max(lost), 1), 0, accused, accused, 0),
    )


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--dry-run", action="store_true", help="print rows and write no file")
    options = parser.parse_args()
    named = options.methods.split(",")
    rows = kept_rows(NAME, lambda row: row[0] in named)
    for method in named:
        for alpha in ALPHAS if method not in LONGEST else ALPHAS[1:]:
            for row in rows_of(method, alpha):
                print(*row, sep="\t", flush=True)
                rows.append(row)
                if not options.dry_run:
                    report(NAME, "worst attack that a search finds", COLUMNS, rows, **SEEDS)


NAME = "searched-attacks-rounds"
# What was chosen and measured on which seeds.
SEEDS = {
    "grid searched on seed": f"{SEARCHED}, with {SEARCHED_WITH}",
    "variants searched and measured on seeds": list(HELD_OUT),
    "without attack": f"seeds {HONEST[0]} to {HONEST[-1]}",
}


if __name__ == "__main__":
    main()
