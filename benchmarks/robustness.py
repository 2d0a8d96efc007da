"""Hostile sites: attacks against defences, with and without differential privacy.

Ten sites, of which none, one or two send a false surrogate (tests/hostile_sites.py). Every row: accuracy on real test
data in %, the share of test records with the trigger of the backdoor that are taken for its target, and how many hostile
(caught) and honest sites (accused) were suspected. Heads are in closed form under privacy, else trained with few steps.
Without the sample data next to the checkout only the digits are measured.

    python benchmarks/robustness.py --seeds 1
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from statistics import mean
from typing import Any

import torch
from _report import RESULTS, ROOT, SHARED, report
from rich.progress import track
from torch import Tensor

sys.path.insert(0, str(ROOT))

from common.config.run_config import RunConfig, parse_run_config
from common.surrogates.surrogates import AnySurrogate
from strategies.fedpft.learn import learn
from tests.hostile_sites import ATTACKS, Data, surrogate_of, trigger

SITES = 10
DEFENCES = ("none", "median", "trimmed", "screen")
STEPS = {"head.min-steps": 150, "head.epochs": 1, "fedpft.covariance": "diag"}
PRIVATE = {"delta": 1e-5, "fedpft.covariance": "spherical"}
Split = tuple[list[Data], Data]


def digits(alpha: float, seed: int) -> Split:
    from sklearn.datasets import load_digits

    found = load_digits()
    features, labels = torch.tensor(found.data).float() / 16, torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[:360], order[360:]
    return dirichlet(features[train], labels[train], alpha, seed, SITES), (features[test], labels[test])


def stored(name: str, part: str) -> Data:
    from safetensors.torch import load_file

    tables = load_file(SHARED / "features" / f"{name}-{part}.safetensors")
    return tables["x"].float(), tables["y"].long()


def cifar(alpha: float, seed: int) -> Split:
    features, labels = stored("cifar10", "train")
    return dirichlet(features, labels, alpha, seed, SITES), stored("cifar10", "test")


def pacs(alpha: float, seed: int) -> Split:
    """Half of the sites have photos, half have sketches."""
    parts: list[Data] = []
    for style in ("photo", "sketch"):
        parts += dirichlet(*stored(f"pacs-{style}", "train"), alpha, seed, SITES // 2)
    tests = [stored(f"pacs-{style}", "test") for style in ("photo", "sketch")]
    # Hostile sites are the first two: one of each style.
    parts[1], parts[5] = parts[5], parts[1]
    return parts, (torch.cat([x for x, _ in tests]), torch.cat([y for _, y in tests]))


def dirichlet(features: Tensor, labels: Tensor, alpha: float, seed: int, sites: int) -> list[Data]:
    """Every class divided among the sites by shares from Dirichlet(alpha); no site is without records."""
    torch.manual_seed(seed)
    shares = torch.distributions.Dirichlet(torch.full((sites,), alpha)).sample((int(labels.max()) + 1,))
    owner = torch.multinomial(shares[labels], 1)[:, 0]
    owner[torch.randperm(len(labels))[: 2 * sites]] = torch.arange(2 * sites) % sites
    return [(features[owner == site], labels[owner == site]) for site in range(sites)]


def judged(sent: list[AnySurrogate], run: RunConfig, classes: tuple[str, ...], test: Data) -> dict[str, Any]:
    learned = learn(sent, run, "cpu", classes)
    features, labels = test
    marked = features + trigger(features)
    target = torch.zeros_like(labels)
    right = learned.head.accuracy(features, classes, labels)[0]
    others = labels != 0
    fooled = learned.head.accuracy(marked[others], classes, target[others])[0]
    return {
        "accuracy": 100 * right / len(labels),
        "backdoor": 100 * fooled / int(others.sum()),
        "suspects": [suspect.site for suspect in learned.defended.suspects],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", help="one data set, as the table names it; rows of the others are kept")
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="names, separated by commas")
    options = parser.parse_args()
    places: dict[str, Any] = {"digits 0.1": (digits, 0.1), "digits 0.5": (digits, 0.5)}
    if (SHARED / "features").exists():
        places |= {"cifar10 0.1": (cifar, 0.1), "cifar10 0.5": (cifar, 0.5), "pacs": (pacs, 100.0)}
    found: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    work = [(place, seed) for place in places if options.only in ("", place) for seed in range(options.seeds)]
    for place, seed in track(list(work), description="places"):
        make, alpha = places[place]
        parts, test = make(alpha, seed)
        classes = tuple(str(index) for index in range(int(test[1].max()) + 1))
        for privacy in ("none", "4", "1"):
            settings = {"seed": seed, "deadline": 60.0} | (
                STEPS if privacy == "none" else PRIVATE | {"epsilon": float(privacy)}
            )
            run = parse_run_config(settings)
            good = [surrogate_of(part, classes, "f" * 16, str(site), run) for site, part in enumerate(parts)]

            for attack, hostile, sent in casts(parts, good, run, classes, options.attacks.split(",")):
                rules = {rule: {"defence": rule} for rule in (DEFENCES if attack != "honest rest" else ("none",))}
                if attack in ("no attack", "inflated count"):
                    rules["no cap"] = {"defence": "none", "max-share": 0.0}
                for rule, chosen in rules.items():
                    cell = judged(sent, parse_run_config(settings | chosen), classes, test)
                    found[place, privacy, attack, str(hostile), rule].append(cell)
    report_table(found, options.only, options.seeds)


def casts(
    parts: list[Data], good: list[AnySurrogate], run: RunConfig, classes: tuple[str, ...], attacks: list[str]
) -> Iterator[tuple[str, int, list[AnySurrogate]]]:
    """Every attack with one and two hostile sites, and what it is compared with: all honest, and the honest ones alone."""
    yield "no attack", 0, good
    for hostile in (1, 2):
        yield "honest rest", hostile, good[hostile:]
    for name in attacks:
        bad = [surrogate_of(parts[site], classes, "f" * 16, str(site), run, ATTACKS[name]) for site in range(2)]
        for hostile in (1, 2):
            yield name, hostile, bad[:hostile] + good[hostile:]


def report_table(found: dict[tuple[str, ...], list[dict[str, Any]]], only: str, seeds: int) -> None:
    rows = []
    for (place, privacy, attack, hostile, defence), cells in found.items():
        suspected = [sum(int(site) < int(hostile) for site in cell["suspects"]) for cell in cells]
        accused = [sum(int(site) >= int(hostile) for site in cell["suspects"]) for cell in cells]
        middle = [round(mean(cell[key] for cell in cells), 1) for key in ("accuracy", "backdoor")]
        rows.append((place, privacy, attack, hostile, defence, *middle, round(mean(suspected), 2), round(mean(accused), 2)))
    columns = ("data, alpha", "epsilon", "attack", "hostile", "defence", "accuracy %", "triggered %", "caught", "accused")
    file = RESULTS / "robustness.json"
    if only and file.exists():
        rows = [tuple(row) for row in json.loads(file.read_text())["rows"] if row[0] != only] + rows
    report("robustness", f"hostile sites of {SITES}, {seeds} seeds", columns, rows)


if __name__ == "__main__":
    main()
