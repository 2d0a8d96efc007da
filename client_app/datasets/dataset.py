"""Data sets of a site: labels, classes, a train/test split, and images or precomputed features.
And their schema: columns, types and dimension, read from headers without any record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from fedsurrogate.common.data_report import DataReport
from fedsurrogate.common.errors import DataError, told_as
from fedsurrogate.common.identity import check_one_truth

from ..node_config import NodeConfig
from .dicom import KEYS, OF_HEADERS, OF_ONE_IMAGE, key_of, read_dicom
from .feature_files import feature_headers, read_safetensors, read_slides
from .image_folders import class_folders, find_table, path_column, read_imagefolder, table_of
from .images import once, without_leaks
from .left_out import LeftOut, SourceError, loss_of_other_classes, printable, warnings_of_data
from .readers import content_key, parquet_files, read_digits, read_parquet, split_files
from .records import Content, Records, described, only, pooled, select
from .source import DataSource as DataSource
from .source import folder_of as folder_of
from .source import require_columns, some
from .tables import csv_header, is_parquet, of_lists, parquet_table

READERS = {
    "safetensors": read_safetensors,
    "dicom": read_dicom,
    "parquet": read_parquet,
    "imagefolder": read_imagefolder,
    "slides": read_slides,
}
# Bytes of feature files whose records a process keeps.
LARGEST_KEPT = 2**27


@dataclass(frozen=True, eq=False)
class Dataset(Content):
    """Records of one source, with features, or with images that `open_image` opens one by one.

    Attributes:
        name: of the data set.
        labels: (n,) int64, indices into `classes`.
        classes: names of the classes.
        is_train: (n,) bool.
        key: identifies the content and order of the records; equal keys may share cached features.
        drawn: whether the split was drawn here, because the files have none.
        whole: the records of all classes, and in turn all images that were found. Features are
            computed once for these, whatever a run leaves out, so they depend on the files alone.
        rows: indices (n,) of these records among those of `whole`.
        groups: of records with like values, (n,), int64; None for classes.
        members: of each record, where it is a bag, the indices of its images in `whole`.
    """

    name: str
    labels: Tensor
    classes: tuple[str, ...]
    is_train: Tensor
    key: str
    drawn: bool = False
    whole: Dataset | None = None
    rows: Tensor | None = None
    groups: Tensor | None = None
    members: tuple[Tensor, ...] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def strata(self) -> Tensor:
        """What splits and partitions keep balanced, (n,): classes, or groups of like values."""
        return self.labels if self.groups is None else self.groups

    @property
    def report(self) -> DataReport:
        """What was left out before any image was opened."""
        bags = "" if self.members is None else described(self.members)
        return DataReport(self.name, len(self), self.left_out, self.warnings, bags)

    def open_image(self, index: int, shortest: int = 0) -> Image.Image:
        """A record as an RGB image; safe in threads.

        Args:
            index: of the record.
            shortest: above 0: a large JPEG may be decoded smaller, but its shorter side keeps at
                least twice that many pixels.

        Raises:
            OSError: and other errors of Pillow, for a broken image.
            DataError: for a broken DICOM file, or a data set without images.
        """
        if self.opener is None:
            raise DataError(
                f"data set {self.name!r} holds precomputed features, no images; use a backbone on "
                "images instead"
            )
        return self.opener(index, shortest)

    def where(self, index: int) -> str:
        """Where record `index` is, such as the path of its file: for the site's own log and console
        only.
        """
        return f"record {index + 1}" if self.place is None else printable(self.place(index))


def load(source: DataSource, seed: int) -> Dataset:
    """Load a source of one data set.

    Args:
        source: of the data.
        seed: of the split.

    Raises:
        DataError: for several names (see `load_all`) and for unusable data.
    """
    if len(source.names) > 1:
        raise DataError(
            f"dataset = {', '.join(source.names)!r} names {len(source.names)} data sets where one "
            "is needed"
        )
    return load_all(source, seed)[0]


def load_all(source: DataSource, seed: int) -> list[Dataset]:
    """Load every data set of a source, over one common tuple of classes.

    A split in the files is kept; otherwise it is drawn per class.

    Args:
        source: names the data sets.
        seed: of the split.

    Raises:
        DataError: for unusable data.
    """
    key = _key_of_small(source)
    return _loaded(source, seed) if key is None else list(_kept(source, seed, key))


@lru_cache(maxsize=2)
def _kept(source: DataSource, seed: int, key: str) -> tuple[Dataset, ...]:
    """Data sets that each request to a site of a simulation asks for again."""
    return tuple(_loaded(source, seed))


def _key_of_small(source: DataSource) -> str | None:
    """What identifies the bundled digits, or features in small files, as they are now; None for others."""
    if source.kind != "safetensors":
        return "" if source.kind == "digits" else None
    try:
        folders = [(folder_of(source, name), name) for name in source.names or ("",)]
        files = [(at, split_files(at, name, ".safetensors")) for at, name in folders]
        if sum(file.stat().st_size for _, own in files for file in own) > LARGEST_KEPT:
            return None
    except (DataError, OSError):
        return None
    return "".join(content_key(at, own) for at, own in files)


def _loaded(source: DataSource, seed: int) -> list[Dataset]:
    names = source.names or ("",)
    all_records = [_read(source, name) for name in names]
    if source.bags is not None:
        # Where patients are not protected, they decide nothing about another record.
        owned = source.patients_protected or not source.noisy
        all_records = [pooled(each, LeftOut(source.one_by_one), owned) for each in all_records]
    if source.noisy:
        all_records = [once(each, source.patients_protected) for each in all_records]
    classes = source.classes or _common_classes(all_records)
    if source.whole:
        classes = tuple(dict.fromkeys([*classes, *(n for own in all_records for n in own.labels)]))
    return [
        _assemble(source, name or source.kind, records, classes, seed)
        for name, records in zip(names, all_records, strict=True)
    ]


def class_order(names: Iterable[str]) -> tuple[str, ...]:
    """Distinct class names, sorted as numbers if all are integers, otherwise as texts.

    Example:
        >>> class_order(["10", "9", "9"]), class_order(["b", "10", "9"])
        (('9', '10'), ('10', '9', 'b'))
    """
    distinct = set(names)
    try:
        return tuple(sorted(distinct, key=lambda name: (int(name), name)))
    except ValueError:
        return tuple(sorted(distinct))


def stratified_split(
    labels: Tensor, test_fraction: float, seed: int, patients: Sequence[str] | None = None
) -> Tensor:
    """Hold out the same share of every class, but never its last record.

    Args:
        labels: indices of classes, (n,).
        test_fraction: share that is held out.
        seed: of the choice.
        patients: of each record, (n,); then whole patients are held out, and a patient has the
            class of its first record.

    Returns:
        (n,) bool, True for training.

    Example:
        >>> stratified_split(torch.tensor([0, 0, 1]), test_fraction=0.5, seed=0).sum().item()
        2
    """
    if patients is not None:
        first, of = group(patients)
        return stratified_split(labels[first], test_fraction, seed)[of]
    generator = torch.Generator().manual_seed(seed)
    is_train = torch.ones(len(labels), dtype=torch.bool)
    for label in labels.bincount().nonzero().flatten():
        members = (labels == label).nonzero().flatten()
        held_out = min(int(len(members) * test_fraction + 0.5), len(members) - 1)
        is_train[members[torch.randperm(len(members), generator=generator)[:held_out]]] = False
    return is_train


def group(names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Group records by a name.

    Args:
        names: of each record, (n,).

    Returns:
        The first record of each distinct name, and for every record the index of its name among
        these, (n,).

    Example:
        >>> first, of = group(["a", "b", "a"])
        >>> first.tolist(), of.tolist()
        ([0, 1], [0, 1, 0])
    """
    firsts: dict[str, int] = {}
    for row, name in enumerate(names):
        firsts.setdefault(name, row)
    places = {name: at for at, name in enumerate(firsts)}
    of = torch.tensor([places[name] for name in names], dtype=torch.int64)
    return torch.tensor(list(firsts.values()), dtype=torch.int64), of


def _read(source: DataSource, name: str) -> Records:
    if source.kind == "digits":
        if source.target is not None:
            raise SourceError(
                f"the digits have classes, no {source.target.name}; set data and data-dir"
            )
        source.refuse_columns("the digits have no columns; leave it out")
        return read_digits()
    todo = "check the files and who may read them"
    with told_as(SourceError, f"data in '{source.folder}' cannot be read", todo):
        return READERS[source.kind](source, name, LeftOut(source.one_by_one))


def _common_classes(all_records: list[Records]) -> tuple[str, ...]:
    """The order of classes that all files declare; sorted classes if there is none."""
    declared = {records.classes for records in all_records}
    first = all_records[0].classes
    if first is not None and len(declared) == 1:
        return first
    check_one_truth(records.classes or set(records.labels) for records in all_records)
    return class_order(
        name for records in all_records for name in (records.classes or records.labels)
    )


def _assemble(
    source: DataSource, name: str, records: Records, classes: tuple[str, ...], seed: int
) -> Dataset:
    if source.target is not None and records.values is not None:
        # All are records of the run, and what each is stands in its values.
        values = records.values
        records = replace(
            records,
            labels=classes[:1] * len(values),
            warnings=(*records.warnings, *source.target.warnings(values)),
        )
    names = set(records.labels)
    index = {class_name: i for i, class_name in enumerate(classes)}
    labels = torch.tensor([index.get(label, -1) for label in records.labels], dtype=torch.int64)
    kept = (labels >= 0).nonzero().flatten()
    if not len(kept) and not source.one_by_one:
        present = ", ".join(class_order(records.labels)[:5]) or "none"
        raise DataError(
            f"data set {name!r} has no record of the classes {', '.join(classes) or '(none)'}; it "
            f"has {len(labels)} records of the classes {present}; correct classes, or the data"
        )
    whole = _all_images(name, records if records.images is None else records.images.records)
    others = Counter(label for label in records.labels if label not in index)
    records = replace(
        select(records, kept.tolist()), left_out=(*records.left_out, *loss_of_other_classes(others))
    )
    labels, is_train, groups = labels[kept], records.is_train, None
    if source.target is not None and records.values is not None:
        groups = source.target.groups(records.values)
    if is_train is None:
        strata = labels if groups is None else groups
        how = source.test_fraction, seed, records.patients
        is_train = stratified_split(strata, *how)
        if groups is not None and is_train.all():
            # As many groups of a target as there are cells may each be too small for a share.
            is_train = stratified_split(torch.zeros_like(groups), *how)
    drawn = records.is_train is None
    rows = None
    if not (source.noisy or source.whole):
        rows, records = without_leaks(records, is_train)
    if rows is not None:
        records = only(records, rows)
        labels, is_train, kept = labels[rows], is_train[rows], kept[rows]
        groups = None if groups is None else groups[rows]
    shown, images = classes if source.target is None else classes[:1], records.images
    warnings = warnings_of_data(labels, shown, is_train, records.patients, names)
    return _dataset(
        name,
        records,
        labels=labels,
        classes=classes,
        is_train=is_train,
        drawn=drawn,
        warnings=(*records.warnings, *warnings),
        whole=whole,
        rows=kept if images is None else images.firsts,
        groups=groups,
        members=None if images is None else images.members,
    )


def _all_images(name: str, records: Records) -> Dataset:
    """All records of a source, among all images found, without labels; for their features only."""
    found = records.found
    labels = torch.full((len(records.labels),), -1)
    return _dataset(
        name,
        records,
        labels=labels,
        classes=(),
        is_train=labels >= 0,
        whole=None if found is None else _all_images(name, found[0]),
        rows=None if found is None else found[1],
    )


def _dataset(name: str, records: Records, **own: Any) -> Dataset:
    """A data set with the fields of records that have the same names, and its own."""
    shared = {each.name: getattr(records, each.name) for each in fields(Content)}
    return Dataset(name, key=records.key, **shared | own)


def read_schema(source: DataSource) -> tuple[int, str]:
    """The schema of a source of one data set.

    Args:
        source: of the data.

    Returns:
        Dimension and fingerprint of stored features; zero and empty for images, whose backbone decides them.

    Raises:
        DataError: for a wrong folder, file, column or type; one record more or less changes none of
            these.
    """
    name = source.names[0] if source.names else ""
    folder = folder_of(source, name)
    todo = "check the files and who may read them"
    with told_as(DataError, f"data in '{folder}' cannot be read", todo):
        if source.kind == "safetensors":
            files = split_files(folder, name, ".safetensors")
            header = feature_headers(files, replace(source, site_column="", label_column="y"))[0]
            return header.dimension, header.fingerprint
        if source.kind == "slides":
            found = read_slides(source, name, LeftOut(one_by_one=True))
            assert found.features is not None
            return found.features.shape[1], found.fingerprint
        if source.kind == "parquet":
            parquet_files(source, folder, name)
            return 0, ""
        dicom = source.kind == "dicom"
        _, table = table_of(source, name, OF_HEADERS if dicom else ())
        if table is None:
            return 0, ""
        in_header = dicom and source.bags in OF_HEADERS
        wanted = (replace(source, bags="") if in_header else source).named
        if is_parquet(table):
            columns = parquet_table(table, wanted, source.label_column, source.target, ())[1]
        else:
            columns = csv_header(table)[0]
            if source.target and of_lists(columns, source.label_column, source.target):
                columns += source.target.columns
        if dicom:
            _check_key(key_of(table, columns), source, table)
        require_columns(table, ({} if dicom else path_column(columns)) | wanted, columns)
    return 0, ""


def check_class_folders(node: NodeConfig) -> None:
    """Refuse data without a folder of a class that the site's own settings name. An empty folder
    counts, so no record decides this.

    Args:
        node: the site's settings.

    Raises:
        DataError: for a class without a folder; nothing for tables and files, which have none.
    """
    if not node.classes or node.data not in ("imagefolder", "dicom"):
        return
    there = set[str]()
    for name in node.dataset or ("",):
        root, table = find_table(folder_of(DataSource(node.data, node.data_dir), name), name)
        if table is not None:
            return
        there |= class_folders(root)
    check_named(node, there, "folder")


def check_run_classes(node: NodeConfig, wanted: Collection[str]) -> None:
    """Refuse a run that writes classes otherwise than the site's own settings: the records of such
    a class would be left out, and only noise would be charged for it.

    A site may lack classes of a run, and a run may leave classes of a site out. Where both is so,
    a name is wrong. No record decides this.

    Args:
        node: the site's settings.
        wanted: the classes of the run; empty if it names none.

    Raises:
        DataError: that names the classes.
    """
    unknown = [name for name in wanted if name not in node.classes]
    unused = [name for name in node.classes if name not in wanted]
    if wanted and unknown and unused:
        raise SourceError(
            f"the run has classes {some(unknown)}, which this site's settings do not name, and lacks "
            f"{some(unused)}, which they do (classes = {','.join(node.classes)!r}). The coordinator and all "
            "sites need the same names: rename the folders or labels, and classes in this site's settings "
            "(CLASSES in the .env of a kit); if the run means to leave yours out, remove classes there"
        )


def check_named(node: NodeConfig, there: Collection[str], what: str) -> None:
    """Refuse data that lack a class of the site's own settings.

    Args:
        node: the site's settings.
        there: the classes that the data have.
        what: of a class is missing.

    Raises:
        DataError: that names the class.
    """
    if gone := [name for name in node.classes if name not in there]:
        raise SourceError(
            f"classes = {','.join(node.classes)!r} in the node-config, but data-dir = "
            f"{node.data_dir!r} has no {what} of {some(gone)}; it has {some(sorted(there))}. Was it "
            "renamed, or not mounted? If the class is gone for good, correct classes"
        )


def _check_key(key: str, source: DataSource, table: Path) -> None:
    """Where single images are protected, refuse a table whose rows are about many images.

    One more image with a row of its own may contradict the row of a patient, and all images of that
    patient would be left out.
    """
    of_one_bag = {"study": KEYS[:3], "patient": KEYS}.get(source.bags or "", OF_ONE_IMAGE)
    if source.one_by_one and not source.patients_protected and key not in of_one_bag:
        raise DataError(
            f"'{table}' names images by {key!r}, so one row decides about many, but this site "
            f"protects single images; add one of the columns {', '.join(OF_ONE_IMAGE)}, or protect "
            "patients (unit in the node-config)"
        )
