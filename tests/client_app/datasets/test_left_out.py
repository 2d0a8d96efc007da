"""Unusable records in a private run: they are left out, or no record is used; only the hospital
sees which.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.client_app.audit.disclosure import check_run
from fedsurrogate.client_app.datasets.dataset import DataSource, load
from fedsurrogate.client_app.diagnostics.site_checks import check_site
from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures, load_site
from fedsurrogate.client_app.governance import release
from fedsurrogate.client_app.governance.policy import policy_of
from fedsurrogate.client_app.governance.release import FALLBACK, with_records, without_records
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.client_app.offline.answers import release_to
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.documents import Request
from fedsurrogate.common.security.sealing import new_key, public_key
from tests.attacks.privacy.neighbours import FAULTS, Data, Record
from tests.attacks.privacy.visits import METHODS, PRIVATE, Hospital, close_logs

RUN = parse_run(PRIVATE | METHODS["sums spherical"])
# Faults that make a record unusable; an image with several frames can be used if the site's
# settings say how.
BAD = [(kind, fault) for kind, faults in FAULTS.items() for fault in faults if fault]


@pytest.fixture(autouse=True)
def _logs() -> Any:
    yield
    close_logs()


def hospital(folder: Path, kind: str, records: Data, **node: Any) -> NodeConfig:
    return parse_node_config(Hospital(folder, kind, records, **node).node)


@pytest.mark.parametrize(("kind", "fault"), BAD)
def test_a_record_that_cannot_be_used_is_left_out_alone(
    tmp_path: Path, kind: str, fault: str
) -> None:
    records = (
        Record(),
        Record("b", "2", grey=2),
        Record("a", "3", grey=3, fault=fault),
        Record("b", "4", grey=4),
    )
    node = hospital(tmp_path / "h", kind, records)
    found = load_site(RUN, node, policy_of(node).cache_mib)
    assert sorted(found.train.labels.tolist()) == [0, 1, 1]
    assert found.train.units is None or len(set(found.train.units)) == 3


def test_in_a_private_run_an_id_is_one_patient_whoever_issued_it(tmp_path: Path) -> None:
    """Otherwise another patient's file would decide the patient of a file without an issuer, or
    whether it is used.
    """
    from pydicom import dcmread

    records = tuple(Record("a", "7", grey=grey) for grey in (1, 2, 3))
    node = hospital(tmp_path / "h", "dicom", records)
    for file, issuer in zip(
        sorted(Path(node.data_dir).rglob("*.dcm")), ("", "east", "west"), strict=True
    ):
        dataset = dcmread(file)
        dataset.IssuerOfPatientID = issuer
        dataset.save_as(file)
    assert load(DataSource.of_node(node, RUN), 0).patients == ("0", "0", "0")


def test_images_of_any_size_need_a_size_in_a_private_run(tmp_path: Path) -> None:
    settings = {key: value for key, value in PRIVATE.items() if key != "image-size"}
    node = hospital(tmp_path / "h", "folder", (Record(),))
    for backbone in ("pixels", "pixels:rgb"):
        run = parse_run(settings | {"backbone": backbone})
        with pytest.raises(ConfigError, match="set image-size"):
            without_records(run, node)
        for kind in ("imagefolder", "dicom", "parquet"):
            with pytest.raises(ConfigError, match="set image-size"):
                parse_run(settings | {"backbone": backbone, "data": kind})
    states = {each.what: each.state for each in check_site(parse_run(settings), node)}
    assert states["backbone"] == "FAIL"


def broken(*_: object, **__: object) -> Any:
    raise ValueError("a decoder gave up")


def test_what_failed_is_shown_to_the_hospital_and_in_its_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Hospital(tmp_path / "h", "folder", (Record(), Record("b", grey=2)))
    node = parse_node_config(site.node)
    assert check_run(RUN, node)["refusal"] is None
    assert site.visit(METHODS["sums spherical"]).charged
    assert not [
        each for each in check_site(RUN, node) if each.what == "ledger" and each.state != "PASS"
    ]
    monkeypatch.setattr(release, "load_site", broken)
    found = check_run(RUN, node)
    assert "THE RECORDS CANNOT BE USED" in found["refusal"]
    assert found["failure"] == "ValueError: a decoder gave up"
    assert not found["may_leave"]
    coordinator, request = new_key(), tmp_path / "request.json"
    request.write_bytes(
        Request.fresh(PRIVATE | METHODS["sums spherical"], None).signed(coordinator)
    )
    node = node.model_copy(update={"coordinator_key": public_key(coordinator).hex()})
    with pytest.raises(DataError, match="nothing was charged"):
        release_to(tmp_path / "out.bundle", request, node)
    before = len(site.entries())
    assert site.visit(METHODS["chain"]).charged
    assert [FALLBACK in entry["facts"] for entry in site.entries()] == [False] * before + [True]
    assert "a decoder gave up" in (tmp_path / "h" / "state" / "site.log").read_text()
    (ledger,) = (each for each in check_site(RUN, node) if each.what == "ledger")
    assert (ledger.state, "1 of them WITHOUT ANY RECORD" in ledger.found) == ("WARN", True)


def test_the_doctor_warns_of_records_that_are_left_out(tmp_path: Path) -> None:
    node = hospital(
        tmp_path / "h", "table", (Record(), Record("b", "2"), Record(fault="no patient"))
    )
    data = next(each for each in check_site(RUN, node) if each.what == "data")
    assert data.state == "WARN"
    assert "1 of 3 records have no patient ID" in data.found


def test_a_failure_that_a_site_without_records_has_as_well_is_reported(tmp_path: Path) -> None:
    node = hospital(tmp_path / "h", "folder", (Record(),))

    def work(found: SiteFeatures, _: NodeConfig) -> None:
        raise ConfigError(f"{len(found.train.labels)} records")

    with pytest.raises(ConfigError, match="0 records"):
        with_records(RUN, node, 1.0, work)


def test_a_site_that_gets_sigterm_ends_and_releases_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a signal, Flower ends an app with SystemExit during its work; SystemExit from a library is
    an ordinary failure.
    """
    node = hospital(tmp_path / "h", "folder", (Record(),))
    made: list[int] = []

    def ending(module: str) -> Any:
        names: dict[str, Any] = {"__name__": module}
        exec("def end(*_):\n    raise SystemExit(0)\n", names)
        return names["end"]

    def work(found: SiteFeatures, _: NodeConfig) -> LabelledFeatures:
        made.append(len(found.train.labels))
        return found.train

    monkeypatch.setattr(release, "load_site", ending("flwr.supercore.exit.exit"))
    with pytest.raises(SystemExit):
        with_records(RUN, node, 1.0, work)
    assert made == []
    monkeypatch.setattr(release, "load_site", ending("a_decoder"))
    assert with_records(RUN, node, 1.0, work)[2] == ("SystemExit: 0", False)
    assert made == [0]
