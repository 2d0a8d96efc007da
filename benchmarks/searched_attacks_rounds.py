"""The worst of many attacks by hostile sites, for methods with rounds and for heads.

The attacker knows all honest replies of a round and the defence, and tries every attack of a grid:
scale and sign, the opposite of the honest mean, random directions, training on shifted labels,
steps at the edge of the bound, small steps within what honest sites differ by, and a small steady
drift. He claims ten times the records of the largest site. Every row is the attack of the grid that
costs most, over all seeds: the accuracy without hostile sites (under the default defence, and
without one), that of the honest sites alone, that under the attack, the loss against the honest
sites alone, and in how many of the seeds hostile sites were found and honest ones accused. Honest
sites that are accused without an attack are counted too.

    python benchmarks/searched_attacks_rounds.py --seeds 2
    python benchmarks/searched_attacks_rounds.py --honest --seeds 20 --places "digits 0.1"
    python benchmarks/searched_attacks_rounds.py --methods scaffold --places "digits 0.1" --dry-run
"""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.federation import Federation, site
from benchmarks.harness.options import described
from benchmarks.harness.results import kept_rows, report
from benchmarks.harness.samples import sample_folder, stored_features
from client_app.features.site_features import LabelledFeatures
from client_app.governance.release import site_function
from client_app.methods.task import MethodOutput, Task
from client_app.node_config import NodeConfig
from common.files import replace_file
from common.models.parameters import Parameters, by_name, flat
from common.run import Run, parse_run
from common.surrogates.synthetic import Synthetic
from common.wire.records import Info
from strategies import stored_strategy, strategy_of
from strategies.base.collection import Unrecorded
from strategies.base.training import Training
from strategies.fedavg.strategy import with_memory
from tests.hostile_sites import Data, dirichlet, shifted, uneven_digits

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
    "accused without attack in",
)
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"fedavg.rounds": 5},
    "fedyogi": {"fedavg.rounds": 5},
    "scaffold": {"fedavg.rounds": 5},
    "average": {"head.min-steps": 100, "head.epochs": 2},
    "fedlap": {
        "fedlap.rounds": 3,
        "fedlap.model": "linear",
        "fedlap.image-steps": 20,
        "fedlap.images-per-class": 2,
    },
    "dpcvae": {"dpcvae.rounds": 4, "dpcvae.local-epochs": 2},
    "dp-fedavg": {"fedavg.rounds": 3, "epsilon": 8.0, "delta": 1e-5},
}
# Hostile sites of all.
SITES = {
    "1 of 3": (1, 3),
    "1 of 4": (1, 4),
    "1 of 5": (1, 5),
    "1 of 10": (1, 10),
    "2 of 10": (2, 10),
}
CIFAR_RECORDS, CIFAR_TESTED = 2000, 1000
CLAIMED = 10
# An attack: from the replies of honest sites as rows (H, P), the hostile site's own honest reply and
# that for shifted labels (P,), and the round, to what it sends (P,).
Attack = Callable[[Tensor, Tensor, Tensor, int], Tensor]
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


ATTACKS: Mapping[str, Attack] = {
    **{
        f"own x {times:g}": lambda honest, own, lie, number, times=times: times * own
        for times in (-1e4, -10, -1, 10, 1e4)
    },
    **{
        f"against the mean, {times:g} lengths": lambda honest, own, lie, number, times=times: (
            -times * usual(honest) * unit(honest.mean(0))
        )
        for times in (0.5, 1, 2)
    },
    **{
        f"random, {times:g} lengths": lambda honest, own, lie, number, times=times: (
            times * usual(honest) * random_unit(own, number)
        )
        for times in (1, 10)
    },
    **{
        f"shifted labels x {times:g}": lambda honest, own, lie, number, times=times: times * lie
        for times in (1, 3)
    },
    **{
        f"edge of the bound, {times:g}": lambda honest, own, lie, number, times=times: edge(
            honest, times
        )
        for times in (1, 2)
    },
    "mean less 1.5 deviations": lambda honest, own, lie, number: (
        honest.mean(0) - 1.5 * honest.std(0)
    ),
    "drift": lambda honest, own, lie, number: drift(honest, own, number),
}


@dataclass
class Result:
    """Accuracy in percent, and the sites that were suspected in any round."""

    accuracy: float
    suspects: set[str]


class Bench:
    """The sites of one partition under one method."""

    def __init__(self, data: Federation, settings: dict[str, Any], hostile: int) -> None:
        self.data, self.hostile = data, hostile
        self.run = parse_run(data.named(settings))

    def result(self, attack: Attack | None, start: int = 0, defence: str = "auto") -> Result:
        """One run, with the sites from `start` on."""
        run = Run.resolve(self.run.settings.model_copy(update={"defence": defence}))
        with tempfile.TemporaryDirectory() as folder:
            node = NodeConfig(state_dir=folder)
            tasks = [Task(run, node, str(i), own) for i, own in enumerate(self.data.sites)][start:]
            if run.plan.kind == "rounds":
                return self._in_rounds(run, tasks, attack)
            made = [site_function(run.plan.combination)(task).payload for task in tasks]
            strategy = stored_strategy(run)(run, Unrecorded())
            sent = [strategy.unpack(payload) for payload in made]
            lies = [strategy.unpack(self._lie(task).payload) for task in tasks[: self.hostile]]
            sent = self._attacked(sent, lies, attack, 1)
            learned = strategy.learn(sent, self.data.classes)
            found = {suspect.site for suspect in learned.defended.suspects}
            return Result(self.data.judge(learned.model), found)

    def _in_rounds(self, run: Run, tasks: Sequence[Task], attack: Attack | None) -> Result:
        first, found = self.data.sites[0], set[str]()
        # Another strategy class for each method.
        strategy: Any = strategy_of(run)(run, Unrecorded())
        dimension = first.train.features.shape[1]
        training = with_memory(Training.begin(run, self.data.classes, first.fingerprint, dimension))
        while training.round < run.rounds:
            reported: Info = {"round": training.round + 1, "lineage": training.lineage}
            reported["confirmed"] = training.round
            question = training.payload()
            asked = [replace(task, payload=question, info=reported) for task in tasks]
            made = [site_function(run.plan.combination)(task) for task in asked]
            for each in made:
                for file, content in each.keep.items():
                    replace_file(file, content)
            sent = [strategy.parse(each.payload, training) for each in made]
            if attack is not None and (training.round or run.plan.messages.first is None):
                lies = [
                    strategy.parse(self._lie(task).payload, training)
                    for task in asked[: self.hostile]
                ]
                sent = self._attacked(sent, lies, attack, training.round + 1)
            defended = strategy.defend(training, sent)
            found |= {suspect.site for suspect in defended.suspects}
            strategy.absorb(training, defended.kept)
        return Result(self.data.judge(strategy.classifier(training)), found)

    def _lie(self, task: Task) -> MethodOutput:
        """What the site would send if all its labels were those of the next class."""
        train = task.found.train
        turned = shifted(train.features, train.labels, len(self.data.classes))[1]
        own = replace(task.found, train=replace(train, labels=turned))
        return site_function(task.run.plan.combination)(replace(task, found=own))

    def _attacked(
        self, sent: list[Any], lies: list[Any], attack: Attack | None, number: int
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
            value = attack(torch.stack(alike), vector(own), false, number)
            forged.append(with_vector(own, value, records))
        return forged + honest


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
    return replace(reply, tensors=tensors, records=records)


def cifar(alpha: float, seed: int, sites: int) -> tuple[list[Data], Data]:
    features, labels = stored_features("cifar10")
    chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    chosen = chosen[:CIFAR_RECORDS]
    tested, wanted = stored_features("cifar10", "test")
    parts = dirichlet(features[chosen].float(), labels[chosen], alpha, seed, sites)
    return parts, (tested[:CIFAR_TESTED].float(), wanted[:CIFAR_TESTED])


def federation(place: str, alpha: float, seed: int, sites: int) -> Federation:
    parts, (features, labels) = {"digits": uneven_digits, "cifar10": cifar}[place](
        alpha, seed, sites
    )
    classes, test = tuple(str(i) for i in range(10)), LabelledFeatures(features, labels)
    made = [site(x, y, test, classes, "f" * 16) for x, y in parts]
    return Federation(made, test)


def worst_row(method: str, place: str, hostile: str, seeds: Sequence[int]) -> tuple[Any, ...]:
    """The worst attack on one method with these sites."""
    bad, sites = SITES[hostile]
    name, alpha = place.split()
    plain: dict[str, list[float]] = defaultdict(list)
    under: dict[str, list[Result]] = defaultdict(list)
    accused_alone = 0
    for seed in seeds:
        settings = {"method": method, "seed": seed, "deadline": 60.0} | METHODS[method]
        bench = Bench(federation(name, float(alpha), seed, sites), settings, bad)
        honest = bench.result(None)
        accused_alone += bool(honest.suspects)
        plain["honest"].append(honest.accuracy)
        plain["none"].append(bench.result(None, defence="none").accuracy)
        plain["rest"].append(bench.result(None, start=bad, defence="none").accuracy)
        for attack, function in ATTACKS.items():
            under[attack].append(bench.result(function))
    middle = {key: round(mean(values), 1) for key, values in plain.items()}
    losses = {
        attack: [rest - each.accuracy for rest, each in zip(plain["rest"], results, strict=True)]
        for attack, results in under.items()
    }
    worst = max(losses, key=lambda attack: mean(losses[attack]))
    names = {str(index) for index in range(bad)}
    found = sum(names <= each.suspects for each in under[worst])
    accused = sum(bool(each.suspects - names) for each in under[worst])
    reached = round(mean(each.accuracy for each in under[worst]), 1)
    epsilon = f"{METHODS[method].get('epsilon', 'none')}"
    return (
        *(method, place, epsilon, hostile, len(seeds), middle["honest"], middle["none"]),
        *(middle["rest"], worst, reached, round(mean(losses[worst]), 1)),
        *(round(max(losses[worst]), 1), found, accused, accused_alone),
    )


def honest_row(method: str, place: str, hostile: str, seeds: Sequence[int]) -> tuple[Any, ...]:
    """What the default defence costs where no site is hostile."""
    sites = SITES[hostile][1]
    name, alpha = place.split()
    with_it, without, accused = list[float](), list[float](), 0
    for seed in seeds:
        settings = {"method": method, "seed": seed, "deadline": 60.0} | METHODS[method]
        bench = Bench(federation(name, float(alpha), seed, sites), settings, 0)
        result = bench.result(None)
        with_it.append(result.accuracy)
        without.append(bench.result(None, defence="none").accuracy)
        accused += bool(result.suspects)
    lost = [b - a for a, b in zip(with_it, without, strict=True)]
    epsilon = f"{METHODS[method].get('epsilon', 'none')}"
    return (
        *(method, place, epsilon, f"0 of {sites}", len(seeds), round(mean(with_it), 1)),
        *(round(mean(without), 1), round(mean(without), 1), "no attack", round(mean(with_it), 1)),
        *(round(mean(lost), 1), round(max(lost), 1), 0, accused, accused),
    )


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--places", default="digits 100,digits 0.1", help="data and alpha")
    parser.add_argument("--hostile", default=",".join(SITES), help="such as '1 of 3'")
    parser.add_argument("--honest", action="store_true", help="without attacks: honest sites only")
    parser.add_argument("--dry-run", action="store_true", help="print rows and write no file")
    options = parser.parse_args()
    measured = honest_row if options.honest else worst_row
    places = options.places.split(",")
    if not (sample_folder() / "features").exists():
        places = [place for place in places if not place.startswith("cifar10")]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for method in options.methods.split(","):
        for place in places:
            for hostile in options.hostile.split(","):
                row = measured(method, place, hostile, seeds)
                print(*row, sep="\t", flush=True)
                if not options.dry_run:
                    key = (row[0], row[1], row[3])
                    kept = kept_rows(
                        "searched-attacks-rounds",
                        lambda old, key=key: (old[0], old[1], old[3]) == key,
                    )
                    report(
                        "searched-attacks-rounds", "worst attack of the grid", COLUMNS, [*kept, row]
                    )


if __name__ == "__main__":
    main()
