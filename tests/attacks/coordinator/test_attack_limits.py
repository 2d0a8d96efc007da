"""A coordinator asks a site, whose policy limits attacks, for the same records by another way."""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from fedsurrogate.client_app.governance.gate import open_ledger
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.wire.records import INFO, to_record
from tests.client_app.model_use.hospitals import hospital, rows_of_classes
from tests.grid import FAST, FIRST_NODE, InProcessGrid, events_of, run_federation

RUN: dict[str, Any] = FAST | {
    "backbone": "pixels",
    "image-size": 8,
    "fedpft.covariance": "spherical",
}
CHAIN = {"fedpft.topology": "chain"}
POLICY = (
    "without-dp = true\nsmallest-class = 1\nexact-sums-at-models = true\n"
    "exact-runs-may-differ = true\n"
)


class Site:
    """A hospital with three kinds of digits."""

    def __init__(self, home: Path) -> None:
        self.home, self.node, self.runs = home, hospital(home, "clinic", rows_of_classes()[:60]), 0
        open_ledger(parse_node_config(self.node))

    def ask(self, kind: str, settings: dict[str, Any], limit: str = "") -> object:
        """The status of the reply to a request of a new Flower run."""
        (self.home / "policy.toml").write_text(POLICY + limit)
        self.runs += 1
        grid = InProcessGrid([self.node], run_id=self.runs)
        grid.run_config = RUN | settings
        content = to_record(None, {"run": parse_run(grid.run_config).digest, "lineage": "x"})
        (reply,) = grid.pull_messages(grid.push_messages([Message(content, FIRST_NODE, kind)]))
        return reply.content.config_records[INFO]["status"]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize(
    "limit", ["largest-attack-auc = 0.99\n", "smallest-nearest-ratio = 0.01\n"]
)
def test_a_head_kept_from_a_chain_does_not_leave_where_attacks_are_limited(
    site: Site, limit: str
) -> None:
    assert site.ask("train", CHAIN) == "ok"
    assert site.ask("query.head", CHAIN) == "ok"
    assert site.ask("query.head", CHAIN, limit) == "policy"


def test_a_limit_on_distances_holds_for_mixtures_and_methods_without_means(site: Site) -> None:
    limit = "smallest-nearest-ratio = 1.0\n"
    assert site.ask("train", {"method": "fedpft"}) == "ok"
    assert site.ask("train", {"method": "fedpft"}, limit) == "policy"
    assert site.ask("train", {"method": "average"}, limit) == "policy"


@pytest.mark.parametrize("other", [{"test-fraction": 0.3}, {"seed": 1}, {"classes": "1,2"}])
def test_other_records_of_the_same_files_do_not_leave_where_attacks_are_limited(
    site: Site, other: dict[str, Any]
) -> None:
    """Two releases that pass would show, by their difference, the records that only one of them
    has.
    """
    limit, run = "smallest-nearest-ratio = 0.01\n", {"fedpft.covariance": "gram"}
    assert site.ask("train", run | other) == "ok"
    assert site.ask("train", run, limit) == "ok"
    assert site.ask("train", run, limit) == "ok"
    assert site.ask("train", run | other, limit) == "policy"


@pytest.mark.parametrize(("limit", "reported"), [("", 1), ("smallest-nearest-ratio = 0.01\n", 0)])
def test_no_exact_result_of_an_evaluation_leaves_where_attacks_are_limited(
    site: Site, limit: str, reported: int
) -> None:
    (site.home / "policy.toml").write_text(POLICY + limit)
    folder = run_federation(site.home, InProcessGrid([site.node]), **RUN)
    assert sum(event["event"] == "evaluated" for event in events_of(folder)) == reported
