"""Before secure aggregation is opened, no answer depends on records: hospitals with any data answer alike.

Differential testing, as for private runs: the answers to every step must be equal up to the masks,
refusals and codes included, for hospitals with no, one or many records of a class, and for data
that change between two sums.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app import requests as answers_of
from fedsurrogate.client_app import secure_aggregation
from fedsurrogate.client_app.features.site_features import load_site
from fedsurrogate.client_app.governance import release
from fedsurrogate.client_app.governance.release import Failure
from fedsurrogate.client_app.secure_aggregation import _random
from fedsurrogate.common.methods.method import BITS
from tests.attacks.privacy.neighbours import FAULTS, LABELS, Data, Record
from tests.attacks.privacy.summing import SMALLEST, SUMS, Summing
from tests.attacks.privacy.visits import close_logs

KINDS = ("folder", "features", "table")
SIZES = (0, 1, SMALLEST - 1, SMALLEST, 3 * SMALLEST)


@st.composite
def data_sets(draw: st.DrawFn, kind: str) -> Data:
    """Records of each class: none, one, fewer than a class needs, as many, and more. No two images
    are equal, as copies are left out.
    """
    greys = itertools.count(1)
    plain = [
        Record(label, str(number), grey=next(greys))
        for label in LABELS
        for number in range(draw(st.sampled_from(SIZES)))
    ]
    odd = draw(st.lists(st.sampled_from(FAULTS[kind]), max_size=1))
    return (*plain, *(Record("a", "9", grey=next(greys), fault=fault) for fault in odd))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Iterator[Path]]:
    yield (tmp_path / str(number) for number in itertools.count())
    close_logs()


def answers(
    home: Path, kind: str, sums: list[str], before: Data, after: Data
) -> list[tuple[str, object]]:
    """All answers of a hospital whose data are replaced after the first sum, unless they are the
    same.
    """
    hospital, found = Summing(home, kind, before), []
    try:
        for place, name in enumerate(sums):
            if place == 1 and after != before:
                hospital.change(after)
            found += [(name, each) for each in hospital.sum(SUMS[name])]
    finally:
        close_logs()
        shutil.rmtree(home)
    return found


@pytest.mark.parametrize(
    "examples", [6, pytest.param(60, marks=pytest.mark.faults)], ids=["some", "many"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_hospitals_with_any_data_answer_alike(
    kind: str, examples: int, home: Iterator[Path]
) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.lists(st.sampled_from(sorted(SUMS)), min_size=1, max_size=3),
        data_sets(kind),
        data_sets(kind),
        data_sets(kind),
    )
    def alike(sums: list[str], one: Data, other: Data, changed: Data) -> None:
        first = answers(next(home), kind, sums, one, one)
        assert first == answers(next(home), kind, sums, other, changed)

    alike()


MANY = tuple(Record("a", str(number), grey=number) for number in range(1, 13))
RARE = Record("b", "9", grey=99)


@pytest.mark.parametrize("name", SUMS)
def test_a_site_without_records_answers_as_one_with_some(name: str, home: Iterator[Path]) -> None:
    one, other = (answers(next(home), "folder", [name], data, data) for data in ((), MANY))
    assert one == other
    assert [each[1]["status"] for _, each in one] == ["ok"] * 5


def test_one_record_of_a_rare_class_does_not_show(home: Iterator[Path]) -> None:
    """A survey of one class, and then of two: only the hospital with a record of the second one
    refused.
    """
    sums = ["survey of one class", "survey"]
    one, other = (answers(next(home), "folder", sums, data, data) for data in (MANY, (*MANY, RARE)))
    assert one == other


def test_the_sum_holds_classes_with_enough_records_only(home: Iterator[Path]) -> None:
    few = tuple(Record("b", str(number), grey=200 + number) for number in range(SMALLEST - 1))
    hospital = Summing(next(home), "folder", (*MANY, *few))
    hospital.sum(SUMS["survey"])
    assert hospital.total is not None
    assert hospital.total.tolist() == [10, 0, 0], "those of 12 that train"


def test_a_sum_after_a_change_of_the_data_is_random(home: Iterator[Path]) -> None:
    """It shows neither the change nor the rest, and a second one is not of use for the first."""
    hospital, found = Summing(next(home), "folder", MANY), []
    hospital.sum(SUMS["survey"])
    hospital.change((*MANY, RARE))
    for _ in range(2):
        hospital.sum(SUMS["survey"])
        assert hospital.total is not None
        found.append(hospital.total.tolist())
    assert all(total[-1] for total in found), "the coordinator sees that it is withheld"
    assert not set(found[0]) & set(found[1])
    assert min(map(min, found)) > 2 * len(MANY), "random numbers of 32 bits are hardly ever small"


def test_a_withheld_sum_has_uniform_bits() -> None:
    """With anything less, the sum would show something of the others' numbers."""
    drawn = np.array([_random(100) for _ in range(200)])
    assert drawn[:, -1].all()
    bits = (drawn[..., None] >> np.arange(BITS)) & 1
    # 20,000 draws of each bit: five standard deviations.
    assert np.abs(bits.mean((0, 1)) - 0.5).max() < 5 * 0.5 / 20_000**0.5
    assert drawn.min() >= 0
    assert drawn.max() < 2**BITS


def _identified_by_records(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(answers_of, "without_records", lambda run, node: load_site(run, node, 1024.0))


def _a_failure_that_shows(patch: pytest.MonkeyPatch) -> None:
    def plain(run: Any, node: Any, _: float, work: Any) -> Any:
        found = load_site(run, node, 1024.0)
        return work(found, node), found, Failure()

    patch.setattr(release, "with_records", plain)


def _an_empty_site_that_refuses(patch: pytest.MonkeyPatch) -> None:
    honest = secure_aggregation._beyond

    def leaking(values: Any, numbers: Any) -> str:
        if not any(value.any() for value in values.values()):
            raise SystemExit("nothing to add")
        return honest(values, numbers)

    patch.setattr(secure_aggregation, "_beyond", leaking)
    _a_failure_that_shows(patch)


def _changed_data_that_refuse(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(secure_aggregation, "why_changed", lambda node, settings, records: "")


def _settings_compared_by_records(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(secure_aggregation, "settings_in", lambda run, limits, public: {})
    _changed_data_that_refuse(patch)


LEAKS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], list[str], Data, Data, Data]] = {
    "records looked at to say hello": (_identified_by_records, ["gram"], MANY, (), ()),
    "a failure": (_a_failure_that_shows, ["narrow gram"], MANY, (Record(fault="broken"),), MANY),
    "a site with nothing": (_an_empty_site_that_refuses, ["survey"], MANY, (), ()),
    "a change": (_changed_data_that_refuse, ["gram", "gram"], MANY, MANY, (*MANY, RARE)),
    "other classes": (
        _settings_compared_by_records,
        ["survey of one class", "survey"],
        MANY,
        (*MANY, RARE),
        (*MANY, RARE),
    ),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_planted_leak_is_found(
    name: str, home: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, sums, one, other, changed = LEAKS[name]
    plant(monkeypatch)
    first = answers(next(home), "folder", sums, one, one)
    assert first != answers(next(home), "folder", sums, other, changed)
