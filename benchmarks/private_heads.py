"""Private heads of CIFAR-10 features: the closed form and the logistic rounds of secure aggregation, by two
trusts, beside central peers with the same budget and the same public map.

Records are pooled, and the noise is drawn here, as large as in a sum of that many sites when none is
lost; the sums and the coordinator's steps are the product's. Peers see all records: DP-FC, and DP-SGD of
Opacus and, where it is installed, jax_privacy (`_private_peers.py`); scikit-learn without privacy is
the upper reference.

    python benchmarks/private_heads.py --draws 3 --parts samples --peers DP-FC Opacus jax_privacy
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from benchmarks._private_peers import DELTA, GRIDS, chosen, no_privacy
from benchmarks.harness.options import described
from benchmarks.harness.results import report, stored
from benchmarks.harness.samples import shared, stored_features
from benchmarks.secure_aggregation_head import Data, cifar
from fedsurrogate.client_app.methods.fedpft.logistic_rounds import (
    gaps,
    in_bins,
    residuals,
    with_constant,
)
from fedsurrogate.common.backbones.power_transform import raised
from fedsurrogate.common.methods.logistic_rounds import (
    BIAS,
    CENTRE,
    CONSTANT,
    GAPS,
    PROJECTION,
    WEIGHT,
)
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.privacy.gaussian_mechanism import clip, weigh_mean_over_columns
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.secure_aggregation.rules import rules_of
from fedsurrogate.common.surrogates.class_sums import Sums, fold
from fedsurrogate.common.surrogates.mixtures import PublicMap
from fedsurrogate.common.surrogates.surrogates import Header, SumsSurrogate
from fedsurrogate.common.targets.target import CODE, RECORDS, SUMS, TOTALS
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedpft.logistic_rounds import absorb_total, head_of
from fedsurrogate.strategies.fedpft.private_head import learn_from_sums
from fedsurrogate.strategies.pooling.class_means import read_map
from fedsurrogate.strategies.pooling.site_weights import Total

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
TRUSTS = {
    "default trust": {},
    "none colludes, none is lost": {"colluding": 0.0, "dropouts": 0.0},
}
CLASSES = tuple(map(str, range(10)))
LOGISTIC = {"head.solver": "logistic"}
CLOSED = {"fedpft.covariance": "gram"}
Metric = Callable[[float], list[float]]
Maker = Callable[[Data, Run, int, int], Head]


def settings(trust: dict[str, float], **more: Any) -> dict[str, Any]:
    """Settings of a run on mapped features."""
    return {
        "secure-aggregation": True,
        "classes": ",".join(CLASSES),
        "delta": DELTA,
        "features.power-transform": 0.5,
        "features.projection": str(shared("weights/mobilenet_v2-imagenet.safetensors")),
        "fedpft.public": str(shared("features/pacs-photo-train.safetensors")),
        **trust,
        **more,
    }


def factor(run: Run, sites: int) -> float:
    """Noise of a sum of all sites, relative to that of the claim."""
    return float((sites / rules_of(run.settings, sites).lasting.honest) ** 0.5)


def drawn(value: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    return value + sigma * torch.randn(value.shape, generator=generator, dtype=torch.float64)


def logistic(data: Data, run: Run, sites: int, draw: int) -> Head:
    """The head of the rounds."""
    x, y = _weighed(data[0], run), data[1]
    assert run.mechanism is not None
    noise = {name: sigma * factor(run, sites) for name, (sigma, _) in run.mechanism.noise.items()}
    generator = torch.Generator().manual_seed(draw)
    training = Training.begin(run, run.settings.classes, "f" * 16, x.shape[1])
    features = torch.zeros(0)
    for number in range(run.rounds):
        model = {name: tensor.double() for name, tensor in training.model.items()}
        if number < 2:
            apart = x - model[CENTRE]
            mapped = apart @ model[PROJECTION].T if PROJECTION in model else apart
            bound = float(model["bound"]) if number == 0 else run.mechanism.clip
            features = clip(mapped, bound)[0]
        if number == 0:
            exact = {
                RECORDS: torch.tensor([float(len(x))], dtype=torch.float64),
                TOTALS: features.sum(0),
            }
            if CODE in noise:
                exact[CODE] = in_bins(mapped.norm(dim=1)).sum(0)
            rows = features
        else:
            rows = with_constant(features) if number == 1 else rows
            head = torch.cat([model[WEIGHT], model[BIAS][:, None] / CONSTANT], 1)
            exact = {SUMS: residuals(rows, y, head).T @ rows, GAPS: gaps(rows, y, head).sum(0)}
        sums = {name: drawn(value, noise[name], generator) for name, value in exact.items()}
        sigmas = {name: noise[name] for name in sums}
        absorb_total(Total(training.header(), sums, sigmas, run.mechanism), training, ["1", "2"])
    return head_of(training)


def closed_form(data: Data, run: Run, sites: int, draw: int) -> Head:
    """The head of one sum of class statistics."""
    public, claim = read_map(run, data[0].shape[1]), run.mechanism
    classes = run.settings.classes
    assert claim is not None
    x, y = _weighed(data[0], run), data[1]
    features = clip(mapped_by(public, x), claim.clip)[0]
    generator = torch.Generator().manual_seed(draw)
    noise = {name: sigma * factor(run, sites) for name, (sigma, _) in claim.noise.items()}
    ones = one_hot(y, len(classes)).double()
    exact = {
        "counts": ones.sum(0),
        "sums": ones.T @ features,
        "squares": fold(features.T @ features),
    }
    noisy = {name: drawn(value, noise[name], generator) for name, value in exact.items()}
    sums = Sums(noisy["counts"], noisy["sums"], noisy["squares"], noise)
    header = Header("fedpft", "run", "sum", "f" * 16, classes)
    head, _ = learn_from_sums([SumsSurrogate(header, sums, claim)], "distributed", 0)
    own = run.plan.mean_over_columns_weight(x.shape[1])
    return replace(head, centre=public.centre, projection=public.projection, mean_over_columns=own)


def _weighed(rows: Tensor, run: Run) -> Tensor:
    """Features (n, d) with what they keep of their own mean and length."""
    weight = run.plan.mean_over_columns_weight(rows.shape[1])
    return weigh_mean_over_columns(raised(rows.float(), run.power).double(), weight)


def mapped_by(public: PublicMap, rows: Tensor) -> Tensor:
    """Features (n, k) by a product of matrices, which is faster than one record at a time."""
    apart = rows if public.centre is None else rows - public.centre.double()
    return apart if public.projection is None else apart @ public.projection.double().T


def accuracy(head: Head, data: Data, power: float) -> float:
    scores = head.scores(raised(data[2].float(), power).float())
    names = torch.tensor([int(name) for name in head.header.classes])
    return 100 * float((names[scores.argmax(1)] == data[3]).double().mean())


def table(name: str, data: Data, options: Any, file: dict[str, Any]) -> None:
    """All rows of a data set, written after each; those that the file has are not measured again."""
    rows, settled = file["rows"], file["settings"]

    def add(row: str, sites: int | str, measure: Metric) -> None:
        if (name, row, sites) in [each[:3] for each in rows]:
            return
        found = [measure(epsilon) for epsilon in options.epsilons]
        rows.append((name, row, sites, *(round(statistics.mean(each), 2) for each in found)))
        columns = ("data", "row", "sites", *(f"epsilon {each:g}" for each in options.epsilons))
        title = f"accuracy %, {len(data[1])} records, delta {DELTA:g}, {options.draws} draws"
        report("private-heads", title, columns, rows, draws=options.draws, settings=settled)

    run = run_of(data, {}, 1.0, LOGISTIC)
    x, test_x = (raised(rows.float(), run.power) for rows in (data[0], data[2]))
    raw = (x, data[1], test_x, data[3])
    mapped = mapped_data(run, raw)
    for sites in options.sites:
        for trust, given in TRUSTS.items():
            for what, (make, own) in OURS.items():
                measure = of_sums(data, make, own, given, sites, options.draws)
                add(f"{what}, {trust}", sites, measure)
        for peer in options.peers:
            add(f"{peer}, central", "-", of_peer(name, peer, mapped, settled, options.draws))
    ceiling = no_privacy(raw)
    add("scikit-learn, central, no privacy", "-", lambda epsilon: [ceiling])


def run_of(data: Data, trust: dict[str, float], epsilon: float, own: dict[str, Any]) -> Run:
    """The run that says in public how many records there are."""
    records = {"features.records": len(data[1])}
    return parse_run(settings(trust, epsilon=epsilon, **own) | records)


def of_sums(
    data: Data, make: Maker, own: dict[str, Any], trust: dict[str, float], sites: int, draws: int
) -> Metric:
    """From epsilon to the accuracies of draws of our heads."""

    def measure(epsilon: float) -> list[float]:
        run = run_of(data, trust, epsilon, own)
        heads = [make(data, run, sites, draw) for draw in range(draws)]
        return [accuracy(head, data, run.power) for head in heads]

    return measure


def of_peer(name: str, peer: str, mapped: Data, settled: dict[str, Any], draws: int) -> Metric:
    """From epsilon to the accuracies of draws of a peer, whose settings are chosen once."""
    # Two of them are the same mechanism.
    tuned = "Opacus" if peer == "jax_privacy" else peer

    def measure(epsilon: float) -> list[float]:
        what = f"{tuned}, epsilon {epsilon:g}"
        # The second data set takes the settings that were chosen on the first, as ours were.
        place = next((each for each in settled if each.endswith(what)), f"{name}, {what}")
        if place not in settled:
            settled[place] = chosen(tuned, mapped, epsilon)
        return [GRIDS[peer][0](mapped, epsilon, draw, **settled[place]) for draw in range(draws)]

    return measure


def mapped_data(run: Run, raw: Data) -> Data:
    """Features of norm one after the public map of a run, and labels.

    Args:
        run: with the map.
        raw: features and labels, for training and for testing.
    """
    public = read_map(run)
    x, test_x = (clip(mapped_by(public, rows.double()), 0.0)[0] for rows in (raw[0], raw[2]))
    return x, raw[1], test_x, raw[3]


OURS: dict[str, tuple[Maker, dict[str, Any]]] = {
    "logistic rounds": (logistic, LOGISTIC),
    "closed form": (closed_form, CLOSED),
}


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--sites", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--parts", nargs="+", default=["samples", "others"])
    parser.add_argument("--peers", nargs="*", default=["DP-FC", "Opacus"], choices=list(GRIDS))
    parser.add_argument("--images", type=int, default=17_000, help="of CIFAR-10, for `others`")
    parser.add_argument("--continue", dest="keep", action="store_true", help="add to the file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = stored("private-heads") if options.keep else {}
    file = {
        "rows": [tuple(row) for row in before.get("rows", [])],
        "settings": before.get("settings", {}),
    }
    if "samples" in options.parts:
        (x, y), (test_x, test_y) = (stored_features("cifar10", part) for part in ("train", "test"))
        table("CIFAR-10", (x.double(), y, test_x.double(), test_y), options, file)
    if "others" in options.parts:
        x, y, test_x, test_y = cifar(options.images)
        table("CIFAR-10, other images", (x[:10_000], y[:10_000], test_x, test_y), options, file)


if __name__ == "__main__":
    main()
