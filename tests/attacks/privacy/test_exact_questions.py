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

from fedsurrogate.client_app import secure_aggregation
from fedsurrogate.client_app.datasets.partition import selection, share
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.settings.base import known_keys
from fedsurrogate.common.surrogates.surrogates import Surrogate
from fedsurrogate.common.wire.records import unpack_surrogate
from tests.attacks.privacy.asked import Site
from tests.common.test_document import values_of
from tests.grid import Scalar, default_run_config

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
    {"task": "regression", "value-columns": "time", "target-range": "0,3"},
    {"task": "regression", "value-columns": "event", "target-range": "0,3"},
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
                secure_aggregation.forget(parse_node_config(site.node))
                first = None
            status, _ = site.ask(MEANS | SELECTING[which])
            first = which if first is None else first
            assert status == ("ok" if which == first else "policy"), (order, at)


NUMBER: dict[str, Scalar] = {"task": "regression", "value-columns": "time", "target-range": "0,3"}


@pytest.mark.parametrize(
    ("base", "sites", "bags"), [(MEANS, 3, "bag"), (MEANS | NUMBER, 1, "bag"), (MEANS, 1, "")]
)
def test_every_setting_that_changes_which_records_train_changes_what_is_selected(
    tmp_path: Path, base: dict[str, Scalar], sites: int, bags: str
) -> None:
    """Settings are found by their types, so a new one is tried without a line here. Where no column names
    bags, files of several images are one each: a run over images leaves them out in a secure sum.
    """
    more: dict[str, Scalar] = {"bag-column": bags, "num-partitions": sites}
    node = parse_node_config(Site(tmp_path / "site", EXACT, **more).node)

    def used(settings: dict[str, Scalar]) -> tuple[list[object], dict[str, str]] | None:
        try:
            run = parse_run(default_run_config() | base | settings)
            found = share(run, node, in_simulation=False)
        except FedSurrogateError:
            return None
        data, train = found.dataset, found.train
        values = data.values[train].tolist() if run.target is not None else []
        facts = [run.settings.features.bag, train.tolist(), data.labels[train].tolist(), values]
        return facts, selection(run, node)

    before = used({})
    assert before is not None
    changing = set()
    for key in known_keys(Settings):
        for value in (*values_of(key), *["event"] * key.endswith(("column", "columns"))):
            if (after := used({key: value})) is not None and after[0] != before[0]:
                changing.add(key)
                assert after[1] != before[1], f"{key} = {value!r}"
    assert changing >= {"seed", "test-fraction"}
