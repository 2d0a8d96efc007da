"""No record, and no patient, changes a sum over a code by more than its bound; and sums without noise
show no single record.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedsurrogate as fs
from fedsurrogate import _surrogate
from fedsurrogate.client_app import secure_aggregation
from fedsurrogate.client_app.datasets.images import once
from fedsurrogate.client_app.datasets.records import Records
from fedsurrogate.client_app.governance.work_limits import SiteLimits
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.common.surrogates.class_sums import unfold
from fedsurrogate.common.targets.target import CODE, SUMS, TOTALS
from fedsurrogate.common.wire.model_proto import unpack_parameters

PRIVATE: dict[str, Scalar] = {"epsilon": 2.0, "delta": 1e-5}
KINDS: dict[str, dict[str, Scalar]] = {
    "number": {"task": "regression", "target-range": "-1,1", "value-columns": "age,dose"},
    "labels": {"task": "multilabel", "label-columns": "edema,fracture,nodule"},
    "time": {"task": "survival", "horizon": 3.0, "bins": 3},
    "capped": {
        "task": "multilabel",
        "label-columns": "edema,fracture,nodule",
        "label-sets": "a=edema,fracture; b=nodule",
    },
}


def test_copies_with_other_values_are_left_out_under_privacy() -> None:
    """A new copy with another value must not decide which value an old record has."""
    values = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    same = torch.tensor([0, 0, 1])
    records = Records(["1.0", "2.0", "3.0"], "key", same=lambda: same, values=values)
    left = once(records, patients_protected=False)
    assert left.values is not None
    assert left.values.tolist() == [[3.0]]


def sent(x: Any, y: Any, least: int, **settings: Any) -> dict[str, Tensor]:
    """A site's exact message, under a policy that asks for `least` records of a class."""
    limited = partial(Job, limits=SiteLimits(smallest_class=least))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_surrogate, "Job", limited)
        return dict(unpack_parameters(fs.fit(x, y, **settings).payload).tensors)


def around_zero(tensors: dict[str, Tensor]) -> Tensor:
    """The sums of features by row, as anyone can compute them from a message."""
    mean = tensors[TOTALS] / tensors["records"]
    return tensors[SUMS] + torch.outer(tensors[CODE], mean)


def test_a_label_of_few_records_does_not_leave_and_nor_does_its_complement() -> None:
    """A positive record alone is its row of sums; a record that alone is not annotated is the
    difference of all records and both rows.
    """
    x = np.random.default_rng(0).normal(size=(40, 3))
    y = np.tile([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]], (20, 1))
    y[:, 1] = 0
    y[7, 1] = 1
    y[9, 2] = np.nan
    tensors = sent(x, y, 5, task="multilabel", label_columns="fine,rare,nearly")
    rows = around_zero(tensors)
    secret = torch.from_numpy(x).float()
    shown = [*rows, tensors[TOTALS] - rows[4] - rows[5]]
    assert not any(torch.allclose(each, secret[at], atol=0.02) for each in shown for at in (7, 9))
    assert tensors[CODE].tolist() == [20, 20, 0, 0, 0, 0]


def test_a_cell_of_one_record_does_not_leave() -> None:
    x = np.random.default_rng(0).normal(size=(40, 3))
    y = np.stack([np.full(40, 5.0), np.zeros(40)], 1)
    y[7] = 0.5, 1
    with pytest.raises(DataError, match="'event 0 to 0"):
        sent(x, y, 1, task="survival", horizon=3.0, bins=4)


def test_few_records_do_not_leave() -> None:
    with pytest.raises(DataError, match="smallest-class"):
        sent([[1.0, 2.0]], [0.5], 2, task="regression", target_range=(0, 1))


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ("", "needs label-sets"),
        ("a=edema,nodule; b=edema; c=edema", "'nodule' is annotated by 1 sites"),
        ("a=edema,nodule; b=edema,nodule; c=edema", "needs 3"),
    ],
)
def test_a_label_that_few_sites_annotate_is_in_no_sum_without_noise(sets: str, said: str) -> None:
    flat: dict[str, Scalar] = {
        "task": "multilabel",
        "label-columns": "edema,nodule",
        "label-sets": sets,
        "secure-aggregation": True,
    }
    with pytest.raises(ConfigError, match=said):
        parse_run(flat)
    assert parse_run(flat | PRIVATE).target is not None


def test_the_second_moment_of_a_message_is_around_its_mean() -> None:
    """So that 16 bits hold it next to a mean of columns that have no frame."""
    x = np.random.default_rng(0).normal(size=(50, 2)) + 2.5
    tensors = sent(x, x[:, 0] - 2.5, 1, task="regression", target_range=(-5, 5))
    covariance = unfold(tensors["squares"].double(), 2) / 50
    assert np.abs(covariance.numpy() - np.cov(x.T, bias=True)).max() < 0.01


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("number", {"target-range": "-1,2"}),
        ("number", {"target-range": "-1,1; -1,2"}),
        ("labels", {"label-sets": "a=edema,fracture,nodule; b=edema,fracture,nodule"}),
        ("time", {"horizon": 4.0}),
        ("time", {"bins": 4}),
    ],
)
def test_exact_sums_over_the_same_sites_have_one_target(
    kind: str, change: dict[str, Scalar]
) -> None:
    """With another range, the difference of two sums shows the records beyond the narrower one."""
    secure: dict[str, Scalar] = {"secure-aggregation": True, "colluding": 0.0}
    if kind == "labels":
        secure |= {"label-sets": "b=edema,fracture,nodule; c=edema,fracture,nodule"}
    one, other = (
        secure_aggregation.settings_in(parse_run(KINDS[kind] | secure | more), SiteLimits(), b"")
        for more in ({}, change)
    )
    assert one["training"] != other["training"]
