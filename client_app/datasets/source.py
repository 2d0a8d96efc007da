"""Where the records of a site are, how they are read, and which columns say what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedsurrogate.common.errors import DataError
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import DataKind, Settings
from fedsurrogate.common.targets.target import Target

from ..node_config import Frames, NodeConfig, is_protected
from .left_out import SourceError
from .tables import check_columns


@dataclass(frozen=True)
class DataSource:
    """Location and format of data.

    Attributes:
        kind: of the files.
        folder: of the data.
        names: of data sets; empty: the one data set in the folder.
        label_column: column of labels.
        site_column: column of sites; empty for none.
        patient_column: column of patients; empty for none.
        test_fraction: share of the records that is held out if the files have no split.
        classes: names of the run's classes; empty: those of the data.
        frames: which frame of a DICOM file with several.
        one_by_one: leave out single unusable records, and accept data without any record.
        patients_protected: whether the unit of privacy is the patient.
        noisy: whether noise hides single records, which must then not move others: copies count
            once, and no record leaves the split because of another one.
        target: of the run; None for classes.
        bags: column of the bag of an image, empty for none; None where images are records.
        whole: whether all records are judged, of any class, in whatever part of a split they are.
    """

    kind: DataKind
    folder: str = ""
    names: tuple[str, ...] = ()
    label_column: str = "label"
    site_column: str = ""
    patient_column: str = ""
    test_fraction: float = 0.2
    classes: tuple[str, ...] = ()
    frames: Frames = "refuse"
    one_by_one: bool = False
    patients_protected: bool = False
    noisy: bool = False
    target: Target | None = None
    bags: str | None = None
    whole: bool = False

    @classmethod
    def of_run(cls, data: Settings, target: Target | None = None) -> DataSource:
        """Return the run's own data, for simulation; of a private run as a hospital reads them."""
        return cls(
            data.data,
            data.data_dir,
            data.dataset,
            data.label_column,
            data.site_column if data.partition == "column" else "",
            data.patient_column,
            data.test_fraction,
            data.classes,
            one_by_one=bool(data.epsilon),
            target=target,
            bags=bags_of(data.data, data.features.bag, data.bag_column),
        )

    @classmethod
    def of_node(cls, node: NodeConfig, run: Run) -> DataSource:
        """Return the site's own data. The run sets only the classes and the test fraction, nothing
        about files.
        """
        if not node.data:
            raise DataError(
                "data is not set in this site's node-config; set data and data-dir there"
            )
        check_columns(run.target, node.target_columns)
        protected = is_protected(run.private, node)
        judged = run.settings.counting.kind == "evaluation" and bool(node.held_out_dir)
        apart = judged and node.held_out_apart
        names = node.dataset[node.partition_id :][:1] if protected or judged else node.dataset
        column = ""
        if run.settings.partition == "column" and node.num_partitions > 1 and not protected:
            column = run.settings.site_column
        return cls(
            node.data,
            node.held_out_dir if apart else node.data_dir,
            # In a private run, another site's data set must not affect the reply.
            () if apart else names,
            node.label_column,
            column,
            node.patient_column,
            run.settings.test_fraction,
            run.settings.classes,
            node.dicom_frames,
            one_by_one=is_protected(run.hides_sites, node),
            patients_protected=node.protects == "patient",
            noisy=protected,
            target=run.target,
            bags=bags_of(node.data, run.settings.features.bag, node.bag_column),
        )

    @property
    def target_columns(self) -> tuple[str, ...]:
        """The columns that say what is learned of a record: its class, or another target."""
        return (self.label_column,) if self.target is None else self.target.columns

    @property
    def named(self) -> dict[str, str]:
        """The columns of a table that settings name, each with what helps where it is missing."""
        own = "label-column"
        if self.target is not None:
            own = f"the columns of task = {self.target.name!r}"
        named = dict.fromkeys(self.target_columns, own) | self._others
        return {name: f"correct {setting}" for name, setting in named.items() if name}

    @property
    def _others(self) -> dict[str, str]:
        return {
            self.site_column: "--by" if self.whole else "site-column",
            self.patient_column: "patient-column",
            self.bags or "": "bag-column",
        }

    def refuse_columns(self, why: str) -> None:
        """Refuse settings of columns for data without columns.

        Args:
            why: the data have none, and what to do.

        Raises:
            DataError: if a column is set.
        """
        for column, key in self._others.items():
            if column:
                raise SourceError(f"{key} = {column!r}: {why}")


def bags_of(kind: str, bag: str, column: str | None) -> str | None:
    """The column of bags; None where images are records.

    Args:
        kind: of the data.
        bag: how a run pools images, `features.bag`.
        column: that names bags at the site.

    Raises:
        DataError: for slides, which are bags, in a run that learns from single images.
    """
    if bag != "none":
        return column
    if kind == "slides":
        raise SourceError(
            "data = 'slides': a slide is a bag of patches, but features.bag = 'none' learns from single "
            "images; run with features.bag = 'mean'"
        )
    return None


def folder_of(source: DataSource, name: str) -> Path:
    """The folder that holds the data.

    Args:
        source: of the data.
        name: of a data set.

    Raises:
        DataError: when there is none, or when `name` lies outside.
    """
    folder = Path(source.folder).expanduser()
    if not source.folder or not folder.is_dir():
        raise SourceError(
            f"data-dir = {source.folder!r}: no such folder; give the folder that holds the "
            f"{source.kind} data"
        )
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise SourceError(
            f"dataset = {name!r} leaves data-dir; give names of files or folders inside '{folder}'"
        )
    return folder


def require_columns(file: Path, wanted: Mapping[str, str], present: Iterable[str]) -> None:
    """Refuse a table that lacks a column.

    Args:
        file: the table.
        wanted: names of columns, each with what helps besides another name in the table; empty if
            nothing else does.
        present: names of its columns.

    Raises:
        DataError: unless all wanted columns are present.
    """
    names = list(present)
    if missing := [column for column in wanted if column not in names]:
        others = "".join(f", or {todo}" for todo in dict.fromkeys(map(wanted.get, missing)) if todo)
        raise SourceError(
            f"'{file}' lacks the columns {some(missing)}; it has {some(names)}; rename them{others}"
        )


def listing(folder: Path) -> str:
    """Quote the first five names in a folder."""
    return some(sorted(path.name for path in folder.iterdir()))


def some(names: Iterable[str]) -> str:
    """Quote the first five names."""
    listed = list(names)
    more = ", ..." if len(listed) > 5 else ""
    return (", ".join(map(repr, listed[:5])) or "nothing") + more
