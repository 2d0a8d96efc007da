"""Failures with records: a listed cause gives a release without records; any other holds them."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.audit.disclosure import check_run
from fedsurrogate.client_app.datasets.left_out import CAUSES, SYSTEM, AcceleratorError, cause_of
from fedsurrogate.client_app.diagnostics.site_checks import check_site
from fedsurrogate.client_app.features.site_features import SiteFeatures
from fedsurrogate.client_app.governance import release
from fedsurrogate.client_app.governance.release import FALLBACK, why_held, with_records
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.common.errors import DataError, LedgerError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.wire.records import to_record
from tests.attacks.privacy.neighbours import Record
from tests.attacks.privacy.visits import METHODS, PRIVATE, Hospital, close_logs

RUN = parse_run(PRIVATE | METHODS["sums spherical"])
RECORDS = (Record(), Record("b", grey=2))


@pytest.fixture(autouse=True)
def _logs() -> Any:
    yield
    close_logs()


def failing(error: BaseException) -> Callable[..., Any]:
    def load(*_: object, **__: object) -> Any:
        raise error

    return load


def ask(site: Hospital) -> None:
    """Request a release, in a new run."""
    site.run_id += 1
    asked = {"run": RUN.digest, "round": 1, "lineage": "abc"}
    site.ask("train", PRIVATE | METHODS["sums spherical"], to_record(None, asked))


def train(site: Hospital) -> dict[str, Any]:
    """The newest entry of its ledger after a release."""
    before = len(site.entries())
    ask(site)
    assert len(site.entries()) == before + 1
    return site.entries()[-1]


UNLISTED: tuple[BaseException, ...] = (
    ValueError("embedded null byte"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    SystemExit(1),
    RecursionError(),
    FileNotFoundError(errno.ENOENT, "No such file or directory"),
    PermissionError(errno.EACCES, "Permission denied"),
    DataError("a record without a label"),
    RuntimeError("a tensor of another size"),
)


@pytest.mark.parametrize("error", UNLISTED, ids=lambda each: type(each).__name__)
def test_a_failure_without_a_listed_cause_shows_once_and_holds_the_records_until_a_person_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    site = Hospital(tmp_path / "h", "folder", RECORDS)
    node = parse_node_config(site.node)
    assert FALLBACK not in train(site)["facts"]
    with monkeypatch.context() as patch:
        patch.setattr(release, "load_site", failing(error))
        assert check_run(RUN, node)["refusal"]
        assert why_held(node) == "", "a person sees a dry run, and nothing leaves"
        assert FALLBACK in train(site)["facts"]
    # The failure is over, but whether it comes again must not be visible.
    assert FALLBACK in train(site)["facts"]
    assert type(error).__name__ in why_held(node)
    assert "held since" in check_run(RUN, node)["refusal"]
    (data,) = (each for each in check_site(RUN, node) if each.what == "data")
    assert (data.state, "delete" in data.found) == ("FAIL", True)
    (file,) = (tmp_path / "h" / "state" / "held").iterdir()
    file.unlink()
    assert FALLBACK not in train(site)["facts"]


@pytest.mark.parametrize(
    "error",
    [
        *(kind("x") for kinds, _ in CAUSES for kind in kinds),
        *(OSError(number, "x") for number in sorted(SYSTEM)),
    ],
    ids=repr,
)
def test_a_listed_cause_gives_a_release_without_records_and_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    site = Hospital(tmp_path / "h", "folder", RECORDS)
    monkeypatch.setattr(release, "load_site", failing(error))
    assert FALLBACK in train(site)["facts"]
    assert why_held(parse_node_config(site.node)) == ""
    assert cause_of(error) in (tmp_path / "h" / "state" / "site.log").read_text()


def test_what_is_held_of_one_data_set_leaves_another_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (Hospital(tmp_path / name, "folder", RECORDS) for name in "ab")
    other.node["state-dir"] = one.node["state-dir"]
    monkeypatch.setattr(release, "load_site", failing(ValueError()))
    train(one)
    assert why_held(parse_node_config(one.node))
    assert not why_held(parse_node_config(other.node))


def test_the_records_are_held_before_a_release_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a kill after the release would let the failure show again."""
    site = Hospital(tmp_path / "h", "folder", RECORDS)
    held: list[str] = []

    def charged(*_: object, **__: object) -> None:
        held.append(why_held(parse_node_config(site.node)))
        raise LedgerError("not in this test")

    monkeypatch.setattr(release, "load_site", failing(ValueError("x")))
    monkeypatch.setattr("fedsurrogate.client_app.requests.charge_and_release", charged)
    ask(site)
    assert held
    assert all("ValueError: x" in each for each in held)


@pytest.mark.parametrize("failing_record", [False, True])
def test_records_are_not_used_where_a_failure_could_not_be_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_record: bool
) -> None:
    """Otherwise a failure would show in each run, at a site whose disk is full."""
    site = Hospital(tmp_path / "h", "folder", RECORDS)
    (tmp_path / "h" / "state" / "held").write_text("in the place of the folder")
    if failing_record:
        monkeypatch.setattr(release, "load_site", failing(ValueError("x")))
    for _ in range(2):
        ask(site)
    assert site.entries() == []
    log = (tmp_path / "h" / "state" / "site.log").read_text()
    assert log.count("could not be held") == 2


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from([*UNLISTED, MemoryError(), OSError(errno.ENOSPC, "x")]), st.booleans())
def test_work_that_fails_with_records_is_done_without(
    tmp_path: Path, error: BaseException, everywhere: bool
) -> None:
    """A failure that a site without records has as well is a public fact, and is reported."""
    home = tmp_path / "h"
    if not home.exists():
        Hospital(home, "folder", RECORDS)
    own = {"data": "imagefolder", "data-dir": str(home / "data"), "state-dir": str(home / "state")}
    node = parse_node_config(own | {"cache-dir": str(home / "cache")})

    def work(site: SiteFeatures, _: NodeConfig) -> int:
        if everywhere or len(site.train.labels):
            raise error
        return 0

    if everywhere:
        with pytest.raises(type(error)):
            with_records(RUN, node, 1.0, work)
    else:
        made, site, failure = with_records(RUN, node, 1.0, work)
        assert (made, len(site.train.labels)) == (0, 0)
        assert failure.text.startswith(type(error).__name__)
        assert failure.explained == (error not in UNLISTED)


def test_every_cause_is_one_of_all_records() -> None:
    """The list is closed: a cause that is added here must be one that no record can have."""
    assert {kind.__name__ for kinds, _ in CAUSES for kind in kinds} == {
        "NoRecordsError", "SourceError", "BackboneError", "PackageError", "MemoryError",
        torch.OutOfMemoryError.__name__, AcceleratorError.__name__,
    }  # fmt: skip
    assert not {errno.ENOENT, errno.EACCES, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP} & SYSTEM
