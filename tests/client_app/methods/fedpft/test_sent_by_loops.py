"""What a site sends for FedPFT, record by record: mixtures of the classes that are large enough, and
sums of clipped gradients at a received head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from benchmarks.harness.site_data import SiteData, make_surrogate
from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance.work_limits import SiteLimits
from fedsurrogate.client_app.methods.fedpft import surrogate
from fedsurrogate.client_app.methods.fedpft.logistic_rounds import bounded_round
from fedsurrogate.client_app.methods.fedpft.surrogate import fedpft_surrogate, release_mixtures
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import DataError, SurrogateError
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import Surrogate
from fedsurrogate.common.wire.records import pack_public_mean, unpack_surrogate
from fedsurrogate.strategies.base.training import Training

NAMES, D = ("a", "b", "c", "e"), 4
ROWS = st.lists(st.integers(0, 3), min_size=1, max_size=20)


def records(labels: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.tensor(labels, dtype=torch.int64)
    x = torch.randn(len(y), D, generator=torch.Generator().manual_seed(len(y)))
    return x + y[:, None], y


def of_class(found: Any, name: str) -> tuple[int, Any, Any, Any]:
    """Count, weights, means and covariance rows of a class."""
    at = found.header.classes.index(name)
    own = found.mixtures
    rows = own.labels == at
    return int(own.counts[at]), own.weights[rows], own.means[rows], rows


@settings(max_examples=25, deadline=None)
@given(
    labels=ROWS,
    least=st.integers(1, 5),
    family=st.sampled_from(["spherical", "diag"]),
    limit=st.sampled_from([0, 1]),
)
def test_a_class_that_is_large_enough_is_its_mean_and_variance(
    labels: list[int], least: int, family: str, limit: int
) -> None:
    """Several components have the same mean together; a site's own limit makes it one."""
    run = parse_run(
        {"fedpft.covariance": family, "fedpft.components": 2, "fedpft.samples-per-component": 4}
    )
    x, y = records(labels)
    data = SiteData(x, y, NAMES, "print", "north")
    large = [label for label in range(4) if labels.count(label) >= max(1, least)]
    limits = SiteLimits(components=limit, smallest_class=least)
    if not large:
        with pytest.raises(DataError, match=f"no class has the {least} records"):
            make_surrogate(data, run, limits)
        return
    made = make_surrogate(data, run, limits)
    assert made.facts == {}
    found = made.surrogate
    assert isinstance(found, Surrogate)
    assert found.claim is None
    header = found.header
    assert header.classes == tuple(NAMES[label] for label in large)
    assert (header.method, header.run, header.site, header.fingerprint) == (
        "fedpft",
        run.digest,
        "north",
        "print",
    )
    for label in large:
        own = x[y == label].double().numpy()
        count, weights, means, rows = of_class(found, NAMES[label])
        assert count == len(own)
        assert len(weights) == (1 if limit else max(1, min(2, len(own) // 4)))
        np.testing.assert_allclose(weights @ means, own.mean(0), atol=1e-2)
        if len(weights) == 1 and len(own) > 1:
            spread: Any = found.mixtures.covariance
            variances = spread.variances[rows].double()
            wanted = own.var(0) if family == "diag" else own.var(0).mean()
            np.testing.assert_allclose(variances.squeeze(), wanted, rtol=0.02, atol=1e-3)


def test_copies_of_records_count_once() -> None:
    run = parse_run(
        {
            "fedpft.covariance": "spherical",
            "fedpft.components": 3,
            "fedpft.samples-per-component": 2,
        }
    )
    x, y = records([0] * 7 + [2] * 2)
    data = SiteData(x, y, NAMES, "f", "north")
    header = make_surrogate(data, run).surrogate.header
    whole = make_surrogate(data, run).surrogate
    full = replace(header, classes=NAMES)
    made = release_mixtures(
        x.repeat(5, 1), y.repeat(5), full, run.settings.fedpft, SiteLimits(), torch.Generator(), 5
    )
    assert made.header.classes == whole.header.classes == ("a", "c")
    assert made.mixtures.counts.tolist() == [7, 2]
    numbers = [int((made.mixtures.labels == at).sum()) for at in range(2)]
    assert numbers == [3, 1], "as many components as the records pay for"


def job(run: Run, labels: list[int], payload: bytes | None, least: int = 1, **more: Any) -> Job:
    x, y = records(labels)
    x = x * more.pop("scale", torch.ones(D)) + more.pop("offset", torch.zeros(D))
    part = LabelledFeatures(x, y, more.pop("units", None))
    site = SiteFeatures(part, part, NAMES, "f", 0.0, simulated=False)
    limits = SiteLimits(smallest_class=least)
    return Job(
        run,
        NodeConfig(site="north"),
        "north",
        site,
        limits,
        payload=payload,
        info={"round": 1} | more,
    )


def test_features_are_in_a_frame_that_classes_which_do_not_leave_have_no_part_in() -> None:
    run = parse_run({"fedpft.covariance": "diag", "fedpft.components": 1})
    offset = torch.tensor([0.0, 1e4, 0.0, 0.0])
    labels = [0] * 12 + [1] * 12 + [2] * 2
    asked = job(run, labels, None, 5, offset=offset)
    sent = unpack_surrogate(fedpft_surrogate(asked).payload)
    assert isinstance(sent, Surrogate)
    assert sent.header.classes == ("a", "b")
    assert sent.header.frame
    x, y = asked.found.train.features, asked.found.train.labels
    own = x[y < 2].double().numpy()
    framed = (x.double().numpy() - own.mean(0)) / own.std(0)
    for at in range(2):
        count, _, means, _ = of_class(sent, NAMES[at])
        assert count == 12
        np.testing.assert_allclose(means[0], framed[y == at].mean(0), atol=0.02)


def test_a_centre_of_another_dimension_is_refused() -> None:
    run = parse_run({"epsilon": 3.0, "delta": 1e-5, "classes": ",".join(NAMES)})
    labels = [0] * 12
    fedpft_surrogate(job(run, labels, pack_public_mean(torch.zeros(D))))
    with pytest.raises(SurrogateError, match="a centre of 3 dimensions; features here have 4"):
        fedpft_surrogate(job(run, labels, pack_public_mean(torch.zeros(3))))


@pytest.fixture(scope="module")
def logistic(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings with a file of public features, of which the map of features is made."""
    folder: Path = tmp_path_factory.mktemp("public")
    drawn = torch.rand(30, D, generator=torch.Generator().manual_seed(0))
    save_file({"x": drawn}, folder / "public.safetensors")
    return {
        "head.solver": "logistic", "secure-aggregation": True, "classes": "c,a", "epsilon": 8.0, "delta": 1e-5,
        "fedpft.public": str(folder / "public.safetensors"),
    }  # fmt: skip


@pytest.mark.parametrize("patients", [False, True])
def test_the_sums_of_a_logistic_round_are_of_mapped_and_clipped_features_of_the_runs_classes(
    logistic: dict[str, Any], patients: bool
) -> None:
    run = parse_run(logistic)
    training = Training.begin(run, run.settings.classes, "f", D)
    training.model["weight"] = torch.randn(2, D, generator=torch.Generator().manual_seed(5))
    training.model["bias"] = torch.tensor([0.5, -1.0])
    labels = [0, 0, 1, 2, 2, 3, 0, 2]
    units = tuple("ppqqrrss") if patients else None
    for number in (1, 2):
        training.round = number - 1
        asked = job(run, labels, training.payload(), units=units, round=number)
        made = bounded_round(asked)
        found, claim = made.values, made.claim
        assert claim is not None
        assert claim.unit == ("patient" if patients else "record")
        got = {name: each.double().numpy() for name, each in asked.received_model().tensors.items()}
        mapped = asked.found.train.features.double().numpy() - got["centre"]
        if "projection" in got:
            mapped = mapped @ got["projection"].T
        bound = float(got["bound"][0]) if number == 1 else claim.clip
        records_, totals, sums = 0.0, np.zeros(mapped.shape[1]), np.zeros((2, mapped.shape[1] + 1))
        gaps = np.zeros(6)
        for row, label in zip(mapped, labels, strict=True):
            if NAMES[label] not in "ca":
                continue
            weight = 0.5 if patients else 1.0
            own = row / max(np.linalg.norm(row), bound)
            records_ += weight
            totals += weight * own
            logits = got["weight"] @ own + got["bias"]
            chances = np.exp(logits) / np.exp(logits).sum()
            left = np.eye(2)["ca".index(NAMES[label])] - chances
            left = left / max(np.linalg.norm(left), 0.75)
            sums += weight * np.outer(left, np.append(own, 0.25) / np.sqrt(1 + 0.25**2))
            for index, factor in enumerate((0.7, 1.0, 1.4, 2.0, 2.8, 4.0)):
                sure = np.exp(factor * (logits - logits.max()))
                expected = float(sure @ logits / sure.sum())
                above = logits["ca".index(NAMES[label])] - expected
                gaps[index] += weight * above / (logits.max() - logits.min()) / np.sqrt(6)
        first = {"records": [records_], "totals": totals}
        wanted = first if number == 1 else {"sums": sums, "gaps": gaps}
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_allclose(
                found[name].reshape(np.shape(value)), value, rtol=1e-3, atol=1e-3
            )


def test_a_head_of_other_shapes_is_refused(logistic: dict[str, Any]) -> None:
    run = parse_run(logistic)
    training = Training.begin(run, run.settings.classes, "f", D)
    bounded_round(job(run, [0, 2], training.payload(), round=1))
    for name, wrong in (
        ("bias", torch.zeros(3)),
        ("centre", torch.zeros(D + 1)),
        ("weight", torch.zeros(2, 2)),
    ):
        before = training.model[name]
        training.model[name] = wrong
        with pytest.raises(SurrogateError, match="a head and map of shapes"):
            bounded_round(job(run, [0, 2], training.payload(), round=1))
        training.model[name] = before


@pytest.mark.parametrize(("components", "passes"), [(1, 2), (2, 1)])
def test_features_in_a_file_are_read_in_as_many_passes_as_the_progress_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, components: int, passes: int
) -> None:
    run = parse_run(
        {
            "fedpft.covariance": "diag",
            "fedpft.components": components,
            "fedpft.samples-per-component": 2,
        }
    )
    x, y = records([0] * 8 + [1] * 3 + [2] * 6)
    begun: list[Any] = []
    forgotten: list[Any] = []
    passed: list[int] = []

    @contextmanager
    def counted(*given: Any) -> Iterator[Any]:
        begun.append(given)
        yield passed.append

    monkeypatch.setattr(surrogate, "counted", counted)
    monkeypatch.setattr(surrogate, "forget", forgotten.append)
    limits, threads = SiteLimits(smallest_class=4), torch.get_num_threads()
    whole = make_surrogate(SiteData(x, y, NAMES, "f", "north"), run, limits).surrogate
    made = make_surrogate(
        SiteData(x, y, NAMES, "f", "north", folder=tmp_path), run, limits
    ).surrogate
    assert begun == [("north", passes * 17)]
    assert all(each is x for each in forgotten)
    assert len(forgotten) == len(passed) > 0
    assert sum(passed) <= passes * 17
    assert torch.get_num_threads() == threads
    assert made.header == whole.header
    assert made.header.classes == ("a", "c")
    for name in ("a", "c"):
        one, other = of_class(made, name), of_class(whole, name)
        assert one[0] == other[0]
        assert len(one[1]) == len(other[1]) == components
        np.testing.assert_allclose(one[1] @ one[2], other[1] @ other[2], atol=1e-2)
