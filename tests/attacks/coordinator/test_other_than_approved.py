"""A coordinator has a run approved, and starts another one: the site's gate refuses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance.gate import Gate, open_gate
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.common.errors import ConfigError, PolicyError, RunError, SurrogateError
from fedsurrogate.common.methods.fedpft import form_of
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.security.documents import Proposal, SignedProposal
from fedsurrogate.common.security.sealing import public_key
from fedsurrogate.common.surrogates.mixtures import PublicMap
from fedsurrogate.common.wire.surrogate_proto import pack_map
from fedsurrogate.strategies.pooling.class_means import with_digest
from tests.common.test_document import bases
from tests.grid import FAST, run_federation, sites

KEY = b"k" * 32
THIN = {"method": "fedpft", "max-payload-mib": 1}
# With features of this many columns.
DIMENSION = 1280


def approved(content: dict[str, Any]) -> str:
    """The setting `approval` of a run that a person has signed."""
    return SignedProposal(Proposal.fresh("run", content, "a test", 30)).sign(KEY).setting()


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """The gate of a hospital that answers signed runs only."""
    rules = "require-approval = 1\nwithout-dp = true\nmechanisms = ['*']\n"
    (tmp_path / "policy.toml").write_text(rules)
    (tmp_path / "approvers.toml").write_text(f'"Ada" = "{public_key(KEY).hex()}"\n')
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.safetensors").touch()
    node = {"site": "north", "data": "safetensors", "policy": str(tmp_path / "policy.toml")}
    for name in ("data", "state", "check-log"):
        node[f"{name}-dir"] = str(tmp_path / name)
    own = open_gate(parse_node_config(node), "safetensors", "7")
    own.ledger.open()
    return own


def started(approval: str, content: dict[str, Any]) -> Run:
    return parse_run({**content, "approval": approval})


def test_a_run_that_sends_the_whole_second_moment_is_not_the_one_of_rank_64_that_was_signed(
    gate: Gate,
) -> None:
    signed = approved(THIN)
    proposed, other = started(signed, THIN), started(signed, {**THIN, "max-payload-mib": 256})
    forms = [form_of(run.settings, DIMENSION) for run in (proposed, other)]
    found = [(form.family, form.rank, form.bits) for form in forms]
    assert found == [("lowrank", 64, 8), ("gram", 16, 16)]
    gate.check_request(proposed)
    with pytest.raises(PolicyError, match="allows something else"):
        gate.check_request(other)


CLASSES = ",".join(map(str, range(10)))
PRIVATE: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5, "classes": CLASSES}
SUM: dict[str, Any] = {
    "secure-aggregation": True,
    "classes": CLASSES,
    "colluding": 0.0,
    "dropouts": 0.0,
}
# A head in few dimensions, in few rounds.
ROUNDS: dict[str, Any] = PRIVATE | {
    **{"head.solver": "logistic", "epsilon": 0.5, "features.dimensions": 2, "classes": "0,1"},
}
# Every way in which a site receives a public map or centre.
MAPPED: dict[str, dict[str, Any]] = {
    "sum": SUM | {"fedpft.covariance": "gram", "features.projection": "map"},
    "private sum": SUM | PRIVATE | {"fedpft.covariance": "gram", "features.projection": "map"},
    "rounds": SUM | ROUNDS | {"features.projection": "map"},
    "rounds of sites": ROUNDS | {"fedpft.public": "public"},
    "centre": PRIVATE | {"fedpft.covariance": "diag", "fedpft.public": "public"},
}


def write_files(folder: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    save_file({"projection": torch.randn(20, 64, generator=generator)}, folder / "map")
    save_file({"x": torch.rand(40, 64, generator=generator)}, folder / "public")


@pytest.mark.parametrize("name", MAPPED)
def test_sites_take_the_public_map_that_was_signed_and_no_other(tmp_path: Path, name: str) -> None:
    files = {
        key: str(tmp_path / value) if key in ("features.projection", "fedpft.public") else value
        for key, value in MAPPED[name].items()
    }
    write_files(tmp_path, 0)
    asked = with_digest({**FAST, **files})
    assert len(str(asked["features.digest"])) == 128
    run_federation(tmp_path / "one", sites(3), **asked)
    write_files(tmp_path, 1)
    assert with_digest({**FAST, **files})["features.digest"] != asked["features.digest"]
    with pytest.raises(RunError):
        run_federation(tmp_path / "two", sites(3), **asked)


def test_no_sum_of_any_method_and_target_takes_another_map() -> None:
    """Also of a new method or target: the check is the first that its function does."""
    tried = 0
    for base in bases():
        try:
            run = parse_run({**base, "features.projection": "map", "features.digest": "0" * 128})
        except ConfigError:
            continue
        if not run.settings.secure_aggregation or run.plan.kind != "one-shot" or run.plan.counts:
            continue
        train = LabelledFeatures(torch.zeros(3, 6), torch.zeros(3, dtype=torch.int64))
        found = SiteFeatures(train, train, run.settings.classes, "f", 0.0, simulated=False)
        payload = pack_map(PublicMap(torch.eye(3, 6)))
        job = Job(run, NodeConfig(site="north"), "north", found, payload=payload)
        with pytest.raises(SurrogateError, match=r"another content than features\.digest"):
            load(run.plan.combination.site_sums)(job)
        tried += 1
    assert tried > 3


def test_a_map_that_nobody_has_signed_is_refused_where_people_sign(gate: Gate) -> None:
    content = SUM | PRIVATE | {"features.projection": "map", "colluding": 0.4, "epsilon": 1.0}
    with pytest.raises(PolicyError, match="have not signed which public map"):
        gate.check_request(started(approved(content), content))
    for digest in ("5e" * 64, "e5" * 64):
        named = content | {"features.digest": digest}
        gate.check_request(started(approved(named), named))
        with pytest.raises(PolicyError, match="allows something else"):
            gate.check_request(started(approved(named), named | {"features.digest": "0" * 128}))
