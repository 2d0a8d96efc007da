"""Which requests a site that only seals, or a run that only counts, has, of all kinds of requests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.governance.gate import (
    IN_CLEAR,
    check_counting,
    check_sealed_request,
    in_clear,
)
from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.requests import WORK
from fedsurrogate.common.errors import PolicyError
from fedsurrogate.common.run import Run, parse_run

COUNTS = {"counting.kind": "survey", "classes": "a,b", "sites": 9}
TRAINS = parse_run({"classes": "a,b"})
ALONE = parse_run(COUNTS)
SUMMED = parse_run(COUNTS | {"secure-aggregation": True})
# Kinds that are not thought of yet count as all others.
KINDS = st.sampled_from([*WORK, "another"])
ALONE_NEEDS = {"name", "surrogate"}
SUMMED_NEEDS = ALONE_NEEDS | {"identification", *(kind for kind in WORK if kind.startswith("sum-"))}


@settings(max_examples=60)
@given(st.sampled_from([TRAINS, ALONE, SUMMED]), KINDS)
def test_a_run_that_counts_makes_no_other_request_than_it_needs(run: Run, work: str) -> None:
    needs = {id(ALONE): ALONE_NEEDS, id(SUMMED): SUMMED_NEEDS}.get(id(run))
    if needs is None or work in needs:
        check_counting(run.settings.counting, run.settings.secure_aggregation, work)
    else:
        with pytest.raises(PolicyError, match=f"no request for '{work}'"):
            check_counting(run.settings.counting, run.settings.secure_aggregation, work)


@settings(max_examples=100)
@given(st.booleans(), st.booleans(), st.sampled_from(["", "peers.toml"]), KINDS)
def test_a_site_that_only_seals_answers_nothing_else(
    require: bool, sealed: bool, peers: str, work: str
) -> None:
    policy = Policy(require_seal=require)
    facts = {"fingerprint": "f", "dimension": 3, "simulated": False, "key": "k", "classes": "[]"}
    if require and not (sealed and peers and work in IN_CLEAR):
        with pytest.raises(PolicyError, match="require-seal = true"):
            check_sealed_request(policy, sealed, peers, work)
        return
    check_sealed_request(policy, sealed, peers, work)
    clear = in_clear(policy, work, facts)
    assert clear.items() <= facts.items()
    assert (clear == facts) == (not require)
    assert not require or "classes" not in clear
    # Only an identification says which backbone and key a site has.
    assert not require or work == "identification" or not {"fingerprint", "key"} & clear.keys()
