"""The comparison of two revisions notices what differs, and what cannot be compared."""

from typing import Any

import pytest

from benchmarks import same_as_before
from fedsurrogate.common.methods import METHODS


def found(**changed: str) -> dict[str, dict[str, Any]]:
    row = dict.fromkeys(same_as_before.COLUMNS, "3 messages, 10 bytes, abc")
    return {"fedpft": row | changed}


@pytest.mark.parametrize("column", same_as_before.COLUMNS)
def test_a_difference_in_any_column_is_shown_where_it_begins(column: str) -> None:
    ((_, *cells),) = same_as_before.compared(
        found(), found(**{column: "3 messages, 10 bytes, abd"})
    )
    wrong = [cell for cell in cells if cell != "same"]
    assert wrong == ["DIFFERENT: 's, 10 bytes, abc' is now 's, 10 bytes, abd'"]


def test_every_method_runs_in_each_situation_that_it_supports() -> None:
    names = set(same_as_before.runs_of(METHODS))
    assert names >= same_as_before.RUNS.keys()
    assert names >= {name for name, each in METHODS.items() if not each.needs_budget}
    assert names >= {f"{name}, private" for name, each in METHODS.items() if each.private}
    assert {"fedprox, secure aggregation", "dp-fedavg, private secure aggregation"} <= names
    assert not {"fedprox, private", "psg", "scaffold, secure aggregation"} & names
