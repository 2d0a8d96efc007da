"""A survey of images: hospitals whose images lie on their side, are inverted or empty are named, and no
other; noise and chance name none; and what leaves is charged once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedsurrogate.common.image_histograms import HISTOGRAMS, Histogram
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.surrogate_proto import Counts
from fedsurrogate.server_app.counting import counting_budget, survey_settings
from fedsurrogate.strategies.counting.images import images_of_sites
from tests.samples import Samples
from tests.strategies.counting.hospitals import counted, entries
from tests.strategies.counting.image_hospitals import (
    CLASSES,
    POLICY,
    drawn,
    hospitals,
    write_dicom,
)

Json = dict[str, Any]
LABELS = np.arange(400) % 2


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsurrogate.strategies.base.collection.POLL_SECONDS", 0.02)


def surveyed(home: Path, nodes: list[Json], epsilon: float = 1.0, **more: Any) -> Json:
    settings = survey_settings(CLASSES, counting_budget(epsilon, 1e-5), "all")
    folder = counted(home, nodes, settings | more)
    result: Json = json.loads((folder / "survey.json").read_text())
    return result


def named(images: Json) -> set[tuple[str, str]]:
    return {(each["site"], each["histogram"]) for each in images["warnings"]}


FOUND = {("south", "orientation"), ("south", "mirror"), ("east", "brightness")}


def test_the_hospital_on_its_side_and_the_inverted_one_are_named_and_no_other(
    tmp_path: Path,
) -> None:
    nodes = hospitals(tmp_path, drawn(400, 1), LABELS[:400])
    result = surveyed(tmp_path, nodes, epsilon=2.0)
    images = result["images"]
    assert named(images) == FOUND
    (turned,) = (each["why"] for each in images["warnings"] if each["histogram"] == "orientation")
    assert "turned by a quarter to the right" in turned
    makers = images["histograms"]["maker"]
    likely = {
        site: makers["cells"][int(np.argmax(counts))] for site, counts in makers["per_site"].items()
    }
    assert likely == {"north": "Philips", "south": "Siemens", "east": "Fuji", "west": "other"}
    for node in nodes:
        (entry,) = entries(node)
        assert (entry["method"], entry["mechanism"], entry["epsilon"]) == ("survey", "counts", 2.0)
        assert len(entry["events"]) == 1
        assert entry["sensitivities"] == {"records": 1.0, "images": pytest.approx(3.0)}
    assert sum(images["budget"].values()) == pytest.approx(1)
    assert images["budget"]["images"] == pytest.approx(0.75)


def test_real_x_rays_are_told_apart_as_well(tmp_path: Path, samples: Samples) -> None:
    archive = np.load(samples("data/pneumonia/pneumonia-28px.npz"))
    pictures, labels = archive["train_images"][:1200], archive["train_labels"][:1200, 0]
    # With epsilon 1, one run in seven does not name the brightness of 300 small pictures.
    images = surveyed(tmp_path, hospitals(tmp_path, pictures, labels), epsilon=4.0)["images"]
    assert named(images) == FOUND


def test_a_hospital_with_empty_images_is_named(tmp_path: Path) -> None:
    north, *_, west = hospitals(tmp_path, drawn(240, 2), LABELS[:240])
    assert "contrast" not in {
        each for _, each in named(surveyed(tmp_path, [north, west], 8.0)["images"])
    }
    # In a private run copies count once within a patient, and these are of different ones.
    empty = np.zeros((30, 48, 48), np.uint8)
    write_dicom(tmp_path / "west", empty, LABELS[3:240:4][:30])
    images = surveyed(tmp_path, [north, west], epsilon=8.0)["images"]
    assert ("west", "contrast") in named(images)
    assert ("north", "contrast") not in named(images)
    (why,) = (each["why"] for each in images["warnings"] if each["histogram"] == "contrast")
    share = int(why.split("%")[0].split()[-1])
    assert 40 <= share <= 60
    assert "images are empty" in why


def test_exact_histograms_leave_where_the_policy_allows_and_no_small_cell_with_them(
    tmp_path: Path,
) -> None:
    """A class that is left out would follow from a histogram, which counts all records."""
    nodes = hospitals(tmp_path, drawn(120, 4), np.array([0] * 100 + [1] * 20))[:2]
    for name, least in (("north", 1), ("south", 10)):
        policy = f'{POLICY}exact-counts = ["survey"]\nsmallest-cell = {least}\n'
        (tmp_path / f"{name}.toml").write_text(policy)
    result = surveyed(tmp_path, nodes, epsilon=0.0)
    images = result["images"]["histograms"]
    assert result["per_site"] == {"north": [25, 5], "south": [25, 0]}
    assert all(sum(each["per_site"]["north"]) == 30 for each in images.values())
    assert all(sum(each["per_site"]["south"]) == 0 for each in images.values())
    assert all(each["hidden"] == ["south"] for each in images.values())
    assert result["images"]["warnings"] == []
    assert "budget" not in result["images"]


def test_folders_of_image_files_count_what_they_have_and_the_rest_as_unknown(
    tmp_path: Path,
) -> None:
    nodes = []
    for number, name in enumerate(("north", "south")):
        for at, own in enumerate(drawn(40, number)):
            file = tmp_path / name / CLASSES[at % 2] / f"{at}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(own).save(file)
        (tmp_path / f"{name}.toml").write_text(f'{POLICY}exact-counts = ["survey"]\n')
        node = {"site": name, "data": "imagefolder", "data-dir": str(tmp_path / name)}
        places = {
            key: str(tmp_path / f"{name}-{key}")
            for key in ("state-dir", "cache-dir", "check-log-dir")
        }
        nodes.append(node | places | {"policy": str(tmp_path / f"{name}.toml")})
    images = surveyed(tmp_path, nodes, epsilon=0.0)["images"]["histograms"]
    for name in ("orientation", "view", "maker", "spacing"):
        assert images[name]["per_site"]["north"][-1] == 40
    assert images["bits"]["per_site"]["north"][1] == 40
    for name in ("size", "brightness", "contrast", "mirror"):
        assert images[name]["per_site"]["north"][-1] == 0


def test_another_target_than_classes_is_surveyed_with_its_images(tmp_path: Path) -> None:
    folder, chests = tmp_path / "north", drawn(60, 5)
    for at, own in enumerate(chests):
        folder.mkdir(exist_ok=True)
        Image.fromarray(own).save(folder / f"{at}.png")
    rows = [f"{at}.png,{at % 2},{1 - at % 2}" for at in range(60)]
    (folder / "table.csv").write_text("\n".join(["path,edema,mass", *rows]))
    (tmp_path / "north.toml").write_text(POLICY)
    node = {"site": "north", "data": "imagefolder", "data-dir": str(folder)}
    places = {key: str(tmp_path / key) for key in ("state-dir", "cache-dir", "check-log-dir")}
    node |= places | {"policy": str(tmp_path / "north.toml"), "target-columns": "edema,mass"}
    settings = survey_settings((), counting_budget(8.0, 1e-5), "size,brightness")
    settings |= {"task": "multilabel", "label-columns": "edema,mass"}
    run = counted(tmp_path, [node], settings)
    result = json.loads((run / "survey.json").read_text())
    assert result["images"]["histograms"]["size"]["totals"]["north"] == pytest.approx(60, abs=10)
    assert result["images"]["histograms"]["size"]["per_site"]["north"][0] == pytest.approx(
        60, abs=15
    )
    (entry,) = entries(node)
    assert entry["sensitivities"].keys() == {"records", "images"}


# Of noisy counts alone.


def noisy(
    shares: dict[str, list[list[float]]], records: int, epsilon: float, generator: torch.Generator
) -> Json:
    """The images of a survey of sites with these shares of each histogram."""
    names = [*shares]
    settings = {"counting.kind": "survey", "classes": "a,b", "counting.images": ",".join(names)}
    budget = {"epsilon": epsilon, "delta": 1e-5} if epsilon else {}
    run = parse_run(settings | budget)
    sites = []
    for number in range(len(shares[names[0]])):
        parts = []
        for name in names:
            drawn_cells = torch.multinomial(
                torch.tensor(shares[name][number]), records, replacement=True, generator=generator
            )
            parts.append(torch.bincount(drawn_cells, minlength=len(HISTOGRAMS[name].cells)))
        tables = {"images": torch.cat(parts).double(), "records": torch.tensor([records / 2.0] * 2)}
        if run.mechanism is not None:
            for name, table in tables.items():
                sigma = run.mechanism.noise[name][0]
                tables[name] = (
                    table + sigma * torch.randn(table.shape, generator=generator)
                ).round()
        header = Header("survey", "", f"s{number}", "", ("a", "b"))
        claim = None if run.mechanism is None else run.mechanism
        whole = {name: each.long() for name, each in tables.items()}
        sites.append(Counts(header, whole, claim))
    return images_of_sites(sites, run.settings.counting, run.mechanism)


def peaked(histogram: Histogram, at: dict[int, float]) -> list[float]:
    return [at.get(cell, 0.0) for cell in range(len(histogram.cells))]


def usual() -> dict[str, list[float]]:
    own = {name: peaked(each, {1: 0.6, 2: 0.3, 3: 0.1}) for name, each in HISTOGRAMS.items()}
    own["orientation"] = peaked(HISTOGRAMS["orientation"], {0: 0.5, 3: 0.3, 8: 0.2})
    return own


@pytest.mark.parametrize(
    ("records", "epsilon"), [(30, 0.0), (1000, 0.0), (30, 0.5), (150, 1.0), (1000, 1.0), (300, 8.0)]
)
def test_sites_that_do_not_differ_are_not_said_to_by_noise_or_chance(
    records: int, epsilon: float
) -> None:
    """Of 60 surveys of four like sites, at one percent each at most one has anything to say."""
    generator, wrong = torch.Generator().manual_seed(records), 0
    shares = {name: [own] * 4 for name, own in usual().items()}
    for _ in range(60):
        found = noisy(shares, records, epsilon, generator)
        differing = any(each["differing"] for each in found["histograms"].values())
        wrong += bool(found["warnings"]) or differing
    assert wrong <= 2


def test_noise_that_hides_a_hospital_hides_what_is_wrong_with_it() -> None:
    shares = {"brightness": [peaked(HISTOGRAMS["brightness"], {5: 1.0})] * 3}
    shares["brightness"].append(peaked(HISTOGRAMS["brightness"], {2: 1.0}))
    generator = torch.Generator().manual_seed(0)
    assert named(noisy(shares, 20, 0.1, generator)) == set()
    assert named(noisy(shares, 1000, 1.0, generator)) == {("s3", "brightness")}
    assert named(noisy(shares, 20, 0.0, generator)) == {("s3", "brightness")}


def test_a_darker_hospital_differs_and_is_not_called_inverted() -> None:
    shares = {"brightness": [peaked(HISTOGRAMS["brightness"], {5: 1.0})] * 3}
    shares["brightness"].append(peaked(HISTOGRAMS["brightness"], {0: 1.0}))
    found = noisy(shares, 1000, 1.0, torch.Generator().manual_seed(0))
    assert named(found) == set()
    assert found["histograms"]["brightness"]["differing"]["s3"]


def test_other_views_are_no_turned_images() -> None:
    """A side view runs to the front where another runs to the left: no way to lay it down makes it that."""
    cells = HISTOGRAMS["orientation"].cells
    front, side = (
        peaked(HISTOGRAMS["orientation"], {cells.index(name): 1.0}) for name in ("L/F", "A/F")
    )
    found = noisy({"orientation": [front] * 3 + [side]}, 500, 1.0, torch.Generator().manual_seed(0))
    assert named(found) == set()


TURNS = {
    "H/L": "turned by a quarter to the right",
    "F/R": "turned by a quarter to the left",
    "R/H": "upside down",
    "R/F": "mirrored from left to right",
    "L/H": "mirrored from top to bottom",
    "F/L": "mirrored and turned by a quarter",
    "H/R": "mirrored and turned by a quarter the other way",
}


@pytest.mark.parametrize("turned", TURNS)
def test_each_way_to_lay_an_image_down_has_its_words(turned: str) -> None:
    """The directions are those of the pixels, turned by numpy."""
    cells = HISTOGRAMS["orientation"].cells
    up, other = (
        peaked(HISTOGRAMS["orientation"], {cells.index(name): 1.0}) for name in ("L/F", turned)
    )
    found = noisy({"orientation": [up] * 3 + [other]}, 500, 1.0, torch.Generator().manual_seed(0))
    (warning,) = found["warnings"]
    assert warning["site"] == "s3"
    assert f"are {TURNS[turned]} against" in warning["why"]
    ways = {
        "turned by a quarter to the right": lambda x: np.rot90(x, -1),
        "turned by a quarter to the left": np.rot90,
        "upside down": lambda x: np.rot90(x, 2),
        "mirrored from left to right": np.fliplr,
        "mirrored from top to bottom": np.flipud,
        "mirrored and turned by a quarter": np.transpose,
        "mirrored and turned by a quarter the other way": lambda x: np.rot90(x, 2).T,
    }
    # Corners of an upright image by the directions of its rows and columns.
    corners = np.array([["RH", "LH"], ["RF", "LF"]])
    laid = ways[TURNS[turned]](corners)
    row = (set(laid[0, 1]) - set(laid[0, 0])).pop()
    column = (set(laid[1, 0]) - set(laid[0, 0])).pop()
    assert f"{row}/{column}" == turned
