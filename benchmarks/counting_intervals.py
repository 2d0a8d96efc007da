"""How often the 95 % intervals of an evaluation by noisy counts hold the truth, in 500 simulated evaluations of two sites.

Claim: about 95 %. Scores of two classes are drawn from normal distributions `apart` standard deviations from each other, and
40 % of the records are positive. The noise is the product's. The truth of the records is the value without noise and bins;
that of the population is the one behind the records.
"""

import math

from _report import report

from tests.strategies.counting.test_intervals import RUNS, held, runs

SETTINGS = ((1.0, 1.0, 600), (2.5, 1.0, 600), (2.5, 4.0, 100))
OF_CLASS = ("classes", "c1")


def main() -> None:
    rows = []
    for apart, epsilon, count in SETTINGS:
        results, areas, accuracies = runs(apart, epsilon, count)
        area, share = 0.5 * (1 + math.erf(apart / 2)), 0.5 * (1 + math.erf(apart / 2 / math.sqrt(2)))
        covered = {
            "AUROC of the records": held(results, (*OF_CLASS, "auroc"), areas),
            "AUROC of the population": held(results, (*OF_CLASS, "auroc"), [area] * RUNS),
            "accuracy of the records": held(results, ("accuracy",), accuracies),
            "accuracy of the population": held(results, ("accuracy",), [share] * RUNS),
            "sensitivity of the population": held(results, (*OF_CLASS, "sensitivity"), [share] * RUNS),
            "specificity of the population": held(results, (*OF_CLASS, "specificity"), [share] * RUNS),
        }
        rows += [(apart, epsilon, count, what, number, number / RUNS) for what, number in covered.items()]
    columns = ("apart", "epsilon", "records at each site", "interval of", f"of {RUNS} runs", "share")
    report("counting-intervals", "95 % intervals from noisy counts that hold the truth", columns, rows, runs=RUNS)


if __name__ == "__main__":
    main()
