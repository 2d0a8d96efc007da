"""FedLAP compared with FedAvg, by round and by bytes: five sites with two classes each, the same ConvNet, several seeds.

    python benchmarks/fedlap_against_fedavg.py digits            the bundled digits
    python benchmarks/fedlap_against_fedavg.py cifar10           the small preset, on sample data next to the checkout
    python benchmarks/fedlap_against_fedavg.py digits --epsilon 8      FedLAP-DP, DP-FedAvg and DP-FedProx

FedAvg makes five local epochs per round. Without a case, all cases run.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "reproduce"))
from _harness import Federation, Measured, federate, load, mean_and_deviation
from _report import RESULTS, described, report, shared
from rich.progress import track

from client_app.features.site_features import LabelledFeatures, SiteFeatures
from common.models.networks import convnet
from common.run import parse_run

SITES = 5
# Settings, records used per site (0: all), and rounds. All 10,000 records of CIFAR-10 would take hours on two cores.
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "digits": ({"image-size": 16}, 0, 5),
    "cifar10": ({"data": "parquet", "backbone": "pixels:rgb", "image-size": 16}, 2000, 6),
}


def methods(case: str, rounds: int, epsilon: float, records: int) -> dict[str, dict[str, Any]]:
    """Settings of each method.

    Learning rates and clips of the private methods were the best of several on one seed. For DP-FedAvg: learning rates of
    0.1 to 10 and clips of 0.1, 0.3 and 1, with all records in a step or a tenth of them.
    """
    own = {"fedavg.model": "convnet", "fedavg.width": 32, "fedavg.rounds": rounds, "fedavg.local-epochs": 5}
    if not epsilon:
        lap = {"method": "fedlap", "fedlap.rounds": rounds}
        found = {"FedLAP": lap, "FedLAP, no memory": lap | {"fedlap.memory": 0.0}, "FedAvg": own | {"method": "fedavg"}}
        if case == "digits":
            momentum = {"fedavg.momentum": 0.9, "fedavg.learning-rate": 0.01}
            found |= {"FedAvg, momentum": own | {"method": "fedavg"} | momentum}
        return found
    budget: dict[str, Any] = {"epsilon": epsilon, "delta": 1e-5}
    whole = own | budget | {"fedavg.sample-rate": 1.0, "fedavg.batch-size": records, "fedavg.learning-rate": 0.5}
    tenths = own | budget | {"fedavg.sample-rate": 0.1, "fedavg.batch-size": records // 10}
    lap = budget | {"method": "fedlap", "fedlap.rounds": rounds, "fedlap.images-per-class": 3}
    return {
        "FedLAP-DP": lap,
        "FedLAP-DP, memory": lap | {"fedlap.memory": 0.33},
        "DP-FedAvg": whole | {"method": "dp-fedavg"},
        "DP-FedProx": whole | {"method": "dp-fedprox"},
        "DP-FedAvg, tenths": tenths | {"method": "dp-fedavg"},
    }


def fewer(data: Federation, most: int) -> Federation:
    """Only the first `most` records of each site (0: all); their order is random."""

    def cut(site: SiteFeatures) -> SiteFeatures:
        train = LabelledFeatures(site.train.features[:most], site.train.labels[:most])
        return SiteFeatures(train, site.test, site.classes, site.fingerprint, 0.0, simulated=False)

    return Federation([cut(site) for site in data.sites], data.test) if most else data


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("case", nargs="*", choices=[*CASES, []], default=[])
    parser.add_argument("--epsilon", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args()
    for case in options.case or CASES:
        run_case(case, options)
        if not options.case:
            options.epsilon = 8.0
            run_case(case, options)
            options.epsilon = 0.0


def run_case(case: str, options: argparse.Namespace) -> None:
    settings, most, rounds = CASES[case]
    rounds = options.rounds or rounds
    base = settings | {"partition": "classes", "classes-per-site": 2}
    if case == "cifar10":
        base["data-dir"] = str(shared("data/cifar10/train.parquet").parent)
    found: dict[str, list[Measured]] = {}
    for seed in range(options.seeds):
        data = fewer(load(parse_run(base | {"seed": seed}), SITES), most)
        named = {"classes": ",".join(data.classes)} if options.epsilon else {}
        records = min(len(site.train.labels) for site in data.sites)
        for name, own in track(methods(case, rounds, options.epsilon, records).items(), description=f"seed {seed}"):
            found.setdefault(name, []).append(federate(parse_run(base | named | own | {"seed": seed}), data))
    table = []
    for number in range(rounds):
        cells: list[Any] = [number + 1]
        for measured in found.values():
            cells += [mean_and_deviation([m.curve[number][1] for m in measured]), measured[0].curve[number][0] / SITES / 1e3]
        table.append(cells)
    pixels = data.test.features.shape[1]
    size = sum(p.numel() for p in convnet(pixels, len(data.classes), 32).parameters())
    private = f", epsilon {options.epsilon:g} a site in all rounds, delta 1e-5" if options.epsilon else ""
    title = f"{case}, {SITES} sites of 2 classes, ConvNet of width 32 ({size:,} parameters), {options.seeds} seeds{private}"
    columns = ["round"] + [text for name in found for text in (f"{name}, %", "kB up a site")]
    name = f"fedlap-{case}" + (f"-epsilon{options.epsilon:g}" if options.epsilon else "")
    seconds = {method: sum(m.seconds for m in measured) / len(measured) for method, measured in found.items()}
    report(name, title, columns, table, seconds_of_a_site_a_round=seconds)
    plot(found, title, name)


def plot(found: dict[str, list[Measured]], title: str, name: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    by_round, by_bytes = figure.subplots(1, 2, sharey=True)
    for index, (method, measured) in enumerate(found.items()):
        curves = list(zip(*(m.curve for m in measured), strict=True))
        mean = [sum(a for _, a in step) / len(step) for step in curves]
        style = {"color": f"C{index}", "marker": "o", "label": method}
        by_round.plot(range(1, len(mean) + 1), mean, **style)
        by_bytes.plot([step[0][0] / SITES / 1e3 for step in curves], mean, **style)
    by_round.set(xlabel="round", ylabel="accuracy on all test data, %")
    by_bytes.set(xlabel="kB sent by a site, 16-bit")
    for axes in (by_round, by_bytes):
        axes.grid(alpha=0.3)
    by_bytes.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(RESULTS / f"{name}.png", dpi=130)


if __name__ == "__main__":
    main()
