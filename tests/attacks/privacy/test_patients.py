"""A patient with many images changes each sum of every private method by at most its bound.

A site answers twice, with one patient more and without, by its own code. All that depends on
records goes through a bounded sum to which noise is added; here the noise is the same both times and
does not depend on the sum, so the two answers are equal to the last bit unless something else of a
record leaves. The added patient has a dozen records, all alike, far from all others and of one
class: as records they would change the sums a dozen times as much.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.dp import units
from fedsurrogate.client_app.methods.dpcvae import training_steps
from fedsurrogate.client_app.methods.task import MethodOutput, Task
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.methods import METHODS
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.privacy.gaussian_mechanism import BoundedSum, Noisy
from fedsurrogate.common.privacy.mechanism import JOINT_SUMS, Mechanism
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings.flat import Scalar
from fedsurrogate.common.surrogates.public_map import PublicMap
from fedsurrogate.common.wire.sum_proto import pack_map
from fedsurrogate.strategies.base.training import Training
from tests.registry import TINY

CLASSES = ("a", "b")
DIMENSION, MANY = 16, 12
PRIVATE: dict[str, Scalar] = {"epsilon": 4.0, "delta": 1e-5, "classes": ",".join(CLASSES)}
# Every unit in every step, unless a variant says otherwise.
WHOLE: dict[str, Scalar] = {
    f"{section}.sample-rate": 1.0 for section in ("fedavg", "fedlap", "dpcvae")
}
SUMMED: dict[str, Scalar] = {"secure-sum": True, "colluding": 0.0, "dropouts": 0.0}
NUMBERS: dict[str, Scalar] = {
    "target": "number",
    "value-columns": "age",
    "target-range": "0,100",
    "classes": "",
}
LABELS: dict[str, Scalar] = {"target": "labels", "label-columns": "edema,fracture", "classes": ""}
# What a method does differently under its settings.
VARIANTS: dict[str, dict[str, Scalar]] = {
    **{
        f"fedpft {family}": {"fedpft.covariance": family}
        for family in ("spherical", "diag", "full", "lowrank", "gram")
    },
    "fedpft, two components": {"fedpft.covariance": "spherical", "fedpft.components": 2},
    "fedpft, number": NUMBERS,
    "fedpft, labels": LABELS,
    "dp-fedavg, number": {"method": "dp-fedavg", **NUMBERS},
    "dp-fedavg, labels": {"method": "dp-fedavg", **LABELS},
    "dp-fedavg, half of the units in a step": {"method": "dp-fedavg", "fedavg.sample-rate": 0.5},
    **{
        f"{method}, {model}": {"method": method, f"{section}.model": model, f"{section}.width": 3}
        for method, section in (
            ("dp-fedavg", "fedavg"),
            ("dp-fedprox", "fedavg"),
            ("fedlap", "fedlap"),
        )
        for model in ("mlp", "convnet")
    },
    "dpcvae, hidden layers": {"method": "dpcvae", "dpcvae.hidden": 5},
}


def _private_runs() -> Iterator[tuple[str, Run]]:
    """Every private method of the registry, alone and in secure sums, and its variants."""
    cases: dict[str, dict[str, Scalar]] = {name: {"method": name} for name in METHODS} | VARIANTS
    for name, settings in cases.items():
        for how, more in (("", {}), (", secure sum", SUMMED)):
            try:
                run = parse_run(TINY | PRIVATE | WHOLE | settings | more)
            except ConfigError:
                # A method without privacy, or that is no sum.
                continue
            # Its noise is found in the test: that takes long, and each process collects all tests.
            if run.plan.privacy is not None:
                yield name + how, run


RUNS = dict(_private_runs())


@dataclass(frozen=True)
class Answer:
    """What a site computes and sends: bounded sums in their order, and everything that leaves."""

    sums: list[tuple[str, Tensor, float]]
    left: list[bytes]
    claims: list[Mechanism]


def records(run: Run, extra: int, patients: bool) -> LabelledFeatures:
    """Five patients with one to three records each, and one with `extra` records."""
    random = torch.Generator().manual_seed(5)
    owners = [*"aabbbcddeee", *("z" * extra)]
    x = torch.randn(11 + MANY, DIMENSION, generator=random)
    x[11:] = 40 * x[11]
    labels = torch.arange(11 + MANY) % 2
    labels[11:] = 1
    values = None
    if run.target is not None:
        values = torch.rand(11 + MANY, len(run.target.columns), generator=random).double().round()
        values[11:] = 1.0
        values = values[: len(owners)]
    return LabelledFeatures(
        x[: len(owners)], labels[: len(owners)], tuple(owners) if patients else None, values=values
    )


def answer(run: Run, folder: Path, train: LabelledFeatures, patch: pytest.MonkeyPatch) -> Answer:
    """The answers of a site with these records, to all rounds but those after the second."""
    found: list[tuple[str, Tensor, float]] = []
    noise = torch.Generator().manual_seed(9)

    def independent(self: BoundedSum, sigma: float, rounding: float = 0.0) -> Noisy:
        found.append((self.name, self.value.clone(), self.bound))
        drawn = torch.randn(self.value.shape, generator=noise, dtype=torch.float64)
        return Noisy(self.name, sigma * drawn, sigma, self.bound)

    table = torch.rand(10_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    patch.setattr(BoundedSum, "noisy", independent)
    patch.setattr(units, "system_uniforms", lambda count: table[:count])
    patch.setattr(
        training_steps,
        "system_normals",
        lambda shape: table[: shape[0] * shape[1]].reshape(shape) - 0.5,
    )
    classes = run.settings.classes or ("0", "1")
    site = SiteFeatures(train, replace(train, units=None), classes, "f", 0.0, simulated=False)
    left, claims = [], []
    for number in range(1, min(2, run.rounds) + 1):
        task = Task(run, NodeConfig(state_dir=str(folder)), "s", site, payload=b"", info={})
        task = replace(task, payload=_request(run, classes, number))
        task = replace(task, info={"round": number, "confirmed": number - 1, "lineage": "abc"})
        kept, payload, claim = _made(run, task, found)
        for file, content in kept.items():
            replace_file(file, content)
        assert claim is not None
        left.append(payload)
        claims.append(claim)
    return Answer(found, left, claims)


def _request(run: Run, classes: tuple[str, ...], number: int) -> bytes | None:
    if run.plan.kind == "rounds":
        training = Training.begin(run, classes, "f", DIMENSION)
        training.round = number - 1
        return training.payload()
    return pack_map(PublicMap()) if run.settings.secure_sum else None


def _made(
    run: Run, task: Task, found: list[tuple[str, Tensor, float]]
) -> tuple[dict[Path, bytes], bytes, Mechanism | None]:
    if not run.settings.secure_sum:
        made: MethodOutput = load(run.plan.combination.site)(task)
        return dict(made.keep), made.payload, made.claim
    sums, claim, *kept = load(run.plan.combination.site_sums)(task)
    payload = b""
    if run.plan.mechanism_name == JOINT_SUMS:
        # The noise of all sites is added to integers of these.
        bounds = {each.name: each.bound for each in run.plan.combination.sums_in(task.round)}
        found += [(name, value.flatten().clone(), bounds[name]) for name, value in sums.items()]
    else:
        payload = b"".join(value.double().numpy().tobytes() for value in sums.values())
    return (dict(kept[0]) if kept else {}), payload, claim


def moved(run: Run, folder: Path, patients: bool) -> tuple[list[tuple[str, float]], bool, set[str]]:
    """How far each sum moves by the patient, over its bound; whether anything else that leaves
    differs; and the units of the claims.
    """
    pair = []
    for extra in (0, MANY):
        with pytest.MonkeyPatch.context() as patch:
            pair.append(answer(run, folder / str(extra), records(run, extra, patients), patch))
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
    assert any(run.plan.mechanism_name == JOINT_SUMS for run in RUNS.values())


@pytest.mark.parametrize("name", RUNS)
def test_a_patient_with_many_images_moves_each_sum_by_at_most_its_bound(
    name: str, tmp_path: Path
) -> None:
    far, differs, protected = moved(RUNS[name], tmp_path, patients=True)
    assert far
    assert all(share <= 1 + 1e-12 for _, share in far), far
    assert not differs, "something that depends on a patient leaves without noise"
    assert protected == {"patient"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_same_images_as_records_move_some_sum_by_more(name: str, tmp_path: Path) -> None:
    """So the test above would find records that are not weighed by their patient."""
    far, _, protected = moved(RUNS[name], tmp_path, patients=False)
    assert max(share for _, share in far) > 1.5
    assert protected == {"record"}
