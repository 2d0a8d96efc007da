"""Features whose columns have other scales and offsets: accuracy of methods, and bytes, beside those
of scikit-learn.

    python benchmarks/column_scales.py

Claim: no change of a column's scale or offset costs a method more than a point against
scikit-learn's discriminant analysis on the same numbers in single precision, and features without
such columns take no more bytes. Three sites share 600 records in 24 dimensions and 4 classes; 600
more are for tests. With `--before FILE`, figures of an earlier version, measured by the same
command, stand beside.
"""

import json
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

import fedsurrogate as fs

RECORDS, DIMENSION, CLASSES = 600, 24, 4
METHODS: dict[str, dict[str, Any]] = {
    f"fedpft {family}": {"method": "fedpft", "covariance": family}
    for family in ("spherical", "diag", "full", "lowrank", "gram")
}
METHODS["fedpft full, sampled"] = {"method": "fedpft", "covariance": "full", "solver": "sampled"}
METHODS |= {
    name: {"method": name}
    for name in ("afl", "fedcgs", "gh-ofl", "fedcof", "average", "ensemble", "fedbe", "fedavg")
}
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


def main() -> None:
    """Measure every method after every change, and write the table."""
    parser = ArgumentParser()
    parser.add_argument("--before", type=Path, help="results of an earlier version")
    options = parser.parse_args()
    rows = []
    before = {}
    if options.before:
        known = json.loads(options.before.read_text())["rows"]
        before = {(row["change"], row["method"]): row for row in known}
    for change_name, change in CHANGES.items():
        features, labels = records(change)
        oracle = LinearDiscriminantAnalysis(solver="svd")
        oracle.fit(features[:RECORDS].double().numpy(), labels[:RECORDS].numpy())
        best = oracle.score(features[RECORDS:].double().numpy(), labels[RECORDS:].numpy())
        for name, settings in METHODS.items():
            accuracy, sent = measured(features, labels, settings)
            row = {"change": change_name, "method": name, "accuracy": round(accuracy, 4)}
            row |= {"scikit-learn": round(float(best), 4), "bytes": sent}
            if old := before.get((change_name, name)):
                row |= {"accuracy before": old["accuracy"], "bytes before": old["bytes"]}
            print(row, flush=True)
            rows.append(row)
    Path("/tmp/p/scales.d/out.json").write_text(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
