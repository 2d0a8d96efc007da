"""Reader of image files: one folder per class, or a table of paths and labels."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from fedsurrogate.common.errors import DataError
from fedsurrogate.common.identity import is_text, name_of, normal

from .dicom_files import is_dicom_file
from .images import of_file, open_rgb, remembered, same_files
from .left_out import FolderWalk, LeftOut, SourceError, attempt, is_file, is_folder, of_system
from .readers import content_key
from .records import OF_FOLDER, Records, bags_by_folder, records_of, split_by_size, without
from .source import DataSource, folder_of, listing, require_columns, some
from .tables import check_table, read_table

# Names of folders that hold a part of the records, not a class.
SPLITS = frozenset(
    {"train", "training", "test", "testing", "val", "valid", "validation", "eval", "dev"}
)
IMAGE_SUFFIXES = frozenset(
    {
        *(".apng", ".avif", ".bmp", ".dib", ".gif", ".j2c", ".j2k", ".jfif", ".jp2", ".jpe"),
        *(".jpeg", ".jpf", ".jpg", ".jpx", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif"),
        *(".tiff", ".webp"),
    }
)


def read_imagefolder(source: DataSource, name: str, left: LeftOut) -> Records:
    """Read a folder with one sub-folder per class, or with a CSV, TSV or parquet table of paths and
    labels in it.

    Args:
        source: of the data; a folder with the name of one of its classes is a class.
        name: of a sub-folder or table; empty for none.
        left: collects unusable records.

    Raises:
        DataError: for unusable data.
    """
    root, table = table_of(source, name)
    if table:
        return _by_table(root, table, source, left)
    files, is_train = in_class_folders(root, _is_image_or_dicom, left, source)
    images = [row for row, (path, _) in enumerate(files) if is_image(path)]
    if len(images) < len(files):
        # Read as images, they would lose their patients.
        example = next(path for path, _ in files if not is_image(path))
        left.note_unread(
            len(files) - len(images),
            f"{len(files) - len(images)} files in the class folders are DICOM, such as "
            f"'{example}'; set data to 'dicom' if all are, or keep these in a folder of their own",
        )
        files = [files[row] for row in images]
        is_train = None if is_train is None else is_train[images]
    if not files and not left.one_by_one:
        dicom = any(not is_image(each) and _is_image_or_dicom(each) for each in root.iterdir())
        advice = "set data to 'dicom' for DICOM files, or " if dicom else ""
        raise DataError(
            f"'{root}' has no images in class folders; it has {listing(root)}; {advice}make one folder "
            f"per class with images in it, or put a table with the columns 'path' and "
            f"{source.label_column!r} next to them"
        )
    in_bags = source.bags == OF_FOLDER
    note_depth(root, files, left, None if in_bags else source.classes)
    bags = folder_bags(root, files) if in_bags else None
    records = Records([label for _, label in files], "", is_train, bags=bags)
    return _opened(records, root, [path for path, _ in files], left)


def table_of(
    source: DataSource, name: str, of_headers: Collection[str] = ()
) -> tuple[Path, Path | None]:
    """The folder of the files, and its table if there is one; without one, no setting may name a
    column.

    Args:
        source: of the data.
        name: of a sub-folder or table; empty for none.
        of_headers: bags that the files themselves name.

    Raises:
        DataError: for a setting of a column without a table, and as `find_table` and `check_table`.
    """
    root, table = find_table(folder_of(source, name), name)
    if table is None:
        check_table(root, source.target)
        named = None if source.bags in (OF_FOLDER, *of_headers) else source.bags
        replace(source, bags=named).refuse_columns(
            f"'{root}' has no table with columns; put one next to the images"
        )
    return root, table


def folder_bags(root: Path, files: Sequence[tuple[Path, str]]) -> tuple[str, ...]:
    """The bag of each file: the folder inside that of its class, or itself.

    Args:
        root: of the class folders.
        files: with their class folder.
    """
    depths = [len(_below_class(path.relative_to(root).parts, name)) for path, name in files]
    tops = [path.parents[depth] for (path, _), depth in zip(files, depths, strict=True)]
    return bags_by_folder([path for path, _ in files], tops)


def is_image(file: Path) -> bool:
    """Whether a file is an image by its name."""
    return file.suffix.lower() in IMAGE_SUFFIXES


def _is_image_or_dicom(file: Path) -> bool:
    return is_image(file) or attempt(partial(is_dicom_file, file)) is True


def find_table(folder: Path, name: str) -> tuple[Path, Path | None]:
    """The folder of the files, and its table if there is one.

    Args:
        folder: of the data.
        name: a sub-folder or a table; may be empty.

    Raises:
        DataError: if `name` is neither, or if it is empty and there are several tables.
    """
    if name and (folder / name).is_dir():
        return find_table(folder / name, "")
    if name:
        tables = [
            p
            for p in (folder / f"{name}{s}" for s in ("", ".csv", ".tsv", ".parquet"))
            if p.is_file()
        ] or [p for p in folder.iterdir() if p.stem == name and _is_table(p) and is_file(p)]
        if not tables:
            raise SourceError(
                f"dataset = {name!r}: '{folder}' has no such sub-folder or table; it has "
                f"{listing(folder)}"
            )
    else:
        tables = find_tables(folder)
    if len(tables) > 1:
        raise SourceError(
            f"'{folder}' has several tables ({some(p.name for p in tables)}); name one of them in "
            "dataset"
        )
    return folder, tables[0] if tables else None


def find_tables(folder: Path) -> list[Path]:
    """The tables in a folder, sorted."""
    return sorted(
        p for p in folder.iterdir() if _is_table(p) and not of_system(p.name) and is_file(p)
    )


def _is_table(path: Path) -> bool:
    return path.suffix.lower() in (".csv", ".tsv", ".parquet")


def in_class_folders(
    root: Path, wanted: Callable[[Path], bool], left: LeftOut, source: DataSource | None = None
) -> tuple[list[tuple[Path, str]], Tensor | None]:
    """Files below class folders.

    Args:
        root: folder of the class folders, or of folders `train` and `test` with these.
        wanted: which files.
        left: counts the others.
        source: says whether no record may decide about another. A file's own path then decides its
            class and whether it trains: whether there is another folder, which one record may bring,
            must not. So a folder `train` or `test` is a part of the split unless a class of the run
            has its name, also where the other does not exist.

    Returns:
        The wanted files below each class folder, with its name; and a mask of training files if
        folders `train` and `test` exist, or if no record may decide about another.
    """
    noisy = source is not None and source.noisy
    splits = [root / "train", root / "test"]
    if source is not None and noisy:
        splits = [each for each in splits if each.name not in source.classes]
        tops = [*splits, root]
    else:
        tops = splits if all(map(is_folder, splits)) else [root]
    files: list[tuple[Path, str]] = []
    sizes: list[int] = []
    walk = FolderWalk(wanted, IMAGE_SUFFIXES)
    for top in tops:
        folders = attempt(partial(walk.folders, top))
        if isinstance(folders, BaseException):
            # It is missing, or cannot be read.
            if not (left.one_by_one and isinstance(folders, OSError)):
                raise folders
            folders = []
        own = [
            (path, _class_of(folder))
            for folder in folders
            if folder not in tops
            for path in walk.files(folder)
        ]
        files += own
        sizes.append(len(own))
    walk.report(left)
    nameless = [path for path, name in files if not (name and (noisy or is_text(name)))]
    if nameless:
        left.note_unread(
            len(nameless),
            f"{len(nameless)} files are in a folder whose name is blank or not UTF-8, such as "
            f"'{nameless[0].parent}'; rename it",
        )
    if not noisy:
        return files, split_by_size(sizes)
    trains = [top.name != "test" or top == root for top in tops]
    return files, torch.tensor(trains).repeat_interleave(torch.tensor(sizes))


def class_folders(root: Path) -> set[str]:
    """Names of the folders that may be classes, also of empty ones, in their normal form.

    Args:
        root: folder of the class folders, or of folders `train` and `test` with these.

    Raises:
        OSError: if it cannot be read.
    """
    walk = FolderWalk(lambda file: False, IMAGE_SUFFIXES)
    tops = [root, *filter(is_folder, (root / "train", root / "test"))]
    return {_class_of(folder) for top in tops for folder in walk.folders(top)}


def files_below(folder: Path, wanted: Callable[[Path], bool], left: LeftOut) -> list[Path]:
    """Wanted files at any depth, sorted, without those of systems.

    Args:
        folder: of the files.
        wanted: which files.
        left: counts the others.
    """
    walk = FolderWalk(wanted, IMAGE_SUFFIXES)
    files = walk.files(folder)
    walk.report(left)
    return files


def _class_of(folder: Path) -> str:
    """The class that a folder names, in its normal form; its name is never a missing value."""
    return name_of(folder.name, (normal(folder.name),)) or ""


def _below_class(parts: tuple[str, ...], name: str) -> tuple[str, ...]:
    """The folders of a path between the folder of its class and the file."""
    classes = [_class_of(Path(part)) for part in parts]
    return parts[classes.index(name) + 1 : -1] if name in classes else ()


def note_depth(
    root: Path, files: Sequence[tuple[Path, str]], left: LeftOut, classes: Sequence[str] | None
) -> None:
    """Refuse folders that are not classes: parts of a split, or one folder around the folders of
    classes.

    In a private run only the site's log states it, because one more record may change it.

    Args:
        root: of the class folders.
        files: with their class folder.
        left: collects unusable records.
        classes: as for `read_imagefolder`; None: a class folder may have any folders inside, such
            as those of patients.
    """
    names = sorted({label for _, label in files})
    if not names or set(names) & set(classes or ()):
        return
    if all(name.lower() in SPLITS for name in names):
        fix = (
            f"set data-dir to '{root / names[0]}', which is then split here, or put a folder "
            "'test' next to 'train'"
            if len(names) == 1
            else "name them 'train' and 'test'"
        )
        left.warn(
            f"the folders {some(names)} in '{root}' are parts of a split, not classes; {fix}; "
            "they must hold one folder per class"
        )
    elif len(names) == 1 and classes is not None:
        below = {_below_class(path.relative_to(root).parts, names[0])[:1] for path, _ in files}
        if len(below) > 1 and () not in below:
            folders = sorted(folder for (folder,) in below)
            left.warn(
                f"all images in '{root}' are in folders inside '{names[0]}' ({some(folders)}); if "
                f"these are the classes, set data-dir to '{root / names[0]}'; if {names[0]!r} is "
                "the only class, list the images in a table"
            )


def _by_table(root: Path, file: Path, source: DataSource, left: LeftOut) -> Records:
    wanted = source.named
    columns = read_table(file, ("path", *wanted), left, source.label_column, source.target)
    require_columns(file, path_column(columns) | wanted, columns)
    records = records_of(file, columns, source, left)
    given = columns["path"]
    absent = [row for row, path in enumerate(given) if not (isinstance(path, str) and path)]
    left.note(
        absent,
        f"{len(absent)} rows of '{file}' have no path, such as {left.where(absent)}; "
        "fill it in or remove them",
    )
    outside = [row for row, path in enumerate(given) if row not in absent and leaves(path)]
    if outside:
        left.note(
            outside,
            f"{left.where(outside)} of '{file}': path {given[outside[0]]!r} leaves '{root}', "
            f"as in {len(outside)} rows; paths must lie inside that folder",
        )
    gone = {*absent, *outside}
    paths = [root if row in gone else root / path for row, path in enumerate(given)]
    if paths and not left.one_by_one and not any(path.is_file() for path in paths):
        raise DataError(
            f"none of the {len(paths)} files in '{file}' exists, such as '{paths[0]}'; paths start "
            f"at '{root}'"
        )
    if find_tables(root) == [file]:
        # Another table may name the others.
        unnamed = sorted(set(FolderWalk(is_image, IMAGE_SUFFIXES).files(root)) - set(paths))
        left.skip(
            len(unnamed),
            f"{len(unnamed)} images are not in the table '{file}', such as "
            f"{some(map(str, unnamed))}",
        )
    cells = [columns[name] for name in (*wanted, "split") if name in columns]
    note_repeated(file, paths, list(zip(*cells, strict=True)), left)
    return _opened(records, root, paths, left)


# Columns by which tables find DICOM files.
OF_DICOM = ("sopinstanceuid", "studyinstanceuid", "accessionnumber", "patientid")


def path_column(columns: Iterable[str]) -> dict[str, str]:
    """The column of a table of images that no setting names, with what helps where it is missing.

    Args:
        columns: of the table.
    """
    todo = "add 'path' with the file of each image, below the folder of the table"
    keys = [name for name in columns if re.sub("[ _-]", "", name).lower() in OF_DICOM]
    if keys:
        todo += f" ({keys[0]!r} names none: set it as patient-column, or data = 'dicom' for DICOM files)"
    return {"path": todo}


def leaves(path: str) -> bool:
    """Whether a path of a table may be outside of the table's folder."""
    return Path(path).is_absolute() or ".." in Path(path).parts


def note_repeated(
    file: Path, paths: Sequence[Path], values: Sequence[tuple[Any, ...]], left: LeftOut
) -> None:
    """Leave out rows that repeat an earlier one. In a private run all copies are handled together
    instead, by content: see client_app/datasets/images.py.

    Args:
        file: the table.
        paths: of each row.
        values: of each row, the cells that are used.
        left: collects the rows.

    Raises:
        DataError: for two rows that differ in their values for one path.
    """
    if left.one_by_one:
        return
    first: dict[Path, int] = {}
    repeated = [row for row, path in enumerate(paths) if first.setdefault(path, row) != row]
    for row in repeated:
        if values[row] != values[first[paths[row]]]:
            left.note_unread(
                1,
                f"{left.place(first[paths[row]])} and {left.place(row)} of '{file}' name the same image but "
                "differ; keep one of them",
            )
    if repeated:
        left.count_once(
            repeated,
            f"{len(repeated)} rows of '{file}' repeat an earlier row, such as "
            f"{left.where(repeated)}",
        )


def _open_file(paths: Sequence[Path], index: int, shortest: int) -> Image.Image:
    return open_rgb(paths[index], shortest)


def _opened(records: Records, root: Path, paths: Sequence[Path], left: LeftOut) -> Records:
    """Records with their image files, without those that are left out."""
    key = content_key(root, paths)
    own = replace(
        records,
        key=key,
        opener=partial(_open_file, paths),
        describe=partial(of_file, paths),
        same=lambda: remembered(key, lambda: same_files(paths)),
        place=lambda i: str(paths[i]),
    )
    return without(own, left)
