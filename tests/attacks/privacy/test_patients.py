"""A unit changes each sum and count of every private method by at most the bound that is charged,
whatever the coordinator sends.

A site answers twice, with one unit more and without, by its own code: a record, or a patient with a
dozen records that are all alike. All that depends on records goes through a bounded sum to which
noise is added; here the noise is the same both times and does not depend on the sum, so the two
answers are equal to the last bit unless something else of a record leaves. Models, maps, bins and names
of the requests are hostile. Parsers let any names in here: they refuse names that stand twice
(test_names_in_headers.py), and the mechanism keeps its bound without that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.dp import record_gradients
from fedsurrogate.client_app.methods.dpcvae import training
from fedsurrogate.client_app.methods.job import Job, MethodOutput, SiteStatistic
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import ConfigError, SurrogateError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.methods import METHODS
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.models.classifiers import Ensemble, Head
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.privacy.gaussian_mechanism import BoundedSum, Noisy
from fedsurrogate.common.privacy.mechanism import DISTRIBUTED_SUMS, Mechanism
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings import CountingSettings
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.common.surrogates.mixtures import PublicMap
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.registry import CLASS, TARGETS
from fedsurrogate.common.wire import model_proto, surrogate_proto
from fedsurrogate.common.wire.model_proto import pack_classifier, pack_parameters, unpack_parameters
from fedsurrogate.common.wire.surrogate_proto import pack_map
from fedsurrogate.strategies.base.training import Training
from tests.registry import TINY

CLASSES = ("a", "b")
DIMENSION, MANY = 16, 12
PRIVATE: dict[str, Scalar] = {"epsilon": 4.0, "delta": 1e-5, "classes": ",".join(CLASSES)}
# Stands for the digest of the model that is sent.
JUDGED: dict[str, Scalar] = {"counting.digest": "0" * 64, "counting.bins": 8}
# Every unit in every step, unless a variant says otherwise.
WHOLE: dict[str, Scalar] = {
    f"{section}.sample-rate": 1.0 for section in ("fedavg", "fedlap", "dpcvae")
}
SUMMED: dict[str, Scalar] = {"secure-aggregation": True, "colluding": 0.0, "dropouts": 0.0}
# A run of each target of the registry.
OF_TARGET: dict[str, dict[str, Scalar]] = {
    CLASS: {},
    "regression": {"value-columns": "age,dose", "target-range": "0,100"},
    "multilabel": {"label-columns": "edema,fracture"},
    "survival": {"horizon": 3.0, "bins": 3},
}
TARGETED = {name: {"task": name, "classes": ""} | own for name, own in OF_TARGET.items() if own}
# What a method does differently under its settings.
VARIANTS: dict[str, dict[str, Scalar]] = {
    **{
        f"fedpft {family}": {"fedpft.covariance": family}
        for family in ("spherical", "diag", "full", "lowrank", "gram")
    },
    "fedpft, two components": {"fedpft.covariance": "spherical", "fedpft.components": 2},
    "fedpft, residuals": TARGETED["survival"] | {"time-head": "residuals"},
    "fedpft, capped labels": TARGETED["multilabel"] | {"label-sets": "s=edema,fracture; t=edema"},
    "logistic rounds": {"head.solver": "logistic"},
    "dp-fedavg, half of the units in a step": {"method": "dp-fedavg", "fedavg.sample-rate": 0.5},
    **{
        f"{method}, {model}": {"method": method, f"{section}.model": model, f"{section}.width": 3}
        # The term of dp-fedprox depends on no record.
        for method, section in (("dp-fedavg", "fedavg"), ("fedlap", "fedlap"))
        for model in ("mlp", "convnet")
    },
    "dpcvae, hidden layers": {"method": "dpcvae", "dpcvae.hidden": 5},
}


def _private_runs() -> Iterator[tuple[str, Run]]:
    """Every private method and target of the registry and all that is counted, alone and in secure
    aggregation, and variants.
    """
    methods: dict[str, dict[str, Scalar]] = {name: {"method": name} for name in METHODS}
    kinds = get_args(CountingSettings.model_fields["kind"].annotation)
    methods |= {kind: {"counting.kind": kind, **JUDGED} for kind in kinds if kind != "none"}
    cases = methods | VARIANTS
    for target, own in TARGETED.items():
        cases |= {f"{name}, {target}": each | own for name, each in methods.items()}
    for name, own in cases.items():
        for how, more in (("", {}), (", secure aggregation", SUMMED)):
            try:
                run = parse_run(TINY | PRIVATE | WHOLE | own | more)
            except ConfigError:
                # A method without privacy, or that is no sum.
                continue
            # Its noise is found in the test: that takes long, and each process collects all tests.
            if run.plan.privacy is not None:
                yield name + how, run


RUNS = dict(_private_runs())


@dataclass(frozen=True)
class Hostile:
    """What a coordinator chooses, and the unit that it looks for.

    Attributes:
        seed: of all numbers.
        names: of the model's outputs, see NAMES.
        model: powers of ten of what is added to each tensor; none for a tensor as it is.
        length: power of ten of the unit's features.
        patient: whether patients are protected, and the unit is one.
        bins: of what is counted, where a model is.
    """

    seed: int = 5
    names: str = "as they are"
    model: tuple[int, ...] = ()
    length: float = 1.6
    patient: bool = True
    bins: int = 8

    def tensor(self, at: int, value: Tensor) -> Tensor:
        """The tensor at this place, changed: some of its numbers large, and alike."""
        if not self.model:
            return value
        draw = torch.Generator().manual_seed(self.seed + at)
        noise = torch.randn(value.shape, generator=draw)
        noise = torch.where(torch.rand(value.shape, generator=draw) < 0.3, noise.sign(), noise)
        return value + noise * 10.0 ** self.model[at % len(self.model)]


NAMES = {
    "as they are": lambda names: names,
    "repeated": lambda names: names[:1] * 64,
    "one repeated": lambda names: (*names, names[-1]),
    "alike": lambda names: (*names, names[0] + " "),
    "reversed": lambda names: names[::-1],
    "fewer": lambda names: names[1:],
    "nameless": lambda names: (*names, ""),
}
scenarios = st.builds(
    Hostile,
    st.integers(0, 10**6),
    st.sampled_from([*NAMES, "as they are", "as they are"]),
    st.lists(st.integers(-3, 3), max_size=3).map(tuple),
    st.floats(-3, 6),
    st.booleans(),
    st.sampled_from([4, 8, 64, 256]),
)


@dataclass(frozen=True)
class Answer:
    """What a site computes and sends: bounded sums in their order, and everything that leaves."""

    sums: list[tuple[str, Tensor, float]]
    left: list[bytes]
    claims: list[Mechanism]


def records(run: Run, extra: int, hostile: Hostile) -> LabelledFeatures:
    """Five patients with one to three records each, and one with `extra` records."""
    random = torch.Generator().manual_seed(hostile.seed)
    owners = [*"aabbbcddeee", *("z" * extra)]
    x = torch.randn(11 + MANY, DIMENSION, generator=random)
    x[11:] = 10**hostile.length * x[11] / x[11].norm()
    labels = torch.arange(11 + MANY) % 2
    labels[11:] = 1
    values = None
    if run.target is not None:
        values = torch.rand(11 + MANY, len(run.target.columns), generator=random).double().round()
        values[11:] = 1.0
        if run.target.gaps:
            values[:11][torch.rand(11, values.shape[1], generator=random) < 0.3] = torch.nan
        values = values[: len(owners)]
    whose = tuple(owners) if hostile.patient else None
    return LabelledFeatures(x[: len(owners)], labels[: len(owners)], whose, values=values)


def answer(run: Run, folder: Path, train: LabelledFeatures, hostile: Hostile) -> Answer:
    """The answers of a site with these records, to all rounds but those after the second. Raises
    SurrogateError where it refuses a request.
    """
    found: list[tuple[str, Tensor, float]] = []
    noise = torch.Generator().manual_seed(9)

    def independent(self: BoundedSum, sigma: float, rounding: float = 0.0) -> Noisy:
        found.append((self.name, self.value.clone(), self.bound))
        drawn = torch.randn(self.value.shape, generator=noise, dtype=torch.float64)
        return Noisy(self.name, sigma * drawn, sigma, self.bound)

    table = torch.rand(10_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    classes = run.settings.classes or ("0", "1")
    site = SiteFeatures(train, train, classes, "f", 0.0, simulated=False)
    left, claims = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundedSum, "noisy", independent)
        for parser in (model_proto, surrogate_proto):
            patch.setattr(parser, "distinct_names", lambda names, what: tuple(names))
        patch.setattr(record_gradients, "system_uniforms", lambda count: table[:count])
        patch.setattr(
            training,
            "system_normals",
            lambda shape: table[: shape[0] * shape[1]].reshape(shape) - 0.5,
        )
        for number in range(1, min(2, run.rounds) + 1):
            payload = _request(run, classes, number, hostile)
            own = run
            if run.settings.counting.digest:
                flat = run.settings.flat() | {"counting.digest": sha256(payload).hexdigest()}
                if run.settings.counting.kind == "evaluation":
                    # Bins of a survey name its rows.
                    flat["counting.bins"] = hostile.bins
                own = parse_run(flat)
            info = {"round": number, "confirmed": number - 1, "lineage": "abc"}
            node = NodeConfig(state_dir=str(folder))
            job = Job(own, node, "s", site, payload=payload or None, info=info)
            kept, sent, claim = _made(own, job, found)
            for file, content in kept.items():
                replace_file(file, content)
            assert claim is not None
            left.append(sent)
            claims.append(claim)
    charged = {name: bound for claim in claims for name, (_, bound) in claim.noise.items()}
    sums = [(name, value, charged.get(name, bound)) for name, value, bound in found]
    return Answer(sums, left, claims)


def _request(run: Run, classes: tuple[str, ...], number: int, hostile: Hostile) -> bytes:
    """A request's payload; empty for none."""
    if run.settings.counting.kind == "evaluation":
        return _judged(run, hostile)
    if run.plan.kind == "rounds":
        training = Training.begin(run, classes, "f", DIMENSION)
        training.round = number - 1
        model = unpack_parameters(training.payload())
        pairs = enumerate(model.tensors.items())
        tensors = {name: hostile.tensor(at, tensor) for at, (name, tensor) in pairs}
        header = replace(model.header, classes=NAMES[hostile.names](model.header.classes))
        return pack_parameters(Parameters(header, model.round, tensors))
    if not run.settings.secure_aggregation:
        return b""
    eye = torch.eye(DIMENSION)
    public = PublicMap(hostile.tensor(0, eye), hostile.tensor(1, eye[0])) if hostile.model else None
    return pack_map(public or PublicMap())


def _judged(run: Run, hostile: Hostile) -> bytes:
    """A model that is counted. Its scores do not differ much, so that rounding would show."""
    names, facts = run.settings.classes, ""
    if run.target is not None:
        names, facts = run.target.outputs, json.dumps(run.target.public | STATED)
    names = NAMES[hostile.names](names)
    header = Header("fedpft", "", "coordinator", "f", names)
    place = torch.linspace(-8, 8, 64).repeat(1 + len(names) // 64)[: len(names)]

    def head(at: int) -> Head:
        parts = (torch.zeros(len(names), DIMENSION), place, torch.zeros(DIMENSION))
        weight, bias, centre = (hostile.tensor(at + n, part) for n, part in enumerate(parts))
        return Head(header, weight, bias, float(hostile.seed % 3), centre, target=facts)

    if run.settings.counting.kind == "evaluation":
        return pack_classifier(head(0))
    return pack_classifier(Ensemble((head(0), head(1))))


# Of a model: what a target needs to be counted, and to be read.
STATED: dict[str, Any] = {"deviation": [0.1, 0.4], "spread": 0.7, "hazard": [0.1] * 3}


def _made(
    run: Run, job: Job, found: list[tuple[str, Tensor, float]]
) -> tuple[dict[Path, bytes], bytes, Mechanism | None]:
    if not run.settings.secure_aggregation:
        made: MethodOutput = load(run.plan.combination.site)(job)
        return dict(made.keep), made.payload, made.claim
    summed: SiteStatistic = load(run.plan.combination.site_sums)(job)
    payload = b""
    if run.plan.mechanism_name == DISTRIBUTED_SUMS:
        # The noise of all sites is added to integers of these.
        found += [
            (name, value.flatten().clone(), torch.nan) for name, value in summed.values.items()
        ]
    else:
        payload = b"".join(value.double().numpy().tobytes() for value in summed.values.values())
    return dict(summed.keep), payload, summed.claim


def moved(
    run: Run, folder: Path, hostile: Hostile, extra: int
) -> tuple[list[tuple[str, float]], bool, set[str]]:
    """How far each sum moves by so many records of a patient, over its bound; whether anything else
    that leaves differs; and the units of the claims. Nothing where the site refuses both times.
    """
    pair = []
    for more in (0, extra):
        try:
            pair.append(answer(run, folder / str(more), records(run, more, hostile), hostile))
        except SurrogateError:
            pair.append(Answer([], [], []))
    less, more = pair
    assert [name for name, *_ in less.sums] == [name for name, *_ in more.sums]
    far = [
        (name, float((b - a).norm()) / bound)
        for (name, a, bound), (_, b, _) in zip(less.sums, more.sums, strict=True)
    ]
    return far, less.left != more.left, {claim.unit for claim in (*less.claims, *more.claims)}


def test_the_walk_meets_every_mechanism_with_gradients() -> None:
    met = {run.settings.method for run in RUNS.values()}
    assert met >= {"fedpft", "dp-fedavg", "dp-fedprox", "fedlap", "psg", "dpcvae", "dpcgan"}
    assert any(run.plan.mechanism_name == DISTRIBUTED_SUMS for run in RUNS.values())


def test_every_target_of_the_registry_has_a_run() -> None:
    assert {CLASS, *TARGETS} == OF_TARGET.keys()
    counting = {run.settings.counting.kind for run in RUNS.values()}
    assert counting == set(get_args(CountingSettings.model_fields["kind"].annotation))


@pytest.mark.parametrize(
    "part", [3, pytest.param(1, marks=pytest.mark.faults)], ids=["a third", "all"]
)
@pytest.mark.parametrize("name", RUNS)
def test_no_request_makes_a_unit_move_a_sum_by_more_than_its_bound(
    name: str, part: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of the generated requests a third, in the same order; `make faults` tries all."""

    @settings(
        max_examples=12 // part,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(hostile=scenarios)
    @example(hostile=Hostile())
    @example(hostile=Hostile(patient=False))
    @example(hostile=Hostile(names="repeated", patient=False))
    def alone(hostile: Hostile) -> None:
        folder = tmp_path_factory.mktemp("site")
        far, differs, units = moved(RUNS[name], folder, hostile, MANY if hostile.patient else 1)
        assert far or hostile.names != "as they are" or hostile.model
        assert all(share <= 1 + 1e-9 for _, share in far), far
        assert not differs, "something that depends on a unit leaves without noise"
        assert units <= {"patient" if hostile.patient else "record"}

    alone()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_same_images_as_records_move_some_sum_by_more(name: str, tmp_path: Path) -> None:
    """So the test above would find records that are not weighed by their patient."""
    far, _, protected = moved(RUNS[name], tmp_path, Hostile(patient=False), MANY)
    assert max(share for _, share in far) > 1.5
    assert protected == {"record"}
