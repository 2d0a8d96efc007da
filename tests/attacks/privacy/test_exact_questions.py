"""A coordinator that may ask without noise asks twice: two exact answers that differ by one record
show that record, and a model that it makes for this shows one in every answer.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.client_app.secure_sum import same_sites
from fedsurrogate.common.surrogates.surrogates import Surrogate
from fedsurrogate.common.targets.time_rounds import LARGEST_SCORE
from fedsurrogate.common.wire.model_proto import unpack_parameters
from fedsurrogate.common.wire.parts import in_parts, joined
from fedsurrogate.common.wire.records import unpack_surrogate
from tests.attacks.privacy.asked import DIMENSION, Site
from tests.grid import Scalar

EXACT = "without-dp = true\nsmallest-class = 10\nsmallest-cell = 10\n"
COX: dict[str, Scalar] = {
    "target": "time",
    "time-head": "cox",
    "horizon": 3.0,
    "bins": 3,
    "time-column": "time",
    "event-column": "event",
    "time-unit": "years",
    "classes": "",
    "device": "cpu",
}


def sums_of_a_half_space(site: Site, direction: Tensor, threshold: float) -> tuple[float, Tensor]:
    """The number of training records beyond a threshold, and the sum of their features."""
    steep = 1e4
    point = {
        "beta": steep * direction,
        "offset": torch.tensor([steep * threshold]),
        "hazard": torch.zeros(3),
    }
    model = {
        part: tensor
        for name, whole in point.items()
        for part, tensor in in_parts(name, whole.double(), 3).items()
    }
    _, payload = site.ask(COX, model)
    if payload is None:
        return 0.0, torch.zeros(DIMENSION)
    tensors = unpack_parameters(payload).tensors
    weights, first = (joined(name, tensors, 3).sum(0) for name in ("weights", "first"))
    largest = np.exp(LARGEST_SCORE)
    return float(weights) / largest, first / largest


def records_by_half_spaces(site: Site) -> int:
    """Records that the coordinator reads from the differences of neighbouring half-spaces."""
    direction = torch.nn.functional.one_hot(torch.tensor(0), DIMENSION).double()
    found, before = 0, None
    for threshold in np.linspace(-1.0, -0.8, 15):
        now = sums_of_a_half_space(site, direction, float(threshold))
        if before is not None and round(before[0] - now[0]) == 1:
            record = before[1] - now[1]
            found += bool((site.x.double() - record).abs().amax(1).min() < 1e-2)
        before = now
    return found


@pytest.mark.parametrize("allowed", [True, False])
def test_exact_cox_rounds_show_records_and_leave_only_where_the_policy_says_so(
    tmp_path: Path, allowed: bool
) -> None:
    """A steep beta makes each answer the sum over a half-space; the clamp makes its weights even."""
    site = Site(tmp_path / "site", EXACT + "exact-sums-at-models = true\n" * allowed)
    found = records_by_half_spaces(site)
    assert found > 1 if allowed else found == 0
    assert ("exact-sums-at-models = false" in site.log.read_text()) is not allowed


MEANS: dict[str, Scalar] = {"device": "cpu", "seed": 3}
ALLOWED = "exact-runs-may-differ = true\n"


def sums_of(payload: bytes | None) -> Tensor:
    """The sum of the training records of each class, of the means that a site sent."""
    sent = unpack_surrogate(payload or b"")
    assert isinstance(sent, Surrogate)
    return torch.tensor(sent.counts)[:, None] * sent.mixtures.means.double()


@pytest.mark.parametrize("allowed", [True, False])
def test_the_same_question_with_another_split_shows_records_and_is_refused(
    tmp_path: Path, allowed: bool
) -> None:
    site = Site(tmp_path / "site", EXACT + ALLOWED * allowed)
    answers = [site.ask(MEANS | {"test-fraction": share}) for share in (0.2, 0.207)]
    if allowed:
        for record in sums_of(answers[0][1]) - sums_of(answers[1][1]):
            assert (site.x.double() - record).abs().amax(1).min() < 0.1
        return
    assert [status for status, _ in answers] == ["ok", "policy"]
    assert "test-fraction (training) = 0.2, this one has 0.207" in site.log.read_text()


# Settings of a run that change which records enter what it sends, or what they count as.
SELECTING: list[dict[str, Scalar]] = [
    {},
    {"test-fraction": 0.225},
    {"seed": 4},
    {"classes": "0,1"},
    {"classes": "1"},
    {"target": "number", "value-columns": "time", "target-range": "0,3"},
    {"target": "number", "value-columns": "event", "target-range": "0,3"},
    {"features.bag": "mean"},
]


@settings(max_examples=12, deadline=None)
@given(st.lists(st.sampled_from(range(len(SELECTING))), min_size=2, max_size=4), st.booleans())
def test_runs_without_noise_select_what_the_first_one_did_until_a_person_decides(
    order: list[int], forget: bool
) -> None:
    with TemporaryDirectory() as home:
        site = Site(Path(home) / "site", EXACT, **{"bag-column": "bag"})
        first: int | None = None
        for at, which in enumerate(order):
            if forget and at == 2:
                same_sites.forget(parse_node_config(site.node))
                first = None
            status, _ = site.ask(MEANS | SELECTING[which])
            first = which if first is None else first
            assert status == ("ok" if which == first else "policy"), (order, at)
