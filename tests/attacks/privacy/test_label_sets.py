"""Sums of labels that hospitals annotate differently, and differences of such sums, show no hospital
alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedsurrogate as fs
from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.base import Scalar
from tests.attacks.privacy.test_coded_sums import sent

COLUMNS = ("edema", "fracture", "nodule")
SUMMED: dict[str, Scalar] = {
    "task": "multilabel",
    "label-columns": ",".join(COLUMNS),
    "secure-aggregation": True,
}
subsets = st.sets(st.sampled_from(COLUMNS), min_size=1)


def text(sets: list[set[str]]) -> str:
    return "; ".join(f"s{at}={','.join(sorted(each))}" for at, each in enumerate(sets))


def shown_with(sets: list[set[str]], friends: int) -> int:
    """Fewest honest sites that a difference of sums is of, where some sites tell their own part: the
    sums are over all sites, and over the annotators of each label.
    """
    table = np.array([[True] * len(sets), *([name in s for s in sets] for name in COLUMNS)], float)
    if friends:
        table = np.concatenate([table, np.eye(len(sets))[:friends]])
    # A site's own part can be found if its row of the identity is a sum of multiples of the rows.
    projected = np.linalg.pinv(table) @ table
    alone = [at for at in range(friends, len(sets)) if projected[at, at] > 1 - 1e-9]
    return 1 if alone else 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sets=st.lists(subsets, min_size=2, max_size=8), colluding=st.sampled_from([0.0, 0.25]))
def test_no_difference_of_exact_sums_is_that_of_one_hospital(
    sets: list[set[str]], colluding: float
) -> None:
    flat = SUMMED | {"label-sets": text(sets), "colluding": colluding}
    try:
        parse_run(flat)
    except ConfigError:
        return
    assert shown_with(sets, int(colluding * len(sets))) > 1, sets


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ([{"edema", "fracture"}, {"fracture", "nodule"}, {"edema", "nodule"}], "annotated by 1"),
        ([{"edema", "fracture", "nodule"}] * 3 + [{"edema", "fracture"}] * 1, "annotated by 1"),
        ([{"edema", "fracture", "nodule"}] * 2 + [{"nodule"}] * 2, ""),
    ],
)
def test_hospitals_with_a_set_of_their_own_are_refused(sets: list[set[str]], said: str) -> None:
    """All records less those of a label are those of the hospitals that do not annotate it."""
    flat = SUMMED | {"label-sets": text(sets), "colluding": 0.0}
    if not said:
        assert parse_run(flat).target is not None
        return
    with pytest.raises(ConfigError, match=said):
        parse_run(flat)
    assert parse_run(flat | {"epsilon": 2.0, "delta": 1e-5}).target is not None


def test_a_hospital_sends_only_labels_that_settings_say_it_annotates() -> None:
    """A label that its table has besides would change whose sums a difference shows."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(40, 3)), draw.integers(0, 2, (40, 3)).astype(float)
    own = {"task": "multilabel", "label_columns": ",".join(COLUMNS)}
    sets = "north=edema,fracture; south=edema,fracture"
    tensors = sent(x, y, 1, site="north", label_sets=sets, **own)
    assert tensors["code"].tolist()[4:] == [0, 0]
    assert float(tensors["code"][:4].sum()) == pytest.approx(80, abs=0.1)
    with pytest.raises(ConfigError, match="do not name site 'east'"):
        sent(x, y, 1, site="east", label_sets=sets, **own)


def test_a_sum_that_too_few_hospitals_of_a_set_take_part_in_is_not_completed(
    tmp_path: Path,
) -> None:
    """Who takes part is known only when the sum begins; of a set that two hospitals were to have,
    the one that is there would be alone.
    """
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(4, 60, 3)), draw.integers(0, 2, (4, 60, 3)).astype(float)
    y[2:, :, 2] = np.nan
    more: dict[str, Any] = {"secure_aggregation": True, "colluding": 0.0, "dropouts": 0.0}
    more |= {"task": "multilabel", "label_columns": list(COLUMNS), "output_dir": tmp_path}
    sets = "0={0}; 1={0}; 2={1}; 3={1}".format(",".join(COLUMNS), ",".join(COLUMNS[:2]))
    assert fs.simulate(list(zip(x, y, strict=True)), label_sets=sets, **more).metric_values
    with pytest.raises(RunError):
        fs.simulate(list(zip(x[:3], y[:3], strict=True)), label_sets=sets, **more)
