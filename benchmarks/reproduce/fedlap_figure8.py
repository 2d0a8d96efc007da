"""FedLAP-DP, figures 8 and 9: membership in the data of a model that sites have trained together, from the
loss of a record (figure 8, black box) and from the norm of its gradient (figure 9, white box).

    python benchmarks/reproduce/fedlap_figure8.py

As in section 6.6: half of the test records, and as many training records, train the attacker, a small
network; the others are audited. Each method trains a model without privacy and at epsilon 10.18. The paper
has images of CIFAR-10; here features of them by MobileNetV2, one hidden layer, at five sites of two classes
with few records each, so that a model can remember them. A row has the model's accuracy on training and
test records, and the area under the attacker's curve with each score; 0.5 is a guess.
"""

from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from benchmarks.harness.federation import Federation, federate, joined, load_seed
from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.samples import feature_settings
from benchmarks.harness.seeds import mean_and_deviation
from benchmarks.reproduce.fedlap_tables import pairs
from fedsurrogate.client_app.audit.membership import model_scores
from fedsurrogate.common.run import parse_run

ROUNDS, EPSILON = 10, 10.18
AVERAGED: dict[str, Any] = {
    "fedavg.model": "mlp",
    "fedavg.rounds": ROUNDS,
    "fedavg.local-epochs": 5,
}
LAP: dict[str, Any] = {"method": "fedlap", "fedlap.model": "mlp", "fedlap.rounds": ROUNDS}
BUDGET: dict[str, Any] = {"epsilon": EPSILON, "delta": 1e-5}
ROWS: dict[tuple[str, str], dict[str, Any]] = {
    ("FedAvg", "none"): {"method": "fedavg"} | AVERAGED,
    ("FedLAP", "none"): LAP | {"fedlap.memory": 0.0},
    ("DP-FedAvg", f"{EPSILON}"): {"method": "dp-fedavg"} | AVERAGED | BUDGET,
    ("FedLAP-DP", f"{EPSILON}"): LAP | BUDGET,
}
SCORES = ("loss", "norm of the gradient")


def scores(data: Federation, run_settings: dict[str, Any]) -> tuple[list[Tensor], list[float]]:
    """For training and test records: the loss and the norm of the gradient of each (n, 2), and the
    accuracy in %.
    """
    model = federate(parse_run(data.named(run_settings)), data).model
    assert model is not None
    assert model.header.classes == data.classes
    rows, right = [], []
    for part in (joined([each.train for each in data.sites]), data.test):
        found = model_scores(model, part.features, part.labels)
        rows.append(-torch.stack(list(found.values()), 1))
        correct, count = model.accuracy(part.features, data.classes, part.labels)
        right.append(100 * correct / count)
    return rows, right


def attacked(seed: int, rows: list[Tensor]) -> list[float]:
    """The area under the curve of the attacker, with each score alone."""
    from sklearn.metrics import roc_auc_score
    from sklearn.neural_network import MLPClassifier

    drawn = torch.Generator().manual_seed(seed)
    count = min(map(len, rows)) // 2
    known, audited = [], []
    for part in rows:
        order = torch.randperm(len(part), generator=drawn)
        known.append(part[order[:count]])
        audited.append(part[order[count : 2 * count]])
    truth = [1] * count + [0] * count
    areas = []
    for place in range(len(SCORES)):
        train, test = (
            torch.cat(parts)[:, [place]].clamp_min(1e-12).log() for parts in (known, audited)
        )
        middle, spread = train.mean(), train.std()
        attacker = MLPClassifier((32,), max_iter=2000, random_state=seed)
        attacker.fit(((train - middle) / spread).numpy(), truth)
        guessed = attacker.predict_proba(((test - middle) / spread).numpy())[:, 1]
        areas.append(float(roc_auc_score(truth, guessed)))
    return areas


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--records", type=float, default=0.1, help="share of the training records")
    options = parser.parse_args()
    base = feature_settings("cifar10")
    whole = load_seed(base, 1, 0)

    found: dict[tuple[str, str], list[list[float]]] = {row: [] for row in ROWS}
    for seed in range(options.seeds):
        data = pairs(whole, options.records, seed)
        for row, own in track(ROWS.items(), description=f"seed {seed}"):
            rows, right = scores(data, {**base, **own, "seed": seed})
            found[row].append(right + attacked(seed, rows))
        # After each seed, so that an interrupted run keeps what it has.
        write(found, sum(data.sizes))


def write(found: dict[tuple[str, str], list[list[float]]], records: int) -> None:
    """Print and store the table of the seeds so far."""
    rows = [
        (*row, *map(mean_and_deviation, zip(*each, strict=True))) for row, each in found.items()
    ]
    columns = ("model", "epsilon", "on training records, %", "on test records, %")
    columns += tuple(f"AUC: {score}" for score in SCORES)
    seeds = len(next(iter(found.values())))
    title = f"FedLAP figures 8 and 9, CIFAR-10 features, {records} records, {seeds} seeds"
    report("reproduce-fedlap-figure8", title, columns, rows)


if __name__ == "__main__":
    main()
