"""`site fetch` from a real PACS: what comes, what is refused, what goes on after it was broken off."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pydicom
import pytest
from pydicom.data import get_testdata_file
from pydicom.dataset import Dataset
from pydicom.uid import generate_uid
from sklearn.datasets import load_digits

from fedsurrogate.client_app.datasets.pacs import (
    client_of,
    fetch,
    read_labels,
    read_query,
    search,
    settings_of,
)
from fedsurrogate.common.errors import ConfigError
from tests import dicom_files
from tests.client_app.model_use.hospitals import site
from tests.client_app.test_own_files import open_umask, readable
from tests.e2e.processes import coordinator, federation
from tests.grid import metrics_of, run_folders
from tests.orthanc import PASSWORD, USER, Orthanc, needed

STUDIES = 300
SECRETS = {"FEDSURROGATE_PACS_USER": USER, "FEDSURROGATE_PACS_PASSWORD": PASSWORD}


def studies(count: int, year: int = 2024) -> list[Dataset]:
    """Studies of one or two images of a digit, of two classes and modality CR; each has a report."""
    digits = load_digits()
    rows = np.flatnonzero(digits.target < 2)
    found = []
    for at in range(count):
        tags = {
            "StudyInstanceUID": generate_uid(entropy_srcs=[f"{year} {at}"]),
            "PatientID": f"P{at // 2}",
            "AccessionNumber": f"A{at}",
            "StudyDate": f"{year}0{at % 9 + 1}01",
            "SeriesInstanceUID": generate_uid(),
            "Modality": "CR",
            "StudyDescription": ("zero", "one")[digits.target[rows[at]]],
        }
        pixels = (digits.images[rows[at]] * 15).astype(np.uint8)
        found += [dicom_files.image(pixels + each, **tags) for each in range(1 + at % 2)]
        report = dicom_files.header(
            **tags | {"SeriesInstanceUID": generate_uid(), "Modality": "SR"}
        )
        report.SOPClassUID = "1.2.840.10008.5.1.4.1.1.88.11"
        found.append(report)
    return found


def write_labels(file: Path, images: list[Dataset], key: str = "StudyInstanceUID") -> Path:
    rows = {str(each[key].value): str(each.StudyDescription) for each in images}
    file.write_text("\n".join([f"{key},label", *map(",".join, rows.items())]) + "\n")
    return file


def words(pacs: str, labels: Path, out: Path, query: str = "Modality=CR") -> tuple[str, ...]:
    given = {"--dicomweb": pacs, "--query": query, "--labels": str(labels), "--out": str(out)}
    return ("fetch", *(each for pair in given.items() for each in pair))


def fetched(out: Path) -> list[dict[str, str]]:
    with (out / ".fetch" / "studies.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def pacs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Orthanc]:
    own = Orthanc(tmp_path_factory.mktemp("pacs") / "orthanc")
    own.fill([*studies(12), *studies(4, 2020), pydicom.dcmread(get_testdata_file("CT_small.dcm"))])
    yield own
    own.stop()


@pytest.fixture
def let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


@needed
@pytest.mark.parametrize("key", ["StudyInstanceUID", "AccessionNumber", "PatientID"])
def test_studies_that_match_and_have_a_label_come(
    pacs: Orthanc, key: str, tmp_path: Path, let_in: None
) -> None:
    images = studies(12)
    labels = write_labels(tmp_path / "labels.csv", images[3:], key)
    if key != "PatientID":
        labels.write_text(labels.read_text() + "1.2.3,one\n")
    query = "Modality=CR StudyDate=20240101-20241231"
    with open_umask():
        done = site(*words(pacs.dicomweb, labels, tmp_path / "data", query))
    assert done.code == 0, done.stderr
    assert not readable(tmp_path / "data"), "by other accounts"
    kept = {each[key].value for each in images[3:]}
    wanted = [each for each in images if each.Modality == "CR" and each[key].value in kept]
    files = [pydicom.dcmread(file) for file in (tmp_path / "data").glob("*/*.dcm")]
    assert len(files) == len(wanted)
    pixels = {each.SOPInstanceUID: each.PixelData for each in files}
    assert {each.StudyInstanceUID for each in files} == {each.StudyInstanceUID for each in wanted}
    assert Counter(pixels.values()) == Counter(each.PixelData for each in wanted)
    came = Counter(row["state"] for row in fetched(tmp_path / "data"))
    assert came == {"copied": len({each.StudyInstanceUID for each in wanted})} | (
        {} if came["refused"] == 0 else {"refused": 12 - came["copied"]}
    )
    assert (tmp_path / "data" / "labels.csv").read_bytes() == labels.read_bytes()
    assert ("1 labels without a study" in done.stdout) == (key != "PatientID")
    again = site(*words(pacs.dicomweb, labels, tmp_path / "data", query))
    assert f"0 copied now (0 images), {came['copied']} copied earlier" in again.stdout


@needed
def test_a_compressed_study_comes_as_it_is_stored(
    pacs: Orthanc, tmp_path: Path, let_in: None
) -> None:
    image = pydicom.dcmread(get_testdata_file("JPEG2000.dcm"))
    pacs.fill([image])
    (tmp_path / "t.csv").write_text(f"PatientID,label\n{image.PatientID},a\n")
    out = tmp_path / "data"
    done = site(*words(pacs.dicomweb, tmp_path / "t.csv", out, f"PatientID={image.PatientID}"))
    assert done.code == 0, done.stderr
    (file,) = out.glob("*/*.dcm")
    came = pydicom.dcmread(file)
    assert came.file_meta.TransferSyntaxUID == image.file_meta.TransferSyntaxUID
    assert came.PixelData == image.PixelData


@needed
@pytest.mark.parametrize("secret", ["token", "password", "none"])
def test_a_site_that_is_not_let_in_is_told_so(pacs: Orthanc, secret: str, tmp_path: Path) -> None:
    file = tmp_path / "pacs.env"
    file.touch(0o600)
    lines = {
        "token": "FEDSURROGATE_PACS_TOKEN=stolen",
        "password": f"FEDSURROGATE_PACS_USER={USER}\nFEDSURROGATE_PACS_PASSWORD=stolen",
        "none": "",
    }
    file.write_text(lines[secret])
    labels = write_labels(tmp_path / "labels.csv", studies(2))
    done = site(*words(pacs.dicomweb, labels, tmp_path / "data"), "--env-file", file)
    assert done.code == 1
    assert "the PACS refuses this site (status 401); check FEDSURROGATE_PACS_TOKEN" in done.stderr
    assert "stolen" not in done.stdout + done.stderr
    assert not list((tmp_path).glob("data/*/*.dcm"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"--query": "Modality"}, "'Modality' is no KEYWORD=VALUE"),
        ({"--query": "Kind=CR"}, "'Kind=CR' is no KEYWORD=VALUE"),
        ({"--query": ""}, "--query is empty"),
        ({"--dicomweb": "http://site:secret@pacs/web"}, "without a password"),
        ({"--dicomweb": "http://127.0.0.1:9/web"}, "the PACS cannot be asked: ConnectionError"),
    ],
)
def test_what_is_wrong_in_a_command_is_named(
    change: dict[str, str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client asks five times, half a minute in all.
    monkeypatch.setattr("retrying.time.sleep", lambda _: None)
    (tmp_path / "t.csv").write_text("PatientID,label\n1,a\n")
    given = list(words("http://127.0.0.1:9/web", tmp_path / "t.csv", tmp_path / "data"))
    for option, value in change.items():
        given[given.index(option) + 1] = value
    done = site(*given)
    assert done.code == 1
    assert why in done.stderr
    assert "secret" not in done.stderr


@pytest.mark.parametrize("header", ["path", "SOPInstanceUID", "name"])
def test_a_table_that_names_no_studies_is_refused(header: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"{header},label\n1,a\n")
    done = site(*words("http://127.0.0.1:9/web", tmp_path / "t.csv", tmp_path / "data"))
    assert done.code == 1
    assert "StudyInstanceUID" in done.stderr


def test_a_file_of_secrets_is_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "pacs.env"
    file.write_text("FEDSURROGATE_PACS_TOKEN=a=b\n# a note\n")
    with pytest.raises(ConfigError, match="chmod 600"):
        settings_of({}, file)
    file.chmod(0o600)
    assert settings_of({"FEDSURROGATE_PACS_TOKEN": "old"}, file)["TOKEN"] == "a=b"
    file.write_text("TOKEN=geheim\n")
    with pytest.raises(ConfigError, match="line 1") as caught:
        settings_of({}, file)
    assert "geheim" not in str(caught.value)


def test_certificates_and_tokens_are_in_what_is_sent(tmp_path: Path) -> None:
    names = {"CERTIFICATE": "c.pem", "KEY": "k.pem", "CA": "ca.pem", "TOKEN": "t"}
    client = client_of("https://pacs/web/", settings_of(_variables(names), None))
    assert client.base_url == "https://pacs/web"
    session = client._session
    assert (session.cert, session.verify) == (("c.pem", "k.pem"), "ca.pem")
    assert read_query("Modality=CR 'StudyDescription=CHEST PA'")["StudyDescription"] == "CHEST PA"


def _variables(names: dict[str, str]) -> dict[str, str]:
    return {f"FEDSURROGATE_PACS_{name}": value for name, value in names.items()}


def _command(*given: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fedsurrogate.client_app.cli.main", *given],
        env=os.environ | SECRETS,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _folders(out: Path) -> int:
    return sum(not each.name.startswith(".") for each in out.iterdir() if each.is_dir())


def _until(out: Path, count: int, running: subprocess.Popen[str]) -> None:
    pause = threading.Event()
    while not out.is_dir() or _folders(out) < count:
        assert running.poll() is None, running.communicate()
        pause.wait(0.02)


@needed
@pytest.mark.slow
def test_300_studies_come_although_command_and_pacs_are_stopped(
    tmp_path: Path, let_in: None
) -> None:
    own, images = Orthanc(tmp_path / "orthanc"), studies(STUDIES)
    try:
        own.fill(images)
        labels = write_labels(tmp_path / "labels.csv", images)
        out = tmp_path / "data"
        given = words(own.dicomweb, labels, out)
        # The command is killed, which leaves what was not whole.
        running = _command(*given)
        _until(out, 60, running)
        running.send_signal(signal.SIGKILL)
        running.communicate()
        # The PACS is killed.
        running = _command(*given)
        _until(out, 150, running)
        own.stop()
        _, errors = running.communicate()
        assert running.returncode == 1
        assert "the PACS has stopped: 3 studies in a row do not come" in errors
        states = Counter(row["state"] for row in fetched(out))
        # One more where the kill met a study under way.
        assert 3 <= states["refused"] <= 4
        assert states["copied"] + states["copied earlier"] == _folders(out) < STUDIES
        assert states.total() == STUDIES
        earlier = _folders(out)
        own.start()
        done = site(*given, "--json")
        assert done.code == 0, done.stderr
        found = json.loads(done.stdout)
        assert (found["copied"], found["earlier"]) == (STUDIES - earlier, earlier)
        assert not found["refused"]
    finally:
        own.stop()
    files = [pydicom.dcmread(file) for file in out.glob("*/*.dcm")]
    wanted = [each for each in images if each.Modality == "CR"]
    assert Counter(each.PixelData for each in files) == Counter(each.PixelData for each in wanted)
    _learned_from(out, tmp_path)


def _learned_from(data: Path, home: Path) -> None:
    """A doctor passes the folder, and a site joins a run with it; no ID leaves the site."""
    (home / "policy.toml").write_text(
        "without-dp = true\nsmallest-class = 1\nexact-sums-at-models = true\n"
    )
    node = (
        f'site="north" data="dicom" data-dir="{data}" policy="{home}/policy.toml" '
        f'state-dir="{home}/state" check-log-dir="{home}/check-log" cache-dir="{home}/cache"'
    )
    run = 'backbone="pixels" image-size=8 classes="zero,one" sites=1'
    assert site("ledger", "open", "--yes", "--node-config", node).code == 0
    done = site("doctor", "--node-config", node, "--run-config", run)
    assert done.code == 0, done.stdout
    assert "360 training and 90 test records: zero 174, one 186" in done.stdout
    with federation(home / "flower", [node]) as running:
        settings = f'{run} output-dir="{home}/out"'
        ended = coordinator("run", *running.control, "-c", settings, cwd=home)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    (folder,) = run_folders(home / "out")
    metrics = metrics_of(folder)
    assert metrics["sites"]["used"] == 1
    uid = next(data.glob("*/*.dcm")).parent.name
    for file in folder.rglob("*"):
        assert not file.is_file() or uid.encode() not in file.read_bytes()


@needed
def test_a_study_that_the_pacs_has_lost_is_refused_and_the_others_come(tmp_path: Path) -> None:
    own, images = Orthanc(tmp_path / "orthanc"), studies(8)
    labels = read_labels(write_labels(tmp_path / "labels.csv", images))
    try:
        own.fill(images)
        client = client_of(own.dicomweb, settings_of(SECRETS, None))
        found = search(client, {"Modality": "CR"})
        for study in found[:4]:
            own.delete(study.keys["StudyInstanceUID"])
        list(fetch(client, found, labels, tmp_path / "data"))
    finally:
        own.stop()
    table = fetched(tmp_path / "data")
    assert [row["state"] for row in table] == ["refused"] * 4 + ["copied"] * 4
    assert all("404" in row["reason"] for row in table[:4])
    uids = sorted({each.StudyInstanceUID for each in images})
    assert sorted(each.name for each in (tmp_path / "data").glob("[0-9]*")) == uids[4:]
