"""Secure aggregation among many sites: a logistic head in rounds with distributed noise, all sites in one
process.

The features of CIFAR-10 at 10 and 100 sites (Dirichlet 0.5), epsilon 2, nothing else set. Every site
checks, signs, masks and charges as a hospital does, one after the other. Goal: the whole run of 100 sites
in a minute of one core.

    python benchmarks/many_secure_sites.py --sites 10 100
"""

import os
import statistics
import tempfile
import time
from typing import Any

import torch

from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.samples import MOBILENET, feature_settings
from benchmarks.harness.timing import peak
from fedsurrogate.server_app.deployment.local_engine import simulate_here

CLASSES = ",".join(map(str, range(10)))


def measured(sites: int, folder: str) -> tuple[float, dict[str, Any]]:
    """Processor seconds of a run, and what it was."""
    begun = time.process_time()
    settings = feature_settings("cifar10", MOBILENET) | {"partition": "dirichlet", "alpha": 0.5}
    private = {"secure-aggregation": True, "epsilon": 2.0, "delta": 1e-5, "classes": CLASSES}
    rounds = list[dict[str, Any]]()
    simulate_here(
        sites,
        settings | private | {"sites": sites, "output-dir": folder},
        lambda event: rounds.append(event) if event["event"] == "round" else None,
        report=False,
    )
    return time.process_time() - begun, rounds[-1]


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--sites", type=int, nargs="*", default=[10, 100])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for sites in options.sites:
        with tempfile.TemporaryDirectory() as folder:
            os.environ |= {"XDG_STATE_HOME": f"{folder}/state", "XDG_CACHE_HOME": f"{folder}/cache"}
            found = [measured(sites, folder) for _ in range(options.repeats)]
        spent, last = [each for each, _ in found], found[0][1]
        median = statistics.median(spent)
        # Each round identifies, shares, lists, sums and opens.
        per = (median / last["round"], 1000 * median / last["round"] / (5 * sites))
        accuracy = f"{100 * statistics.mean(each['accuracy'] for _, each in found):.1f}"
        rows.append((sites, last["round"], min(spent), median, max(spent), *per, accuracy, peak()))
    columns = ("sites", "rounds", "processor s, least", "median", "most", "a round", "ms a message")
    report(
        "many-secure-sites",
        f"a logistic head in rounds of secure aggregation, {options.repeats} runs each",
        (*columns, "accuracy %", "peak GB so far"),
        rows,
    )


if __name__ == "__main__":
    main()
