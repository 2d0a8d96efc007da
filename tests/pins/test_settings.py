"""What follows from settings alone is what it was: digests, descriptions, planned bytes, privacy
claims, refusals.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import Any
from zlib import crc32

import pytest

from tests.pins import combinations, facts, pinned

# Characters of a whole digest.
WHOLE = 64


@pytest.fixture(scope="module")
def runs() -> list[tuple[str, combinations.Flat]]:
    """The runs of all subjects that are not refused."""
    found = combinations.subjects(facts.methods(), facts.kinds_of_counts())
    return [
        (name, settings)
        for name, settings in found
        if not isinstance(pinned.consequences(settings), str)
    ]


def test_everything_that_follows_from_settings_is_as_pinned(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = request.config.getoption("--quick")
    if quick:
        every = combinations.variations
        monkeypatch.setattr(
            combinations,
            "variations",
            lambda name, settings: islice(every(name, settings), crc32(name.encode()) % 5, None, 5),
        )
    now = pinned.expected(pinned.pins_of_settings())
    before = pinned.expected(pinned.read_settings())
    if quick:
        before = {name: found for name, found in before.items() if name in now}
    assert len(before) > (1000 if quick else 5000)
    lines = list(pinned.differences(before, now))
    assert not lines, pinned.report(lines)


def test_wrong_settings_are_refused_with_the_pinned_words() -> None:
    before = json.loads(pinned.REFUSALS.read_text())
    lines = list(pinned.differences(before, pinned.refusals()))
    assert not lines, pinned.report(lines)


def test_plans_of_other_roads_are_as_pinned() -> None:
    assert facts.other_plans() == [
        {
            "name": "FedAvg of the head, 20 rounds",
            "up": 1080,
            "down": 1080,
            "rounds": 20,
            "messages": 20,
        }
        | {"epsilon": None, "delta": None, "noise": None},
        {"name": "raw features", "up": 960, "down": 54, "rounds": 1, "messages": 1}
        | {"epsilon": None, "delta": None, "noise": None},
    ]


def test_the_pins_cover_every_method_and_every_setting() -> None:
    pins = pinned.read_settings()
    first = {name.partition(",")[0] for name in pins}
    now = {*facts.methods(), "fedpft chain", *facts.kinds_of_counts()}
    assert first == now, pinned.report([f"{name}: new or gone" for name in sorted(first ^ now)])
    assert {*combinations.VALUES, *combinations.OF_SUBJECTS} == set(facts.setting_keys()), (
        "a new setting needs another value here"
    )
    assert len(pinned.expected(pins)) > 5000


def test_a_digest_in_messages_is_the_beginning_of_the_whole_one(
    runs: list[tuple[str, combinations.Flat]],
) -> None:
    for name, settings in runs:
        whole = facts.whole_digest(settings)
        assert len(whole) == WHOLE, name
        assert whole.startswith(str(facts.facts(settings)["digest"])), name


def test_a_claim_for_patients_or_with_a_centre_differs_in_that_alone(
    runs: list[tuple[str, combinations.Flat]],
) -> None:
    private = [(name, found) for name, settings in runs if (found := facts.claims(settings))]
    assert len(private) > 10
    for name, (record, patient, centred) in private:
        assert record | {"unit": "patient"} == patient, name
        # Distributed noise and counts have no centre of their own.
        assert centred in (record, record | {"centre": "0f" * 8}), name


@pytest.mark.parametrize(
    ("fact", "change", "noticed"),
    [
        ("digest", "0" * 16, True),
        ("plan.up", 493, True),
        ("claim.epsilon", 8.0 * (1 + 1e-8), True),
        ("claim.epsilon", 8.0 * (1 + 1e-10), False),
        ("power", 1.0 + 1e-12, True),
        ("claim.clip", None, True),
    ],
)
def test_a_change_of_any_kind_is_noticed_and_the_report_names_the_command(
    fact: str, change: Any, noticed: bool
) -> None:
    name = "fedpft, private"
    before = facts.facts(dict(combinations.subjects(("fedpft",), ())).pop(name))
    after = (
        {**before, fact: change}
        if change is not None
        else {key: v for key, v in before.items() if key != fact}
    )
    lines = list(pinned.differences({name: before}, {name: after}))
    assert bool(lines) == noticed
    if lines:
        report = pinned.report(lines)
        assert f"{name}\n    {fact} was {before[fact]!r}" in report
        assert "tests/pins/renew.py --renew" in report
