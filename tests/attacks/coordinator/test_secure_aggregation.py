"""Attacks of the coordinator on secure aggregation: the messages are its own, the sites are the real
ones.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from safetensors.torch import save_file

from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.client_app.offline.answers import release_to
from fedsurrogate.client_app.offline.keys import private_key
from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.privacy.accounting import GaussianEvent, epsilon_spent, gaussian_epsilon
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation.rules import context_of, local_epsilon, rules_of
from fedsurrogate.common.secure_aggregation.secrets import Dealt, Member
from fedsurrogate.common.security.documents import Request
from fedsurrogate.common.security.sealing import new_key, public_key
from fedsurrogate.common.surrogates.mixtures import PublicMap
from fedsurrogate.common.wire import surrogate_proto
from fedsurrogate.common.wire.records import from_record, to_record
from fedsurrogate.server_app.exchange import make_request
from fedsurrogate.strategies.base.training import Training
from tests.common.secure_aggregation.parties import Party
from tests.grid import (
    FIRST_NODE,
    InProcessGrid,
    NodeConfig,
    confirm,
    default_run_config,
    open_new,
    run_federation,
)

NAMES = ("north", "south", "west", "east", "centre")
CLASSES = "benign,malign"
PLAIN: dict[str, Any] = {
    "fedpft.covariance": "gram",
    "classes": CLASSES,
    "secure-aggregation": True,
    "colluding": 0.0,
    "dropouts": 0.2,
}
PRIVATE = PLAIN | {"epsilon": 1.0, "delta": 1e-5}
POLICY = (
    'without-dp = true\nsmallest-class = 1\nmechanisms = "secure-aggregation"\nrequire-secure-aggregation = true\n'
    "smallest-colluding = 0.0\nexact-sums-at-models = true\n"
    # The rule of secure aggregation holds by itself.
    "exact-runs-may-differ = true\n"
)


@dataclass
class Hospitals:
    """Sites with data of their own, and a coordinator that sends what a test wants it to."""

    folder: Path
    nodes: dict[str, NodeConfig]
    settings: dict[str, Any] = field(default_factory=lambda: dict(PLAIN))
    name: str = ""
    flower_run: int = 77

    def ask(
        self, site: str, kind: str, payload: bytes | None = None, **reported: Any
    ) -> tuple[bytes | None, dict[str, Any]]:
        """One site's reply to one message."""
        grid = InProcessGrid([self.nodes[site]], run_id=self.flower_run)
        grid.run_config = default_run_config() | {"device": "cpu"} | self.settings
        numbers = {"run": parse_run(grid.run_config).digest, "sum": self.name} | reported
        numbers |= {} if payload is None else {"bytes": len(payload)}
        sent = Message(to_record(payload, numbers), FIRST_NODE, kind)
        (reply,) = grid.pull_messages(list(grid.push_messages([sent])))
        return from_record(reply.content, 2**30)

    def status(self, site: str, kind: str, payload: bytes | None = None, **reported: Any) -> str:
        found, info = self.ask(site, kind, payload, **reported)
        assert found is None or info["status"] == "ok"
        return str(info["status"])

    def keys(self, sites: Iterable[str] = NAMES) -> dict[str, Member]:
        """Begin a new sum; the keys of each site."""
        self.name = secrets.token_hex(16)
        found = {}
        for site in sites:
            _, info = self.ask(site, "query.hello")
            assert info["status"] == "ok", self.log(site)
            found[site] = surrogate_proto.unpack_member(bytes.fromhex(info["key"]))
        return found

    def shares(
        self, members: Mapping[str, Member], sites: Iterable[str] = NAMES
    ) -> dict[str, Dealt]:
        found = {}
        for site in sites:
            payload, _ = self.ask(
                site, "query.sum_shares", surrogate_proto.pack_members(members.values())
            )
            assert payload is not None, self.log(site)
            found[site] = surrogate_proto.unpack_dealt(payload)
        return found

    def masked(self, dealt: Mapping[str, Dealt], sites: Iterable[str] = NAMES) -> dict[str, bytes]:
        found = {}
        for site in sites:
            payload, _ = self.ask(
                site, "train", surrogate_proto.pack_delivery(dealt.values(), site)
            )
            assert payload is not None, self.log(site)
            found[site] = payload
        return found

    def signatures(self, summed: Iterable[str], sites: Iterable[str] = NAMES) -> dict[str, bytes]:
        found = {}
        for site in sites:
            payload, _ = self.ask(site, "query.sum_list", surrogate_proto.pack_list(summed))
            assert payload is not None, self.log(site)
            found[site] = payload
        return found

    def up_to_masked(self) -> dict[str, Dealt]:
        dealt = self.shares(self.keys())
        self.masked(dealt)
        return dealt

    def log(self, site: str) -> str:
        return (self.folder / site / "state" / "site.log").read_text()

    def released(self, site: str) -> int:
        """Entries in a site's ledger after its header."""
        return sum(
            len(file.read_text().splitlines()) - 1
            for file in self.folder.glob(f"{site}/state/ledgers/*.jsonl")
        )


@pytest.fixture
def hospitals(tmp_path: Path) -> Hospitals:
    return open_hospitals(tmp_path, NAMES)


def open_hospitals(home: Path, names: Iterable[str]) -> Hospitals:
    """Hospitals that know each other's keys, each with data of its own."""
    nodes: dict[str, NodeConfig] = {}
    for number, name in enumerate(names):
        folder = home / name
        folder.mkdir()
        labels = torch.arange(60 + 4 * number) % 2
        features = (
            torch.randn(len(labels), 6, generator=torch.Generator().manual_seed(number))
            + 3 * torch.eye(2, 6)[labels]
        )
        for part in ("train", "test"):
            save_file(
                {"x": features, "y": labels},
                folder / f"f-{part}.safetensors",
                {"classes": CLASSES, "fingerprint": "f" * 16},
            )
        (folder / "policy.toml").write_text(POLICY)
        own: NodeConfig = {
            "site": name,
            "data": "safetensors",
            "data-dir": str(folder),
            "dataset": "f",
        }
        own |= {
            key: str(folder / value)
            for key, value in {
                "policy": "policy.toml",
                "state-dir": "state",
                "cache-dir": "c",
            }.items()
        }
        open_new(own)
        nodes[name] = own | {"peers": str(folder / "peers.toml")}
    lasting = {
        name: public_key(private_key(parse_node_config(node), name)).hex()
        for name, node in nodes.items()
    }
    for name in nodes:
        (home / name / "peers.toml").write_text(
            "".join(f'{site} = "{key}"\n' for site, key in lasting.items())
        )
    return Hospitals(home, nodes)


def test_an_honest_coordinator_gets_every_step(hospitals: Hospitals) -> None:
    hospitals.up_to_masked()
    signatures = hospitals.signatures(NAMES)
    for site in NAMES:
        payload, _ = hospitals.ask(
            site, "query.sum_open", surrogate_proto.pack_list(NAMES, signatures)
        )
        assert payload is not None
        found = surrogate_proto.unpack_revealed(payload)
        assert found["masking"] == {}
        assert found["blind"].keys() == set(NAMES)


def test_different_key_lists_are_refused(hospitals: Hospitals) -> None:
    """With keys of its own for one site, the coordinator could open shares that are meant for that
    site.
    """
    members = hospitals.keys()
    stranger = Party(
        "east", context=context_of(parse_run(hospitals.settings), hospitals.name)
    ).member
    false = surrogate_proto.pack_members((members | {"east": stranger}).values())
    assert hospitals.status("north", "query.sum_shares", false) == "seal"
    fewer = surrogate_proto.pack_members(members[name] for name in NAMES[:4])
    assert hospitals.ask("north", "query.sum_shares", fewer)[0] is not None
    dealt = hospitals.shares(members, NAMES[1:])
    payload, _ = hospitals.ask(
        "south", "train", surrogate_proto.pack_delivery(dealt.values(), "south")
    )
    assert payload is not None, "the sites with one list go on"
    mixed = [
        replace(each, content={**each.content, "west": each.content["south"]})
        for each in dealt.values()
    ]
    assert hospitals.status("west", "train", surrogate_proto.pack_delivery(mixed, "west")) == "seal"
    assert hospitals.released("west") == 0


def test_invented_sites_are_refused_where_keys_are_pinned(hospitals: Hospitals) -> None:
    own = hospitals.keys(["north"])
    context = context_of(parse_run(hospitals.settings), hospitals.name)
    invented = {name: Party(name, context=context).member for name in NAMES[1:]}
    assert (
        hospitals.status(
            "north", "query.sum_shares", surrogate_proto.pack_members((own | invented).values())
        )
        == "seal"
    )
    assert "not the one in peers" in hospitals.log("north")


def test_a_sum_of_one_or_two_sites_is_refused(hospitals: Hospitals) -> None:
    for count in (1, 2):
        members = hospitals.keys(NAMES[:count])
        assert (
            hospitals.status(
                "north", "query.sum_shares", surrogate_proto.pack_members(members.values())
            )
            == "policy"
        )


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
        assert hospitals.status("north", "query.sum_list", surrogate_proto.pack_list(few)) == "seal"
    members = hospitals.keys()
    dealt = hospitals.shares(members)
    some = [dealt[name] for name in NAMES[:3]]
    assert (
        hospitals.status("north", "train", surrogate_proto.pack_delivery(some, "north")) == "state"
    )
    assert hospitals.released("north") == 1, "only the first sum was charged"


def test_both_shares_of_one_site_are_never_revealed(hospitals: Hospitals) -> None:
    """Half of the sites are to believe that west is lost, the others that it is not; each signs one
    list, once.
    """
    hospitals.up_to_masked()
    without = tuple(name for name in NAMES if name != "west")
    first = hospitals.signatures(NAMES, ["west", "east", "centre"])
    second = hospitals.signatures(without, ["north", "south"])
    assert hospitals.status("north", "query.sum_list", surrogate_proto.pack_list(NAMES)) == "state"
    for site in ("north", "south"):
        assert (
            hospitals.status(site, "query.sum_open", surrogate_proto.pack_list(without, second))
            == "seal"
        )
        assert (
            hospitals.status(
                site, "query.sum_open", surrogate_proto.pack_list(without, second | first)
            )
            == "seal"
        )
    payload, _ = hospitals.ask("east", "query.sum_open", surrogate_proto.pack_list(NAMES, first))
    assert payload is not None
    assert "west" not in surrogate_proto.unpack_revealed(payload)["masking"]
    assert (
        hospitals.status("east", "query.sum_open", surrogate_proto.pack_list(without, second))
        == "state"
    )


@pytest.mark.parametrize("lost", ["", "west"])
def test_noise_for_lost_sites_stays_when_one_is_lost(hospitals: Hospitals, lost: str) -> None:
    """A coordinator that had the seeds would take out noise that then protects."""
    hospitals.settings = dict(PRIVATE)
    for name in NAMES:
        (hospitals.folder / name / "policy.toml").write_text(
            POLICY + "epsilon-total = 9.0\nepsilon-per-run = 9.0\n"
        )
    hospitals.up_to_masked()
    listed = tuple(name for name in NAMES if name != lost)
    signatures = hospitals.signatures(listed, listed)
    for site in listed:
        payload, _ = hospitals.ask(
            site, "query.sum_open", surrogate_proto.pack_list(listed, signatures)
        )
        assert payload is not None
        assert bool(surrogate_proto.unpack_spare(payload)) == (not lost)
    (state,) = hospitals.folder.glob("north/state/sums/*.pb")
    assert not surrogate_proto.unpack_state(state.read_bytes()).spare


def test_a_replayed_step_is_refused(hospitals: Hospitals) -> None:
    members = hospitals.keys()
    assert hospitals.status("north", "query.hello") == "state", (
        "keys are not made twice for one sum"
    )
    dealt = hospitals.shares(members)
    assert (
        hospitals.status(
            "north", "query.sum_shares", surrogate_proto.pack_members(members.values())
        )
        == "state"
    )
    hospitals.masked(dealt)
    fewer = [dealt[name] for name in NAMES[:4]]
    for again in (dealt.values(), fewer):
        assert (
            hospitals.status("north", "train", surrogate_proto.pack_delivery(again, "north"))
            == "state"
        )
    signatures = hospitals.signatures(NAMES)
    opened = surrogate_proto.pack_list(NAMES, signatures)
    assert hospitals.ask("north", "query.sum_open", opened)[0] is not None
    assert hospitals.status("north", "query.sum_open", opened) == "state"


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
    assert (
        hospitals.status("north", "query.sum_list", surrogate_proto.pack_list(NAMES[:3])) == "state"
    )
    for name in ("", "../../etc", secrets.token_hex(16)):
        hospitals.name = name
        assert hospitals.status("north", "query.sum_list", surrogate_proto.pack_list(NAMES)) in (
            "state",
            "surrogate",
        )


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
    dealt = hospitals.shares(hospitals.keys(NAMES[:4]), NAMES[:4])
    assert (
        hospitals.status("north", "train", surrogate_proto.pack_delivery(dealt.values(), "north"))
        == "policy"
    )
    assert "with other sites" in hospitals.log("north")


def test_under_privacy_the_difference_of_two_sums_is_paid_for(hospitals: Hospitals) -> None:
    hospitals.settings = PRIVATE | {"dropouts": 0.0}
    for name in NAMES:
        (hospitals.folder / name / "policy.toml").write_text(POLICY + "epsilon-total = 1.2\n")
    hospitals.up_to_masked()
    dealt = hospitals.shares(hospitals.keys(NAMES[:4]), NAMES[:4])
    assert (
        hospitals.status("north", "train", surrogate_proto.pack_delivery(dealt.values(), "north"))
        == "budget"
    )


@pytest.mark.parametrize(
    "settings", [{"secure-aggregation": False}, {"secure-aggregation": False, "method": "fedavg"}]
)
def test_a_site_that_requires_secure_aggregation_answers_nothing_else(
    hospitals: Hospitals, settings: dict[str, Any]
) -> None:
    for key in settings:
        hospitals.settings[key] = settings[key]
    for kind in ("train", "evaluate", "query.hello", "query.head"):
        assert hospitals.status("north", kind) in ("policy", "surrogate")
    assert hospitals.released("north") == 0


def test_a_site_that_requires_secure_aggregation_needs_the_keys_of_its_peers(
    hospitals: Hospitals,
) -> None:
    del hospitals.nodes["north"]["peers"]
    hospitals.name = secrets.token_hex(16)
    assert hospitals.status("north", "query.hello") == "policy"


def test_the_evaluation_of_the_model_shows_no_number_of_one_site(hospitals: Hospitals) -> None:
    from fedsurrogate.common.models.classifiers import Head
    from fedsurrogate.common.surrogates.surrogates import Header
    from fedsurrogate.common.wire.model_proto import pack_classifier

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
    hospitals.name = secrets.token_hex(16)
    assert hospitals.status("north", "query.hello") == "policy"


def test_a_local_floor_is_held(hospitals: Hospitals) -> None:
    hospitals.settings = dict(PRIVATE)
    (hospitals.folder / "north" / "policy.toml").write_text(POLICY + "local-epsilon = 1.5\n")
    members = hospitals.keys()
    listed = surrogate_proto.pack_members(members.values())
    assert hospitals.status("north", "query.sum_shares", listed) == "policy"
    assert hospitals.status("south", "query.sum_shares", listed) == "ok"
    assert "local-epsilon" in hospitals.log("north")


def test_the_ledger_names_the_trust_assumption(hospitals: Hospitals) -> None:
    hospitals.settings = dict(PRIVATE)
    hospitals.up_to_masked()
    (file,) = hospitals.folder.glob("north/state/ledgers/*.jsonl")
    entry = json.loads(file.read_text().splitlines()[-1])
    assert entry["mechanism"] == "secure-aggregation"
    assert entry["facts"]["local-epsilon"] > entry["epsilon"] == 1.0
    assert (entry["facts"]["members"], entry["facts"]["colluding"]) == (5, 0)
    assert entry["facts"]["keys-pinned"] == 1


def test_the_ledger_tells_whether_the_coordinator_could_make_up_the_other_sites(
    hospitals: Hospitals,
) -> None:
    """A site without peers accepts any keys; it is then protected by its own noise alone."""
    hospitals.settings = dict(PRIVATE)
    (hospitals.folder / "north" / "policy.toml").write_text(
        POLICY.replace("require-secure-aggregation = true", "")
    )
    del hospitals.nodes["north"]["peers"]
    own = hospitals.keys(["north"])
    context = context_of(parse_run(hospitals.settings), hospitals.name)
    invented = {name: Party(name, context=context) for name in NAMES[1:]}
    members = [own["north"], *(party.member for party in invented.values())]
    dealt = hospitals.shares({member.site: member for member in members}, ["north"])
    rules = rules_of(parse_run(hospitals.settings).settings, len(members))
    made_up = [party.share(members, rules) for party in invented.values()]
    hospitals.masked({each.site: each for each in [*dealt.values(), *made_up]}, ["north"])
    (file,) = hospitals.folder.glob("north/state/ledgers/*.jsonl")
    assert json.loads(file.read_text().splitlines()[-1])["facts"]["keys-pinned"] == 0


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
    (hospitals.folder / "north" / "policy.toml").write_text(
        POLICY.replace("smallest-colluding = 0.0", "")
    )
    hospitals.settings = settings | {"colluding": colluding}
    hospitals.name = secrets.token_hex(16)
    assert hospitals.status("north", "query.hello") == ("ok" if allowed else "policy")
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
    members = hospitals.keys()
    honest, other = b"one packed model", b"another"
    dealt = {}
    for site in NAMES:
        listed = surrogate_proto.pack_members(members.values(), surrogate_proto.map_digest(honest))
        payload, _ = hospitals.ask(site, "query.sum_shares", listed)
        assert payload is not None
        dealt[site] = surrogate_proto.unpack_dealt(payload)
    hospitals.settings |= {"classes": CLASSES}
    for public, reason in ((other, "agreed"), (b"", "agreed")):
        false = surrogate_proto.pack_delivery(dealt.values(), "south", public)
        assert hospitals.status("south", "train", false, round=1) == "seal"
        assert reason in hospitals.log("south")
    assert hospitals.released("south") == 0


def test_private_training_in_a_secure_aggregation_is_charged_as_without_one(
    hospitals: Hospitals,
) -> None:
    """DP-FedAvg: the guarantee is that of the site's own noise, and the difference of two sums
    still shows no update.
    """
    hospitals.settings = PRIVATE | {
        "method": "dp-fedavg",
        "fedavg.rounds": 3,
        "fedavg.sample-rate": 0.5,
        "dropouts": 0.0,
    }
    hospitals.settings["fedavg.noise"] = "site"
    for name in NAMES:
        (hospitals.folder / name / "policy.toml").write_text(
            "require-secure-aggregation = true\nsmallest-colluding = 0.0\n"
        )
    run = parse_run(hospitals.settings)
    model = Training.begin(run, tuple(CLASSES.split(",")), "f" * 16, 6).payload()
    for sites, allowed in ((NAMES, True), (NAMES[:4], False)):
        members = hospitals.keys(sites)
        listed = surrogate_proto.pack_members(members.values(), surrogate_proto.map_digest(model))
        dealt = [hospitals.ask(site, "query.sum_shares", listed)[0] for site in sites]
        delivered = [surrogate_proto.unpack_dealt(each) for each in dealt if each is not None]
        expected = "ok" if allowed else "policy"
        assert (
            hospitals.status(
                "north", "train", surrogate_proto.pack_delivery(delivered, "north", model), round=1
            )
            == expected
        )
    (file,) = hospitals.folder.glob("north/state/ledgers/*.jsonl")
    entries = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    assert run.mechanism is not None
    (event,) = run.mechanism.events
    assert [entry["mechanism"] for entry in entries] == ["dp-sgd"]
    for entry in entries:
        (charged,) = entry["events"]
        assert charged["noise_multiplier"] == pytest.approx(event.noise_multiplier)
        assert (charged["sample_rate"], charged["count"]) == (0.5, event.count / 3)


DISTRIBUTED_ROUNDS = PRIVATE | {"method": "dp-fedavg", "fedavg.rounds": 3, "dropouts": 0.0}


def next_round(hospitals: Hospitals, sites: Iterable[str] = NAMES, site: str = "north") -> str:
    """The status of one site's release in a new sum of gradients; each of these sums is a round."""
    model = Training.begin(
        parse_run(hospitals.settings), tuple(CLASSES.split(",")), "f" * 16, 6
    ).payload()
    members = hospitals.keys(sites)
    listed = surrogate_proto.pack_members(members.values(), surrogate_proto.map_digest(model))
    delivered = []
    for name in sites:
        payload, info = hospitals.ask(name, "query.sum_shares", listed)
        if payload is None:
            return f"{name}: {info['status']}"
        delivered.append(surrogate_proto.unpack_dealt(payload))
    return hospitals.status(
        site, "train", surrogate_proto.pack_delivery(delivered, site, model), round=1
    )


def test_every_round_of_distributed_noise_is_charged_and_the_ledger_names_what_it_rests_on(
    hospitals: Hospitals,
) -> None:
    """Any sites may be in a sum: each costs its share of the epsilon, and a fourth of three rounds
    does not pass.
    """
    hospitals.settings = dict(DISTRIBUTED_ROUNDS)
    for sites in (NAMES, NAMES[:4], NAMES):
        assert next_round(hospitals, sites) == "ok"
    (file,) = hospitals.folder.glob("north/state/ledgers/*.jsonl")
    entries = [json.loads(line) for line in file.read_text().splitlines()[1:]]
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
    assert next_round(hospitals) == "budget"


def test_the_local_floor_of_all_rounds_together_is_held_before_the_first(
    hospitals: Hospitals,
) -> None:
    hospitals.settings = dict(DISTRIBUTED_ROUNDS)
    run = parse_run(hospitals.settings)
    together = local_epsilon(
        run.settings.epsilon, run.mechanism, rules_of(run.settings, len(NAMES))
    )
    assert run.mechanism is not None
    # A single round would pass this floor.
    assert (
        gaussian_epsilon(run.mechanism.events[0].noise_multiplier / math.sqrt(len(NAMES)), 1e-5)
        < 0.7 * together
    )
    for limit, expected in ((together * 0.99, "north: policy"), (together * 1.01, "ok")):
        (hospitals.folder / "north" / "policy.toml").write_text(
            POLICY + f"local-epsilon = {limit}\n"
        )
        confirm(hospitals.nodes["north"])
        assert next_round(hospitals) == expected
    assert "local-epsilon" in hospitals.log("north")


def test_more_rounds_than_planned_do_not_pass_the_local_floor(hospitals: Hospitals) -> None:
    """The policy allows a larger epsilon than the run's, so the budget alone would allow twelve of
    its rounds.
    """
    hospitals.settings = dict(DISTRIBUTED_ROUNDS)
    for name in NAMES:
        limits = "epsilon-per-run = 2.0\nlocal-epsilon = 3.0\n"
        (hospitals.folder / name / "policy.toml").write_text(POLICY + limits)
    assert [next_round(hospitals) for _ in range(4)] == ["ok", "ok", "ok", "budget"]
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
    listed = surrogate_proto.pack_list(NAMES)
    assert hospitals.status("north", "query.sum_list", listed) == "state"
    assert "no state of the secure aggregation" in hospitals.log("north")
    signatures = hospitals.signatures(NAMES, NAMES[1:])
    payload, _ = hospitals.ask(
        "south", "query.sum_open", surrogate_proto.pack_list(NAMES, signatures)
    )
    assert payload is not None
    assert (
        hospitals.status("north", "query.sum_open", surrogate_proto.pack_list(NAMES, signatures))
        == "state"
    )


def test_different_projections_do_not_single_out_one_site(hospitals: Hospitals) -> None:
    """With zeros for all others, the sum of the projected features would be that of one site alone."""
    dealt = hospitals.shares(hospitals.keys())
    zeros = surrogate_proto.pack_delivery(
        dealt.values(), "south", surrogate_proto.pack_map(PublicMap(torch.zeros(6, 6)))
    )
    assert hospitals.status("south", "train", zeros) == "seal"
    assert hospitals.released("south") == 0
    assert "projection" in hospitals.log("south")
    # A site that agreed on another map than the others cannot open their shares.
    public = surrogate_proto.pack_map(PublicMap(centre=torch.ones(6)))
    members = hospitals.keys()
    dealt = hospitals.shares(members, NAMES[1:])
    listed = surrogate_proto.pack_members(members.values(), surrogate_proto.map_digest(public))
    payload, _ = hospitals.ask("north", "query.sum_shares", listed)
    assert payload is not None
    mixed = surrogate_proto.pack_delivery(
        [*dealt.values(), surrogate_proto.unpack_dealt(payload)], "north", public
    )
    assert hospitals.status("north", "train", mixed) == "seal"
    assert hospitals.released("north") == 0
