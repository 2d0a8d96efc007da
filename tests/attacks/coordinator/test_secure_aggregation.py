"""Attacks of the coordinator on secure aggregation: the messages are its own, the sites are the real
ones.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.client_app.offline.answers import release_to
from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.privacy.accounting import GaussianEvent, epsilon_spent, gaussian_epsilon
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation.rules import context_of, local_epsilon, rules_of
from fedsurrogate.common.security.documents import Request
from fedsurrogate.common.security.sealing import new_key, public_key
from fedsurrogate.common.surrogates.mixtures import PublicMap
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire import surrogate_proto
from fedsurrogate.common.wire.model_proto import pack_classifier
from fedsurrogate.server_app.exchange import make_request
from tests.attacks.hospitals import (
    CLASSES,
    NAMES,
    PLAIN,
    POLICY,
    PRIVATE,
    Hospitals,
    open_hospitals,
)
from tests.grid import run_federation


@pytest.fixture
def hospitals(tmp_path: Path) -> Hospitals:
    return open_hospitals(tmp_path, NAMES)


def test_an_honest_coordinator_gets_every_step(hospitals: Hospitals) -> None:
    hospitals.up_to_masked()
    signed = surrogate_proto.pack_list(NAMES, hospitals.signatures(NAMES))
    for site in NAMES:
        found = surrogate_proto.unpack_revealed(hospitals.answer(site, "query.sum_open", signed))
        assert found["masking"] == {}
        assert found["blind"].keys() == set(NAMES)


def test_different_key_lists_are_refused(hospitals: Hospitals) -> None:
    """With keys of its own for one site, the coordinator could open shares that are meant for that
    site.
    """
    members = hospitals.keys()
    false = members | {"east": hospitals.party("east").member}
    assert hospitals.offer("north", false.values()) == "seal"
    assert hospitals.offer("north", [members[name] for name in NAMES[:4]]) == "ok"
    dealt = hospitals.shares(members, NAMES[1:]).values()
    assert hospitals.deliver("south", dealt) == "ok", "the sites with one list go on"
    mixed = [
        replace(each, content={**each.content, "west": each.content["south"]}) for each in dealt
    ]
    assert hospitals.deliver("west", mixed) == "seal"
    assert hospitals.released("west") == 0


def test_invented_sites_are_refused_where_keys_are_pinned(hospitals: Hospitals) -> None:
    own = hospitals.keys(["north"])
    invented = [hospitals.party(name).member for name in NAMES[1:]]
    assert hospitals.offer("north", [*own.values(), *invented]) == "seal"
    assert "not the one in peers" in hospitals.log("north")


def test_a_sum_of_one_or_two_sites_is_refused(hospitals: Hospitals) -> None:
    for count in (1, 2):
        assert hospitals.offer("north", hospitals.keys(NAMES[:count]).values()) == "policy"


def test_a_run_of_two_sites_ends_and_names_their_refusal(
    hospitals: Hospitals, tmp_path: Path
) -> None:
    two = [hospitals.nodes[name] for name in NAMES[:2]]
    with pytest.raises(
        RunError, match=r"nothing was revealed; north: lost after its keys: .*policy does not allow"
    ):
        run_federation(tmp_path / "run", two, **PLAIN)


@pytest.mark.parametrize("settings", [PLAIN, PRIVATE])
def test_a_request_by_file_is_refused_by_both_sides(
    hospitals: Hospitals, settings: dict[str, Any]
) -> None:
    """A site that answered by file would send its vector unmasked: there is no step in which sites
    share keys.
    """
    file, key = hospitals.folder / "request.json", new_key()
    with pytest.raises(ConfigError, match="secure-aggregation = true: a request needs"):
        make_request(settings, file, key)
    assert not file.exists()
    asked = {name: value for name, value in settings.items() if name != "secure-aggregation"}
    request = Request.fresh(asked, None, 0, {})
    file.write_bytes(replace(request, settings=settings).signed(key))
    node = parse_node_config(hospitals.nodes["north"] | {"coordinator-key": public_key(key).hex()})
    with pytest.raises(ConfigError, match="secure-aggregation = true: a request needs"):
        release_to(hospitals.folder / "north.bundle", file, node)
    assert hospitals.released("north") == 0


def test_claimed_losses_do_not_unmask_one_site(hospitals: Hospitals) -> None:
    hospitals.up_to_masked()
    for few in (["north"], ["north", "south"], NAMES[:3], NAMES[1:]):
        assert hospitals.sign("north", few) == "seal"
    dealt = hospitals.dealt()
    assert hospitals.deliver("north", [dealt[name] for name in NAMES[:3]]) == "state"
    assert hospitals.released("north") == 1, "only the first sum was charged"


def test_both_shares_of_one_site_are_never_revealed(hospitals: Hospitals) -> None:
    """Half of the sites are to believe that west is lost, the others that it is not; each signs one
    list, once.
    """
    hospitals.up_to_masked()
    without = tuple(name for name in NAMES if name != "west")
    first = hospitals.signatures(NAMES, ["west", "east", "centre"])
    second = hospitals.signatures(without, ["north", "south"])
    assert hospitals.sign("north", NAMES) == "state"
    for site in ("north", "south"):
        for signatures in (second, second | first):
            assert hospitals.open(site, without, signatures) == "seal"
    opened = hospitals.answer("east", "query.sum_open", surrogate_proto.pack_list(NAMES, first))
    assert "west" not in surrogate_proto.unpack_revealed(opened)["masking"]
    assert hospitals.open("east", without, second) == "state"


@pytest.mark.parametrize("lost", ["", "west"])
def test_noise_for_lost_sites_stays_when_one_is_lost(hospitals: Hospitals, lost: str) -> None:
    """A coordinator that had the seeds would take out noise that then protects."""
    hospitals.settings = dict(PRIVATE)
    hospitals.policy(POLICY + "epsilon-total = 9.0\nepsilon-per-run = 9.0\n")
    hospitals.up_to_masked()
    listed = tuple(name for name in NAMES if name != lost)
    signed = surrogate_proto.pack_list(listed, hospitals.signatures(listed, listed))
    for site in listed:
        spare = surrogate_proto.unpack_spare(hospitals.answer(site, "query.sum_open", signed))
        assert bool(spare) == (not lost)
    (state,) = hospitals.folder.glob("north/state/sums/*.pb")
    assert not surrogate_proto.unpack_state(state.read_bytes()).spare


def test_a_replayed_step_is_refused(hospitals: Hospitals) -> None:
    members = hospitals.keys()
    again = hospitals.status("north", "query.hello")
    assert again == "state", "keys are not made twice for one sum"
    dealt = hospitals.shares(members)
    assert hospitals.offer("north", members.values()) == "state"
    hospitals.masked(dealt)
    for delivered in (dealt.values(), [dealt[name] for name in NAMES[:4]]):
        assert hospitals.deliver("north", delivered) == "state"
    signatures = hospitals.signatures(NAMES)
    assert hospitals.open("north", NAMES, signatures) == "ok"
    assert hospitals.open("north", NAMES, signatures) == "state"


def test_every_step_is_taken_in_its_place_only(hospitals: Hospitals) -> None:
    members = hospitals.keys()
    steps = {
        "query.sum_shares": surrogate_proto.pack_members(members.values()),
        "train": surrogate_proto.pack_delivery([], "north"),
        "query.sum_list": surrogate_proto.pack_list(NAMES),
        "query.sum_open": surrogate_proto.pack_list(NAMES, {}),
    }
    dealt, done = {}, []
    for step in steps:
        for other, payload in steps.items():
            if other != step:
                assert hospitals.status("north", other, payload) == "state", (other, done)
        if step == "query.sum_shares":
            dealt = hospitals.shares(members)
        elif step == "train":
            hospitals.masked(dealt, ["north"])
        elif step == "query.sum_list":
            hospitals.signatures(NAMES, ["north"])
        done.append(step)
    assert hospitals.released("north") == 1


def test_a_step_of_another_sum_or_of_other_settings_is_refused(hospitals: Hospitals) -> None:
    hospitals.up_to_masked()
    hospitals.settings |= {"dropouts": 0.9}
    assert hospitals.sign("north", NAMES[:3]) == "state"
    for hospitals.name in ("", "../../etc", secrets.token_hex(16)):
        assert hospitals.sign("north", NAMES) in ("state", "surrogate")


def test_settings_whose_short_digests_are_equal_do_not_share_a_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run's digest has 64 bits, so 2^32 tries find two settings with the same one. With a tiny
    learning rate for all sites but one, the sum of updates is that site's.
    """
    settings = PLAIN | {"method": "fedavg", "fedavg.learning-rate": 0.1}
    runs = [parse_run(settings | {"fedavg.learning-rate": rate}) for rate in (0.1, 1e-9)]
    monkeypatch.setattr("fedsurrogate.common.run.Run.digest", "0" * 16)
    assert runs[0].digest == runs[1].digest
    name = secrets.token_hex(16)
    assert context_of(runs[0], name) != context_of(runs[1], name)
    assert context_of(runs[0], name) == context_of(parse_run(settings), name)


def test_the_difference_of_two_sums_does_not_show_one_site(hospitals: Hospitals) -> None:
    hospitals.up_to_masked()
    hospitals.signatures(NAMES)
    hospitals.settings |= {"dropouts": 0.0}
    assert hospitals.deliver("north", hospitals.dealt(NAMES[:4]).values()) == "policy"
    assert "with other sites" in hospitals.log("north")


def test_under_privacy_the_difference_of_two_sums_is_paid_for(hospitals: Hospitals) -> None:
    hospitals.settings = PRIVATE | {"dropouts": 0.0}
    hospitals.policy(POLICY + "epsilon-total = 1.2\n")
    hospitals.up_to_masked()
    assert hospitals.deliver("north", hospitals.dealt(NAMES[:4]).values()) == "budget"


@pytest.mark.parametrize("method", ["fedpft", "fedavg"])
def test_a_site_that_requires_secure_aggregation_answers_nothing_else(
    hospitals: Hospitals, method: str
) -> None:
    hospitals.settings |= {"secure-aggregation": False, "method": method}
    for kind in ("train", "evaluate", "query.hello", "query.head"):
        assert hospitals.status("north", kind) in ("policy", "surrogate")
    assert hospitals.released("north") == 0


def test_a_site_that_requires_secure_aggregation_needs_the_keys_of_its_peers(
    hospitals: Hospitals,
) -> None:
    del hospitals.nodes["north"]["peers"]
    assert hospitals.hello("north") == "policy"


def test_the_evaluation_of_the_model_shows_no_number_of_one_site(hospitals: Hospitals) -> None:
    run = parse_run(hospitals.settings)
    header = Header("fedpft", run.digest, "coordinator", "f" * 16, tuple(CLASSES.split(",")))
    model = pack_classifier(Head(header, torch.eye(2, 6), torch.zeros(2)))
    hospitals.name = secrets.token_hex(16)
    _, info = hospitals.ask("north", "evaluate", model)
    assert info.keys() <= {"status", "site", "version", "receipt"}
    assert info["status"] == "ok"


def test_the_default_policy_does_not_trust_other_sites(hospitals: Hospitals) -> None:
    """Central privacy through secure aggregation is weaker alone than noise at the site, so a hospital
    chooses it.
    """
    hospitals.settings = dict(PRIVATE)
    del hospitals.nodes["north"]["policy"]
    assert hospitals.hello("north") == "policy"


def test_a_local_floor_is_held(hospitals: Hospitals) -> None:
    hospitals.settings = dict(PRIVATE)
    hospitals.policy(POLICY + "local-epsilon = 1.5\n", "north")
    members = hospitals.keys().values()
    assert hospitals.offer("north", members) == "policy"
    assert hospitals.offer("south", members) == "ok"
    assert "local-epsilon" in hospitals.log("north")


def test_the_ledger_names_the_trust_assumption(hospitals: Hospitals) -> None:
    hospitals.settings = dict(PRIVATE)
    hospitals.up_to_masked()
    entry = hospitals.entries("north")[-1]
    assert entry["mechanism"] == "secure-aggregation"
    assert entry["facts"]["local-epsilon"] > entry["epsilon"] == 1.0
    assert (entry["facts"]["members"], entry["facts"]["colluding"]) == (5, 0)
    assert entry["facts"]["keys-pinned"] == 1


def test_the_ledger_tells_whether_the_coordinator_could_make_up_the_other_sites(
    hospitals: Hospitals,
) -> None:
    """A site without peers accepts any keys; it is then protected by its own noise alone."""
    hospitals.settings = dict(PRIVATE)
    hospitals.policy(POLICY.replace("require-secure-aggregation = true", ""), "north")
    del hospitals.nodes["north"]["peers"]
    members = hospitals.keys(["north"])
    invented = {name: hospitals.party(name) for name in NAMES[1:]}
    members |= {name: party.member for name, party in invented.items()}
    dealt = hospitals.shares(members, ["north"])
    rules = rules_of(parse_run(hospitals.settings).settings, len(members))
    made_up = {name: party.share(members.values(), rules) for name, party in invented.items()}
    hospitals.masked(dealt | made_up, ["north"])
    assert hospitals.entries("north")[-1]["facts"]["keys-pinned"] == 0


@pytest.mark.parametrize("settings", [PLAIN, PRIVATE])
@pytest.mark.parametrize(
    ("colluding", "allowed"), [(0.0, False), (0.25, False), (0.3334, True), (0.5, True)]
)
def test_a_site_refuses_a_sum_that_fewer_colluding_sites_break(
    hospitals: Hospitals, settings: dict[str, Any], colluding: float, allowed: bool
) -> None:
    """The coordinator chooses `colluding`: with zero, one site that tells its noise weakens the
    others' privacy.
    """
    hospitals.policy(POLICY.replace("smallest-colluding = 0.0", ""), "north")
    hospitals.settings = settings | {"colluding": colluding}
    assert hospitals.hello("north") == ("ok" if allowed else "policy")
    if not allowed:
        assert "smallest-colluding = 0.3333: the run is safe only against" in hospitals.log("north")


def test_no_state_on_disk_is_readable_by_others(hospitals: Hospitals) -> None:
    hospitals.up_to_masked()
    for file in hospitals.folder.glob("*/state/sums/*.pb"):
        assert file.stat().st_mode & 0o077 == 0, file


def test_another_model_for_one_site_does_not_show_its_update(hospitals: Hospitals) -> None:
    """Rounds of FedAvg: a model on which all others have no gradient would leave one site's update
    alone in the sum.
    """
    hospitals.settings = PLAIN | {"method": "fedavg"}
    dealt = hospitals.dealt(public=b"one packed model").values()
    for public in (b"another", b""):
        assert hospitals.deliver("south", dealt, public, round=1) == "seal"
        assert "agreed" in hospitals.log("south")
    assert hospitals.released("south") == 0


DISTRIBUTED_ROUNDS = PRIVATE | {"method": "dp-fedavg", "fedavg.rounds": 3, "dropouts": 0.0}


def test_private_training_in_a_secure_aggregation_is_charged_as_without_one(
    hospitals: Hospitals,
) -> None:
    """DP-FedAvg: the guarantee is that of the site's own noise, and the difference of two sums
    still shows no update.
    """
    own = {"fedavg.sample-rate": 0.5, "fedavg.noise": "site"}
    hospitals.settings = DISTRIBUTED_ROUNDS | own
    hospitals.policy("require-secure-aggregation = true\nsmallest-colluding = 0.0\n")
    assert hospitals.first_round() == "ok"
    assert hospitals.first_round(NAMES[:4]) == "policy"
    mechanism = parse_run(hospitals.settings).mechanism
    assert mechanism is not None
    (event,) = mechanism.events
    (entry,) = hospitals.entries("north")
    assert entry["mechanism"] == "dp-sgd"
    (charged,) = entry["events"]
    assert charged["noise_multiplier"] == pytest.approx(event.noise_multiplier)
    assert (charged["sample_rate"], charged["count"]) == (0.5, event.count / 3)


def test_every_round_of_distributed_noise_is_charged_and_the_ledger_names_what_it_rests_on(
    hospitals: Hospitals,
) -> None:
    """Any sites may be in a sum: each costs its share of the epsilon, and a fourth of three rounds
    does not pass.
    """
    hospitals.settings = dict(DISTRIBUTED_ROUNDS)
    for sites in (NAMES, NAMES[:4], NAMES):
        assert hospitals.first_round(sites) == "ok"
    entries = hospitals.entries("north")
    mechanism = parse_run(hospitals.settings).mechanism
    assert mechanism is not None
    (event,) = mechanism.events
    assert event.count == len(entries) == 3
    for entry, members in zip(entries, (5, 4, 5), strict=True):
        (charged,) = entry["events"]
        assert entry["mechanism"] == "secure-aggregation"
        assert (charged["sample_rate"], charged["count"]) == (1.0, 1)
        assert charged["noise_multiplier"] == pytest.approx(event.noise_multiplier)
        own = event.noise_multiplier / math.sqrt(3 * members)
        assert entry["facts"]["local-epsilon"] == pytest.approx(gaussian_epsilon(own, 1e-5))
        assert (entry["facts"]["colluding"], entry["facts"]["fewest-in-the-sum"]) == (0, members)
    charges = [GaussianEvent(**event) for entry in entries for event in entry["events"]]
    assert epsilon_spent(charges, 1e-5) == pytest.approx(1.0)
    # The default policy allows epsilon 1 in a run.
    assert hospitals.first_round() == "budget"


def test_the_local_floor_of_all_rounds_together_is_held_before_the_first(
    hospitals: Hospitals,
) -> None:
    hospitals.settings = dict(DISTRIBUTED_ROUNDS)
    run = parse_run(hospitals.settings)
    rules = rules_of(run.settings, len(NAMES))
    together = local_epsilon(run.settings.epsilon, run.mechanism, rules)
    assert run.mechanism is not None
    # A single round would pass this floor.
    one = run.mechanism.events[0].noise_multiplier / math.sqrt(len(NAMES))
    assert gaussian_epsilon(one, 1e-5) < 0.7 * together
    hospitals.policy(POLICY + f"local-epsilon = {together * 0.99}\n", "north")
    assert hospitals.offer("north", hospitals.keys().values(), hospitals.model()) == "policy"
    assert "local-epsilon" in hospitals.log("north")
    hospitals.policy(POLICY + f"local-epsilon = {together * 1.01}\n", "north")
    assert hospitals.first_round() == "ok"


def test_more_rounds_than_planned_do_not_pass_the_local_floor(hospitals: Hospitals) -> None:
    """The policy allows a larger epsilon than the run's, so the budget alone would allow twelve of
    its rounds.
    """
    hospitals.settings = dict(DISTRIBUTED_ROUNDS)
    hospitals.policy(POLICY + "epsilon-per-run = 2.0\nlocal-epsilon = 3.0\n")
    assert [hospitals.first_round() for _ in range(4)] == ["ok", "ok", "ok", "budget"]
    assert "start another run" in hospitals.log("north")
    assert hospitals.released("north") == 3


def test_a_site_that_lost_its_state_reveals_nothing_and_the_others_go_on(
    hospitals: Hospitals,
) -> None:
    """Each step here runs without the memory of the step before; only the file of the sum is
    needed, and never made anew.
    """
    hospitals.up_to_masked()
    for file in hospitals.folder.glob("north/state/sums/*.pb"):
        file.unlink()
    assert hospitals.sign("north", NAMES) == "state"
    assert "no state of the secure aggregation" in hospitals.log("north")
    signatures = hospitals.signatures(NAMES, NAMES[1:])
    assert hospitals.open("south", NAMES, signatures) == "ok"
    assert hospitals.open("north", NAMES, signatures) == "state"


def test_different_projections_do_not_single_out_one_site(hospitals: Hospitals) -> None:
    """With zeros for all others, the sum of the projected features would be that of one site alone."""
    zeros = surrogate_proto.pack_map(PublicMap(torch.zeros(6, 6)))
    assert hospitals.deliver("south", hospitals.dealt().values(), zeros) == "seal"
    assert hospitals.released("south") == 0
    assert "projection" in hospitals.log("south")
    # A site that agreed on another map than the others cannot open their shares.
    public = surrogate_proto.pack_map(PublicMap(centre=torch.ones(6)))
    members = hospitals.keys()
    dealt = hospitals.shares(members, NAMES[1:]) | hospitals.shares(members, ["north"], public)
    assert hospitals.deliver("north", dealt.values(), public) == "seal"
    assert hospitals.released("north") == 0
