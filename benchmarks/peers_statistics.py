"""A head from a site's statistics beside scikit-learn's fit on the same records with the same
shrinkage: linear discriminants, and a ridge whose strength generalised cross-validation chooses.

    python benchmarks/peers_statistics.py

A site makes its statistics and a message of 16 bits once (`fs.fit`), in double precision; each head
that is learned from them (`fs.learn`, with all checks) needs no record. scikit-learn has the records,
in single precision. Features are drawn. Times are of the processor, in turn.
"""

import statistics
import time
import warnings
from typing import Any

import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import RidgeClassifierCV

import fedsurrogate as fs
from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.timing import Work, in_turn, ratio

SIZES = ((5_000, 256), (10_000, 1_280))
CLASSES, SHRINKAGE = 10, 0.1
# scikit-learn's ridge takes a minute with more features.
MOST_OF_RIDGE = 256


def works(records: int, d: int) -> dict[str, Work]:
    """Pieces of work by name."""
    random = torch.Generator().manual_seed(0)
    y = torch.arange(records) % CLASSES
    mixing = torch.randn(d, d, generator=random) / d**0.5
    centres = torch.randn(CLASSES, d, generator=random) / 4
    x = (centres[y] + torch.randn(records, d, generator=random) @ mixing).numpy()
    labels = y.numpy()
    own = fs.fit(x, labels, covariance="gram")
    settings: dict[str, Any] = {"covariance": "gram"}
    lda = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=SHRINKAGE)
    ridge = RidgeClassifierCV(alphas=torch.logspace(-8, 2, 61).numpy() * records)
    pieces: dict[str, Work] = {
        "ours, statistics and message": lambda: fs.fit(x, labels, **settings),
        "ours, discriminants": lambda: fs.learn([own], **settings, solver="lda", shrinkage=0.1),
        "ours, ridge": lambda: fs.learn([own], **settings, solver="ridge"),
        "scikit-learn, discriminants": lambda: lda.fit(x, labels),
    }
    if d <= MOST_OF_RIDGE:
        pieces["scikit-learn, ridge of 61 strengths"] = lambda: ridge.fit(x, labels)
    return pieces


def main() -> None:
    """Measure every size."""
    options = described(__doc__)
    options.add_argument("--repeats", type=int, default=9)
    given = options.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = []
    columns = ("records", "features", "work", "least ms", "median", "most", "discriminants over it")
    for records, d in SIZES:
        times = in_turn(works(records, d), given.repeats, warm=1, clock=time.process_time)
        for name, seconds in times.items():
            three = (min(seconds), statistics.median(seconds), max(seconds))
            over = ratio(times["scikit-learn, discriminants"], seconds)
            rows.append((records, d, name, *(1000 * each for each in three), over))
        report("peers-statistics", "A head from statistics, beside scikit-learn", columns, rows)


if __name__ == "__main__":
    main()
