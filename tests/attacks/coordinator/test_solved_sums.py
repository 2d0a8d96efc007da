"""Attacks of the coordinator on sums without distributed noise: many sums, chosen so that together they
show one site.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fedsurrogate.client_app.cli.main import app
from fedsurrogate.client_app.governance import release
from fedsurrogate.client_app.governance.ledger import Ledger
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.client_app.offline.keys import private_key
from fedsurrogate.common.errors import LedgerError
from fedsurrogate.common.security.sealing import public_key
from fedsurrogate.common.surrogates.mixtures import PublicMap
from fedsurrogate.common.wire import surrogate_proto
from tests.attacks.hospitals import CLASSES, PLAIN, POLICY, PRIVATE, Hospitals, open_hospitals
from tests.grid import Fault, InProcessGrid, metrics_of, run_federation

SITES = tuple("1234567")
# The sites in each sum; the weights of the sums, and their divisor, which give one site's vector;
# and that site.
SOLVED = {
    "three of four": (("123", "124", "134", "234"), (-2, 1, 1, 1), 3, "4"),
    "two groups and all": (("123", "456", "1234567"), (-1, -1, 1), 1, "7"),
}


@pytest.fixture
def seven(tmp_path: Path) -> Hospitals:
    found = open_hospitals(tmp_path, SITES)
    found.settings = PLAIN | {"dropouts": 0.25}
    return found


@pytest.mark.parametrize("name", SOLVED)
def test_several_exact_sums_cannot_be_solved_for_one_site(
    seven: Hospitals, vectors: Mapping[str, np.ndarray], name: str
) -> None:
    sets, weights, divisor, victim = SOLVED[name]
    found = [seven.total(tuple(sites)) for sites in sets]
    allowed = [each.astype(np.int32).astype(np.int64) for each in found if each is not None]
    if len(allowed) == len(sets):
        # Counts have the same step in every sum; that of the other numbers depends on the number of
        # sites.
        solved = (
            sum(weight * each for weight, each in zip(weights, allowed, strict=True))[:2] // divisor
        )
        pytest.fail(
            f"the sums show the class counts of site {victim}: {solved} is {vectors[victim][:2]}"
        )
    assert found[0] is not None, "the first sum is allowed"
    assert "with other sites" in seven.log(victim if victim in sets[0] else "1")


def test_a_site_that_is_not_asked_to_sign_is_in_no_sum_with_others(seven: Hospitals) -> None:
    """Four of five sites complete a sum without the signature of the fifth, so it must refuse
    before its vector leaves.
    """
    assert seven.total("123") is not None
    seven.settings |= {"colluding": 0.0, "dropouts": 0.2}
    masked_by = seven.masked(seven.dealt("34567"), "4567")
    assert len(masked_by) == 4
    dealt = seven.dealt("34567")
    assert seven.deliver("3", dealt.values()) == "policy"


def test_a_site_that_was_never_asked_to_sign_sums_with_the_same_sites_only(
    seven: Hospitals,
) -> None:
    """It cannot know whether the others have completed the first sum."""
    assert seven.total("12345", signing="1234") is not None
    dealt = seven.dealt("567")
    assert seven.deliver("5", dealt.values()) == "policy"
    assert seven.total("12345") is not None


def test_an_open_sum_does_not_allow_another(seven: Hospitals) -> None:
    """Two sums at the same time, before any of their lists is signed."""
    first = seven.dealt("1234")
    name, second_keys = seven.name, seven.keys("1567")
    second = seven.shares(second_keys, "1567")
    assert seven.deliver("1", second.values()) == "ok"
    seven.name = name
    assert seven.deliver("1", first.values()) == "policy"


def test_a_site_lost_in_the_first_sum_stays_out(seven: Hospitals) -> None:
    assert seven.total("12345", lost="5") is not None
    assert seven.total("12345") is None
    assert seven.total("1234") is not None


def test_a_site_lost_in_a_second_sum_is_not_shown_by_the_difference(seven: Hospitals) -> None:
    assert seven.total("12345") is not None
    assert seven.total("12345", lost="5") is None
    assert seven.total("12345") is not None


def test_false_lists_of_one_sum_do_not_make_a_site_free(seven: Hospitals) -> None:
    """A list that only one site has signed proves nothing: that site stays with all whose shares it
    received.
    """
    dealt = seven.dealt("12345")
    seven.masked(dealt, "12345")
    assert seven.sign("5", "2345") == "ok"
    again = seven.dealt("2345")
    assert seven.deliver("5", again.values()) == "policy"


def test_a_list_signed_before_a_second_sum_opens_nothing_after_it(seven: Hospitals) -> None:
    dealt = seven.dealt("12345")
    seven.masked(dealt, "12345")
    signatures = seven.signatures("1234", "1234")
    name = seven.name
    assert seven.total("12345") is not None
    seven.name = name
    for site in "1234":
        assert seven.open(site, "1234", signatures) == "policy"


@pytest.mark.parametrize("other", [{"head.solver": "ridge"}, {"classes": "malign,benign"}])
def test_the_rule_holds_whatever_is_summed(seven: Hospitals, other: dict[str, Any]) -> None:
    """Class counts are in the sums of every method."""
    assert seven.total("1234") is not None
    seven.settings |= other
    assert seven.total("1235") is None
    assert seven.total("1234") is not None


def test_a_change_of_one_sites_data_is_not_shown_by_the_difference(seven: Hospitals) -> None:
    assert seven.total("1234") is not None
    file = seven.folder / "4" / "f-train.safetensors"
    x, y = (load_file(file)[name] for name in "xy")
    save_file({"x": x[:-1], "y": y[:-1]}, file, {"classes": CLASSES, "fingerprint": "f" * 16})
    for settings in ({}, {"classes": "malign,benign"}):
        seven.settings |= settings
        withheld = seven.total("1234")
        assert withheld is not None
        assert withheld[-1], "the sum is random"
    assert "data have changed" in seven.log("4")


OTHER_SETTINGS: list[dict[str, Any]] = [
    {"features.power-transform": 0.7},
    {"secure-aggregation-range": 1.0},
    {"secure-aggregation-records": 5000},
    {"seed": 1},
    {"test-fraction": 0.3},
    {"classes": "benign"},
]


def test_other_settings_of_what_a_site_adds_are_refused_by_all(seven: Hospitals) -> None:
    """Sums of many powers of a feature give its value in each record, and several ranges where a
    site's own sum lies.
    """
    assert seven.total("123") is not None
    first, reason = seven.settings, "other settings of what each site adds"
    for other in OTHER_SETTINGS:
        seven.settings = first | other
        dealt = seven.dealt("123")
        for site in "123":
            before = seven.log(site)
            assert seven.deliver(site, dealt.values()) == "policy", other
            assert reason in seven.log(site).removeprefix(before), other


def test_a_change_since_a_sum_of_an_earlier_version_is_noticed(seven: Hospitals) -> None:
    """Its record names keys by 32 digits, and has one digest, of the training records."""
    assert seven.total("1234") is not None
    (file,) = seven.folder.glob("4/state/sums/*.json")
    record = json.loads(file.read_text())
    keys = [public_key(private_key(parse_node_config(seven.nodes[name]), name)) for name in "1234"]
    sites = sorted(hashlib.sha256(key).hexdigest()[:32] for key in keys)
    earlier = {"sites": sites, "sum": record["sum"]}
    for digest, withheld in (
        ("", False),
        (record["records"]["training"], False),
        ("0" * 64, True),
    ):
        file.write_text(json.dumps({**earlier, "records": digest}))
        found = seven.total("1234")
        assert found is not None
        assert bool(found[-1]) == withheld


def test_another_split_does_not_show_a_record(seven: Hospitals) -> None:
    """A slightly larger share of test records moves one record of each class, at the largest of
    these sites only.
    """
    for site in "1234":
        folder = seven.folder / site
        (folder / "f-train.safetensors").rename(folder / "f.safetensors")
        (folder / "f-test.safetensors").unlink()
    found = []
    for fraction in (0.2083, 0.2084):
        seven.settings |= {"test-fraction": fraction}
        found.append(seven.total("1234"))
    first, second = found
    assert first is not None
    if second is not None:
        pytest.fail(f"the difference shows the sums of {(first - second)[:2]} records")
    assert "other settings of what each site adds" in seven.log("4")
    assert seven.total("1234") is None
    seven.settings |= {"test-fraction": 0.2083}
    assert seven.total("1234") is not None


def test_scales_of_a_projection_do_not_search_for_the_largest_part(seven: Hospitals) -> None:
    """Where the scaled sum of one site is beyond the range, that site alone refused. By bisection,
    its own sum in any direction is known.
    """
    assert seven.total("123") is not None
    found = set()
    for scale in (1.0, 1e9):
        public = surrogate_proto.pack_map(PublicMap(scale * torch.eye(6)))
        dealt = seven.dealt("123", public).values()
        found |= {seven.deliver(site, dealt, public) for site in "123"}
    assert found == {"policy"}


def test_other_classes_select_other_records_at_the_same_places(seven: Hospitals) -> None:
    """Both classes have as many records, so the places within the selected class are equal."""
    seven.settings |= {"classes": "benign"}
    assert seven.total("1234") is not None
    seven.settings |= {"classes": "malign"}
    dealt = seven.dealt("1234")
    assert seven.deliver("4", dealt.values()) == "policy"
    assert "other settings of what each site adds" in seven.log("4")


def test_a_release_that_attacks_refuse_fixes_no_set_of_sites(seven: Hospitals) -> None:
    seven.policy(POLICY + "largest-attack-auc = 0.5\n", "4")
    dealt = seven.dealt("1234")
    assert seven.deliver("4", dealt.values()) == "policy"
    assert "the policy limits attacks" in seven.log("4")
    assert not list(seven.folder.glob("4/state/sums/*.json"))
    seven.policy(POLICY, "4")
    assert seven.total("2345") is not None


@pytest.mark.parametrize("failing", ["charge", "file"])
def test_a_release_that_fails_fixes_no_set_of_sites(
    seven: Hospitals, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """A full disk, or another run that has spent the budget meanwhile: nothing has left, so other
    sums show nothing.
    """

    def fail(*given: Any) -> None:
        raise LedgerError("no room") if failing == "charge" else OSError("no room")

    dealt = seven.dealt("1234")
    with monkeypatch.context() as broken:
        place = (Ledger, "charge") if failing == "charge" else (release, "put_in_place")
        broken.setattr(*place, fail)
        assert seven.deliver("4", dealt.values()) == "ledger"
    assert not list(seven.folder.glob("4/state/sums/*.json"))
    assert not list(seven.folder.glob("4/state/sums/.*")), "no staged file stays"
    assert seven.total("2345") is not None


def test_a_release_that_is_too_large_fixes_no_set_of_sites(seven: Hospitals) -> None:
    """Releases of DP-SGD are charged before their size decides anything."""
    strict = "require-secure-aggregation = true\nsmallest-colluding = 0.0\n"
    seven.policy(strict)
    seven.policy(strict + "largest-payload-mib = 1e-5\n", "4")
    seven.settings |= PRIVATE | {"method": "dp-fedavg", "fedavg.rounds": 2, "dropouts": 0.25}
    seven.settings["fedavg.noise"] = "site"
    assert seven.first_round("1234", "4") == "policy"
    assert "largest-payload-mib" in seven.log("4")
    assert seven.released("4") == 1
    assert not list(seven.folder.glob("4/state/sums/*.json"))


def test_rounds_of_training_are_over_the_same_sites(seven: Hospitals) -> None:
    seven.settings |= {"method": "fedavg", "fedavg.rounds": 2}
    model = seven.model()
    for sites, expected in (("12345", "ok"), ("1234", "policy"), ("123456", "policy")):
        dealt = seven.dealt(sites, model).values()
        for site in "12":
            assert seven.deliver(site, dealt, model, round=1) == expected


def test_rounds_of_the_same_hospitals_are_completed(seven: Hospitals, tmp_path: Path) -> None:
    settings = seven.settings | {"method": "fedavg", "fedavg.rounds": 3}
    folder = run_federation(tmp_path / "run", list(seven.nodes.values()), **settings)
    assert [entry["used"] for entry in metrics_of(folder)["rounds"]] == [7, 7, 7]


def test_a_site_that_comes_back_is_left_out_of_later_rounds(
    seven: Hospitals, tmp_path: Path
) -> None:
    """The others would refuse a sum with it, and the run would end."""
    calls: list[int] = []

    def first_broken(payload: bytes) -> bytes:
        calls.append(len(payload))
        return b"\x0a\x03abc" if len(calls) == 1 else payload

    grid = InProcessGrid(
        list(seven.nodes.values()), {6: Fault(kind="query.sum_shares", payload=first_broken)}
    )
    folder = run_federation(
        tmp_path / "run", grid, **seven.settings | {"method": "fedavg", "fedavg.rounds": 3}
    )
    assert [entry["used"] for entry in metrics_of(folder)["rounds"]] == [6, 6, 6]


def test_a_person_may_forget_earlier_sums(seven: Hospitals) -> None:
    assert seven.total("123") is not None
    node = " ".join(f'{key}="{value}"' for key, value in seven.nodes["1"].items())
    dealt = seven.dealt("1456")
    assert seven.deliver("1", dealt.values()) == "policy"
    assert "site ledger forget" in seven.log("1")
    asked = CliRunner().invoke(app, ["ledger", "forget", "--node-config", node], input="n\n")
    assert asked.exit_code == 1
    asked = CliRunner().invoke(app, ["ledger", "forget", "--node-config", node, "--yes"])
    assert asked.exit_code == 0
    assert seven.deliver("1", dealt.values()) == "ok"
    assert list((seven.folder / "1" / "state" / "sums").glob("*.json.*")), "the old record is kept"


def test_a_damaged_record_refuses_until_a_person_decides(seven: Hospitals) -> None:
    assert seven.total("123") is not None
    (file,) = seven.folder.glob("1/state/sums/*.json")
    file.write_text('[["0", "1"]]')
    dealt = seven.dealt("123")
    assert seven.deliver("1", dealt.values()) == "state"
    assert "site ledger forget" in seven.log("1")


def test_sums_with_distributed_noise_may_be_over_any_sites(seven: Hospitals) -> None:
    """Each is charged to the ledger, and the difference of two has the noise of both."""
    seven.policy(POLICY + "epsilon-total = 9.0\nepsilon-per-run = 9.0\n")
    seven.settings = PRIVATE | {"dropouts": 0.25}
    for seven.flower_run, sites in enumerate(("123", "1234", "1256"), start=1):
        assert seven.total(sites) is not None
    assert seven.released("1") == 3
