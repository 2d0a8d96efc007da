"""A request at a site: which model it takes, and which of its records a method gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance.work_limits import SiteLimits
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import DataError, PolicyError, SurrogateError, largest_parameter
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.mixtures import Frame
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import pack_parameters

CLASSES = ("a", "b", "c")
PLAIN: dict[str, Any] = {"method": "fedavg"}
PRIVATE: dict[str, Any] = {"method": "dp-fedavg", "epsilon": 8.0, "delta": 1e-5}
SUMMED: dict[str, Any] = {"method": "fedavg", "secure-aggregation": True, "classes": "a,b"}


def records(counts: list[int], d: int = 4, seed: int = 0) -> LabelledFeatures:
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(len(labels), d, generator=generator) + 2 * labels[:, None]
    order = torch.randperm(len(labels), generator=generator)
    return LabelledFeatures(features[order], labels[order])


def job(run: Run, counts: list[int], **more: Any) -> Job:
    own = records(counts)
    found = SiteFeatures(own, own, CLASSES, "f", 0.0, simulated=False)
    return Job(run, NodeConfig(), "north", found, **more)


@settings(max_examples=60, deadline=None)
@given(
    flat=st.sampled_from([PLAIN, PLAIN | {"classes": "a,b"}, PRIVATE | {"classes": "a,b"}, PRIVATE, SUMMED]),
    wrong=st.sets(
        st.sampled_from(["run", "backbone", "classes", "many", "frame", "nan", "large", "none"]),
        max_size=1,
    ),
)  # fmt: skip
def test_a_model_is_taken_only_if_it_is_of_this_run_and_hides_nothing(
    flat: dict[str, Any], wrong: set[str]
) -> None:
    run = parse_run(flat)
    fixed = run.settings.classes or ("a", "b")
    header = Header(run.settings.method, run.digest, "coordinator", "f", fixed)
    header = replace(
        header,
        run="other" if "run" in wrong else header.run,
        fingerprint="g" if "backbone" in wrong else "f",
        classes=("a", "c") if "classes" in wrong else fixed,
        frame=Frame(torch.zeros(4), torch.ones(4)).packed() if "frame" in wrong else b"",
    )
    most = largest_parameter(bool(run.settings.epsilon))
    weight = torch.zeros(2, 4)
    if "nan" in wrong:
        weight[1, 2] = torch.nan
    if "large" in wrong:
        weight[1, 2] = -2 * most
    payload = pack_parameters(Parameters(header, 1, {"weight": weight, "none": torch.zeros(0)}, 0))
    asked = job(
        run,
        [5, 5, 0],
        payload=None if "none" in wrong else payload,
        limits=SiteLimits(most_classes=1 if "many" in wrong else 2),
    )
    bad = bool(wrong & {"run", "backbone", "nan", "large", "none"})
    bad |= "frame" in wrong and run.hides_sites
    bad |= "classes" in wrong and bool(run.settings.classes) and run.hides_sites
    if bad or "many" in wrong:
        with pytest.raises(PolicyError if "many" in wrong else SurrogateError):
            asked.received_model()
    else:
        assert asked.received_model().header == header


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 1, 4, 5, 6, 9]), min_size=3, max_size=3).filter(any),
    wanted=st.sampled_from([("a", "b", "c"), ("c", "a"), ("b",), ("x", "c")]),
    least=st.sampled_from([0, 1, 5]),
    flat=st.sampled_from([PLAIN, SUMMED]),
)
def test_a_method_gets_the_records_of_classes_that_are_large_enough(
    counts: list[int], wanted: tuple[str, ...], least: int, flat: dict[str, Any]
) -> None:
    run = parse_run(flat)
    asked = job(run, counts, limits=SiteLimits(smallest_class=least))
    shown = tuple(name for name, size in zip(CLASSES, counts, strict=True) if size >= least)
    assert asked.classes == (shown if least > 1 else CLASSES)
    own = asked.found.train
    kept = [
        row
        for row, label in enumerate(own.labels.tolist())
        if CLASSES[label] in wanted and counts[label] >= least
    ]
    if not kept and not run.hides_sites:
        with pytest.raises(DataError, match="no training record"):
            asked.training_data(wanted)
        return
    features, labels = asked.training_data(wanted)
    assert torch.equal(features, own.features[kept])
    assert [wanted[at] for at in labels.tolist()] == [CLASSES[own.labels[row]] for row in kept]


@given(st.text(max_size=34) | st.text("abz09", min_size=31, max_size=33))
def test_a_lineage_is_a_short_name_of_ascii_letters_and_digits(name: str) -> None:
    asked = job(parse_run(PLAIN), [2, 2, 2], info={"lineage": name})
    if 0 < len(name) <= 32 and name.isascii() and name.isalnum():
        assert asked.lineage == name
        assert asked.state.name == f"{name}-north"
    else:
        with pytest.raises(SurrogateError, match="without the name of its run"):
            _ = asked.lineage


@pytest.mark.parametrize(
    "info", [{}, {"round": "3", "confirmed": 2.0}, {"round": 4, "confirmed": 3}]
)
def test_a_round_is_a_whole_number_and_the_first_where_none_is_named(info: dict[str, Any]) -> None:
    asked = job(parse_run(PLAIN), [2, 2, 2], info=info)
    assert (asked.round, asked.confirmed) == ((4, 3) if info.get("round") == 4 else (1, 0))


NUMBER = {"task": "regression", "value-columns": "x", "target-range": "0,10"}
RUN, HIDDEN = parse_run(NUMBER), parse_run(NUMBER | {"secure-aggregation": True})


@pytest.mark.parametrize("on_disk", [False, True])
def test_features_are_single_precision_unless_memory_cannot_hold_them(
    on_disk: bool, tmp_path: Path
) -> None:
    features = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).half()
    values = torch.tensor([[0.0], [5.0], [10.0], [20.0], [-1.0], [7.5]], dtype=torch.float64)
    zeros = torch.zeros(6, dtype=torch.int64)
    folder = tmp_path if on_disk else None
    train = LabelledFeatures(features, zeros, None, None, folder, values)
    job = Job(RUN, NodeConfig(), "s", SiteFeatures(train, train, (), "f", 0.0, False))
    found, code = job.training_data(())
    assert found.dtype == (torch.float16 if on_disk else torch.float32)
    assert torch.equal(found.float(), features.float())
    assert code[:, -1].tolist() == [-1.0, 0.0, 1.0, 1.0, -1.0, 0.5]
    without = Job(RUN, NodeConfig(), "s", SiteFeatures(
        LabelledFeatures(features, zeros), train, (), "f", 0.0, False
    ))  # fmt: skip
    with pytest.raises(DataError, match="no values"):
        without.training_data(())


@given(records=st.integers(1, 9), least=st.integers(1, 9), seed=st.integers(0, 99))
def test_nothing_of_a_site_with_too_few_records_is_in_a_hidden_sum(
    records: int, least: int, seed: int
) -> None:
    """Not one record: what is sent would be that record, where all other sites send zeros too."""
    features = 1 + torch.rand(records, 3, generator=torch.Generator().manual_seed(seed))
    values = torch.arange(records, dtype=torch.float64)[:, None] % 2
    train = LabelledFeatures(
        features, torch.zeros(records, dtype=torch.int64), None, None, None, values
    )
    site = SiteFeatures(train, train, (), "f", 0.0, False)
    limits = SiteLimits(smallest_class=least)
    found, code = Job(HIDDEN, NodeConfig(), "s", site, limits).training_data(())
    assert len(found) == len(code) == (records if records >= least else 0)
    job = Job(RUN, NodeConfig(), "s", site, limits)
    if records < least:
        with pytest.raises(DataError, match="smallest-class"):
            job.training_data(())
    else:
        assert len(job.training_data(())[0]) == records
