"""New images without labels: a folder at any depth, a table of paths, or DICOM files."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from fedsurrogate.common.backbones.power_transform import raised
from fedsurrogate.common.errors import DataError

from ..datasets.dataset import Dataset
from ..datasets.dicom import MOST_FRAMES, OF_HEADERS, scan_images
from ..datasets.dicom_files import is_dicom_file
from ..datasets.feature_files import SlideFeatures, feature_files, files_of, form_of, slide_column
from ..datasets.image_folders import find_table, is_image, leaves
from ..datasets.images import open_rgb
from ..datasets.left_out import LeftOut, attempt, is_file
from ..datasets.readers import listing, require_columns
from ..datasets.records import OF_FOLDER, bags_by_folder
from ..datasets.source import bags_of
from ..datasets.tables import name_or_blank, read_table
from ..node_config import Frames

Kind = Literal["auto", "imagefolder", "dicom", "slides"]
PATIENT, ISSUER = "patient", "issuer"


@dataclass(frozen=True, eq=False)
class Inputs:
    """Images to classify.

    Attributes:
        root: folder of the images.
        dicom: whether they are DICOM files.
        names: the path of each below `root`.
        columns: other facts of each, such as its patient.
        frames: of each DICOM file, the image that is taken; -1 for a file of several images that
            the site refuses.
        bags: the name of the bag of each; None where each image has its own answer.
        slides: features of each, where they are slides.
    """

    root: Path
    dicom: bool
    names: Sequence[str]
    columns: Mapping[str, Sequence[str]]
    frames: Sequence[int] = ()
    bags: Sequence[str] | None = None
    slides: SlideFeatures | None = None

    def in_bags(self) -> tuple[Inputs, list[list[int]]]:
        """The bags, as rows of a table, and the images of each.

        A name of a bag holds within a patient, as in training; two of one name are told apart by
        their patients.
        """
        names, patients = self.bags or self.names, self.columns.get(PATIENT, [""] * len(self))
        members: dict[tuple[str, str], list[int]] = {}
        for row, whose in enumerate(zip(names, patients, strict=True)):
            members.setdefault(whose, []).append(row)
        counts = Counter(name for name, _ in members)
        shown = [name if counts[name] == 1 else f"{name} ({whose})" for name, whose in members]
        firsts = [own[0] for own in members.values()]
        columns = {
            key: [column[row] for row in firsts]
            for key, column in self.columns.items()
            if key in (PATIENT, ISSUER)
        }
        sizes = [str(len(own)) for own in members.values()]
        what = "images" if self.slides is None else "slides"
        rows = replace(self, names=shown, columns={what: sizes, **columns}, frames=())
        return rows, list(members.values())

    def __len__(self) -> int:
        return len(self.names)

    def dataset(self, rows: Sequence[int]) -> Dataset:
        """These rows, for feature extraction."""
        none = torch.full((len(rows),), -1)

        def opened(index: int, shortest: int) -> Image.Image:
            return self._open(rows[index], shortest)

        return Dataset(
            "predict", none, (), none >= 0, "", opener=opened, place=lambda i: self.names[rows[i]]
        )

    def _open(self, row: int, shortest: int) -> Image.Image:
        file = self.root / self.names[row]
        if not self.dicom:
            return open_rgb(file, shortest)
        from ..datasets.dicom_files import open_dicom

        if self.frames[row] < 0:
            raise DataError(
                'it holds several images; set dicom-frames in the node-config to "first" or '
                '"middle", to take one of them'
            )
        return open_dicom(file, self.frames[row])


def find_inputs(
    folder: str,
    kind: Kind = "auto",
    patient_column: str = "",
    frames: Frames = "refuse",
    bag_column: str | None = None,
) -> Inputs:
    """The images below a folder.

    Args:
        folder: with the images.
        kind: "auto" takes a table or image files if there are any, otherwise DICOM files; "slides"
            are files of features, in a table or all that there are.
        patient_column: of a table; empty for none.
        frames: which frame of a DICOM file with several.
        bag_column: what names the bag of an image, as in training; empty for each alone; None where
            the model answers images.

    Raises:
        DataError: when there is none.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise DataError(f"--data-dir {folder!r}: no such folder; give the folder of the new images")
    if kind == "slides":
        return _slides(
            root, patient_column, bags_of(kind, "none" if bag_column is None else "", bag_column)
        )
    if kind != "dicom":
        inputs = _from_table(root, patient_column, bag_column) or _from_folder(root, bag_column)
        if len(inputs) or kind == "imagefolder":
            return _some(inputs, "images")
    return _some(_from_dicom(root, frames, bag_column), "DICOM images")


def _some(inputs: Inputs, what: str) -> Inputs:
    if not len(inputs):
        raise DataError(f"no {what} in '{inputs.root}'; it has {listing(inputs.root)}")
    return inputs


def _slides(root: Path, patient_column: str, bag_column: str | None) -> Inputs:
    _, table = find_table(root, "")
    key = "" if table is None else slide_column(table)
    inputs = None if table is None else _from_table(root, patient_column, bag_column, key)
    if inputs is None:
        names = [file.relative_to(root).as_posix() for file in feature_files(root)]
        inputs = Inputs(root, False, names, {}, bags=_alone(names, bag_column) or names)
    _some(inputs, "files of features")
    # A slide without one file has a row that says so.
    found = [own[0] if len(own) == 1 else root for own in files_of(root, inputs.names)[0]]
    left = LeftOut(one_by_one=True)
    return replace(inputs, slides=SlideFeatures(tuple(found), form_of(found, left)))


def _from_table(
    root: Path, patient_column: str, bag_column: str | None, key: str = "path"
) -> Inputs | None:
    _, table = find_table(root, "")
    if table is None:
        return None
    options = {patient_column: "--patient-column", bag_column or "": "--bag-column"}
    named = {name: f"correct {option}" for name, option in options.items() if name}
    given = list(named)
    left = LeftOut()
    columns = read_table(table, (key, *given), left)
    if key not in columns and not given:
        return None
    require_columns(table, {key: ""} | named, list(columns))
    for row, path in enumerate(columns[key]):
        if not isinstance(path, str) or not path or leaves(path):
            raise DataError(
                f"{left.place(row)} of '{table}' has no {key} inside '{root}'; correct it or remove it"
            )
    cells = (map(name_or_blank, columns[name]) for name in given)
    rows: dict[str, tuple[str, ...]] = {}
    for row, (path, *own) in enumerate(zip(columns[key], *cells, strict=True)):
        if rows.setdefault(path, tuple(own)) != tuple(own):
            raise DataError(
                f"{left.place(row)} of '{table}' names {path!r} again, with another "
                f"{' or '.join(given)}; correct it"
            )
        if bag_column and not own[-1]:
            raise DataError(
                f"{left.place(row)} of '{table}' has no {bag_column}; fill it in or remove it"
            )
    names = list(rows)
    found = {name: [own[at] for own in rows.values()] for at, name in enumerate(given)}
    bags = found[bag_column] if bag_column else None
    patients = {PATIENT: found[patient_column]} if patient_column else {}
    return Inputs(root, False, names, patients, bags=_alone(names, bag_column) or bags)


def _alone(names: Sequence[str], bag_column: str | None) -> Sequence[str] | None:
    """Each image in a bag of its own, where no column names bags."""
    return names if bag_column == "" else None


def _from_folder(root: Path, bag_column: str | None) -> Inputs:
    """Image files, and the DICOM files among them: these have rows that say why they are not read."""
    files = [path for path in root.rglob("*") if is_file(path)]
    images = [path for path in files if is_image(path)]
    if images:
        others = set(files).difference(images)
        images += [path for path in others if attempt(partial(is_dicom_file, path)) is True]
    names = sorted(path.relative_to(root).as_posix() for path in images)
    bags = _alone(names, bag_column)
    if bag_column == OF_FOLDER:
        bags = bags_by_folder(list(map(Path, names)), [Path()] * len(names))
    elif bag_column and names:
        raise DataError(
            f"bag-column = {bag_column!r}: '{root}' has no table; put one next to the images, or "
            f"give {OF_FOLDER!r}, for folders that are bags"
        )
    return Inputs(root, False, names, {}, bags=bags)


def _from_dicom(root: Path, frames: Frames, bag_column: str | None) -> Inputs:
    images = scan_images(root, sorted(path for path in root.rglob("*") if is_file(path)), LeftOut())
    columns = {
        key: [image.keys[key] for image in images] for key in ("SOPInstanceUID", "StudyInstanceUID")
    }
    columns[PATIENT] = [image.keys["PatientID"] for image in images]
    columns[ISSUER] = [image.issuer for image in images]
    if bag_column and bag_column not in OF_HEADERS:
        raise DataError(
            f"bag-column = {bag_column!r}; of DICOM files without labels, give "
            f"{', '.join(OF_HEADERS)}"
        )
    several = frames == "all" and bag_column is not None
    taken = [_frames_of(image.frames, frames, several) for image in images]
    rows = [row for row, own in enumerate(taken) for _ in own]
    names = [images[row].keys["path"] for row in rows]
    bags = [images[row].keys[OF_HEADERS[bag_column]] for row in rows] if bag_column else None
    columns = {key: [column[row] for row in rows] for key, column in columns.items()}
    all_frames = [frame for own in taken for frame in own]
    bags = [bag or name for bag, name in zip(bags, names, strict=True)] if bags else bags
    return Inputs(root, True, names, columns, all_frames, _alone(names, bag_column) or bags)


def _frames_of(count: int, frames: Frames, several: bool) -> Sequence[int]:
    """The images of a DICOM file that are taken; -1 for one that is refused."""
    if count == 1 or frames == "first":
        return (0,)
    if frames == "middle":
        return (count // 2,)
    return range(count) if several and 0 < count <= MOST_FRAMES else (-1,)


@dataclass(frozen=True, eq=False)
class Batch:
    """Features of some rows.

    Attributes:
        rows: positions in the list of rows with features.
        features: of `rows`, (n, d); None without any.
        broken: positions of rows without features, each with a reason.
        notes: on rows with features, by position.
    """

    rows: list[int]
    features: Tensor | None
    broken: list[tuple[int, str]]
    notes: Mapping[int, str] = field(default_factory=dict)


@dataclass
class _Bag:
    """The images of a bag so far: the sum of their features (d,), and their numbers."""

    total: Tensor | None = None
    used: int = 0
    unread: list[str] = field(default_factory=list)


def pooled(
    batches: Iterable[Batch], bags: Sequence[Sequence[int]], power: float
) -> Iterator[Batch]:
    """Batches of bags, each as soon as all of its images have come. Of a bag that has begun, its sum
    alone is in memory.

    Args:
        batches: of the images of all bags, one bag after the other.
        bags: the images of each bag; only their number counts.
        power: of the features of images, before the mean.
    """
    owners = [at for at, own in enumerate(bags) for _ in own]
    begun: dict[int, _Bag] = {}
    for batch in batches:
        features = None if batch.features is None else raised(batch.features.double(), power)
        for row, x in zip(batch.rows, features if features is not None else (), strict=True):
            bag = begun.setdefault(owners[row], _Bag())
            bag.total = x.clone() if bag.total is None else bag.total + x
            bag.used += 1
        for row, why in batch.broken:
            begun.setdefault(owners[row], _Bag()).unread.append(why)
        done = [at for at, bag in begun.items() if bag.used + len(bag.unread) == len(bags[at])]
        yield _means({at: begun.pop(at) for at in done})


def _means(done: Mapping[int, _Bag]) -> Batch:
    used = {at: bag.total / bag.used for at, bag in done.items() if bag.total is not None}
    notes = {
        at: f"{len(bag.unread)} of {bag.used + len(bag.unread)} images are not in the mean"
        for at, bag in done.items()
        if bag.used and bag.unread
    }
    return Batch(
        list(used),
        torch.stack(list(used.values())).float() if used else None,
        [(at, bag.unread[0]) for at, bag in done.items() if not bag.used],
        notes,
    )


def slide_means(
    slides: SlideFeatures, bags: Sequence[Sequence[int]], power: float
) -> Iterator[Batch]:
    """Batches of bags of slides, each the mean of all its patches.

    Args:
        slides: all.
        bags: the slides of each bag.
        power: of the features of patches, before the mean.
    """
    for at, own in enumerate(bags):
        found = [attempt(partial(slides.patches, row)) for row in own]
        read = [raised(each.double(), power) for each in found if isinstance(each, Tensor)]
        patches = torch.cat([torch.zeros(0, slides.shape[1]), *read])
        good = patches[patches.isfinite().all(1)]
        if not len(good):
            yield Batch([], None, [(at, "cannot be read")])
            continue
        lost = {"slides": len(own) - len(read), "patches": len(patches) - len(good)}
        text = " and ".join(f"{count} {what}" for what, count in lost.items() if count)
        notes = {at: f"{text} are not in the mean"} if text else {}
        yield Batch([at], good.mean(0, keepdim=True).float(), [], notes)


def digest_of(names: Sequence[str]) -> str:
    """A digest of which image is in which bag, by which an output file is continued."""
    return hashlib.sha256(repr(tuple(names)).encode()).hexdigest()[:16]
