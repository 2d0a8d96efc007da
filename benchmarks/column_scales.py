"""Features whose columns have other scales and offsets: accuracy of methods, and bytes, next to those
of scikit-learn.

    python benchmarks/column_scales.py

Claim: no change of a column's scale or offset costs a method more than a point against the same
method on the same numbers in single precision, standardised before by a person who sees all
records. Bytes are of all sites; the change "none" shows what columns without a frame take. Each
method stands next to
discriminant analysis and logistic regression of scikit-learn on all records, and next to its
counterpart: what scikit-learn makes of that which the method's sites send. For mixtures this is
logistic regression on samples of its Gaussian mixtures of each site and class; for heads, the mean
of one logistic regression a site; for all others the better of the first two. Private runs and
secure aggregation have in
features.ranges, for each column, the range of all records and half of it more on both sides. Three
sites share 600 records in 24 dimensions and 4 classes; 600 more are for tests.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression
from sklearn.mixture import GaussianMixture
from sklearn.preprocessing import StandardScaler
from torch import Tensor

import fedsurrogate as fs
from benchmarks.harness.options import described
from benchmarks.harness.results import kept_rows, report
from fedsurrogate.common.errors import FedSurrogateError

NAME, TITLE = "column-scales", "Columns of other scales and offsets"
COLUMNS = (
    "change",
    "method",
    "accuracy",
    "standardised before",
    "LDA",
    "logistic regression",
    "counterpart",
    "counterpart in scikit-learn",
    "bytes",
)
RECORDS, DIMENSION, CLASSES = 600, 24, 4
HEADS = ("average", "ensemble")
ONCE = ("fedpft", *HEADS)
METHODS: dict[str, dict[str, Any]] = {
    f"fedpft {family}": {"method": "fedpft", "covariance": family}
    for family in ("spherical", "diag", "full", "lowrank", "gram")
}
METHODS["fedpft full, lda"] = {"method": "fedpft", "covariance": "full", "head__solver": "lda"}
METHODS |= {name: {"method": name} for name in (*HEADS, "fedavg")}
# Samples of a record of mixtures.
DRAWS = 10
NAMES = {"classes": ",".join(map(str, range(CLASSES)))}
BUDGET: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5} | NAMES
SECURE: dict[str, Any] = {"secure_aggregation": True, "dropouts": 0.0} | NAMES
# With features.ranges.
RANGED: dict[str, dict[str, Any]] = {
    "fedpft, epsilon 8": {"method": "fedpft"} | BUDGET,
    "dp-fedavg, epsilon 8": {"method": "dp-fedavg"} | BUDGET,
    "fedpft, secure aggregation, epsilon 8": {"method": "fedpft"} | SECURE | BUDGET,
}
RANGED |= {
    f"{name}, secure aggregation": {"method": name} | SECURE for name in ("fedpft", "fedavg")
}
# Of the changes, those after which private runs and secure aggregation are measured.
WITH_RANGES = ("x 1e-6 to 1e6",)
Row = tuple[Any, ...]
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
    try:
        if settings["method"] in ONCE and not settings.keys() & {"epsilon", "secure_aggregation"}:
            sent = [fs.fit(*part, site=f"site-{i}", **settings) for i, part in enumerate(parts)]
            return fs.learn(sent).score(*test), sum(len(each.payload) for each in sent)
        with tempfile.TemporaryDirectory() as folder:
            done = fs.simulate(parts, test=test, output_dir=folder, **settings)
            return done.accuracy, done.bytes
    except FedSurrogateError as error:
        print(f"{settings}: {error}")
        return 0.0, 0


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
    """Accuracies of scikit-learn on the test records: discriminant analysis and logistic regression
    of all training records.
    """
    x, y = numbers(features), labels.numpy()
    models = (LinearDiscriminantAnalysis(solver="svd"), LogisticRegression(max_iter=1000))
    return [
        round(float(each.fit(x[:RECORDS], y[:RECORDS]).score(x[RECORDS:], y[RECORDS:])), 4)
        for each in models
    ]


def numbers(features: Tensor) -> Any:
    """Features as scikit-learn takes them, each column of mean zero and deviation one."""
    return standardised(features).double().numpy()


def counterparts(features: Tensor, labels: Tensor) -> dict[str, tuple[str, float]]:
    """For methods whose sites send less than discriminant analysis needs, or learn alone: what
    scikit-learn makes of the same, and its accuracy.
    """
    x, y = numbers(features), labels.numpy()
    test, sites = x[RECORDS:], [np.arange(site, RECORDS, 3) for site in range(3)]

    def right(scores: Any) -> float:
        return round(float((scores.argmax(1) == y[RECORDS:]).mean()), 4)

    alone = [LogisticRegression(max_iter=1000).fit(x[own], y[own]) for own in sites]
    mean = right(sum(model.decision_function(test) for model in alone))
    found = dict.fromkeys(HEADS, ("mean of logistic regressions", mean))
    parts = [(label, own[y[own] == label]) for own in sites for label in range(CLASSES)]
    for family in ("spherical", "diag", "full"):
        drawn = []
        for label, rows in parts:
            mixture = GaussianMixture(1, covariance_type=family, random_state=0).fit(x[rows])
            drawn.append((mixture.sample(DRAWS * len(rows))[0], np.full(DRAWS * len(rows), label)))
        samples, classes = (np.concatenate(each) for each in zip(*drawn, strict=True))
        head = LogisticRegression(max_iter=1000).fit(samples, classes)
        accuracy = right(head.decision_function(test))
        found[f"fedpft {family}"] = ("logistic regression on samples of mixtures", accuracy)
    return found


def rows_of(change_name: str) -> list[Row]:
    """Every method after a change."""
    features, labels = records(CHANGES[change_name])
    best, plain = oracles(features, labels), standardised(features)
    others, usual = counterparts(features, labels), ("the better of both", max(best))
    ranges = [{"features__ranges": ranges_of(each)} for each in (features, plain)]
    rows: list[Row] = []
    for name, settings in (METHODS | RANGED).items():
        if name in RANGED and change_name not in WITH_RANGES:
            continue
        here, there = ranges if name in RANGED else ({}, {})
        accuracy, sent = measured(features, labels, settings | here)
        alike = measured(plain, labels, settings | there)[0]
        numbers = (round(accuracy, 4), round(alike, 4), *best, *others.get(name, usual), sent)
        rows.append((change_name, name, *numbers))
    return rows


def main() -> None:
    """Measure every method after every change, and write the table."""
    options = described(__doc__)
    options.add_argument("--changes", nargs="*", choices=CHANGES, help="of these only; others stay")
    anew = options.parse_args().changes or list(CHANGES)
    rows = kept_rows(NAME, lambda row: row[0] in anew)
    for change in anew:
        rows += rows_of(change)
    report(NAME, TITLE, COLUMNS, sorted(rows, key=lambda row: list(CHANGES).index(row[0])))


if __name__ == "__main__":
    main()
