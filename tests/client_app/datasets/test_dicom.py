"""DICOM studies as a hospital's data: labels by table or folder, patients by header; no output has
a patient's name.
"""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydicom.data import get_testdata_file
from pydicom.pixels import get_decoder
from pydicom.uid import HTJ2K, MPEG2MPML, HTJ2KLossless, SecondaryCaptureImageStorage

from fedsurrogate.client_app.datasets.dataset import DataSource, load
from fedsurrogate.client_app.diagnostics.site_checks import check_site
from fedsurrogate.client_app.features.extraction import extract
from fedsurrogate.client_app.features.site_features import load_site
from fedsurrogate.client_app.governance.policy import policy_of
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.common.backbones.backbones import load_backbone
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.privacy.gaussian_mechanism import unit_weights
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.base import parse_overrides
from tests.dicom_files import header, image, save
from tests.grid import FAST, InProcessGrid, files_with, metrics_of, run_federation

LEVELS = np.random.default_rng(5).integers(0, 256, (64, 8, 8), dtype=np.uint8)


def study(folder: Path, patients: list[str], **tags: Any) -> list[Path]:
    """One image per named patient, in nested folders and without a suffix; and a table of paths and
    labels.
    """
    files, rows = [], ["path,label"]
    for number, patient in enumerate(patients):
        file = folder / "export" / f"S{number // 3:02}" / f"IM{number:03}"
        files.append(save(file, image(LEVELS[number % 64], PatientID=patient, **tags)))
        rows.append(f"{file.relative_to(folder)},{'ab'[number % 2]}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")
    return files


def source(folder: Path, **settings: Any) -> DataSource:
    return DataSource("dicom", str(folder), **settings)


def test_images_are_found_at_any_depth_by_content_and_the_rest_is_counted_once(
    tmp_path: Path,
) -> None:
    study(tmp_path, ["1", "2", "1", "3"])
    save(tmp_path / "export" / "report.dcm", header())
    (tmp_path / "export" / "notes.dcm").write_text("no DICOM")
    for name, sample in (("DICOMDIR", "DICOMDIR"), ("export/broken", "badVR.dcm")):
        (tmp_path / name).write_bytes(Path(str(get_testdata_file(sample))).read_bytes())
    dataset = load(source(tmp_path), 0)
    assert len(dataset) == 4
    assert dataset.classes == ("a", "b")
    assert dataset.labels.tolist() == [0, 1, 0, 1]
    assert dataset.patients == ("0", "1", "0", "2")
    assert (np.asarray(dataset.open_image(3))[..., 2] == LEVELS[3]).all()
    (loss,) = dataset.left_out
    assert loss.count == 4
    assert (
        "1 files are not DICOM, 2 have no image (DICOMDIR, reports), 1 are broken, such as"
        in loss.why
    )


@pytest.mark.parametrize(
    "key", ["path", "SOPInstanceUID", "StudyInstanceUID", "AccessionNumber", "PatientID"]
)
def test_a_table_may_name_images_by_the_most_specific_of_five_keys(
    tmp_path: Path, key: str
) -> None:
    for number in range(4):
        tags = {"SOPInstanceUID": f"1.2.{number}", "StudyInstanceUID": f"1.3.{number}"}
        tags |= {"AccessionNumber": f"00{number}", "PatientID": f"0{number}"}
        save(tmp_path / f"{number}", image(LEVELS[number], **tags))
    values = {
        "path": "{}",
        "SOPInstanceUID": "1.2.{}",
        "StudyInstanceUID": "1.3.{}",
        "AccessionNumber": "00{}",
    }
    values["PatientID"] = "0{}"
    order = list(values)
    less_specific = order[order.index(key) + 1 :]
    lines = [",".join([*less_specific, key, "finding"])]
    for number, label in enumerate("abba"):
        lines.append(
            ",".join([*("nonsense" for _ in less_specific), values[key].format(number), label])
        )
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    assert load(source(tmp_path, label_column="finding"), 0).labels.tolist() == [0, 1, 1, 0]


def test_records_without_a_label_or_a_file_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study(tmp_path, ["1", "2", "3"])
    (tmp_path / "labels.csv").write_text("PatientID,label\n3,a\n99secret,b\n1,b\n")
    dataset = load(source(tmp_path), 0)
    assert (dataset.labels.tolist(), dataset.patients) == ([1, 0], ("0", "1"))
    stated = str(dataset.report)
    assert "1 of 3 DICOM images are left out" in stated
    assert "1 rows of" in stated
    assert "such as line 3" in stated
    assert "99secret" not in stated + caplog.text


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("PatientID,label\n1,a\n1,b\n", "line 2 and line 3 of .* name the same PatientID but differ in 'label'"),
        ("PatientID,label\n1,a\n,b\n", "line 3 of .* has no PatientID or no label"),
        ("PatientID,label\n1,\n", "line 2 of .* has no PatientID or no label"),
        ("PatientID,label\n77secret,a\n", "none of the 2 DICOM images in .* is named by the column 'PatientID'"),
        ("PatientID,label\n1,a\n77secret\n", "line 3 has 1 columns, but the first has 2"),
        (
            "Patient,label\n1,a\n",
            "names no images; it has 'Patient', 'label'; add one of the columns path, "
            "SOPInstanceUID",
        ),
        ("PatientID,finding\n1,a\n", "lacks the columns 'label'"),
        ("PatientID,label,split\n1,a,dev\n2,a,test\n", "'split' of .* holds 'dev'"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_right_is_refused_without_showing_a_patient(
    tmp_path: Path, table: str, reason: str
) -> None:
    study(tmp_path, ["1", "2"])
    (tmp_path / "labels.csv").write_text(table)
    with pytest.raises(DataError, match=reason) as caught:
        load(source(tmp_path), 0)
    assert "secret" not in str(caught.value)


def test_without_a_table_folders_are_classes_with_train_and_test_where_there_are_such(
    tmp_path: Path,
) -> None:
    for number in range(8):
        folder = f"{'train' if number < 5 else 'test'}/{'yn'[number % 2]}/series"
        save(tmp_path / folder / f"{number}", image(LEVELS[number], PatientID=f"{number}"))
    (tmp_path / "train" / "y" / "README").write_text("no DICOM")
    dataset = load(source(tmp_path), 0)
    assert dataset.classes == ("n", "y")
    assert [int(dataset.is_train.sum()), len(dataset)] == [5, 8]
    assert sorted(dataset.labels[dataset.is_train].tolist()) == [0, 0, 1, 1, 1]
    assert (np.asarray(dataset.open_image(0))[..., 0] == LEVELS[1]).all()
    with pytest.raises(DataError, match="patient-column = 'who'"):
        load(source(tmp_path, patient_column="who"), 0)


def test_folders_of_patients_are_no_classes(tmp_path: Path) -> None:
    for number in range(6):
        save(
            tmp_path / f"DOE^{number // 2}" / f"{number}",
            image(LEVELS[number], PatientID=f"{number // 2}"),
        )
    with pytest.raises(
        DataError, match=r"each of the 3 folders in .* has images of one patient only"
    ):
        load(source(tmp_path), 0)


def test_nothing_usable_is_reported_with_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no files in class folders; .*PatientID"):
        load(source(tmp_path), 0)
    (tmp_path / "t.csv").write_text("path,label\nx,a\n")
    (tmp_path / "x").write_text("text")
    with pytest.raises(
        DataError, match=r"no DICOM image among 1 files in .*: 1 files are not DICOM"
    ):
        load(source(tmp_path), 0)


@pytest.mark.parametrize("gap", ["", "  ", None])
def test_an_image_without_a_patient_id_is_refused_unless_the_table_tells(
    tmp_path: Path, gap: str | None
) -> None:
    files = study(tmp_path, ["1", "2", "3"])
    save(files[1], image(LEVELS[1], PatientID=gap))
    with pytest.raises(
        DataError,
        match=r"1 of 3 DICOM images do not identify a patient.*set patient-column to a column",
    ):
        load(source(tmp_path), 0)
    lines = (tmp_path / "labels.csv").read_text().split()
    (tmp_path / "labels.csv").write_text(
        "\n".join(f"{line},{who}" for line, who in zip(lines, ["who", "5", "05", "5"], strict=True))
    )
    assert load(source(tmp_path, patient_column="who"), 0).patients == ("5", "05", "5")


def test_several_images_in_a_file_are_refused_unless_the_site_says_which(tmp_path: Path) -> None:
    files = study(tmp_path, ["1", "2"])
    save(files[1], image(LEVELS[10:15], PatientID="2"))
    with pytest.raises(
        DataError,
        match=rf"1 DICOM files hold several images, such as '{files[1]}' with 5; .*dicom-frames",
    ):
        load(source(tmp_path), 0)
    first, middle = (load(source(tmp_path, frames=frames), 0) for frames in ("first", "middle"))
    for dataset, level in ((first, 10), (middle, 12)):
        assert (np.asarray(dataset.open_image(1))[..., 0] == LEVELS[level]).all()
        assert (np.asarray(dataset.open_image(0))[..., 0] == LEVELS[0]).all()
    assert first.key != middle.key
    node = parse_node_config({"data": "dicom", "data-dir": str(tmp_path), "dicom-frames": "middle"})
    assert DataSource.of_node(node, parse_run({})).frames == "middle"


@pytest.mark.parametrize("syntax", [HTJ2KLossless, MPEG2MPML])
def test_a_transfer_syntax_that_nothing_decodes_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, syntax: Any
) -> None:
    files = study(tmp_path, ["1", "2"])
    packed = image(LEVELS[1], PatientID="2")
    packed.file_meta.TransferSyntaxUID = syntax
    packed["PixelData"].is_undefined_length = True
    packed.PixelData = b"\xfe\xff\x00\xe0\x00\x00\x00\x00\xfe\xff\x00\xe0\x02\x00\x00\x00\x00\x00"
    save(files[1], packed)
    if syntax == HTJ2KLossless:
        # As on a machine without optional decoders.
        monkeypatch.setattr(get_decoder(syntax), "_available", {})
    remedy = (
        r"run pip install 'fedsurrogate\[dicom-decoders\]'"
        if syntax == HTJ2KLossless
        else "leave them out"
    )
    with pytest.raises(
        DataError,
        match=rf"1 DICOM images, such as '{files[1]}', have the .* \({syntax}\).*; {remedy}",
    ):
        load(source(tmp_path), 0)


def test_another_decoder_gives_cached_features_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = image(LEVELS[1])
    packed.file_meta.TransferSyntaxUID = HTJ2K
    packed["PixelData"].is_undefined_length = True
    packed.PixelData = b"\xfe\xff\x00\xe0\x00\x00\x00\x00\xfe\xff\x00\xe0\x02\x00\x00\x00\x00\x00"
    save(tmp_path / "x", packed)
    (tmp_path / "t.csv").write_text("path,label\nx,a\n")
    keys = set()
    for available in ({"one": None}, {"other": None}, {"one": None}):
        monkeypatch.setattr(get_decoder(HTJ2K), "_available", available)
        keys.add(load(source(tmp_path), 0).key)
    assert len(keys) == 2


def test_a_file_cut_short_is_skipped_like_any_broken_image(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = study(tmp_path, ["1", "2", "3"])
    files[1].write_bytes(files[1].read_bytes()[:-20])
    dataset = load(source(tmp_path), 0)
    found = extract(dataset, load_backbone("pixels", image_size=8), tmp_path / "cache")
    assert found.ok.tolist() == [True, False, True]
    assert f"'{files[1]}' cannot be shown" in caplog.text


def test_a_header_that_promises_more_pixels_than_any_image_has_is_not_believed(
    tmp_path: Path,
) -> None:
    files = study(tmp_path, ["1", "2"])
    save(files[1], image(LEVELS[1], Rows=65535, Columns=65535))
    dataset = load(source(tmp_path), 0)
    assert len(dataset) == 1
    assert "65535 x 65535 pixels" in str(dataset.left_out)


def hospital(folder: Path, patients: list[str], **tags: Any) -> dict[str, Any]:
    study(folder / "data", patients, **tags)
    return {"site": folder.name, "data": "dicom", "data-dir": str(folder / "data")}


def test_a_doctor_warns_of_burned_in_text_and_not_of_a_tag_that_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = parse_run(
        parse_overrides(['epsilon=1.0 delta=1e-5 classes="a,b" backbone="pixels" image-size=8'])
    )
    node = NodeConfig(**hospital(tmp_path / "north", ["1", "2", "3", "3"]))
    (sound,) = (each for each in check_site(run, node) if each.what == "data")
    assert sound.state == "PASS"
    assert "a 2, b 2; 3 patients" in sound.found
    assert "burned" not in caplog.text
    save(
        tmp_path / "north" / "data" / "export" / "S00" / "IM001",
        image(LEVELS[0], BurnedInAnnotation="YES"),
    )
    save(
        tmp_path / "north" / "data" / "export" / "S00" / "IM002",
        image(LEVELS[0], BurnedInAnnotation="NO"),
    )
    (found,) = (each for each in check_site(run, node) if each.what == "data")
    assert (found.state, "1 images have text burned into their pixels" in found.found) == (
        "WARN",
        True,
    )
    assert "BurnedInAnnotation" in found.remedy
    assert caplog.text.count("1 of 4 DICOM images have text burned into their pixels") == 1


@pytest.mark.slow
def test_two_studies_of_a_patient_are_one_unit_and_the_patient_is_named_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "fedsurrogate")
    caplog.set_level(logging.DEBUG, "pydicom")
    name = "MRN5550123"
    nodes = []
    for site in ("north", "south"):
        node = hospital(
            tmp_path / site,
            [f"{name}{number // 2}" for number in range(60)],
            IssuerOfPatientID="IssuerOf99",
        )
        # Labels by patient: the table has these patients, and others without data.
        rows = [f"{name}{number},{'ab'[number % 2]}" for number in range(40)]
        (tmp_path / site / "data" / "labels.csv").write_text("\n".join(["PatientID,label", *rows]))
        save(tmp_path / site / "data" / "unasked", image(LEVELS[0], PatientID=f"{name}777"))
        short = tmp_path / site / "data" / "export" / "S00" / "IM000"
        short.write_bytes(short.read_bytes()[:-30])
        nodes.append(node | {"policy": str(tmp_path / "policy.toml")})
    (tmp_path / "policy.toml").write_text("epsilon-per-run = 200.0\nepsilon-total = 200.0\n")
    work = tmp_path / "work"
    grid = InProcessGrid(nodes)
    # Large enough that a class of fifteen patients stands out from the noise.
    settings = {
        "epsilon": 200.0,
        "delta": 1e-5,
        "classes": "a,b",
        "backbone": "pixels",
        "image-size": 8,
    }
    folder = run_federation(work, grid, report=True, **settings, **FAST)
    assert metrics_of(folder)["sites"] == {"invited": 2, "used": 2, "rejected": 0, "dropped": 0}
    ledgers = [
        path.read_text().splitlines() for path in (work / "site-state" / "ledgers").glob("*.jsonl")
    ]
    assert [json.loads(lines[-1])["unit"] for lines in ledgers] == ["patient", "patient"]
    first = parse_node_config(nodes[0] | {"cache-dir": str(work / "site-cache")})
    found = load_site(parse_run(settings), first, policy_of(first).cache_mib)
    assert found.train.units is not None
    assert (len(found.train.units), len(set(found.train.units))) == (59, 30)
    assert float(unit_weights(found.train.units, 59).sum()) == pytest.approx(30)
    assert list(work.rglob("*.npy"))
    assert (work / "site-state" / "site.log").stat().st_size
    for secret in (name, "5550123", "IssuerOf99", "Doe^Jane"):
        assert not files_with(secret, work)
        assert secret not in caplog.text
        for message in grid.received:
            assert secret not in str(message.content)
            assert all(
                secret.encode() not in array.data
                for array in message.content.array_records.get("payload", {}).values()
            )


def test_the_same_pixels_in_png_files_give_the_same_features_and_the_same_share(
    tmp_path: Path,
) -> None:
    study(
        tmp_path / "dicom",
        [f"{number}" for number in range(40)],
        SOPClassUID=SecondaryCaptureImageStorage,
    )
    (tmp_path / "png").mkdir()
    rows = ["path,label"]
    for number in range(40):
        Image.fromarray(LEVELS[number]).save(tmp_path / "png" / f"{number:03}.png")
        rows.append(f"{number:03}.png,{'ab'[number % 2]}")
    (tmp_path / "png" / "t.csv").write_text("\n".join(rows))
    one = load(source(tmp_path / "dicom"), 3)
    other = load(replace(source(tmp_path / "png"), kind="imagefolder"), 3)
    assert one.is_train.tolist() == other.is_train.tolist()
    model = load_backbone("pixels", image_size=8)
    assert (extract(one, model, tmp_path / "c").x == extract(other, model, tmp_path / "c").x).all()
