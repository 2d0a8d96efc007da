"""FedLAP compared with FedAvg, by round and by bytes: five sites with two classes each, the same
ConvNet, several seeds.

    python benchmarks/fedlap_against_fedavg.py digits            the bundled digits
    python benchmarks/fedlap_against_fedavg.py cifar10           the small preset, on sample data
    next to the checkout python benchmarks/fedlap_against_fedavg.py digits --epsilon 8
    FedLAP-DP, DP-FedAvg and DP-FedProx

FedAvg makes five local epochs per round. Without a case, all cases run.
"""

from functools import lru_cache
from typing import Any

from benchmarks.harness.federation import Federation, Measured, load_seed, run_rows, with_rows
from benchmarks.harness.options import described
from benchmarks.harness.plots import axes_of, draw
from benchmarks.harness.results import report
from benchmarks.harness.samples import cifar_images
from benchmarks.harness.seeds import mean_and_deviation
from fedsurrogate.common.models.networks import convnet

SITES = 5
# Settings, records used per site (0: all), and rounds. All 10,000 records of CIFAR-10 would take
# hours on two cores.
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "digits": ({"image-size": 16}, 0, 5),
    "cifar10": ({"data": "parquet", "backbone": "pixels:rgb", "image-size": 16}, 2000, 6),
}


def methods(case: str, rounds: int, epsilon: float, records: int) -> dict[str, dict[str, Any]]:
    """Settings of each method.

    Learning rates and clips of the private methods were the best of several on one seed. For
    DP-FedAvg: learning rates of 0.1 to 10 and clips of 0.1, 0.3 and 1, with all records in a step
    or a tenth of them.
    """
    own = {
        "fedavg.model": "convnet",
        "fedavg.width": 32,
        "fedavg.rounds": rounds,
        "fedavg.local-epochs": 5,
    }
    if not epsilon:
        lap = {"method": "fedlap", "fedlap.rounds": rounds}
        rows = {
            "FedLAP": lap,
            "FedLAP, no memory": lap | {"fedlap.memory": 0.0},
            "FedAvg": own | {"method": "fedavg"},
        }
        if case == "digits":
            momentum = {"fedavg.momentum": 0.9, "fedavg.learning-rate": 0.01}
            rows |= {"FedAvg, momentum": own | {"method": "fedavg"} | momentum}
        return rows
    budget: dict[str, Any] = {"epsilon": epsilon, "delta": 1e-5}
    whole = (
        own
        | budget
        | {"fedavg.sample-rate": 1.0, "fedavg.batch-size": records, "fedavg.learning-rate": 0.5}
    )
    tenths = own | budget | {"fedavg.sample-rate": 0.1, "fedavg.batch-size": records // 10}
    lap = budget | {"method": "fedlap", "fedlap.rounds": rounds, "fedlap.images-per-class": 3}
    return {
        "FedLAP-DP": lap,
        "FedLAP-DP, memory": lap | {"fedlap.memory": 0.33},
        "DP-FedAvg": whole | {"method": "dp-fedavg"},
        "DP-FedProx": whole | {"method": "dp-fedprox"},
        "DP-FedAvg, tenths": tenths | {"method": "dp-fedavg"},
    }


def base_of(case: str) -> dict[str, Any]:
    """Settings of a case's data, with two classes at each site."""
    base = CASES[case][0] | {"partition": "classes", "classes-per-site": 2}
    return base | cifar_images() if case == "cifar10" else base


def fewer(data: Federation, most: int) -> Federation:
    """Only the first `most` records of each site (0: all); their order is random."""
    rows = slice(most or None)
    return Federation([with_rows(site, rows) for site in data.sites], data.test)


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("case", nargs="*", choices=[*CASES, []], default=[])
    parser.add_argument("--epsilon", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args()
    for case in options.case or CASES:
        for epsilon in [options.epsilon] if options.case else [options.epsilon, 8.0]:
            run_case(case, options.rounds or CASES[case][2], epsilon, options.seeds)


def run_case(case: str, rounds: int, epsilon: float, seeds: int) -> None:
    base, most = base_of(case), CASES[case][1]
    load = lru_cache(1)(lambda seed: fewer(load_seed(base, SITES, seed), most))
    results = run_rows(
        base, lambda data: methods(case, rounds, epsilon, min(data.sizes)), seeds, load
    )
    table = []
    for number in range(rounds):
        cells: list[Any] = [number + 1]
        for each in results.values():
            accuracy = mean_and_deviation([one.curve[number][1] for one in each])
            cells += [accuracy, each[0].curve[number][0] / SITES / 1e3]
        table.append(cells)
    data = load(seeds - 1)
    pixels = data.test.features.shape[1]
    size = sum(p.numel() for p in convnet(pixels, len(data.classes), 32).parameters())
    private = f", epsilon {epsilon:g} a site in all rounds, delta 1e-5" if epsilon else ""
    title = (
        f"{case}, {SITES} sites of 2 classes, ConvNet of width 32 ({size:,} parameters), "
        f"{seeds} seeds{private}"
    )
    columns = ["round"] + [text for name in results for text in (f"{name}, %", "kB up a site")]
    name = f"fedlap-{case}" + (f"-epsilon{epsilon:g}" if epsilon else "")
    seconds = {
        method: sum(one.seconds for one in each) / len(each) for method, each in results.items()
    }
    report(name, title, columns, table, seconds_of_a_site_a_round=seconds)
    plot(results, title, name)


def plot(results: dict[str, list[Measured]], title: str, name: str) -> None:
    by_round, by_bytes = axes_of(11, 4.4, panels=2)
    for index, (method, each) in enumerate(results.items()):
        curves = list(zip(*(one.curve for one in each), strict=True))
        mean = [sum(accuracy for _, accuracy in step) / len(step) for step in curves]
        style = {"color": f"C{index}", "marker": "o", "label": method}
        by_round.plot(range(1, len(mean) + 1), mean, **style)
        by_bytes.plot([step[0][0] / SITES / 1e3 for step in curves], mean, **style)
    by_round.set(xlabel="round", ylabel="accuracy on all test data, %")
    by_round.grid(alpha=0.3)
    by_bytes.set(xlabel="kB sent by a site, 16-bit")
    by_bytes.legend(fontsize=8)
    by_bytes.figure.suptitle(title, fontsize=10)
    draw(by_bytes, name, legend=False)


if __name__ == "__main__":
    main()
