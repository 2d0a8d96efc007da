"""A coordinator that may ask without noise asks twice: two exact answers that differ by one record
show that record, and a model that it makes for this shows one in every answer.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.client_app.secure_sum import same_sites
from fedsurrogate.common.surrogates.surrogates import Surrogate
from fedsurrogate.common.wire.records import unpack_surrogate
from tests.attacks.privacy.asked import Site
from tests.grid import Scalar

EXACT = "without-dp = true\nsmallest-class = 10\nsmallest-cell = 10\n"
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
