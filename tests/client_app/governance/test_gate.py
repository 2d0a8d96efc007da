"""The gate: the site decides which data may leave, and the coordinator receives only a code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.governance.budget import Budget, Release, check_budget
from fedsurrogate.client_app.governance.gate import Gate, open_gate
from fedsurrogate.client_app.governance.ledger import Ledger
from fedsurrogate.client_app.governance.policy import DEFAULT, Policy
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import BudgetError, ConfigError, PolicyError
from fedsurrogate.common.methods import METHODS
from fedsurrogate.common.privacy.accounting import gaussian_noise_multiplier
from fedsurrogate.common.privacy.mechanism import EXACT_COUNTS, HIDE_CLASSES, VARY_IN_SIZE
from fedsurrogate.common.run import Run, parse_run
from tests.client_app.governance.ledger_processes import release

PRIVATE: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5}


def gate(folder: Path, **policy: Any) -> Gate:
    return Gate(Policy(**policy), Ledger(folder, "data"))


def test_runs_share_the_total_of_a_data_set(tmp_path: Path) -> None:
    noise = gaussian_noise_multiplier(1.0, 1e-5)
    # Eleven runs of epsilon 1 compose to 3.83 at the same delta, not to 11.
    for number in range(11):
        spent = gate(tmp_path).let_out(release(noise, run=str(number)))
    assert 3.8 < spent < 3.9
    with pytest.raises(BudgetError, match="epsilon-total = 4"):
        gate(tmp_path).let_out(release(noise, run="11"))


def test_small_classes_stay_unless_noise_hides_them(tmp_path: Path) -> None:
    assert [
        gate(tmp_path).smallest_class(name) for name in ("none", "theorem-4.1", "sums", "dp-em")
    ] == [10, 10, 1, 1]


def test_every_simulation_begins_with_a_budget_of_its_own_and_hospital_data_never_does(
    tmp_path: Path,
) -> None:
    run = parse_run(PRIVATE)
    share = NodeConfig(partition_id=1, num_partitions=3, state_dir=str(tmp_path))
    own = NodeConfig(data="parquet", data_dir=str(tmp_path), state_dir=str(tmp_path))
    assert (
        open_gate(share, run.settings.data, "1").ledger.path
        != open_gate(share, run.settings.data, "2").ledger.path
    )
    assert (
        open_gate(own, run.settings.data, "1").ledger.path
        == open_gate(own, run.settings.data, "2").ledger.path
    )
    assert open_gate(own, run.settings.data, "1").policy == DEFAULT
    assert not (tmp_path / "ledgers").exists()


COUNTS: dict[str, Any] = {"counting.kind": "survey", "classes": "a,b"}
SUMMED: dict[str, Any] = {
    "secure-aggregation": True,
    "fedpft.covariance": "gram",
    "classes": "a,b",
    "sites": 9,
}
RUNS = [
    parse_run(each)
    for each in (
        {}, PRIVATE, {"method": "local"}, COUNTS, COUNTS | PRIVATE,
        {"fedpft.topology": "chain", "fedpft.seal": True, "classes": "a,b"},
        PRIVATE | {"epsilon": 0.999}, PRIVATE | {"epsilon": 1.001}, PRIVATE | {"delta": 2e-5},
        PRIVATE | {"fedpft.privacy": "theorem-4.1", "fedpft.covariance": "diag"},
        PRIVATE | {"backbone": "torchvision:mobilenet_v2"},
        SUMMED, SUMMED | {"colluding": 0.25}, SUMMED | {"colluding": 0.5},
        COUNTS | PRIVATE | {"secure-aggregation": True, "sites": 9},
        # At a model of the coordinator, with noise and without, in secure aggregation and not.
        {"method": "fedavg"}, {"method": "scaffold"}, {"fedpft.topology": "chain"},
        {"counting.kind": "evaluation", "counting.digest": "0" * 64, "classes": "a,b"},
        {"task": "survival", "horizon": 3.0, "time-head": "residuals"},
        SUMMED | {"method": "fedavg"}, SUMMED | {"method": "dp-fedavg"} | PRIVATE,
    )
]  # fmt: skip
POLICIES = st.builds(
    Policy,
    methods=st.sampled_from([("*",), ("fedpft",), ("average", "surv*"), ("local",)]),
    backbones=st.sampled_from([("*",), ("pixels",), ("torchvision:*", "digits")]),
    mechanisms=st.sampled_from([("*",), ("sums", "counts"), ("theorem-4.1",)]),
    without_dp=st.booleans(),
    epsilon_per_run=st.sampled_from([0.5, 1.0, 2.0]),
    delta=st.sampled_from([1e-6, 1e-5, 1e-3]),
    exact_counts=st.sampled_from([(), ("survey",), ("evaluation",)]),
    exact_sums_at_models=st.booleans(),
    require_seal=st.sampled_from([False, False, False, True]),
    require_secure_aggregation=st.sampled_from([False, False, False, True]),
    smallest_colluding=st.sampled_from([0.0, 0.25, 1 / 3, 0.3335, 0.34, 0.5]),
)


def forbidden(policy: Policy, run: Run, peers: str) -> Iterator[str]:
    """The rules that a run breaks."""
    own = run.settings
    if policy.require_seal and not (own.fedpft.seal and peers):
        yield "require-seal = true"
    if policy.require_secure_aggregation and not own.secure_aggregation:
        yield "require-secure-aggregation = true"
    if own.secure_aggregation and own.colluding < policy.smallest_colluding - 1e-3:
        yield "smallest-colluding = "
    names = {"methods": run.method.name, "backbones": own.backbone}
    if own.epsilon:
        names["mechanisms"] = run.plan.mechanism_name
    for key, name in names.items():
        if not any(fnmatchcase(name, pattern) for pattern in getattr(policy, key)):
            yield f"{key} = "
    if not own.epsilon:
        yield from forbidden_without_noise(policy, run, peers)
    if own.epsilon > policy.epsilon_per_run:
        yield "epsilon-per-run = "
    if own.delta > policy.delta:
        yield "delta = "


def forbidden_without_noise(policy: Policy, run: Run, peers: str) -> Iterator[str]:
    """The rules that a run without differential privacy breaks."""
    counts = run.plan.counts and run.method.name in policy.exact_counts
    if not policy.without_dp and not counts:
        yield "without-dp = false"
    relayed = run.settings.fedpft.seal and peers
    if run.plan.messages.receives and not (policy.exact_sums_at_models or counts or relayed):
        yield "exact-sums-at-models = false"


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(policy=POLICIES, run=st.sampled_from(RUNS), peers=st.sampled_from(["", "peers.toml"]))
def test_a_run_is_refused_exactly_where_it_breaks_a_rule(
    tmp_path_factory: pytest.TempPathFactory, policy: Policy, run: Run, peers: str
) -> None:
    gate = Gate(
        policy, Ledger(tmp_path_factory.getbasetemp() / "none", "data"), NodeConfig(peers=peers)
    )
    broken = list(forbidden(policy, run, peers))
    if not broken:
        gate.check_request(run)
        return
    with pytest.raises(PolicyError) as error:
        gate.check_request(run)
    assert any(str(error.value).startswith(rule) for rule in broken)


OPEN = Policy(
    without_dp=True, epsilon_per_run=2.0, smallest_colluding=0.0, exact_sums_at_models=True,
    mechanisms=("*",), delta=1e-3,
)  # fmt: skip


# By rule: a run, and the change of a policy that allows it, after which it is refused.
@pytest.mark.parametrize(
    ("run", "change", "words"),
    [
        ({}, {"require_seal": True}, "require-seal = true"),
        ({}, {"require_secure_aggregation": True}, "require-secure-aggregation = true: the run would show"),
        (SUMMED, {"smallest_colluding": 0.9}, "smallest-colluding = 0.9: the run is safe only"),
        ({"classes": "a,b"}, {"most_classes": 1}, "most-classes = 1: the run requests 2"),
        ({}, {"methods": ("average",)}, "methods = average: the run requests 'fedpft'"),
        ({}, {"backbones": ("timm:*",)}, "backbones = timm:*: the run requests 'pixels'"),
        (PRIVATE, {"mechanisms": ("dp-em",)}, "mechanisms = dp-em: the run requests 'sums'"),
        ({}, {"without_dp": False}, "without-dp = false: the run has no differential privacy"),
        (SUMMED | {"method": "fedavg"}, {"exact_sums_at_models": False}, "exact-sums-at-models = false"),
        (PRIVATE, {"epsilon_per_run": 0.5}, "epsilon-per-run = 0.5: the run requests epsilon = 1"),
        (PRIVATE, {"delta": 1e-6}, "delta = 1e-06: the run requests delta = 1e-05"),
    ],
)  # fmt: skip
def test_each_rule_alone_refuses_a_run_that_all_others_allow(
    tmp_path: Path, run: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    asked = parse_run(run)
    Gate(OPEN, Ledger(tmp_path / "none", "data")).check_request(asked)
    strict = OPEN.model_copy(update=change)
    with pytest.raises(PolicyError) as error:
        Gate(strict, Ledger(tmp_path / "none", "data")).check_request(asked)
    assert str(error.value).startswith(words)
    # What is no privacy mechanism is not compared with their names.
    Gate(
        OPEN.model_copy(update={"mechanisms": ("dp-em",)}), Ledger(tmp_path / "n", "d")
    ).check_request(parse_run({}))


ASKED: dict[str, dict[str, Any]] = {
    "classes": {},
    "chain": {"fedpft.topology": "chain"},
    "sealed chain": {"fedpft.topology": "chain", "fedpft.seal": True},
    "labels": {"task": "multilabel", "label-columns": "edema"},
    "number": {"task": "regression", "value-columns": "age", "target-range": "0,100"},
    "residuals": {"task": "survival", "horizon": 3.0, "time-head": "residuals"},
    "evaluation": {"counting.kind": "evaluation", "counting.digest": "0" * 64},
    "survey": {"counting.kind": "survey"},
}


@pytest.mark.parametrize("target", ASKED)
def test_no_run_without_noise_answers_to_a_model_unless_the_policy_says_so(
    tmp_path: Path, target: str
) -> None:
    """Whatever method of the registry it has, and whatever that calls what it sends. A sealed chain message is
    of another hospital only where this one knows the keys of the others.
    """
    strict, found = OPEN.model_copy(update={"exact_sums_at_models": False}), []
    for name in METHODS:
        classes = "a,b" if "task" not in ASKED[target] else ""
        try:
            run = parse_run({"method": name, "classes": classes} | ASKED[target])
        except ConfigError:
            continue
        found.append(bool(run.plan.messages.receives))
        Gate(OPEN, Ledger(tmp_path / "none", "data")).check_request(run)
        for peers in ("", "peers.toml"):
            refused = found[-1] and not (run.settings.fedpft.seal and peers)
            with pytest.raises(PolicyError, match="exact-sums-at") if refused else nullcontext():
                Gate(
                    strict, Ledger(tmp_path / "none", "data"), NodeConfig(peers=peers)
                ).check_request(run)
    assert any(found) or target == "survey"


MIB = 2**20
RELEASES = st.builds(
    lambda private, mechanism, size, sealed: replace(
        release() if private else release(0.0), mechanism=mechanism, bytes=size, sealed=sealed
    ),
    private=st.booleans(),
    mechanism=st.sampled_from(["sums", "none", "dp-em", "dp-sgd", EXACT_COUNTS]),
    size=st.sampled_from([10, MIB, MIB + 1]),
    sealed=st.booleans(),
)


@settings(max_examples=30)
@given(policy=POLICIES, sent=RELEASES)
def test_a_release_leaves_exactly_where_no_rule_forbids_it(
    tmp_path_factory: pytest.TempPathFactory, policy: Policy, sent: Release
) -> None:
    policy = policy.model_copy(update={"largest_payload_mib": 1.0, "epsilon_total": 4.0})
    gate = Gate(policy, Ledger(tmp_path_factory.mktemp("ledger"), "data"))
    large, open_ = sent.bytes > MIB, policy.require_seal and not sent.sealed
    bare = not sent.events and not policy.without_dp and sent.mechanism != EXACT_COUNTS
    shaped = sent.mechanism in VARY_IN_SIZE
    if large or (not shaped and (open_ or bare)):
        with pytest.raises(PolicyError):
            gate.let_out(sent)
        # A size that noise has shaped decides only what is paid for.
        assert len(gate.ledger.entries()) == shaped
    else:
        spent = gate.let_out(sent)
        assert len(gate.ledger.entries()) == 1
        assert spent == gate.spent()
    if not (large or open_ or bare):
        before = gate.ledger.entries()
        assert gate.check(sent) >= gate.spent()
        assert gate.ledger.entries() == before, "a check charges nothing"
    else:
        with pytest.raises(PolicyError):
            gate.check(sent)


@given(policy=POLICIES, smallest=st.integers(1, 30), cell=st.integers(1, 30), hidden=st.booleans())
@settings(max_examples=30)
def test_what_a_site_limits_is_what_its_policy_says(
    tmp_path_factory: pytest.TempPathFactory, policy: Policy, smallest: int, cell: int, hidden: bool
) -> None:
    policy = policy.model_copy(
        update={"smallest_class": smallest, "smallest_cell": cell, "most_classes": 77}
    )
    gate = Gate(policy, Ledger(tmp_path_factory.getbasetemp() / "none", "data"))
    node = NodeConfig(max_components=3, max_rank=5)
    for mechanism in ("none", "theorem-4.1", *HIDE_CLASSES):
        found = gate.limits(mechanism, node)
        fewest = 1 if mechanism in HIDE_CLASSES else smallest
        assert asdict(found) == {
            "components": 3, "rank": 5, "smallest_class": fewest, "most_classes": 77,
            "smallest_cell": cell, "show_evaluation": policy.show_evaluation,
        }  # fmt: skip
    may = policy.without_dp and not hidden and not policy.require_seal
    assert gate.exact_numbers_may_leave(hidden) == may


@settings(max_examples=60)
@given(
    before=st.lists(
        st.tuples(st.sampled_from(["record", "bag", "patient"]), st.sampled_from([0.0, 1000.0])),
        max_size=4,
    ),
    unit=st.sampled_from(["record", "bag", "patient"]),
    private=st.booleans(),
    after_open=st.booleans(),
)
def test_a_promise_to_a_unit_follows_promises_to_this_unit_only(
    before: list[tuple[str, float]], unit: str, private: bool, after_open: bool
) -> None:
    entries = [
        {"kind": "release", **asdict(replace(release(noise, run=str(at)), unit=each))}
        for at, (each, noise) in enumerate(before)
    ]
    sent = replace(release(1000.0 if private else 0.0, run="new"), unit=unit)
    open_ = any(not noise for _, noise in before) and not after_open
    others = any(each != unit and noise for each, noise in before)
    if private and (open_ or others):
        with pytest.raises(BudgetError):
            check_budget(entries, sent, Budget(4.0, 1e-5, 1.0, after_open))
    else:
        assert check_budget(entries, sent, Budget(4.0, 1e-5, 1.0, after_open)) < 4.0


@pytest.mark.parametrize("share", [0.0, 0.25, 1 / 3, 0.5])
@pytest.mark.parametrize("more", [-0.5, -0.002, 0.0, 0.0009, 0.0011, 0.002, 0.4])
def test_a_rounded_share_of_sites_is_taken_for_the_share_that_a_policy_asks_for(
    tmp_path: Path, share: float, more: float
) -> None:
    policy = Policy(smallest_colluding=min(max(share + more, 0.0), 0.9), without_dp=True)
    gate = Gate(policy, Ledger(tmp_path, "data"))
    run = parse_run(SUMMED | {"colluding": share})
    if more > 1e-3:
        with pytest.raises(PolicyError, match="smallest-colluding"):
            gate.check_request(run)
    else:
        gate.check_request(run)
