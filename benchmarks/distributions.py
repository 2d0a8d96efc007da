"""Every sampler and every private release against the distribution that is claimed for it.

Kolmogorov-Smirnov and chi-square tests, the standard deviation, the bias, and the covariance of
neighbours and of runs, with many draws. Releases are made by a site's own code on the same data, so
that only their noise differs. All probabilities are corrected together (Holm). A claim that is
contradicted ends this script with exit code 1; a true one is, once in a thousand runs.

    python benchmarks/distributions.py
    python benchmarks/distributions.py --draws 20000 --runs 2
"""

import logging
import sys
import time

from benchmarks._distribution_checks import releases, samplers
from benchmarks._distribution_tests import failed
from benchmarks.harness.options import described
from benchmarks.harness.results import report

CHANCE = 1e-3


def main() -> int:
    """Run all tests. Returns 1 if a claim is contradicted."""
    parser = described(__doc__)
    parser.add_argument("--draws", type=int, default=200_000, help="numbers from each sampler")
    parser.add_argument("--runs", type=int, default=40, help="releases of each mechanism")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    began = time.perf_counter()
    tests = [*samplers(options.draws), *releases(options.runs)]
    wrong = failed(tests, CHANCE)
    rows = [(each.name, each.test, each.count, each.p, each not in wrong) for each in tests]
    report(
        "distributions",
        f"{len(tests)} tests of samplers and releases",
        ("what", "test", "numbers", "p", "holds"),
        rows,
        chance=CHANCE,
        seconds=time.perf_counter() - began,
    )
    for each in wrong:
        print(f"CONTRADICTED: {each.name}, {each.test}: p = {each.p:.3g}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
