"""Private heads of CIFAR-10 features: the closed form and the logistic rounds of a secure sum, by two
trusts, beside central peers with the same budget and the same public map.

Records are pooled, and the noise is drawn here, as large as in a sum of that many sites when none is
lost; the sums and the coordinator's steps are the product's. Peers see all records: Opacus with full
batches on the mapped features, and scikit-learn without privacy as the upper reference.

    python benchmarks/private_heads.py --draws 3 --parts samples
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from benchmarks.harness.options import described
from benchmarks.harness.results import report, stored
from benchmarks.harness.samples import shared, stored_features
from benchmarks.secure_sums_head import Data, cifar
from fedsurrogate.client_app.methods.fedpft.logistic_rounds import residuals, with_constant
from fedsurrogate.common.backbones.feature_power import raised
from fedsurrogate.common.methods.logistic_rounds import BIAS, CENTRE, CONSTANT, PROJECTION, WEIGHT
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.privacy.accounting import gaussian_noise_multiplier
from fedsurrogate.common.privacy.gaussian_mechanism import clip
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.secure_sum.of_run import rules_of
from fedsurrogate.common.surrogates.class_sums import Sums, fold
from fedsurrogate.common.surrogates.surrogates import Header, SumsSurrogate
from fedsurrogate.common.targets.target import RECORDS, SUMS, TOTALS
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedpft.logistic_rounds import absorb_total
from fedsurrogate.strategies.fedpft.private_head import learn_from_sums
from fedsurrogate.strategies.pooling.public_projection import read_map
from fedsurrogate.strategies.pooling.total import Total

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
DELTA = 1e-5
TRUSTS = {
    "default trust": {},
    "none colludes, none is lost": {"colluding": 0.0, "dropouts": 0.0},
}
CLASSES = tuple(map(str, range(10)))
# Of the peer: full batches; usual values, not tuned.
STEPS, RATE, NORM = 40, 4.0, 1.0


def settings(trust: dict[str, float], **more: Any) -> dict[str, Any]:
    """Settings of a run on mapped features."""
    return {
        "secure-sum": True,
        "classes": ",".join(CLASSES),
        "delta": DELTA,
        "features.power": 0.5,
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
    x, y = raised(data[0].float(), run.power).double(), data[1]
    assert run.mechanism is not None
    noise = {name: sigma * factor(run, sites) for name, (sigma, _) in run.mechanism.noise.items()}
    generator = torch.Generator().manual_seed(draw)
    training = Training.begin(run, CLASSES, "f" * 16, x.shape[1])
    features = torch.zeros(0)
    for number in range(run.rounds):
        model = {name: tensor.double() for name, tensor in training.model.items()}
        if number < 2:
            mapped = (x - model[CENTRE]) @ model[PROJECTION].T
            bound = float(model["bound"]) if number == 0 else run.mechanism.clip
            features = clip(mapped, bound)[0]
        if number == 0:
            exact = {
                RECORDS: torch.tensor([float(len(x))], dtype=torch.float64),
                TOTALS: features.sum(0),
            }
            rows = features
        else:
            rows = with_constant(features) if number == 1 else rows
            head = torch.cat([model[WEIGHT], model[BIAS][:, None] / CONSTANT], 1)
            exact = {SUMS: residuals(rows, y, head).T @ rows}
        sums = {name: drawn(value, noise[name], generator) for name, value in exact.items()}
        sigmas = {name: noise[name] for name in sums}
        absorb_total(Total(training.header(), sums, sigmas, run.mechanism), training, ["1", "2"])
    model = training.model
    clipped = run.mechanism.clip
    return Head(
        training.header(), model[WEIGHT], model[BIAS], clipped, model[CENTRE], model[PROJECTION]
    )


def closed_form(data: Data, run: Run, sites: int, draw: int) -> Head:
    """The head of one sum of class statistics."""
    public, claim = read_map(run), run.mechanism
    assert claim is not None
    x, y = raised(data[0].float(), run.power).double(), data[1]
    features = clip(mapped_by(public.centre, public.projection, x), claim.clip)[0]
    generator = torch.Generator().manual_seed(draw)
    noise = {name: sigma * factor(run, sites) for name, (sigma, _) in claim.noise.items()}
    ones = one_hot(y, len(CLASSES)).double()
    exact = {
        "counts": ones.sum(0),
        "sums": ones.T @ features,
        "squares": fold(features.T @ features),
    }
    noisy = {name: drawn(value, noise[name], generator) for name, value in exact.items()}
    sums = Sums(noisy["counts"], noisy["sums"], noisy["squares"], noise)
    header = Header("fedpft", "run", "sum", "f" * 16, CLASSES)
    head, _ = learn_from_sums([SumsSurrogate(header, sums, claim)], "joint", 0)
    return Head(head.header, head.weight, head.bias, head.clip, public.centre, public.projection)


def mapped_by(centre: Tensor | None, projection: Tensor | None, rows: Tensor) -> Tensor:
    assert centre is not None
    assert projection is not None
    return (rows - centre.double()) @ projection.double().T


def opacus(data: Data, run: Run, epsilon: float, draw: int) -> float:
    """Accuracy in % of Opacus's DP-SGD on all records, with the same map and full batches."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    public = read_map(run)
    x, test_x = (
        clip(
            mapped_by(public.centre, public.projection, raised(rows.float(), run.power).double()),
            0.0,
        )[0].float()
        for rows in (data[0], data[2])
    )
    torch.manual_seed(draw)
    module = GradSampleModule(torch.nn.Linear(x.shape[1], len(CLASSES)))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    multiplier = gaussian_noise_multiplier(epsilon, DELTA) * STEPS**0.5
    steps = DPOptimizer(
        torch.optim.SGD(module.parameters(), RATE * len(CLASSES), momentum=0.5),
        noise_multiplier=multiplier,
        max_grad_norm=NORM,
        expected_batch_size=len(x),
        generator=torch.Generator().manual_seed(draw),
    )
    for _ in range(STEPS):
        steps.zero_grad()
        torch.nn.functional.cross_entropy(module(x), data[1]).backward()
        steps.step()
    with torch.no_grad():
        return 100 * float((module(test_x).argmax(1) == data[3]).double().mean())


def upper(data: Data, power: float) -> float:
    """Accuracy in % of scikit-learn's logistic regression on all records, without privacy."""
    from sklearn.linear_model import LogisticRegression

    x, test_x = (raised(rows.float(), power).numpy() for rows in (data[0], data[2]))
    mean, spread = x.mean(0), x.std()
    model = LogisticRegression(C=0.01, max_iter=200).fit((x - mean) / spread, data[1].numpy())
    return 100 * float(model.score((test_x - mean) / spread, data[3].numpy()))


def accuracy(head: Head, data: Data, power: float) -> float:
    scores = head.scores(raised(data[2].float(), power).float())
    names = torch.tensor([int(name) for name in head.header.classes])
    return 100 * float((names[scores.argmax(1)] == data[3]).double().mean())


def table(name: str, data: Data, options: Any, rows: list[tuple[Any, ...]]) -> None:
    """All rows of a data set, written after each."""

    def add(row: str, sites: int | str, values: dict[float, list[float]]) -> None:
        cells = [
            round(statistics.mean(values[each]), 2) if each in values else None for each in EPSILONS
        ]
        rows.append((name, row, sites, *cells))
        columns = ("data", "row", "sites", *(f"epsilon {each:g}" for each in EPSILONS))
        title = f"accuracy %, {len(data[1])} records, delta {DELTA:g}, {options.draws} draws"
        report("private-heads", title, columns, rows, draws=options.draws)

    def runs(trust: dict[str, float], epsilon: float, **more: Any) -> Run:
        return parse_run(
            settings(trust, epsilon=epsilon, **more) | {"features.records": len(data[1])}
        )

    made = {
        "logistic rounds": (logistic, {"head.solver": "logistic"}),
        "closed form": (closed_form, {"fedpft.covariance": "gram"}),
    }
    for trust, chosen in TRUSTS.items():
        for sites in options.sites if not chosen else options.sites[:1]:
            for what, (make, own) in made.items():
                values = {}
                for epsilon in EPSILONS:
                    run = runs(chosen, epsilon, **own)
                    heads = [make(data, run, sites, draw) for draw in range(options.draws)]
                    values[epsilon] = [accuracy(head, data, run.power) for head in heads]
                add(f"{what}, {trust}", sites, values)
    run = runs({}, 1.0, **{"head.solver": "logistic"})
    if "opacus" in options.peers:
        few = (0.5, 1.0, 2.0, 4.0)
        values = {e: [opacus(data, run, e, draw) for draw in range(options.draws)] for e in few}
        add("Opacus, central", "-", values)
    if "sklearn" in options.peers:
        reached = upper(data, run.power)
        add("scikit-learn, central, no privacy", "-", {each: [reached] for each in EPSILONS})


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--sites", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--parts", nargs="+", default=["samples", "others"])
    parser.add_argument("--peers", nargs="*", default=["opacus", "sklearn"])
    parser.add_argument("--images", type=int, default=17_000, help="of CIFAR-10, for `others`")
    parser.add_argument("--continue", dest="keep", action="store_true", help="add to the file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [tuple(row) for row in stored("private-heads").get("rows", [])] if options.keep else []
    if "samples" in options.parts:
        (x, y), (test_x, test_y) = (stored_features("cifar10", part) for part in ("train", "test"))
        table("CIFAR-10", (x.double(), y, test_x.double(), test_y), options, rows)
    if "others" in options.parts:
        x, y, test_x, test_y = cifar(options.images)
        table("CIFAR-10, other images", (x[:10_000], y[:10_000], test_x, test_y), options, rows)


if __name__ == "__main__":
    main()
