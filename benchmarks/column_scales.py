"""Features whose columns have other scales and offsets: accuracy of methods, and bytes, next to those
of scikit-learn.

    python benchmarks/column_scales.py

Claim: no change of a column's scale or offset costs a method more than a point against the same
method on the same numbers in single precision, standardised before by a person who sees all
records; and features without such columns take no more bytes. Next to it stand discriminant
analysis and logistic regression of scikit-learn on these numbers, whose classes a method with a
weaker model misses on any columns, and the mean of three logistic regressions, one of each site,
which is what the average of heads can be. Private runs and secure sums have in features.ranges, for
each column, the range of all records and half of it more on both sides. Three sites share 600
records in 24 dimensions and 4 classes; 600 more are for tests. With `--before FILE`, figures of an
earlier version, measured by the same command, stand next to it.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

import fedsurrogate as fs
from benchmarks.harness.options import described
from benchmarks.harness.results import report

NAME, TITLE = "column-scales", "Columns of other scales and offsets"
COLUMNS = (
    "change",
    "method",
    "accuracy",
    "standardised before",
    "LDA",
    "logistic regression",
    "mean of sites' logistic regressions",
    "bytes",
    "accuracy before",
    "bytes before",
)
RECORDS, DIMENSION, CLASSES = 600, 24, 4
HEADS = ("average", "ensemble", "fedbe", "fedkt")
METHODS: dict[str, dict[str, Any]] = {
    f"fedpft {family}": {"method": "fedpft", "covariance": family}
    for family in ("spherical", "diag", "full", "lowrank", "gram")
}
METHODS["fedpft full, sampled"] = {"method": "fedpft", "covariance": "full", "solver": "sampled"}
METHODS |= {
    name: {"method": name} for name in ("afl", "fedcgs", "gh-ofl", "fedcof", *HEADS, "fedavg")
}
NAMES = {"classes": ",".join(map(str, range(CLASSES)))}
BUDGET: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5} | NAMES
SECURE: dict[str, Any] = {"secure_sum": True, "dropouts": 0.0} | NAMES
# With features.ranges.
RANGED: dict[str, dict[str, Any]] = {
    "fedpft, epsilon 8": {"method": "fedpft"} | BUDGET,
    "dp-fedavg, epsilon 8": {"method": "dp-fedavg"} | BUDGET,
    "fedpft, secure sum, epsilon 8": {"method": "fedpft"} | SECURE | BUDGET,
}
RANGED |= {f"{name}, secure sum": {"method": name} | SECURE for name in ("fedpft", "afl", "fedavg")}
Change = Callable[[Tensor, torch.Generator], Tensor]


def scaled(features: Tensor, drawn: torch.Generator) -> Tensor:
    """Each column by another power of ten, from 10^-6 to 10^6."""
    powers = torch.linspace(-6, 6, features.shape[1])
    return features * 10 ** powers[torch.randperm(features.shape[1], generator=drawn)]


def with_constants(features: Tensor, drawn: torch.Generator) -> Tensor:
    """Three more columns that are 10^4 everywhere."""
    return torch.cat([features, torch.full((len(features), 3), 1e4)], 1)


def with_noise(features: Tensor, drawn: torch.Generator) -> Tensor:
    """Three more columns of noise with a deviation of 1000."""
    return torch.cat([features, 1e3 * torch.randn(len(features), 3, generator=drawn)], 1)


def with_one_huge(features: Tensor, drawn: torch.Generator) -> Tensor:
    """The first column times 10^20."""
    return torch.cat([features[:, :1] * 1e20, features[:, 1:]], 1)


CHANGES: dict[str, Change] = {
    "none": lambda features, drawn: features,
    "constants of 1e4": with_constants,
    "noise of deviation 1000": with_noise,
    "all + 1e4": lambda features, drawn: features + 1e4,
    "one x 1e20": with_one_huge,
    "x 1e-6 to 1e6": scaled,
    "x 1e-6 to 1e6, then + 1e4": lambda features, drawn: scaled(features, drawn) + 1e4,
}


def records(change: Change, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features (1200, d) and labels (1200,) of correlated Gaussian classes, after a change."""
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.arange(2 * RECORDS) % CLASSES
    means = 0.8 * torch.randn(CLASSES, DIMENSION, generator=drawn)
    mixing = torch.eye(DIMENSION) + 0.15 * torch.randn(DIMENSION, DIMENSION, generator=drawn)
    features = means[labels] + torch.randn(len(labels), DIMENSION, generator=drawn) @ mixing
    return change(features.double(), drawn).float(), labels


def measured(features: Tensor, labels: Tensor, settings: dict[str, Any]) -> tuple[float, int]:
    """Accuracy on the test records, and bytes that all sites sent. Of a run that fails: 0 and 0."""
    parts = [(features[i:RECORDS:3], labels[i:RECORDS:3]) for i in range(3)]
    test = (features[RECORDS:], labels[RECORDS:])
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = fs.simulate(parts, test=test, output_dir=folder, **settings)
        except Exception as error:
            print(f"{settings}: {error}")
            return 0.0, 0
        return done.accuracy, done.bytes


def standardised(features: Tensor) -> Tensor:
    """Each column minus its mean over all training records, over its deviation, at full precision."""
    exact = StandardScaler().fit(features[:RECORDS].double().numpy())
    return torch.from_numpy(exact.transform(features.double().numpy())).float()


def ranges_of(features: Tensor) -> str:
    """Text of `features.ranges`: the range of each column, and half of it more on both sides."""
    low, high = features.double().min(0).values, features.double().max(0).values
    wider = torch.where(high > low, (high - low) / 2, 1.0)
    pairs = zip((low - wider).tolist(), (high + wider).tolist(), strict=True)
    return "; ".join(f"{first!r},{last!r}" for first, last in pairs)


def oracles(features: Tensor, labels: Tensor) -> list[float]:
    """Accuracies of scikit-learn on the test records: discriminant analysis, logistic regression,
    and the mean of the logistic regressions of the three sites.
    """
    numbers, classes = features.double().numpy(), labels.numpy()
    models = (
        LinearDiscriminantAnalysis(solver="svd"),
        make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
    )
    scores = 0.0
    for site in range(3):
        own = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        own.fit(numbers[site:RECORDS:3], classes[site:RECORDS:3])
        scores = scores + own.decision_function(numbers[RECORDS:])
    mean = float((scores.argmax(1) == classes[RECORDS:]).mean())
    return [
        round(
            float(
                model.fit(numbers[:RECORDS], classes[:RECORDS]).score(
                    numbers[RECORDS:], classes[RECORDS:]
                )
            ),
            4,
        )
        for model in models
    ] + [round(mean, 4)]


def main() -> None:
    """Measure every method after every change, and write the table."""
    options = described(__doc__)
    options.add_argument("--before", type=Path, help="results of an earlier version")
    file: Path | None = options.parse_args().before
    known = json.loads(file.read_text()) if file else {"columns": [], "rows": []}
    earlier = [dict(zip(known["columns"], row, strict=True)) for row in known["rows"]]
    before = {(row["change"], row["method"]): (row["accuracy"], row["bytes"]) for row in earlier}
    rows: list[tuple[Any, ...]] = []
    for change_name, change in CHANGES.items():
        features, labels = records(change)
        best, plain = oracles(features, labels), standardised(features)
        ranges = [{"features__ranges": ranges_of(each)} for each in (features, plain)]
        for name, settings in (METHODS | RANGED).items():
            here, there = ranges if name in RANGED else ({}, {})
            accuracy, sent = measured(features, labels, settings | here)
            alike = round(measured(plain, labels, settings | there)[0], 4)
            last = before.get((change_name, name), ("", ""))
            rows.append((change_name, name, round(accuracy, 4), alike, *best, sent, *last))
    report(NAME, TITLE, COLUMNS, rows)


if __name__ == "__main__":
    main()
