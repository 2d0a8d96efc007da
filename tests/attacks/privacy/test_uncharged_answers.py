"""In a private run, uncharged replies do not depend on records: neighbouring data sets give equal
replies.

Differential testing: two data sets differ in one record or patient; each is at its own hospital
with a fresh ledger. Both get every request that a coordinator can send. Uncharged replies must be
equal byte for byte, including refusals and codes. Charged replies must be equal in all parts except
the noisy numbers.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app import requests as answers
from fedsurrogate.client_app.features.site_features import load_site
from fedsurrogate.client_app.governance import release
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.wire.records import Info
from tests.attacks.privacy.neighbours import KINDS, Data, Record, pairs
from tests.attacks.privacy.visits import EXCEPTION, METHODS, TARGETS, Hospital, Visit, close_logs
from tests.grid import Scalar

Leak = Callable[[pytest.MonkeyPatch], None]
# Pairs of each kind, 204 in total; fewer of the kinds that are slow to write or read. `make faults`
# examines all of them, each test of a change a fifth, in the same order.
COUNTS = {"folder": 50, "table": 50, "features": 50, "parquet": 24, "dicom": 15, "dicom table": 15}
# Data sets with extreme neighbours, which must be covered.
RUNS = METHODS | TARGETS
PLAIN, NONE = (Record(),), ()
KNOWN: dict[str, tuple[str, Data, Data]] = {
    "an empty folder": ("folder", NONE, PLAIN),
    "the first of a class": ("folder", PLAIN, (*PLAIN, Record("x", "2"))),
    "a single broken image": ("folder", NONE, (Record(fault="broken"),)),
    "another size": ("folder", PLAIN, (*PLAIN, Record(size=7))),
    "a record without a patient": ("table", PLAIN, (*PLAIN, Record(fault="no patient"))),
    "a path that leaves the folder": ("table", PLAIN, (*PLAIN, Record(fault="outside"))),
    "a quote that does not end": ("table", PLAIN, (Record(fault="quote"), *PLAIN)),
    "a row that is not finite": ("features", PLAIN, (*PLAIN, Record(fault="nan"))),
    "a label that is no class": ("features", NONE, (Record(fault="label"),)),
    "a gap in a column": ("parquet", PLAIN, (*PLAIN, Record(fault="no label"))),
    "a study without a patient": ("dicom", PLAIN, (*PLAIN, Record(fault="no patient"))),
    "several frames": ("dicom table", PLAIN, (*PLAIN, Record(fault="several frames"))),
}


@pytest.fixture
def visit(tmp_path: Path) -> Callable[..., Visit]:
    """All requests to a fresh hospital, whose folder is deleted afterwards."""
    numbers = itertools.count()

    def call(
        kind: str, records: Data, run: dict[str, Scalar], *, exception: bool = False, **node: Scalar
    ) -> Visit:
        home = tmp_path / str(next(numbers))
        try:
            return Hospital(home, kind, records, **node).visit(run, exception)
        finally:
            close_logs()
            shutil.rmtree(home)

    return call


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", [5, pytest.param(1, marks=pytest.mark.faults)], ids=["a fifth", "all"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_answer_alike(kind: str, part: int, visit: Callable[..., Visit]) -> None:
    @settings(
        max_examples=COUNTS[kind] // part,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(pairs(kind), st.sampled_from(sorted(RUNS)), st.sampled_from(("patient", "record")))
    def alike(pair: tuple[Data, Data], method: str, unit: str) -> None:
        one, other = (visit(kind, data, RUNS[method], unit=unit) for data in pair)
        assert one.differences(other) == []

    alike()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_answers_a_site_without_records_as_it_answers_one_with_some(
    method: str, visit: Callable[..., Visit]
) -> None:
    one, other = (
        visit("folder", data, METHODS[method]) for data in (NONE, (Record(), Record("b")))
    )
    assert one.differences(other) == []
    assert "train 1" in one.charged, "noise has left, and was charged"


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_to_depend_on_records_is_not_repeated(
    name: str, visit: Callable[..., Visit]
) -> None:
    kind, *pair = KNOWN[name]
    one, other = (visit(kind, data, METHODS["sums spherical"]) for data in pair)
    assert one.differences(other) == []
    assert "train 1" in one.charged


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("table", Record("x", "2")),
        ("table", Record(fault="no label")),
        ("features", Record(fault="label")),
        ("features", Record("b", "3", grey=7)),
    ],
)
def test_targets_answer_alike(
    target: str, kind: str, more: Record, visit: Callable[..., Visit]
) -> None:
    """Also where a record has a value that no record can have."""
    one, other = (visit(kind, data, TARGETS[target]) for data in (PLAIN, (*PLAIN, more)))
    assert one.differences(other) == []
    assert "train 1" in one.charged, "noise has left, and was charged"


def test_a_coordinator_cannot_ask_for_free_whether_a_site_has_a_class(
    visit: Callable[..., Visit],
) -> None:
    """The coordinator chooses the classes, and requests the site's identity and a model's accuracy
    there.
    """
    only = {"classes": "x"}
    one, other = (visit("folder", data, only) for data in (PLAIN, (*PLAIN, Record("x", grey=5))))
    assert one.differences(other) == []
    assert one.uncharged["hello"] == other.uncharged["hello"]


def test_the_one_exception_keeps_all_that_is_not_charged(visit: Callable[..., Visit]) -> None:
    one, other = (visit("folder", data, EXCEPTION, exception=True) for data in (NONE, PLAIN))
    assert one.differences(other) == []


def _records(asked: Any) -> int:
    return sum(1 for _ in Path(asked.node.data_dir).rglob("*.png"))


def _in_the_identification(change: Callable[[Any, Info], Info]) -> Leak:
    def plant(patch: pytest.MonkeyPatch) -> None:
        honest = answers.WORK["identification"]

        def leaking(asked: Any, gate: Any) -> Any:
            payload, reported = honest(asked, gate)
            return payload, change(asked, reported)

        patch.setitem(answers.WORK, "identification", leaking)

    return plant


def _a_code(patch: pytest.MonkeyPatch) -> None:
    honest = answers.WORK["evaluation"]

    def leaking(asked: Any, gate: Any) -> Any:
        if _records(asked) < 2:
            raise DataError("too few records")
        return honest(asked, gate)

    patch.setitem(answers.WORK, "evaluation", leaking)


def _in_the_release(change: Callable[[Any, int], Any]) -> Leak:
    """A change of what a site has made, by its number of records."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        honest = release.site_function

        def leaking(combination: Any) -> Any:
            made = honest(combination)
            return lambda task: change(made(task), len(task.found.train.labels))

        patch.setattr(release, "site_function", leaking)

    return plant


LEAKS: dict[str, Leak] = {
    "a count": _in_the_identification(
        lambda asked, reported: reported | {"records": _records(asked)}
    ),
    "a dimension": _in_the_identification(
        lambda asked, reported: reported | {"dimension": 16 + (_records(asked) > 1)}
    ),
    "an extra key": _in_the_identification(
        lambda asked, reported: reported | ({"rare": True} if _records(asked) > 1 else {})
    ),
    "a code": _a_code,
    "a key of a release": _in_the_release(
        lambda made, count: replace(made, answer={"rare": True} if count > 1 else {})
    ),
    "a longer release": _in_the_release(
        lambda made, count: replace(made, payload=made.payload + bytes(count))
    ),
    "records looked at to say hello": lambda patch: patch.setattr(
        answers, "without_records", lambda run, node: load_site(run, node, 1024.0)
    ),
    "a failure that shows": lambda patch: patch.setattr(
        release,
        "with_records",
        lambda run, node, cache, work: (
            work(found := load_site(run, node, cache), node),
            found,
            release.Failure(),
        ),
    ),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_planted_leak_is_found(
    name: str, visit: Callable[..., Visit], monkeypatch: pytest.MonkeyPatch
) -> None:
    LEAKS[name](monkeypatch)
    pair: tuple[Data, Data] = (PLAIN, (*PLAIN, Record("b", "2", grey=30)))
    if name in ("records looked at to say hello", "a failure that shows"):
        pair = (NONE, PLAIN)
    one, other = (visit("folder", data, METHODS["sums spherical"]) for data in pair)
    assert one.differences(other)
