"""Readers of precomputed features: safetensors files, and whole slides as CLAM, TRIDENT and STAMP
write them.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fedsurrogate.common.backbones.backbone_names import in_column_order, shown, with_columns
from fedsurrogate.common.errors import LOG, DataError
from fedsurrogate.common.extras import needed_for
from fedsurrogate.common.identity import normal

from .image_folders import find_table, find_tables, note_repeated
from .images import remembered, same_bytes, same_rows
from .left_out import FolderWalk, LeftOut, SourceError, attempt, described
from .readers import content_key, split_files
from .records import Records, records_of, with_declared, without
from .source import DataSource, folder_of, listing, require_columns, some
from .tables import csv_header, is_parquet, name_or_blank, parquet_table, read_table

# Rows that are checked at a time, and bytes of a file that is not copied to memory.
CHECKED, LARGE = 8192, 2**26
# Types of tensors: of features; of numbers that are learned; and of classes, patients and bags.
FLOATING = frozenset({"F64", "F32", "F16", "BF16"})
WHOLE = frozenset({"I64", "I32", "I16", "I8", "U8", "U16", "U32", "U64"})
REAL = FLOATING | WHOLE | {"BOOL"}


@dataclass(frozen=True)
class FeatureHeader:
    """What the header of a file of features says.

    Attributes:
        dimension: of the features.
        fingerprint: of their backbone, with the names of their columns.
        order: in which columns are read.
        classes: that the file declares, with commas.
    """

    dimension: int
    fingerprint: str
    order: list[int]
    classes: str


def read_safetensors(source: DataSource, name: str, left: LeftOut) -> Records:
    """Read features.

    A file has `x` (n, d) floating point, `y` (n,) integer; optional: metadata `fingerprint`,
    `classes` and `columns` (a JSON list of d names), and tensors (n,) of integers named as the
    patient and the bag column of the source. The metadata of a file are about this file alone.

    Args:
        source: of the data.
        name: of the data set; may be empty.
        left: collects unusable records.

    Raises:
        DataError: for unusable data.
    """
    folder = folder_of(source, name)
    replace(source, patient_column="", bags=None).refuse_columns(
        "safetensors files have no columns; leave it out"
    )
    source = replace(source, label_column="y")
    files = split_files(folder, name, ".safetensors")
    headers = feature_headers(files, source)
    tensors: dict[str, list[torch.Tensor]] = {each: [] for each in ("x", *source.named)}
    for file, header in zip(files, headers, strict=True):
        with _opened(file) as content:
            read = {each: content.get_tensor(each) for each in tensors}
        for each, tensor in read.items():
            if len(tensor) != len(read["x"]):
                raise SourceError(
                    f"'{file}' has {len(read['x'])} rows of x but {len(tensor)} of {each}; the "
                    "numbers must be equal"
                )
            tensors[each].append(tensor)
        if header.order != sorted(header.order):
            tensors["x"][-1] = read["x"][:, header.order]
    parts = tensors.pop("x")
    # A large file stays mapped: a copy would fill the memory of the site.
    x = parts[0] if len(parts) == 1 and parts[0].nbytes >= LARGE else torch.cat(parts)
    finite = torch.cat([torch.isfinite(rows).all(dim=1) for rows in torch.split(x, CHECKED)])
    # Of a bag, only the images that can be used are in its mean.
    broken = [] if source.bags is not None else (~finite).nonzero().flatten().tolist()
    left.note(
        broken,
        f"x in '{files[0]}' has NaN or infinity in {len(broken)} of {len(x)} rows, first in row "
        f"{min(broken, default=0)}; remove those rows or compute them again",
    )
    columns = {
        each: [cell for own in all_ for cell in own.tolist()] for each, all_ in tensors.items()
    }
    records = records_of(files[0], columns, source, left)
    declared = [header.classes.split(",") if source.target is None else () for header in headers]
    sizes = list(map(len, parts))
    records = with_declared(records, columns.get("y", ()), files, sizes, declared, left)
    records = replace(
        records,
        key=content_key(folder, files),
        features=x,
        fingerprint=headers[0].fingerprint,
        same=lambda: same_rows(x),
    )
    return without(records, left)


def feature_headers(files: Sequence[Path], source: DataSource) -> list[FeatureHeader]:
    """The headers of files of features, whose tensors are there and of their types; no record is
    read.

    Args:
        files: of one data set.
        source: of the data, with the label column "y".

    Raises:
        DataError: for a file that is none, a tensor that is missing or of another type, or two files
            of different backbones.
    """
    headers = []
    for file in files:
        with _opened(file) as content:
            if missing := sorted({"x", *source.named} - {*content.keys()}):
                raise SourceError(
                    f"'{file}' lacks the tensors {missing}; it has {some(content.keys())}; store x "
                    f"(n, d) and {' (n,), '.join(source.named)} (n,)"
                )
            for each in ("x", *source.named):
                own = content.get_slice(each)
                shape, kind = own.get_shape(), own.get_dtype()
                kinds, what = WHOLE, "integers of shape (n,)"
                if each == "x":
                    kinds, what = FLOATING, "floating point of shape (n, d)"
                elif source.target is not None and each in source.target_columns:
                    kinds, what = REAL, "real numbers of shape (n,)"
                if kind not in kinds or len(shape) != 1 + (each == "x") or 0 in shape[1:]:
                    raise SourceError(
                        f"{each} in '{file}' is {kind} of shape {tuple(shape)}; it must be {what}"
                    )
            metadata, dimension = content.metadata() or {}, content.get_slice("x").get_shape()[1]
        fingerprint, order = _stored_fingerprint(file, metadata, dimension)
        headers.append(FeatureHeader(dimension, fingerprint, order, metadata.get("classes", "")))
    if len({(each.dimension, each.fingerprint) for each in headers}) > 1:
        first, second = (shown(each.fingerprint) for each in headers)
        raise SourceError(
            f"'{files[0]}' and '{files[1]}' hold features of different backbones or columns, "
            f"{first} and {second}; compute both with one"
        )
    return headers


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as content:
            yield content
    # RuntimeError, TypeError: torch cannot represent a side of zero next to a huge one.
    except (SafetensorError, RuntimeError, TypeError) as error:
        raise SourceError(
            f"'{file}' is not a readable safetensors file ({error}); write it again"
        ) from error


def _stored_fingerprint(
    file: Path, metadata: Mapping[str, str], dimension: int
) -> tuple[str, list[int]]:
    """The fingerprint of the features of a safetensors file, with the names of its columns.

    Args:
        file: for errors.
        metadata: of the file.
        dimension: d of the features.

    Returns:
        The fingerprint, and the order in which columns are read.

    Raises:
        DataError: for names that are no list of d different texts.
    """
    fingerprint = metadata.get("fingerprint", "") or f"features-{dimension}"
    try:
        names = json.loads(metadata.get("columns") or "[]")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("no list of texts")
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"the metadata 'columns' of '{file}' is no JSON list of names ({error}); write it again"
        ) from None
    if not names:
        return fingerprint, list(range(dimension))
    if len(names) != dimension:
        raise SourceError(
            f"the metadata 'columns' of '{file}' has {len(names)} names for {dimension} columns of x; "
            "write one for each"
        )
    try:
        found, order = in_column_order(names)
        return with_columns(fingerprint, found), order
    except DataError as error:
        raise SourceError(f"'{file}': {error}") from None


# Files of features, the one that is read first where a slide has several; and names of their tensor.
SUFFIXES, TENSORS = (".h5", ".hdf5", ".pt"), ("features", "feats")
# Columns that name slides, the first that a table has; and what scanners write, whose name a slide may have.
KEYS = ("slide", "slide_id", "FILENAME", "path")
SCANS = frozenset(
    {".svs", ".tif", ".tiff", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".svslide", ".czi", ".dcm"}
)
FORM = "features of shape (n, d) or (1, n, d), floating point"


class SlideForm(NamedTuple):
    """Dimension of a file's features, and the model of pathology that the file names; empty for none."""

    dimension: int
    model: str


@dataclass(frozen=True, eq=False)
class SlideFeatures:
    """Features of the patches of slides, which stay on disk: a row is a slide, and reading it gives
    all its patches.

    Attributes:
        files: of each slide.
        form: of these files.
    """

    files: tuple[Path, ...]
    form: SlideForm

    @property
    def fingerprint(self) -> str:
        """Of the model of pathology, or what stands for it where no file names one."""
        return self.form.model or f"features-{self.form.dimension}"

    @property
    def shape(self) -> tuple[int, int]:
        """Number of slides, and dimension of a patch."""
        return len(self.files), self.form.dimension

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Any) -> Tensor:
        """The patches of some slides, (m, d), float32; NaN for a slide that cannot be read."""
        parts = [torch.zeros(0, self.form.dimension)]
        for row in torch.arange(len(self.files))[index].reshape(-1).tolist():
            found = attempt(partial(self.patches, row))
            if isinstance(found, BaseException):
                LOG.warning("'%s' cannot be read (%s)", self.files[row], described(found))
                found = torch.full((1, self.form.dimension), torch.nan)
            elif lost := int((~found.isfinite().all(1)).sum()):
                LOG.warning(
                    "'%s': %d of %d patches have NaN or infinity, and are not in the mean",
                    *(self.files[row], lost, len(found)),
                )
            parts.append(found)
        return torch.cat(parts)

    def patches(self, row: int) -> Tensor:
        """The patches of a slide, (m, d), float32.

        Raises:
            DataError, OSError: and other errors of the libraries, for a file that cannot be read.
        """
        with _opened_slide(self.files[row]) as (x, _):
            if (dimension := _dimension(x)) != self.form.dimension:
                raise DataError(f"its features have dimension {dimension}")
            content = x if isinstance(x, Tensor) else torch.from_numpy(x[()])
            return content.float().reshape(-1, dimension)


def read_slides(source: DataSource, name: str, left: LeftOut) -> Records:
    """Read slides by a table, whose column `slide` or `slide_id` names files at any depth below the
    folder, with or without their endings.

    Args:
        source: of the data.
        name: of a sub-folder or table; empty for none.
        left: collects unusable records.

    Raises:
        DataError: for unusable data.
    """
    root, table = find_table(folder_of(source, name), name)
    if table is None:
        raise SourceError(
            f"'{root}' has no table of slides; put one next to the files of features, with the columns "
            f"'slide' and {' and '.join(map(repr, source.target_columns))}"
        )
    wanted, key = source.named, slide_column(table)
    columns = read_table(table, (key, *wanted), left, source.label_column, source.target)
    require_columns(table, {key: ""} | wanted, columns)
    records = records_of(table, columns, source, left)
    given = [name_or_blank(cell) for cell in columns[key]]
    found, others = files_of(root, given)
    if find_tables(root) == [table]:
        left.skip(
            len(others),
            f"{len(others)} files of features are not in the table '{table}', such as {some(others)}",
        )
    absent = [row for row, own in enumerate(found) if not own]
    if len(absent) == len(found) > 0 and not left.one_by_one:
        raise DataError(
            f"none of the {len(found)} slides in '{table}' has a file, such as {given[0]!r}; "
            f"'{root}' has {listing(root)}; files end in {', '.join(SUFFIXES)}"
        )
    left.count_once(
        absent,
        f"{len(absent)} slides of '{table}' have no file in '{root}', such as {left.where(absent)}",
    )
    double = [row for row, own in enumerate(found) if len(own) > 1]
    left.note(
        double,
        f"{len(double)} slides have several files, such as "
        f"{some(map(str, found[min(double, default=0)]) if double else ())}; name them by their paths "
        f"in the column {key!r}",
    )
    files = [own[0] if own else root / cell for own, cell in zip(found, given, strict=True)]
    cells = [columns[each] for each in (*wanted, "split") if each in columns]
    note_repeated(table, files, list(zip(*cells, strict=True)), left)
    form = form_of(files, left)
    records = replace(records, key=content_key(root, files))
    if source.bags == "":
        # Without a column each slide is a bag.
        records = replace(records, bags=tuple(given))
    records = without(records, left)
    slides = SlideFeatures(tuple(files[row] for row in left.kept(len(files))), form)

    def content(row: int) -> bytes:
        return slides[row : row + 1].numpy().tobytes()

    return replace(
        records,
        # Bags read it by rows alone, as they read a tensor.
        features=cast(Tensor, slides),
        fingerprint=slides.fingerprint,
        same=lambda: remembered(records.key, lambda: same_bytes(content, len(slides))),
        place=lambda row: str(slides.files[row]),
    )


def slide_column(table: Path) -> str:
    """The column of a table that names slides.

    Args:
        table: CSV or parquet.

    Raises:
        DataError: for a table without one.
    """
    if is_parquet(table):
        names = parquet_table(table, (), "", None, ())[1]
    else:
        names, _ = csv_header(table)
    if key := next((each for each in KEYS if each in names), ""):
        return key
    raise SourceError(
        f"'{table}' has no column that names slides ({', '.join(KEYS)}); it has {some(names)}; rename one"
    )


def feature_files(root: Path) -> list[Path]:
    """Files of features at any depth, sorted."""
    return FolderWalk(lambda file: file.suffix.lower() in SUFFIXES, frozenset(SUFFIXES)).files(root)


def files_of(root: Path, given: Sequence[str]) -> tuple[list[list[Path]], list[str]]:
    """The files of slides.

    Args:
        root: of the files.
        given: names of slides, in their normal form.

    Returns:
        Of each slide its files, of the first ending that it has; several where its name is not
        enough. And the files of no slide.
    """
    named: Mapping[str, set[Path]] = defaultdict(set)
    files = feature_files(root)
    for file in files:
        own = file.relative_to(root)
        for each in (file.name, file.stem, own.as_posix(), own.with_suffix("").as_posix()):
            named[normal(each)].add(file)
    found, used = [], set[Path]()
    for name in given:
        scan = name[: -len(Path(name).suffix)] if Path(name).suffix.lower() in SCANS else name
        all_ = named.get(name) or named.get(scan) or set()
        used |= all_
        first = min((SUFFIXES.index(each.suffix.lower()) for each in all_), default=0)
        found.append(sorted(each for each in all_ if each.suffix.lower() == SUFFIXES[first]))
    return found, [str(file) for file in files if file not in used]


def form_of(files: Sequence[Path], left: LeftOut) -> SlideForm:
    """The form that most files have; the others are left out.

    Args:
        files: of slides; those that are left out are not read.
        left: collects unusable records.

    Raises:
        DataError: where no file has one, and for a file of another one unless records are left out one
            by one.
    """
    forms = {row: attempt(partial(_form, files[row])) for row in left.kept(len(files))}
    broken = {row: each for row, each in forms.items() if isinstance(each, BaseException)}
    for row in list(broken)[:1]:
        left.note(
            broken,
            f"{len(broken)} slides cannot be read, such as '{files[row]}' ({described(broken[row])}); "
            f"each file needs {FORM}",
        )
    good = {row: each for row, each in forms.items() if isinstance(each, SlideForm)}
    if not good:
        raise SourceError(
            f"no slide can be read, so the dimension of the features is unknown; {FORM}"
        )
    form = Counter(good.values()).most_common(1)[0][0]
    other = [row for row, each in good.items() if each != form]
    for row in other[:1]:
        left.note(
            other,
            f"{len(other)} slides have features of dimension {good[row].dimension} of "
            f"{good[row].model or 'a model without a name'}, such as '{files[row]}', and others of dimension "
            f"{form.dimension} of {form.model or 'a model without a name'}; compute all with one model",
        )
    return form


def _form(file: Path) -> SlideForm:
    with _opened_slide(file) as (x, model):
        return SlideForm(_dimension(x), model)


@contextmanager
def _opened_slide(file: Path) -> Iterator[tuple[Any, str]]:
    """The features of a file, which are read when they are used, and the model that it names."""
    if file.suffix.lower() == ".pt":
        try:
            x = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            # The form of torch before 1.6 cannot be mapped.
            x = torch.load(file, map_location="cpu", weights_only=True)
        yield x, ""
        return
    with needed_for("data = 'slides' with .h5 files"):
        import h5py
    with h5py.File(file, "r", locking=False) as content:
        x = next((content[each] for each in TENSORS if each in content), None)
        # As TRIDENT and STAMP name it.
        model = "" if x is None else x.attrs.get("name", content.attrs.get("extractor", ""))
        yield x, str(model)


def _dimension(x: object) -> int:
    shape = tuple(getattr(x, "shape", ()))
    kind = getattr(x, "dtype", None)
    # Of torch, or of numpy.
    floating = getattr(kind, "is_floating_point", getattr(kind, "kind", "") == "f")
    if not (floating and len(shape) in (2, 3) and shape[:-2] in ((), (1,)) and 0 not in shape):
        what = f"{kind} of shape {shape}" if shape else "no tensor 'features'"
        raise DataError(f"it holds {what}")
    return int(shape[-1])
