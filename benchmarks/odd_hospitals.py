"""Three hospitals with photographs, one with swapped labels, one with inverted images, one with
sketches: the map of the report.

    python benchmarks/odd_hospitals.py [FOLDER]

Claim: the map sets the last three apart and names swapped labels. Each hospital has 147 training
records of PACS, with MobileNetV2. FOLDER keeps run and report.
"""

import io
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from benchmarks.harness.commands import json_of, run_command
from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.samples import shared, stored_images
from fedsurrogate.server_app.report.site_distances import site_map_of, words_of
from fedsurrogate.server_app.runs.reader import read_run

CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
SWAPPED = {"dog": "horse", "horse": "dog"}
HOSPITALS = (
    "photographs",
    "photographs",
    "photographs",
    "swapped labels",
    "inverted images",
    "sketches",
)
OF_CLASS, TESTED = 21, 30


def rows(domain: str, part: str) -> dict[int, list[bytes]]:
    """The images of each class as files, in a random order."""
    files, labels = stored_images(f"data/pacs/{domain}-{part}.parquet")
    images: dict[int, list[bytes]] = {}
    for place in np.random.default_rng(0).permutation(len(files)):
        images.setdefault(labels[place], []).append(files[place])
    return images


def write_images(folder: Path) -> None:
    """The images, and a table with label, hospital and split."""
    lines = ["path,label,site,split"]

    def add(content: bytes, label: str, hospital: int, split: str) -> None:
        image = Image.open(io.BytesIO(content)).convert("RGB")
        image = ImageOps.invert(image) if HOSPITALS[hospital] == "inverted images" else image
        image.save(folder / f"{len(lines):04}.png", compress_level=1)
        label = SWAPPED.get(label, label) if HOSPITALS[hospital] == "swapped labels" else label
        lines.append(f"{len(lines):04}.png,{label},{hospital},{split}")

    photos, sketches = rows("photo", "train"), rows("sketch", "train")
    for hospital, kind in enumerate(HOSPITALS):
        source = sketches if kind == "sketches" else photos
        for label, images in source.items():
            for _ in range(OF_CLASS):
                add(images.pop(), CLASSES[label], hospital, "train")
    for domain, count, hospitals in (("photo", TESTED, (0, 1, 2)), ("sketch", TESTED // 3, (5,))):
        for label, images in rows(domain, "test").items():
            for number, content in enumerate(images[:count]):
                add(content, CLASSES[label], hospitals[number % len(hospitals)], "test")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")


def main(home: Path) -> None:
    (home / "images").mkdir(parents=True)
    write_images(home / "images")
    settings = (
        f'data="imagefolder" data-dir="{home}/images" partition="column" site-column="site" '
        f'output-dir="{home}/runs" backbone="torchvision:mobilenet_v2" '
        f'weights-path="{shared("weights/mobilenet_v2-imagenet.safetensors")}"'
    )
    words = ("--engine", "local", "--sites", str(len(HOSPITALS)), "-c", settings)
    run = Path(json_of("coordinator", "simulate", *words)["folder"])
    print(run_command("coordinator", "report", str(run)))
    drawn = site_map_of(read_run(run), run)
    assert drawn is not None
    swapped = {each.site for each in drawn.resemblances}
    columns = ("hospital", "data", "far from the others", "labels may be swapped")
    table = [
        (site, kind, site in drawn.odd, site in swapped)
        for site, kind in zip(map(str, range(len(HOSPITALS))), HOSPITALS, strict=True)
    ]
    seen = words_of(drawn)
    report("odd-hospitals", "the map of six hospitals", columns, table, map=seen)
    print(*seen, sep="\n")
    print(run / "report.html")


if __name__ == "__main__":
    parser = described(__doc__)
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        help="where the hospitals stay afterwards; otherwise none stay",
    )
    if chosen := parser.parse_args().folder:
        main(chosen.absolute())
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary) / "hospitals")
