"""Drawn X-rays: whole tables for every target, the same for the same seed, and findings that can be
seen.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.server_app.cli.main import app
from fedsurrogate.server_app.sample_data import FINDINGS, NOTICE, Chest, skips, write_xrays, xray
from tests.commands import coordinator


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "table.csv").open() as file:
        return list(csv.DictReader(file))


@given(
    hospitals=st.integers(1, 6), images=st.integers(10, 25), seed=st.integers(0, 9), data=st.data()
)
@settings(max_examples=6, deadline=None)
def test_every_picture_has_one_row_and_every_finding_several_hospitals(
    hospitals: int,
    images: int,
    seed: int,
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("drawn") / "xrays"
    names = write_xrays(folder, hospitals, images, seed, 16)
    together = rows(folder / "hospitals")
    assert len(together) == hospitals * images
    for index, name in enumerate(names):
        own = rows(folder / "hospitals" / name)
        assert {row["path"] for row in own} == {
            str(file.relative_to(folder / "hospitals" / name))
            for file in (folder / "hospitals" / name).rglob("*.png")
        }
        assert [row | {"path": f"{name}/{row['path']}"} for row in own] == [
            row for row in together if row["hospital"] == name
        ]
        for row in own:
            assert {finding for finding in FINDINGS if not row[finding]} == set(
                skips(index, hospitals)
            )
            assert row["label"] in ("normal", "pneumonia")
            assert 0.3 < float(row["cardiothoracic_ratio"]) < 0.7
            assert float(row["years"]) > 0
            assert row["event"] in "01"
        # All pictures of a patient say the same, and lie in one part of the split.
        known = [f for f in row if f != "path"]
        for patient in {row["patient"] for row in own}:
            assert len({tuple(r[f] for f in known) for r in own if r["patient"] == patient}) == 1
    for finding in FINDINGS:
        skipped = sum(finding in skips(index, hospitals) for index in range(hospitals))
        assert skipped <= 1 < max(2, hospitals - skipped)
    again = folder.parent / "again"
    write_xrays(again, hospitals, images, seed, 16)
    some = data.draw(st.sampled_from([row["path"] for row in together]))
    assert (folder / "hospitals" / some).read_bytes() == (again / "hospitals" / some).read_bytes()
    with Image.open(folder / "hospitals" / some) as picture:
        assert picture.info["Description"] == NOTICE
        assert (picture.mode, picture.size) == ("L", (16, 16))
    with pytest.raises(ConfigError, match="exists"):
        write_xrays(folder, 1, 10, 0, 16)


@pytest.mark.parametrize("finding", FINDINGS)
def test_a_finding_can_be_seen_in_pictures_of_patients_who_differ(finding: str) -> None:
    random = np.random.default_rng(0)
    truth = random.uniform(size=400) < 0.5
    pictures = [
        xray(Chest.drawn(random), frozenset([finding] if there else []), (0.0, 1.0), 32, random)
        for there in truth
    ]
    # Small ones are in another place each time: their brightest and darkest parts tell them.
    values = np.stack([each.ravel() / 255 for each in pictures])
    inside = np.sort(np.stack([each[6:20, 4:28].ravel() / 255.0 for each in pictures]), 1)
    features = np.c_[values, inside]
    model = LogisticRegression(C=0.1, max_iter=2000).fit(features[:300], truth[:300])
    assert roc_auc_score(truth[300:], model.decision_function(features[300:])) > 0.6


def test_the_command_draws_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app
    monkeypatch.chdir(tmp_path)
    drawn = ("sample-data", "xrays", "--hospitals", "3", "--images", "10", "--size", "16")
    assert coordinator(monkeypatch, *drawn) == 0
    said = capsys.readouterr().out
    assert "north, south, east" in said
    assert Path("xrays", "new", "table.csv").is_file()
    assert coordinator(monkeypatch, *drawn) == 1
    assert "'xrays' exists" in capsys.readouterr().err
