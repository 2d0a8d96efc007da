"""FedLAP, tables 1 to 4: five sites with two classes each; the paper's figures next to ours.

    python benchmarks/reproduce/fedlap_tables.py                                  the digits, for
    two cores python benchmarks/reproduce/fedlap_tables.py --data mnist --folder /data/mnist
    idx archives or parquet python benchmarks/reproduce/fedlap_tables.py --data cifar10 --folder
    /data/cifar10 --full    the paper's size, on a GPU

Table 1: without privacy. Table 2: with a budget of 2.79 in one round, or of 10.18 in all rounds (15
in the paper). Table 3: the rule of the radius. Table 4: a share of the records. --full takes the paper's
settings, 200 rounds (--rounds for fewer) and all records. Without it, the network has width 32,
images of CIFAR-10 have
16 x 16 pixels, and --fraction of the records takes part. Sites have the paper's pairs of classes.
The paper's table 1 is not whole in the copy that we have: rows of MNIST and of Fashion-MNIST, and
the names above four figures of CIFAR-10, are missing, so these cells are empty.
"""

import argparse
import tomllib
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.harness.federation import Federation, accuracies, load, run_rows, site, with_rows
from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.samples import ROOT
from benchmarks.harness.seeds import mean_and_deviation
from benchmarks.reproduce._idx import PARTS, read_images
from fedsurrogate.client_app.features.site_features import LabelledFeatures
from fedsurrogate.common.run import parse_run

PAIRS = ((5, 6), (1, 2), (0, 8), (9, 3), (4, 7))
SIDES = {"digits": 16, "mnist": 28, "fashion-mnist": 28, "cifar10": 16}
LOW, HIGH = 2.79, 10.18
Rows = dict[str, dict[str, Any]]
PRIVATE = [
    f"{row}, {epsilon}"
    for epsilon in (LOW, HIGH)
    for row in ("DP-FedAvg", "DP-FedProx", "FedLAP-DP")
]
FEWER: dict[str, dict[float, float]] = {
    "FedAvg": {5: 55.16, 10: 61.43, 50: 71.34, 100: 75.20},
    "FedLAP": {5: 56.34, 10: 62.76, 50: 68.97, 100: 71.91},
}
PAPER: dict[str, dict[str, dict[str, float]]] = {
    "1": {"cifar10": {"DSC, one shot": 53.90, "FedAvg": 75.20, "FedLAP": 71.91}},
    "2": {
        "mnist": dict(
            zip(["PSG", *PRIVATE], (88.34, 45.25, 54.58, 60.72, 86.99, 88.75, 87.77), strict=True)
        ),
        "fashion-mnist": dict(
            zip(["PSG", *PRIVATE], (67.91, 50.11, 54.57, 59.85, 72.78, 71.67, 73.00), strict=True)
        ),
        "cifar10": dict(
            zip(["PSG", *PRIVATE], (34.58, 17.11, 19.40, 21.42, 31.15, 35.04, 36.09), strict=True)
        ),
    },
    "3": {"cifar10": {"min": 71.90, "max": 72.39, "median": 72.33, "fixed": 71.26}},
    "4": {
        "cifar10": {
            f"{method}, {share:g} %": accuracy
            for method, accuracies in FEWER.items()
            for share, accuracy in accuracies.items()
        }
    },
}


def rows_of(table: str, rounds: int, full: dict[str, Any], records: int) -> Rows:
    """The rows of a table and their settings. full: the paper's settings of FedLAP; empty for the
    small size.
    """
    lap = {"fedlap.memory": 0.0, **full, "method": "fedlap", "fedlap.rounds": rounds}
    width = {"fedavg.model": "convnet", "fedavg.width": full.get("fedlap.width", 32)}
    average = {**width, "fedavg.rounds": rounds, "fedavg.local-epochs": 5}
    if full:
        average |= {"fedavg.batch-size": 256, "fedavg.learning-rate": 0.1, "fedavg.momentum": 0.9}
    one = {**lap, "fedlap.rounds": 1}
    if table == "1":
        plain = {key: value for key, value in average.items() if key != "fedavg.momentum"}
        return {
            "DSC, one shot": one | {"method": "dsc"},
            "FedSGD": average | {"method": "fedsgd"},
            "FedAvg": average | {"method": "fedavg"},
            "FedProx": average | {"method": "fedprox"},
            "SCAFFOLD": plain | {"method": "scaffold"},
            "FedDM": lap | {"method": "feddm", "fedlap.trajectories": 5},
            "FedLAP": lap,
        }
    if table == "3":
        return {rule: lap | {"fedlap.rule": rule} for rule in ("min", "max", "median", "fixed")}
    private = {key: value for key, value in average.items() if key != "fedavg.momentum"} | {
        "fedavg.sample-rate": 1.0
    }
    private |= {"fedavg.batch-size": records, "fedavg.learning-rate": 0.5, "delta": 1e-5}
    dp = {"fedlap.images-per-class": 10 if full else 3, "delta": 1e-5}
    rows: Rows = {"PSG": one | {"method": "psg", "fedlap.trajectories": 5, "epsilon": 32.0} | dp}
    for epsilon, times in ((LOW, 1), (HIGH, rounds)):
        for name, method in (("DP-FedAvg", "dp-fedavg"), ("DP-FedProx", "dp-fedprox")):
            rows[f"{name}, {epsilon}"] = private | {
                "method": method,
                "fedavg.rounds": times,
                "epsilon": epsilon,
            }
        rows[f"FedLAP-DP, {epsilon}"] = lap | dp | {"fedlap.rounds": times, "epsilon": epsilon}
    return rows


def read(data: str, folder: str, full: bool) -> tuple[dict[str, Any], Federation]:
    """Settings of the data, and a federation of one site with all training and test records."""
    side = 32 if full and data == "cifar10" else SIDES[data]
    base: dict[str, Any] = {
        "image-size": side,
        "backbone": "pixels:rgb" if data == "cifar10" else "pixels",
    }
    if any(Path(folder).glob(f"{PARTS['train'][0][:12]}*")) and folder:
        train, test = (LabelledFeatures(*read_images(Path(folder), part)) for part in PARTS)
        names = tuple(str(label) for label in range(10))
        return base, Federation([site(train.features, train.labels, test, names, "pixels")], test)
    if data != "digits":
        base |= {"data": "parquet", "data-dir": folder}
    return base, load(parse_run(base), 1)


def pairs(whole: Federation, fraction: float, seed: int) -> Federation:
    """Five sites with the paper's pairs of classes; each has a random `fraction` of its records."""
    sites, (only,) = [], whole.sites
    labels = only.train.labels
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    for pair in PAIRS:
        rows = order[torch.isin(labels[order], torch.tensor(pair))]
        rows = rows[: max(1, round(fraction * len(rows)))]
        sites.append(with_rows(only, rows, whole.test))
    return Federation(sites, whole.test)


def paper_settings(data: str, private: bool) -> dict[str, Any]:
    """FedLAP's settings in the paper, of the shipped preset."""
    name = "fedlap-dp-cifar10-paper" if private else f"fedlap-{data}"
    preset = tomllib.loads((ROOT / "server_app" / "preset_files" / f"{name}.toml").read_text())
    kept = {key: value for key, value in preset.items() if key.startswith("fedlap.")}
    # Budgets here are those of the table's columns, so the noise follows from them.
    return {key: value for key, value in kept.items() if key != "fedlap.noise-multiplier"}


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--data", choices=SIDES, default="digits")
    parser.add_argument("--folder", default="", help="of the idx archives or parquet files")
    parser.add_argument("--table", nargs="*", choices=list("1234"), default=list("1234"))
    parser.add_argument("--full", action="store_true")
    parser.add_argument(
        "--fraction",
        type=float,
        default=0.0,
        help="of the records; 0: 0.2 for CIFAR-10, otherwise 1",
    )
    parser.add_argument("--rounds", type=int, default=0, help="0: 5, or the paper's")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    if options.data != "digits" and not options.folder:
        parser.error(f"--data {options.data} needs --folder")
    if options.full and options.data == "digits":
        parser.error("--full needs the paper's data: --data mnist, fashion-mnist or cifar10")
    fraction = options.fraction or (0.2 if options.data == "cifar10" and not options.full else 1.0)
    base, whole = read(options.data, options.folder, options.full)
    for table in options.table:
        if table == "4":
            measure_fewer(options, base, whole, fraction)
            continue
        metric_table(table, options, base, whole, fraction)


def measure_fewer(
    options: argparse.Namespace, base: dict[str, Any], whole: Federation, fraction: float
) -> None:
    """Measure and report table 4: FedAvg and FedLAP with shares of the records."""
    full = paper_settings(options.data, False) if options.full else {}
    rounds = options.rounds or (200 if options.full else 5)
    rows, accuracy = [], {}
    for share in (5, 10, 50, 100):
        results = run_rows(
            base,
            {row: rows_of("1", rounds, full, 0)[row] for row in FEWER},
            options.seeds,
            lambda seed, part=fraction * share / 100: pairs(whole, part, seed),
        )
        accuracy |= {f"{row}, {share} %": accuracies(each) for row, each in results.items()}
    for method in FEWER:
        best = mean(accuracy[f"{method}, 100 %"])
        for share in (5, 10, 50, 100):
            row = f"{method}, {share} %"
            less = round(mean(accuracy[row]) - best, 2)
            paper = PAPER["4"].get(options.data, {}).get(row, "")
            rows.append((row, mean_and_deviation(accuracy[row]), less, paper))
    size = "the paper's size" if options.full else "width 32"
    title = f"FedLAP table 4, {options.data}, {size}, {rounds} rounds, {options.seeds} seeds"
    name = f"reproduce-fedlap-table4-{options.data}" + ("-full" if options.full else "")
    columns = ("row", "accuracy, %", "against all records", "paper, %")
    report(name, title, columns, rows, accuracy=accuracy)


def metric_table(
    table: str,
    options: argparse.Namespace,
    base: dict[str, Any],
    whole: Federation,
    fraction: float,
) -> None:
    """Measure and report one table. fraction: of the records that take part."""
    full = paper_settings(options.data, table == "2") if options.full else {}
    rounds = options.rounds or ((15 if table == "2" else 200) if options.full else 5)
    results = run_rows(
        base,
        lambda data: rows_of(table, rounds, full, min(data.sizes)),
        options.seeds,
        lambda seed: pairs(whole, fraction, seed),
    )
    accuracy = {row: accuracies(each) for row, each in results.items()}
    paper = PAPER[table].get(options.data, {})
    side, records = base["image-size"], sum(pairs(whole, fraction, 0).sizes)
    size = "the paper's size" if options.full else f"width 32, {side} x {side} pixels"
    size += f", {rounds} rounds, {options.seeds} seeds"
    title = f"FedLAP table {table}, {options.data}, {records} records ({fraction:g} of all), {size}"
    rows = [(row, mean_and_deviation(each), paper.get(row, "")) for row, each in accuracy.items()]
    name = f"reproduce-fedlap-table{table}-{options.data}" + ("-full" if options.full else "")
    report(name, title, ("row", "accuracy, %", "paper, %"), rows, accuracy=accuracy)


if __name__ == "__main__":
    main()
