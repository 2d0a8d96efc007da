"""FedCOF at a site: each record of a class is in one group, and no group shows fewer than it may."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance.site_limits import SiteLimits
from fedsurrogate.client_app.methods.heads import class_means as module
from fedsurrogate.client_app.methods.heads.local_head import own_head
from fedsurrogate.client_app.methods.task import Task
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.columns import Frame
from fedsurrogate.common.wire.model_proto import unpack_parameters

NAMES = ("a", "b", "c")


def task(counts: list[int], flat: dict[str, object], site: str = "north", most: int = 0) -> Task:
    labels = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    features = torch.stack([torch.arange(len(labels)) % 16 + 1.0, torch.ones(len(labels))], 1)
    own = LabelledFeatures(features, labels)
    found = SiteFeatures(own, own, NAMES, "f", 0.0, simulated=True)
    limits = SiteLimits(components=most, smallest_class=1)
    return Task(parse_run(flat), NodeConfig(), site, found, limits)  # type: ignore[arg-type]


def sent(asked: Task) -> Parameters:
    """What the site packs, before it is rounded to 16 bits; means as they are without a frame."""
    packed: list[Parameters] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "pack_parameters", lambda each: packed.append(each) or b"")
        module.class_means(asked)
    (found,) = packed
    if found.header.frame:
        frame, means = Frame.of(found.header.frame), found.tensors["means"]
        there = found.tensors["counts"][:, :, None] > 0
        plain = torch.where(there, means * frame.divisor + frame.offset, means)
        found = replace(found, tensors=found.tensors | {"means": plain.float()})
    return found


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, 16), min_size=3, max_size=3).filter(any),
    groups=st.integers(1, 5),
    least=st.integers(2, 6),
    most=st.integers(0, 4),
    seed=st.integers(0, 3),
)
def test_groups_of_a_class_are_its_records_once_each(
    counts: list[int], groups: int, least: int, most: int, seed: int
) -> None:
    flat = {"method": "fedcof", "fedcof.groups": groups, "fedcof.samples-per-group": least}
    found = sent(task(counts, flat | {"seed": seed}, most=most))
    assert found.header.classes == NAMES
    assert found.records == sum(counts)
    sizes, means = found.tensors["counts"].double(), found.tensors["means"].double()
    assert (sizes.shape, means.shape) == ((3, groups), (3, groups, 2))
    start = 0
    for count, own, centres in zip(counts, sizes.tolist(), means, strict=True):
        records = [at % 16 + 1 for at in range(start, start + count)]
        start += count
        used = [size for size in own if size]
        expected = max(1, min(min(groups, most or groups), count // least))
        assert len(used) == (expected if count else 0)
        assert own == [*used, *[0.0] * (groups - len(used))]
        assert sum(used) == count
        assert len(used) <= 1 or min(used) >= least
        assert not used or max(used) - min(used) <= 1
        total = float((torch.tensor(own) * centres[:, 0]).sum())
        assert total == pytest.approx(sum(records), rel=1e-4, abs=1e-3)
        assert centres[: len(used), 1].tolist() == pytest.approx([1.0] * len(used), abs=1e-4)
        assert not centres[len(used) :].any()
    # Another seed of a run shows no other groups; another site has others.
    again = sent(task(counts, flat | {"seed": 9}, most=most))
    assert torch.equal(again.tensors["means"], found.tensors["means"])


def test_sites_draw_their_own_groups() -> None:
    flat: dict[str, object] = {
        "method": "fedcof", "fedcof.groups": 4, "fedcof.samples-per-group": 2,
    }  # fmt: skip
    made = [sent(task([16, 0, 0], flat, site)).tensors["means"] for site in ("north", "south")]
    assert not torch.equal(*made)


@settings(max_examples=10, deadline=None)
@given(counts=st.lists(st.integers(2, 9), min_size=3, max_size=3))
def test_only_a_method_that_draws_features_gets_their_moments(counts: list[int]) -> None:
    quick = {"head.epochs": 1, "head.min-steps": 1}
    for method in ("average", "ensemble", "fedbe"):
        asked = task(counts, {"method": method} | quick)
        found = unpack_parameters(own_head(asked).payload)
        assert found.records == sum(counts)
        moments = {"mean", "deviation"} if method == "fedbe" else set()
        assert found.tensors.keys() == {"weight", "bias"} | moments
        if moments:
            features = asked.found.train.features.double()
            if asked.run.frames and found.header.frame:
                continue
            torch.testing.assert_close(
                found.tensors["mean"].double(), features.mean(0), rtol=2e-3, atol=2e-3
            )
            deviation = (features - features.mean(0)).square().mean(0).sqrt()
            torch.testing.assert_close(
                found.tensors["deviation"].double(), deviation, rtol=2e-3, atol=2e-3
            )
