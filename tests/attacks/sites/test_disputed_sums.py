"""A hostile site makes the other sites of secure aggregation refuse: with shares that they cannot open,
or with bad keys.

The run must go on without it and name it. Nobody can check a dispute of two sites, so a message
names both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict

import fedsurrogate.client_app.secure_aggregation as masked
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.client_app.offline.keys import private_key
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation.rules import context_of
from fedsurrogate.common.secure_aggregation.secrets import PURPOSE, words
from fedsurrogate.common.security.sealing import sign
from fedsurrogate.common.wire import surrogate_proto
from fedsurrogate.common.wire.records import DISPUTED, INFO, PAYLOAD
from fedsurrogate.strategies.secure_aggregation.steps import Dispute, left_out, why
from tests.attacks.hospitals import NAMES, Hospitals, key_list, open_hospitals
from tests.attacks.hospitals import PLAIN as EXACT
from tests.attacks.hospitals import PRIVATE as NOISY
from tests.grid import Fault, InProcessGrid, events_of, metrics_of, run_federation, sites
from tests.totals import unpack_total

CLASSES = ",".join(map(str, range(10)))
PLAIN: dict[str, Any] = {
    **{"fedpft.covariance": "gram", "classes": CLASSES, "head.max-samples": 20_000},
    **{"secure-aggregation": True, "colluding": 0.0, "dropouts": 0.2},
}
DISTRIBUTED = {**PLAIN, "method": "dp-fedavg", "epsilon": 8.0, "delta": 1e-5, "fedavg.rounds": 3}
del DISTRIBUTED["fedpft.covariance"]
SHARES = "query.sum_shares"


def spoiled(readers: Collection[str]) -> Callable[[bytes], bytes]:
    """Change the reply of a site so that these readers cannot open its shares."""

    def spoil(payload: bytes) -> bytes:
        dealt = surrogate_proto.unpack_dealt(payload)
        content = {
            name: os.urandom(len(both)) if name in readers else both
            for name, both in dealt.content.items()
        }
        return surrogate_proto.pack_dealt(replace(dealt, content=content))

    return spoil


def complaint(places: list[int]) -> Callable[[RecordDict], None]:
    """Replace a masked vector by the refusal of a site that cannot use the shares at these places
    of the key list.
    """

    def refuse(record: RecordDict) -> None:
        info = {
            "status": "seal",
            "site": str(record.config_records[INFO]["site"]),
            DISPUTED: places,
        }
        record.pop(PAYLOAD, None)
        record[INFO] = ConfigRecord(info)

    return refuse


def summed(folder: Path) -> tuple[tuple[str, ...], np.ndarray]:
    _, names, numbers, _ = unpack_total((folder / "sum.pb").read_bytes())
    return names, numbers


def rejected(folder: Path) -> dict[str, str]:
    found = (event for event in events_of(folder) if event["event"] == "rejected")
    return {event["site"]: event["reason"] for event in found}


def of_five(folder: Path, **fault: Any) -> Path:
    """A run of five sites, of which the last one has a fault."""
    return run_federation(folder, InProcessGrid(sites(5), {4: Fault(**fault)}), **PLAIN)


def of_hospitals(
    home: Path,
    unknown: str = "",
    at: Collection[str] = (),
    fault: Fault | None = None,
    **settings: Any,
) -> tuple[Hospitals, Path]:
    """Hospitals after a run, of which some have no key of one, and east has a fault."""
    hospitals = open_hospitals(home, NAMES)
    without_peer(hospitals, unknown, at)
    grid = InProcessGrid(
        list(hospitals.nodes.values()), {NAMES.index("east"): fault} if fault else {}
    )
    return hospitals, run_federation(home / "run", grid, **settings)


def test_shares_that_nobody_can_open_cost_their_sender_only(
    tmp_path: Path, vectors: dict[str, np.ndarray]
) -> None:
    folder = of_five(tmp_path, kind=SHARES, payload=spoiled(tuple("0123")))
    names, numbers = summed(folder)
    assert names == ("0", "1", "2", "3")
    assert (numbers == words(sum(vectors[name] for name in names))).all()
    reason = rejected(folder)["4"]
    assert "its shares cannot be used, by the report of '0', '1', '2', '3'" in reason
    assert "either side may be at fault" in reason
    assert rejected(folder).keys() == {"4"}


@pytest.mark.parametrize(("count", "offline"), [(7, ""), (9, "7")])
def test_shares_that_some_cannot_open_cost_their_sender_only(
    tmp_path: Path, count: int, offline: str
) -> None:
    """Those who can open them have masked with the sender; enough of them have its shares to take
    these masks out again.

    offline: a site that is lost after its shares, with which all have masked.
    """
    liar = str(count - 1)
    faults = {count - 1: Fault(kind=SHARES, payload=spoiled(("0", "3")))}
    faults |= {int(offline): Fault(offline=True)} if offline else {}
    exact: dict[str, np.ndarray] = {}
    real = masked.protocol.mask

    def seen(state: Any, delivered: Any, rules: Any, values: Any) -> Any:
        after, vector = real(state, delivered, rules, values)
        exact[state.site] = values
        return after, vector

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masked.protocol, "mask", seen)
        more = PLAIN | {"dropouts": 0.25, "deadline": 2.0}
        folder = run_federation(tmp_path, InProcessGrid(sites(count), faults), **more)
    names, numbers = summed(folder)
    assert names == tuple(str(site) for site in range(count) if str(site) not in (liar, offline))
    assert (numbers == words(sum(exact[name] for name in names))).all()
    assert rejected(folder).keys() == {liar}


@pytest.mark.parametrize("settings", [EXACT, NOISY], ids=["exact", "noisy"])
def test_without_any_room_for_losses_the_sum_begins_again_without_the_sender(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """With the default of `dropouts`, fewer than ten sites have no such room. Nobody else has sent
    a vector yet.
    """
    fault = Fault(kind=SHARES, payload=spoiled([name for name in NAMES if name != "east"]))
    hospitals, folder = of_hospitals(tmp_path, fault=fault, **settings | {"dropouts": 0.0})
    assert summed(folder)[0] == ("centre", "north", "south", "west")
    assert "by the report of 'centre', 'north', 'south', 'west'" in rejected(folder)["east"]
    assert {name: hospitals.released(name) for name in NAMES} == dict.fromkeys(NAMES, 1)


def test_shares_that_too_few_can_open_end_the_run_and_their_sender_is_named(tmp_path: Path) -> None:
    """Two of the four others have masked with the sender, and three are needed to take these masks
    out.
    """
    faults = {4: Fault(kind=SHARES, payload=spoiled(("0", "1")))}
    grid = InProcessGrid(sites(5), faults)
    with pytest.raises(
        RunError, match="3 of 5 sites have sent their masked vectors, 4 are needed"
    ) as failure:
        run_federation(tmp_path, grid, **PLAIN)
    assert "0: lost after its shares: it says that it cannot use the shares of '4'" in str(
        failure.value
    )
    assert "run again without the site that is at fault" in str(failure.value)
    assert "site ledger forget" in str(failure.value)
    assert len(grid.asked("train")) == 5, (
        "nobody is asked, and charged, for a sum that cannot be completed"
    )


def test_a_dispute_of_two_sites_names_both_and_the_rest_goes_on(
    tmp_path: Path, vectors: dict[str, np.ndarray]
) -> None:
    folder = of_five(tmp_path, kind=SHARES, payload=spoiled(("0",)))
    names, numbers = summed(folder)
    assert names == ("1", "2", "3", "4")
    assert (numbers == words(sum(vectors[name] for name in names))).all()
    assert (
        "it says that it cannot use the shares of '4'; either side may be at fault"
        in rejected(folder)["0"]
    )


@pytest.mark.parametrize("places", [[0], [0, 1, 2, 3]])
def test_a_false_complaint_costs_the_liar_only(
    tmp_path: Path, vectors: dict[str, np.ndarray], places: list[int]
) -> None:
    folder = of_five(tmp_path, reply=complaint(places))
    names, numbers = summed(folder)
    assert names == ("0", "1", "2", "3")
    assert (numbers == words(sum(vectors[name] for name in names))).all()
    assert rejected(folder).keys() == {"4"}


@pytest.mark.parametrize("places", [[4], [99, -1], [True] * 9, [0.5]])
def test_a_complaint_about_itself_or_nobody_is_a_refusal(tmp_path: Path, places: list[Any]) -> None:
    folder = of_five(tmp_path, reply=complaint(places))
    assert summed(folder)[0] == ("0", "1", "2", "3")
    assert rejected(folder).keys() == {"4"}


def test_shares_of_another_length_are_noticed_before_they_are_delivered(tmp_path: Path) -> None:
    def short(payload: bytes) -> bytes:
        dealt = surrogate_proto.unpack_dealt(payload)
        return surrogate_proto.pack_dealt(
            replace(dealt, content={name: both[1:] for name, both in dealt.content.items()})
        )

    folder = of_five(tmp_path, kind=SHARES, payload=short)
    assert summed(folder)[0] == ("0", "1", "2", "3")
    assert "wrong length" in rejected(folder)["4"]


def test_a_site_that_shuts_out_a_reader_in_each_round_is_left_out_after_the_second(
    tmp_path: Path,
) -> None:
    rounds: list[int] = []

    def one_by_one(payload: bytes) -> bytes:
        rounds.append(len(rounds))
        return spoiled((str(rounds[-1]),))(payload)

    grid = InProcessGrid(sites(6), {5: Fault(kind=SHARES, payload=one_by_one)})
    folder = run_federation(tmp_path, grid, **DISTRIBUTED)
    assert [entry["used"] for entry in metrics_of(folder)["rounds"]] == [5, 4, 5], (
        "the first reader comes back"
    )
    reasons = rejected(folder)
    assert "cannot use the shares of '5'" in reasons["0"]
    assert "by the report of '0', '1'" in reasons["5"]
    assert "1" not in reasons
    assert len(rounds) == 2


def test_shares_that_do_not_fit_together_end_the_run_and_name_their_sender(tmp_path: Path) -> None:
    """Each reader can open its shares, so this shows only at the end. Digests of the shares prove
    who dealt them.
    """

    def unfit(payload: bytes) -> bytes:
        dealt = surrogate_proto.unpack_dealt(payload)
        return surrogate_proto.pack_dealt(
            replace(dealt, checks={"blind": bytes(32), "masking": bytes(32)})
        )

    with pytest.raises(
        RunError, match="site '4' has dealt shares that do not fit together; run again without"
    ) as failure:
        of_five(tmp_path, kind=SHARES, payload=unfit)
    assert "site ledger forget" in str(failure.value)


@pytest.mark.parametrize("key", ["masking", "sharing"])
def test_a_key_that_gives_no_secret_costs_its_owner_only(tmp_path: Path, key: str) -> None:
    """A point of small order: every site that used it would refuse. The site signs it like any
    other key.
    """
    hospitals = open_hospitals(tmp_path, NAMES)
    private = private_key(parse_node_config(hospitals.nodes["east"]), "east")

    def weak(record: RecordDict) -> None:
        info = dict(record.config_records[INFO])
        member = replace(
            surrogate_proto.unpack_member(bytes.fromhex(str(info["key"]))), **{key: bytes(32)}
        )
        name = next(
            str(m.content.config_records[INFO]["sum"])
            for m in grid.sent
            if m.metadata.message_type == "query.hello"
        )
        context = context_of(parse_run(grid.run_config), name)
        info["key"] = surrogate_proto.pack_member(
            replace(member, signature=sign(context + member.content, private, PURPOSE))
        ).hex()
        record[INFO] = ConfigRecord(info)

    grid = InProcessGrid(
        list(hospitals.nodes.values()), {NAMES.index("east"): Fault(kind="query.hello", reply=weak)}
    )
    folder = run_federation(tmp_path / "run", grid, **EXACT)
    assert summed(folder)[0] == ("centre", "north", "south", "west")
    assert (
        "a key of site 'east' for this secure aggregation is not a valid X25519 key"
        in rejected(folder)["east"]
    )


def without_peer(hospitals: Hospitals, unknown: str, at: Collection[str]) -> None:
    """Remove a site's key from the files of peers of other sites."""
    for name in at:
        file = Path(str(hospitals.nodes[name]["peers"]))
        lines = file.read_text().splitlines(True)
        file.write_text("".join(line for line in lines if not line.startswith(unknown)))


@pytest.mark.parametrize("settings", [EXACT, NOISY], ids=["exact", "noisy"])
def test_a_site_that_is_in_no_list_of_peers_costs_only_itself(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    others = ("north", "south", "west", "centre")
    hospitals, folder = of_hospitals(tmp_path, "east", others, **settings)
    assert summed(folder)[0] == ("centre", "north", "south", "west")
    reason = rejected(folder)["east"]
    assert (
        "by their own report it is not in the peers of 'centre', 'north', 'south', 'west'" in reason
    )
    assert "`site offline key` prints the line" in reason
    assert rejected(folder).keys() == {"east"}
    releases = {name: hospitals.released(name) for name in NAMES}
    assert releases == {name: int(name != "east") for name in NAMES}, "each is charged once"


def test_a_site_that_does_not_know_another_is_lost_and_says_whom(tmp_path: Path) -> None:
    _, folder = of_hospitals(tmp_path, "east", ["north"], **EXACT)
    assert summed(folder)[0] == ("centre", "east", "south", "west")
    assert "it says that the key of 'east' is not the one in its peers" in rejected(folder)["north"]


@pytest.mark.parametrize(
    "faults",
    [{}, {6: Fault(kind=SHARES, payload=spoiled("a"))}],
    ids=["", "and a dispute about shares"],
)
def test_a_site_that_some_do_not_know_stays_in_all_rounds(
    tmp_path: Path, faults: dict[int, Fault]
) -> None:
    """Those who do not know it are lost. It must not be left out later for their sake: the others
    sum with it only.
    """
    hospitals = open_hospitals(tmp_path, "abcdefg")
    without_peer(hospitals, "d", ("b", "c"))
    grid = InProcessGrid(list(hospitals.nodes.values()), faults)
    settings = EXACT | {"method": "fedavg", "fedavg.rounds": 2, "dropouts": 0.5}
    folder = run_federation(tmp_path / "run", grid, **settings)
    assert [entry["used"] for entry in metrics_of(folder)["rounds"]] == [4 if faults else 5] * 2
    assert rejected(folder).keys() == ({"a", "b", "c"} if faults else {"b", "c"})


def test_without_any_room_for_losses_the_run_begins_again_without_the_site_that_complains(
    tmp_path: Path,
) -> None:
    _, folder = of_hospitals(tmp_path, "east", ["north"], **EXACT | {"dropouts": 0.0})
    assert summed(folder)[0] == ("centre", "east", "south", "west")


def test_where_too_few_sites_are_left_the_error_names_the_unknown_one(tmp_path: Path) -> None:
    hospitals = open_hospitals(tmp_path, NAMES[:3])
    without_peer(hospitals, "west", ("north", "south"))
    with pytest.raises(
        RunError, match="west: lost after its keys: by their own report it is not in the peers of"
    ):
        run_federation(tmp_path / "run", list(hospitals.nodes.values()), **EXACT)


def test_a_refusal_names_nobody_in_words(tmp_path: Path) -> None:
    """The coordinator gets places in its own list: no text, no path, no name."""
    hospitals = open_hospitals(tmp_path, NAMES)
    without_peer(hospitals, "east", ["north"])
    _, info = hospitals.ask("north", SHARES, key_list(hospitals.keys().values()))
    assert info == {"status": "seal", "site": "north", DISPUTED: [sorted(NAMES).index("east")]}
    assert "the key of site 'east' in the key list is not" in hospitals.log("north")


def disputes(*pairs: str) -> set[Dispute]:
    return {Dispute(by, about, "shares") for by, about in pairs}


@pytest.mark.parametrize(
    ("pairs", "out"),
    [
        ((), ""),
        (("ab",), "a"),
        (("ab", "ba"), "b"),
        (("ab", "cb", "db"), "b"),
        (("ab", "ac", "ad"), "a"),
        (("ab", "ac", "ad", "ba", "ca"), "a"),
        (("xa", "ya", "xb", "yb", "xc", "yc"), "xy"),
        (("ab", "cd"), "ac"),
    ],
)
def test_the_site_in_most_disputes_is_left_out(pairs: tuple[str, ...], out: str) -> None:
    assert left_out(disputes(*pairs)) == set(out)


def test_more_reports_than_may_be_false_prove_false_shares() -> None:
    assert "more sites than may collude (1) report it, so its shares were false" in why(
        "d", disputes("ad", "bd"), 1
    )
    for found, colluding in ((disputes("ad", "bd"), 2), (disputes("ad"), 0)):
        assert "either side may be at fault" in why("d", found, colluding)
