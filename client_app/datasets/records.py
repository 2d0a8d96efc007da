"""Output of a reader: labels, features or an image opener, and patients if known. From the columns of
any source to its records: what each row says of class or target, split, site, patient and bag; and
bags, records of several images.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from fedsurrogate.common.data_report import Loss
from fedsurrogate.common.identity import name_of, normal
from fedsurrogate.common.image_histograms import Value

from .left_out import LeftOut, SourceError
from .source import DataSource, some
from .tables import listed_labels, names_in, values_in

# Facts of an image by the name of their histogram.
Facts = dict[str, Value]
# (record, shortest) -> image; `shortest` > 0: the caller then resizes the shorter side to that many
# pixels. It can be pickled, for the processes of several GPUs.
Opener = Callable[[int, int], Image.Image]


@dataclass(frozen=True, eq=False)
class Images:
    """The images of records that are bags.

    Attributes:
        records: all images of the source.
        members: of each bag, indices of its images, (m,) int64, ascending.
    """

    records: Records
    members: tuple[Tensor, ...]

    @property
    def firsts(self) -> Tensor:
        """The first image of each bag, (n,)."""
        return torch.tensor([int(own[0]) for own in self.members], dtype=torch.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class Content:
    """What is known of records, whether a reader has found them or a data set holds them.

    Attributes:
        origin: value of the site column per record.
        features: (n, d); None for images.
        fingerprint: of the backbone that made `features`, if their file names it.
        opener: opens an image; None for features.
        describe: what the file of an image states of it, for surveys; None where it states nothing.
        patients: of each record, if known.
        burned_in: number of images with text burned into their pixels, as headers state.
        left_out: reasons for missing records.
        warnings: warnings for the data report.
        place: where a record is, for the site's own log.
        values: of the target, (n, k), float64; None for classes.
    """

    origin: tuple[str, ...] | None = None
    features: Tensor | None = None
    fingerprint: str = ""
    opener: Opener | None = None
    describe: Callable[[int], Facts] | None = None
    patients: tuple[str, ...] | None = None
    burned_in: int = 0
    left_out: tuple[Loss, ...] = ()
    warnings: tuple[str, ...] = ()
    place: Callable[[int], str] | None = None
    values: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Records(Content):
    """Records of a reader.

    Attributes:
        labels: a class name for each; with another target than classes, a text of its values.
        key: identifies content and order.
        is_train: (n,) bool; None if the files have no split.
        classes: that the files declare, in their order.
        same: finds copies, as a group (n,) of each record with equal numbers for equal content;
            None for public data that are known.
        bags: name of the bag of each image, where bags are pooled and the source names them.
        images: of each record, where it is a bag; None where it is an image.
        found: where some images were left out, all that the reader has found, and the rows (n,) int64
            that are left of them. Features are computed for all, whichever of them a run leaves out.
    """

    labels: Sequence[str]
    key: str
    is_train: Tensor | None = None
    classes: tuple[str, ...] | None = None
    same: Callable[[], Tensor] | None = None
    bags: tuple[str, ...] | None = None
    images: Images | None = None
    found: tuple[Records, Tensor] | None = None


# What a reader says of each row, one by one.
BY_ROW = ("labels", "is_train", "origin", "patients", "features", "values", "bags")


def select(records: Records, positions: Sequence[int]) -> Records:
    """The records at these positions, in this order."""
    rows = list(positions)
    if rows == list(range(len(records.labels))):
        return records
    opener, same, place, images = records.opener, records.same, records.place, records.images
    describe = records.describe
    whole, places = records.found or (records, torch.arange(len(records.labels)))
    # Bags have no features of their own.
    kept = () if images is None else ("features",)
    own = {name: _rows(getattr(records, name), rows) for name in BY_ROW if name not in kept}
    if images is not None:
        images = replace(images, members=_rows(images.members, rows))
    return replace(
        records,
        **own,
        opener=None if opener is None else partial(_open_row, opener, rows),
        describe=None if describe is None else lambda i: describe(rows[i]),
        same=None if same is None else lambda: same()[rows],
        place=None if place is None else lambda i: place(rows[i]),
        images=images,
        found=(whole, places[rows]),
    )


def _rows(values: Any, rows: list[int]) -> Any:
    if values is None or isinstance(values, Tensor):
        return None if values is None else values[rows]
    return type(values)(values[row] for row in rows)


def _open_row(opener: Opener, rows: Sequence[int], index: int, shortest: int) -> Image.Image:
    return opener(rows[index], shortest)


def without(records: Records, left: LeftOut) -> Records:
    """The records that are not left out. Their key then changes, which identifies rows."""
    noted = replace(records, left_out=tuple(left.reasons), warnings=tuple(left.warnings))
    return only(noted, left.kept(len(records.labels))) if left.rows else noted


def only(records: Records, positions: Sequence[int]) -> Records:
    """As `select`, with a key for these records."""
    key = hashlib.sha256(repr((records.key, list(positions))).encode()).hexdigest()
    return replace(select(records, positions), key=key)


def records_of(
    file: Path, columns: Mapping[str, Sequence[Any]], source: DataSource, left: LeftOut
) -> Records:
    """A record for each row of a source, whatever its format, without a key, images or features.

    Args:
        file: that holds the rows, for errors; the first of two.
        columns: the cells of each row, by the normal name of the column.
        source: names the columns; all but `split` must be there.
        left: collects rows that cannot be used; it says where each is.

    Raises:
        DataError: for such a row, unless records are left out one by one.
    """

    def names(column: str | None, what: str) -> tuple[str, ...] | None:
        return names_in(columns[column], what, left) if column else None

    values, labels = None, list[str]()
    group = "value for --by" if source.whole else "site"
    if source.target is None:
        own = source.label_column
        what = f"label ({own!r} of '{file}')"
        lists = [row for row, cell in enumerate(columns[own]) if listed_labels(cell)]
        left.note(
            lists,
            f"{len(lists)} rows of '{file}' hold a list of labels in {own!r}, such as "
            f"{left.where(lists)}; write one class in a cell, or learn lists with task = 'multilabel'",
        )
        labels += names_in(columns[own], what, left, source.classes)
    else:
        values = values_in(columns, source.target, file, left)
        labels += map(str, values.tolist())
    return Records(
        labels,
        "",
        split_of(columns.get("split"), file, left),
        origin=names(source.site_column, f"{group} ({source.site_column!r} of '{file}')"),
        patients=names(
            source.patient_column, f"patient ID (patient-column = {source.patient_column!r})"
        ),
        values=values,
        bags=names(source.bags, f"bag (bag-column = {source.bags!r})"),
    )


def split_of(cells: Sequence[Any] | None, file: Path, left: LeftOut) -> Tensor | None:
    """The split of a table's rows.

    Args:
        cells: of the column 'split'; None without it.
        file: the table.
        left: collects unusable records.

    Returns:
        (n,) bool, True for training; None without the column.

    Raises:
        DataError: for other values than 'train' and 'test'.
    """
    if cells is None:
        return None
    given = [normal(cell) if isinstance(cell, str) else cell for cell in cells]
    unknown = [row for row, cell in enumerate(given) if cell not in ("train", "test")]
    values = sorted({str(given[row]) for row in unknown})
    left.note(
        unknown, f"column 'split' of '{file}' holds {some(values)}; allowed are 'train' and 'test'"
    )
    return torch.tensor([cell == "train" for cell in given], dtype=torch.bool)


def with_declared(
    records: Records,
    numbers: Sequence[Any],
    files: Sequence[Path],
    sizes: Sequence[int],
    declared: Sequence[Iterable[str]],
    left: LeftOut,
) -> Records:
    """Records of one file, or of the two of a split, whose numbers are those of classes that the
    files declare. A file without a list has that of the other.

    Args:
        records: of all files.
        numbers: cells of the label column; what is no whole number stays a name.
        files: one or two.
        sizes: number of records of each.
        declared: names of the classes of each.
        left: collects unusable records.

    Raises:
        DataError: for a class named twice, a number beyond the list, or two lists of which none has
            all classes of the other.
    """
    lists = [_classes(file, names) for file, names in zip(files, declared, strict=True)]
    longest = max(lists, key=len)
    for file, own in zip(files, lists, strict=True):
        if set(own) - set(longest):
            raise SourceError(
                f"'{file}' names the classes {some(own)}, and '{files[lists.index(longest)]}' names "
                f"{some(longest)}; write both with the same names"
            )
    is_train = split_by_size(sizes)
    if not longest:
        return replace(records, is_train=is_train)
    of_row = list(
        chain(*(repeat(own or longest, size) for own, size in zip(lists, sizes, strict=True)))
    )
    named = [isinstance(number, int) for number in numbers]
    wrong = [
        row
        for row, (number, own) in enumerate(zip(numbers, of_row, strict=True))
        if named[row] and not 0 <= number < len(own)
    ]
    for row in wrong[:1]:
        left.note(
            wrong,
            f"'{files[row >= sizes[0]]}' names {len(of_row[row])} classes but has the label "
            f"{numbers[row]}; labels go from 0 to that number - 1",
        )
    labels = [
        of_row[row][numbers[row]] if named[row] and row not in left.rows else label
        for row, label in enumerate(records.labels)
    ]
    return replace(records, labels=labels, classes=longest, is_train=is_train)


def _classes(file: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Classes that a file declares, in their normal form."""
    classes = tuple(name for each in names if (name := name_of(each, (normal(each),))))
    if len(set(classes)) < len(classes):
        raise SourceError(f"'{file}' names a class twice ({some(classes)}); write it again")
    return classes


def split_by_size(sizes: Sequence[int]) -> Tensor | None:
    """Return (n,) bool, True for the records of the first of two files; None for one file, which
    makes no split.
    """
    return None if len(sizes) == 1 else torch.arange(sum(sizes)) < sizes[0]


# A column that is none: images in one folder are a bag, where no table is.
OF_FOLDER = "folder"
ALONE = "no bag-column: each image is a bag of its own"


def pooled(records: Records, left: LeftOut, by_patient: bool) -> Records:
    """Records of bags.

    Args:
        records: of images.
        left: collects unusable bags.
        by_patient: whether a name of a bag holds within a patient.

    Returns:
        The bags, in the order of their first images; each image alone where the source names no
        bags.

    Raises:
        DataError: for a bag whose images do not agree, unless records are left out one by one.
    """
    count = len(records.labels)
    names = records.bags or tuple(map(str, range(count)))
    owners = records.patients if by_patient and records.patients is not None else [""] * count
    rows: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row, whose in enumerate(zip(owners, names, strict=True)):
        rows[whose].append(row)
    said = _said(records)
    torn = [at for at, own in enumerate(rows.values()) if len({said[row] for row in own}) > 1]
    keys = list(rows)
    left.note(
        torn,
        f"{len(torn)} of {len(rows)} bags have images with different targets, or in both parts of "
        f"the split, such as bag {keys[torn[0]][1] if torn else ''!r}; correct them, or leave them "
        "out",
    )
    kept = left.kept(len(rows))
    members = tuple(torch.tensor(rows[keys[at]], dtype=torch.int64) for at in kept)
    titles = [keys[at][1] for at in kept]
    images = Images(records, members)
    found = select(replace(records, bags=None, features=None), images.firsts.tolist())
    same = records.same
    return replace(
        found,
        key=_key(records.key, members),
        # Without rows: a bag's feature is the mean of its images'.
        features=None if records.features is None else records.features[:0],
        same=None if same is None else lambda: same_bags(same(), members),
        place=lambda at: f"bag {titles[at]!r}",
        left_out=(*records.left_out, *left.reasons),
        warnings=(*records.warnings, *([] if records.bags else [ALONE])),
        images=images,
    )


def _said(records: Records) -> list[object]:
    """What each image says of its bag: target, part of the split, and site."""
    count = len(records.labels)
    if records.values is None:
        targets: Sequence[object] = records.labels
    else:
        # NaN, which no value equals, is "not annotated".
        targets = [tuple(row) for row in records.values.nan_to_num(nan=torch.inf).tolist()]
    parts = [None] * count if records.is_train is None else records.is_train.tolist()
    sites = [None] * count if records.origin is None else records.origin
    return list(zip(targets, parts, sites, strict=True))


def described(members: Sequence[Tensor]) -> str:
    """How many images are in how many bags.

    Args:
        members: indices of each bag's images.

    Example:
        >>> described([torch.tensor([0, 2]), torch.tensor([1])])
        '3 images in 2 bags, of 1 to 2 each'
    """
    sizes = [len(own) for own in members] or [0]
    return f"{sum(sizes)} images in {len(members)} bags, of {min(sizes)} to {max(sizes)} each"


def _key(key: str, members: Sequence[Tensor]) -> str:
    digest = hashlib.sha256(f"bags {key}".encode())
    for own in members:
        digest.update(own.numpy().tobytes() + b";")
    return digest.hexdigest()


def same_bags(group: Tensor, members: Sequence[Tensor]) -> Tensor:
    """Group (n,) of each bag: equal numbers for bags with equal images.

    Args:
        group: of each image, with equal numbers for equal content.
        members: indices of each bag's images.

    Example:
        >>> bags = [torch.tensor(own) for own in ([0, 1], [2], [4, 3])]
        >>> same_bags(torch.tensor([7, 8, 7, 7, 8]), bags).tolist()
        [0, 1, 0]
    """
    seen: dict[bytes, int] = {}
    found = [
        seen.setdefault(group[own].sort().values.numpy().tobytes(), at)
        for at, own in enumerate(members)
    ]
    return torch.tensor(found, dtype=torch.int64)


def bags_by_folder(paths: Sequence[Path], tops: Sequence[Path]) -> tuple[str, ...]:
    """Images in one folder are a bag; those right in a top folder are each a bag.

    Args:
        paths: of images.
        tops: of each, the folder below which folders are bags.

    Example:
        >>> root = Path("a")
        >>> bags_by_folder([root / "1.png", root / "p" / "1.png", root / "p" / "2.png"], [root] * 3)
        ('a/1.png', 'a/p', 'a/p')
    """
    return tuple(
        str(path if path.parent == top else path.parent)
        for path, top in zip(paths, tops, strict=True)
    )
