"""How often the 95 % intervals of an evaluation by noisy counts hold the truth, and how wide they
are, in 500 evaluations.

Claim: about 95 %; and among many sites, one distributed noise in secure aggregation gives narrower ones than
noise at every site. Scores of two classes are drawn from normal distributions `apart` standard
deviations from each other, and 40 % of the records are positive. The noise is the product's. The
truth of the records is the value without noise and bins; that of the population is the one behind
the records. Secure aggregation has the default settings: a third of the sites may collude, a tenth may be
lost, and none is.
"""

import math
import statistics

from benchmarks.harness.options import described
from benchmarks.harness.results import report
from tests.strategies.counting.test_intervals import RUNS, held, runs

# Distance of the classes, epsilon, records of a site, sites, and whether the noise is one distributed
# noise.
SETTINGS = (
    (1.0, 1.0, 600, 2, False),
    (2.5, 1.0, 600, 2, False),
    (2.5, 4.0, 100, 2, False),
    (2.5, 1.0, 200, 10, False),
    (2.5, 1.0, 200, 10, True),
    (2.5, 1.0, 40, 50, False),
    (2.5, 1.0, 40, 50, True),
)
OF_CLASS = ("classes", "c1")


def main() -> None:
    described(__doc__).parse_args()
    rows = []
    for apart, epsilon, count, sites, distributed in SETTINGS:
        results, areas, accuracies = runs(apart, epsilon, count, sites, distributed)
        area, share = (
            0.5 * (1 + math.erf(apart / 2)),
            0.5 * (1 + math.erf(apart / 2 / math.sqrt(2))),
        )
        intervals = {
            "AUROC of the records": ((*OF_CLASS, "auroc"), areas),
            "AUROC of the population": ((*OF_CLASS, "auroc"), [area] * RUNS),
            "accuracy of the records": (("accuracy",), accuracies),
            "accuracy of the population": (("accuracy",), [share] * RUNS),
            "sensitivity of the population": ((*OF_CLASS, "sensitivity"), [share] * RUNS),
            "specificity of the population": ((*OF_CLASS, "specificity"), [share] * RUNS),
        }
        for what, (at, truths) in intervals.items():
            number, widths = held(results, at, truths), widths_of(results, at)
            where = "one distributed noise" if distributed else "noise at every site"
            width = statistics.median(widths) if widths else None
            rows.append(
                (
                    apart,
                    epsilon,
                    count,
                    sites,
                    where,
                    what,
                    number,
                    number / RUNS,
                    width,
                    RUNS - len(widths),
                )
            )
    columns = (
        "apart",
        "epsilon",
        "records at each site",
        "sites",
        "noise",
        "interval of",
        f"of {RUNS} runs",
        "share",
    )
    columns = (*columns, "median width", "hidden by the noise")
    report(
        "counting-intervals",
        "95 % intervals from noisy counts that hold the truth",
        columns,
        rows,
        runs=RUNS,
    )


def widths_of(results: list[dict[str, object]], at: tuple[str, ...]) -> list[float]:
    """The widths of an interval in all results that have it."""
    widths = []
    for result in results:
        for key in at:
            result = result[key]  # type: ignore[assignment]
        if result["low"] is not None:
            widths.append(result["high"] - result["low"])  # type: ignore[operator]
    return widths


if __name__ == "__main__":
    main()
