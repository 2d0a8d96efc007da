"""FedLAP, FedAvg, FedRep, FedPFT, DSC, FedDM and PSG in one table: five sites of two classes,
without and with epsilon.

    python benchmarks/fedlap_comparators.py digits
    python benchmarks/fedlap_comparators.py cifar10            sample data next to the checkout,
    2,000 records a site python benchmarks/fedlap_comparators.py digits --seeds 12 --only FedLAP-DP
    --only DP-FedAvg       more draws of the noise

All but FedPFT train the same ConvNet of width 32; FedPFT takes the pixels as features, and sends
once. PSG needs a budget, and DSC and FedDM refuse one. FedRep shares all layers but the last; its
accuracies are means over the sites' own models. The script continues: a method
and seed whose settings are unchanged are read from the results; remove these to compute all anew.
"""

from typing import Any

from rich.progress import track

from benchmarks.fedlap_against_fedavg import CASES, SITES, base_of, fewer
from benchmarks.harness.federation import load_seed, measure
from benchmarks.harness.options import described
from benchmarks.harness.results import report, stored
from benchmarks.harness.seeds import mean_and_deviation

EPSILON: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5}
AVERAGE: dict[str, Any] = {"fedavg.model": "convnet", "fedavg.width": 32, "fedavg.local-epochs": 5}
MEMORY: dict[str, Any] = {"fedlap.memory": 0.33}
FEDDM: dict[str, Any] = {"method": "feddm", "fedlap.trajectories": 5}


def methods(rounds: int, records: int) -> dict[str, dict[str, Any]]:
    """Settings of each row. records: at the smallest site; a step of DP-FedAvg takes all of them."""
    lap: dict[str, Any] = {"fedlap.rounds": rounds}
    # The publications have no memory of earlier rounds.
    paper, average = lap | {"fedlap.memory": 0.0}, AVERAGE | {"fedavg.rounds": rounds}
    private = EPSILON | {"fedlap.images-per-class": 3}
    whole = {"fedavg.sample-rate": 1.0, "fedavg.batch-size": records, "fedavg.learning-rate": 0.5}
    return {
        "FedLAP": lap | MEMORY | {"method": "fedlap"},
        "FedLAP, no memory": paper | {"method": "fedlap"},
        "FedAvg": average | {"method": "fedavg"},
        "FedRep": average | {"method": "fedrep"},
        "DSC": paper | {"method": "dsc"},
        "DSC, memory": lap | MEMORY | {"method": "dsc"},
        "DSC, one shot": {"method": "dsc", "fedlap.rounds": 1},
        "FedDM": paper | FEDDM,
        "FedDM, one shot": FEDDM | {"fedlap.rounds": 1},
        "FedPFT on pixels": {"method": "fedpft"},
        "FedLAP-DP": lap | private | {"method": "fedlap"},
        "FedLAP-DP, memory": lap | private | MEMORY | {"method": "fedlap"},
        "DP-FedAvg": average | EPSILON | whole | {"method": "dp-fedavg"},
        "PSG": {"method": "psg", "fedlap.rounds": 1, "fedlap.trajectories": 5} | private,
        "FedPFT on pixels, epsilon": EPSILON | {"method": "fedpft"},
    }


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", action="append", default=[], help="a row, by its name")
    options = parser.parse_args()
    base = base_of(options.case)
    _, most, rounds = CASES[options.case]
    for seed in range(options.seeds):
        data = fewer(load_seed(base, SITES, seed), most)
        rows = methods(rounds, min(data.sizes))
        asked = {
            name: own for name, own in rows.items() if not options.only or name in options.only
        }
        for name, own in track(asked.items(), description=f"seed {seed}"):
            if known(options.case).get(name, {}).get(str(seed), {}).get("settings") == own:
                continue
            measured = measure(base | {"seed": seed}, data.named(own), data)
            curve = measured.curve or [(measured.bytes, measured.accuracy)]
            # Read again, because another process may have added rows.
            curves = known(options.case)
            curves.setdefault(name, {})[str(seed)] = {
                "settings": own,
                "curve": curve,
                "own": measured.own,
            }
            write(options.case, rounds, curves)


def known(case: str) -> dict[str, Any]:
    """The curves that are in the results: by row and seed, with their settings."""
    curves: dict[str, Any] = stored(f"fedlap-comparators-{case}").get("curves", {})
    return curves


def write(case: str, rounds: int, curves: dict[str, Any]) -> None:
    """Print what is known so far as a table, and write it with every curve."""
    table = []
    for name in methods(rounds, 1):
        each = list(curves.get(name, {}).values())
        if each:
            steps = each[0]["curve"]
            first, last = ([one["curve"][at][1] for one in each] for at in (0, -1))
            private = "8" if "epsilon" in each[0]["settings"] else ""
            accuracies = map(mean_and_deviation, (first, last, [one["own"] for one in each]))
            table.append(
                [name, private, len(each), len(steps), *accuracies, steps[-1][0] / SITES / 1e3]
            )
    columns = ["method", "epsilon", "seeds", "rounds", "after round 1, %", "at the end, %"]
    columns += ["on a site's own test records, %", "kB up a site, all rounds"]
    title = (
        f"{case}, {SITES} sites of 2 classes, ConvNet of width 32; epsilon is that of all "
        "rounds, delta 1e-5"
    )
    report(f"fedlap-comparators-{case}", title, columns, table, curves=curves)


if __name__ == "__main__":
    main()
