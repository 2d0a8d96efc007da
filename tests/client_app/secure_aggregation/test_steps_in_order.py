"""Each step of secure aggregation at a site, call by call: what is checked before a secret is used, what is
written before anything leaves, and of what numbers a masked vector is made.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedsurrogate.client_app import secure_aggregation
from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.governance.work_limits import SiteLimits
from fedsurrogate.client_app.methods.job import Job, SiteRequest, SiteStatistic
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.client_app.secure_aggregation import (
    masked_sum,
    sum_keys,
    sum_list,
    sum_open,
    sum_shares,
)
from fedsurrogate.common.errors import SealError
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.secure_aggregation.rules import local_epsilon, numbers_of, rules_of
from tests.client_app.requested import Calls, Note, calls

NAME, SITE, FLOWER = "0" * 32, "north", "7"
SUM: dict[str, Any] = {
    "secure-aggregation": True,
    "classes": "a,b",
    "fedpft.covariance": "gram",
    "colluding": 0.4,
}
EXACT, PRIVATE = parse_run(SUM), parse_run(SUM | {"epsilon": 4.0, "delta": 1e-5})
MEMBERS = [
    SimpleNamespace(site=name, public=name.encode()) for name in ("north", "south", "west", "east")
]
__all__ = ["calls"]


@dataclass(frozen=True)
class After:
    """The state after a step."""

    shares: tuple[str, ...]
    by_name: dict[str, Any]
    spare: bytes = b""


def instead(calls: Calls, module: Any, **results: Any) -> None:
    for name, result in results.items():
        calls.instead(name, result, module if hasattr(module, name) else module.surrogate_proto)


def step(
    calls: Calls, run: Run, folder: Path, payload: bytes | None, **node: Any
) -> tuple[SiteRequest, Policy]:
    own = NodeConfig(site=SITE, state_dir=str(folder), **node)
    policy = Policy(smallest_sum=2)
    instead(calls, secure_aggregation, private_key=b"secret", public_key=b"public")
    info = {"run": run.digest, "sum": NAME}
    return SiteRequest(run, own, SITE, payload=payload, info=info), policy


def test_keys_are_made_after_the_policy_has_allowed_the_run_and_stored_before_they_leave(
    calls: Calls, tmp_path: Path
) -> None:
    asked, policy = step(calls, EXACT, tmp_path, None)
    instead(
        calls,
        secure_aggregation,
        _check_peers=None,
        begin=("state", "member"),
        context_of="context",
        pack_member=b"\x01\xfe",
    )
    instead(calls, secure_aggregation, create_state=None)
    assert sum_keys(asked, policy) == "01fe"
    assert calls.made == [
        ("_check_peers", policy, asked.node),
        ("private_key", asked.node, SITE),
        ("context_of", EXACT, NAME),
        ("begin", SITE, b"secret", "context"),
        ("create_state", asked.node, policy, NAME, "state"),
        ("pack_member", "member"),
    ]


@pytest.mark.parametrize("run", [EXACT, PRIVATE], ids=["exact", "private"])
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("payload", [None, b"list"])
def test_shares_are_dealt_after_every_check_of_the_key_list(
    calls: Calls, tmp_path: Path, run: Run, pinned: bool, payload: bytes | None
) -> None:
    asked, policy = step(calls, run, tmp_path, payload, peers="~/peers.toml" if pinned else "")
    instead(calls, secure_aggregation, unpack_members=(MEMBERS, b"map"), read_keys={"south": b"s"}, share=("after", "dealt"),
                  pack_dealt=b"out", _check_colluding=None, _check_local=None, _check_together=None)  # fmt: skip
    instead(calls, secure_aggregation, read_state="state", write_state=None)
    assert sum_shares(asked, policy) == (b"out", {"pinned": pinned})
    rules = rules_of(run.settings, 4)
    names = None if run is PRIVATE else ["north", "south", "west", "east"]
    keys = [("read_keys", Path("~/peers.toml").expanduser())] if pinned else []
    assert calls.made == [
        ("read_state", run, asked.node, NAME, SITE),
        ("unpack_members", payload or b""),
        ("_check_colluding", policy, rules),
        ("_check_local", policy, run, rules),
        ("_check_together", policy, run.target, names, rules),
        *keys,
        ("private_key", asked.node, SITE),
        ("public_key", b"secret"),
        (
            "share",
            "state",
            MEMBERS,
            rules,
            b"public",
            2,
            {"south": b"s"} if pinned else None,
            b"map",
        ),
        ("write_state", asked.node, NAME, "after"),
        ("pack_dealt", "dealt"),
    ]


@pytest.mark.parametrize("run", [EXACT, PRIVATE], ids=["exact", "private"])
@pytest.mark.parametrize("applies", [False, True])
def test_a_list_is_signed_and_a_sum_opened_only_for_the_sites_that_may_be_in_it(
    calls: Calls, tmp_path: Path, run: Run, applies: bool
) -> None:
    asked, policy = step(calls, run, tmp_path, b"list")
    state = SimpleNamespace(members=MEMBERS)
    after = SimpleNamespace(summed=("north", "south"), summed_keys=[b"n", b"s"])
    instead(calls, secure_aggregation, unpack_list=("summed", "signatures"), agree=(after, b"signature"),
                  _check_together=None,
                  reveal=(after, "revealed"), pack_revealed=b"out", spare_seed=b"spare")  # fmt: skip
    instead(calls, secure_aggregation, read_state=state, write_state=None)
    instead(calls, secure_aggregation, applies=applies, check_summed=None, settle=None)
    rules = rules_of(run.settings, 4)
    begun: list[Note] = [
        ("read_state", run, asked.node, NAME, SITE),
        ("unpack_list", b"list"),
    ]
    rule: Note = ("applies", run.plan.mechanism_name, asked.node)
    assert sum_list(asked, policy) == (b"signature", {})
    names = None if run is PRIVATE else ("north", "south")
    assert calls.made == [
        *begun,
        ("private_key", asked.node, SITE),
        ("agree", state, "summed", rules, b"secret"),
        ("_check_together", policy, run.target, names, rules),
        rule,
        *([("check_summed", asked.node, NAME, [b"n", b"s"])] if applies else []),
        ("write_state", asked.node, NAME, after),
    ]
    calls.made.clear()
    assert sum_open(asked, policy) == (b"out", {})
    assert calls.made == [
        *begun,
        ("reveal", state, "signatures", rules),
        rule,
        *([("settle", asked.node, NAME, [b"n", b"s"])] if applies else []),
        ("write_state", asked.node, NAME, after),
        ("spare_seed", state),
        ("pack_revealed", "revealed", b"spare"),
    ]


SHAPES = {"counts": (2,), "sums": (2, 3), "squares": (6,)}


def masked_by(
    calls: Calls,
    run: Run,
    folder: Path,
    *,
    peers: str = "",
    why: str = "",
    far: bool = False,
    digest: bytes = b"digest",
) -> Any:
    """The output of a site whose sums are given, and what it was made of."""
    x, y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0])
    part = LabelledFeatures(x, y)
    site = SiteFeatures(part, part, ("a", "b"), "f", 0.0, simulated=False)
    node = NodeConfig(
        site=SITE, data="imagefolder", data_dir=str(folder), state_dir=str(folder), peers=peers
    )
    info = {"sum": NAME, "round": 1}
    asked = Job(run, node, SITE, site, SiteLimits(smallest_class=2), payload=b"delivery", info=info)
    values = {
        name: torch.arange(float(np.prod(shape))).reshape(shape).double()
        for name, shape in SHAPES.items()
    }
    if far:
        values["sums"] = values["sums"] + 1e12
    claim = run.mechanism_for("record")

    def site_sums(job: Job) -> Any:
        calls.made.append(("site_sums", job.payload))
        return SiteStatistic(values, claim, keep={Path("kept"): b"k"})

    state = SimpleNamespace(members=MEMBERS, public=b"digest", at=calls.noting("at"))
    after = After(("north", "west"), {each.site: each for each in MEMBERS})
    instead(calls, secure_aggregation, unpack_delivery=("delivered", b"map"), map_digest=digest, load=site_sums,
                  mask=(after, b"masked"), pack_masked=b"out", pack_state=b"state")  # fmt: skip
    instead(calls, secure_aggregation, read_state=state)
    instead(calls, secure_aggregation, settings_in={"numbers": "s"}, records_in={"training": "r"}, why_changed=why,
                  fixing=nullcontext())  # fmt: skip
    noise = {
        name: np.full(int(np.prod(shape)), 7, dtype=np.int64) for name, shape in SHAPES.items()
    }
    instead(calls, secure_aggregation, noise_of_site=noise)
    return masked_sum(asked), asked, values, claim, after, state


@pytest.mark.parametrize("run", [EXACT, PRIVATE], ids=["exact", "private"])
@pytest.mark.parametrize("peers", ["", "peers.toml"])
@pytest.mark.parametrize("why", ["", "changed"])
@pytest.mark.parametrize("far", [False, True])
def test_a_masked_vector_is_the_sums_as_whole_numbers_with_noise_or_random(
    calls: Calls, tmp_path: Path, run: Run, peers: str, why: str, far: bool
) -> None:
    made, asked, values, claim, after, state = masked_by(
        calls, run, tmp_path, peers=peers, why=why, far=far
    )
    found = {each[0]: each[1:] for each in calls.made}
    assert [each[0] for each in calls.made][:4] == [
        "read_state",
        "at",
        "unpack_delivery",
        "map_digest",
    ]
    assert found["read_state"] == (run, asked.node, NAME, SITE)
    assert found["at"] == ("shares",)
    assert found["unpack_delivery"] == (b"delivery",)
    assert found["site_sums"] == (b"map",)
    numbers, rules = numbers_of(run.plan, run.settings, 4, 1), rules_of(run.settings, 4)
    withheld = run is EXACT and bool(why or far)
    given_state, delivered, given_rules, vector = found["mask"]
    assert (given_state, delivered, given_rules) == (state, "delivered", rules)
    noise = 7 if run is PRIVATE else 0
    whole = [numbers[name].encode(values[name]).ravel() + noise for name in SHAPES]
    wanted = np.concatenate([*whole, *([[0]] if run is EXACT else [])])
    assert vector.shape == wanted.shape
    assert (withheld and vector[-1] != 0) or np.array_equal(vector, wanted)
    facts = {
        "members": 4, "colluding": rules.colluding, "fewest-in-the-sum": rules.least,
        "keys-pinned": float(bool(peers)),
    }  # fmt: skip
    if run is PRIVATE:
        facts["local-epsilon"] = local_epsilon(4.0, run.mechanism, rules)
        asked_claim, asked_numbers, shapes, noise_rules, seed = found["noise_of_site"]
        assert (asked_claim, asked_numbers, noise_rules) == (claim, numbers, rules)
        assert shapes == SHAPES
        assert len(seed) == 32
    if withheld:
        facts["withheld"] = 1.0
    assert made.facts == facts
    assert (made.payload, made.claim, made.must_keep) == (b"out", claim, True)
    file = asked.node.state / "sums" / f"{NAME}-{SITE}.pb"
    assert made.keep == {Path("kept"): b"k", file: b"state"}
    (kept,) = found["pack_state"]
    assert (kept.shares, kept.spare) == (
        after.shares,
        found["noise_of_site"][4] if run is PRIVATE else b"",
    )
    assert found["pack_masked"][1:] == (b"masked", claim)
    with made.guard():
        pass
    if run is PRIVATE:
        assert made.guard is nullcontext
        assert "records_in" not in found
        return
    found = {each[0]: each[1:] for each in calls.made}
    assert found["settings_in"] == (run, asked.limits, b"digest")
    assert found["records_in"] == (asked.found, "label", run.settings.counting, asked.limits)
    records = {} if withheld else {"training": "r"}
    assert found["fixing"] == (asked.node, NAME, [b"north", b"west"], {"numbers": "s"}, records)
    if not far:
        assert found["why_changed"] == (asked.node, {"numbers": "s"}, {"training": "r"})


def test_sums_that_have_their_noise_already_get_no_distributed_noise(
    calls: Calls, tmp_path: Path
) -> None:
    claim = PRIVATE.mechanism_for("record")
    assert claim is not None
    own = replace(claim, name="dp-sgd")
    calls.patch.setattr(Run, "mechanism_for", lambda run, unit: own)
    made, _, values, _, _, _ = masked_by(calls, PRIVATE, tmp_path)
    assert "noise_of_site" not in calls.names()
    assert "local-epsilon" not in made.facts
    numbers = numbers_of(PRIVATE.plan, PRIVATE.settings, 4, 1)
    whole = np.concatenate([numbers[name].encode(values[name]).ravel() for name in SHAPES])
    assert np.array_equal(calls.of("mask")[3], whole)


def test_a_model_that_not_all_sites_have_agreed_on_is_refused_before_any_record_is_used(
    calls: Calls, tmp_path: Path
) -> None:
    with pytest.raises(SealError, match="is not what all sites have agreed on"):
        masked_by(calls, EXACT, tmp_path, digest=b"other")
    assert "site_sums" not in calls.names()
