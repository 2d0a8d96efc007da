"""A first look at a site's data before it joins: columns and folders, without labels and images. And
checks of a simulation before it starts: labels and their distribution, whether any image can be opened,
and the backbone's weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from fedsurrogate.common.backbones.backbones import load_network
from fedsurrogate.common.backbones.networks import options_of
from fedsurrogate.common.backbones.power_transform import raised
from fedsurrogate.common.costs import check_payload
from fedsurrogate.common.data_report import DataReport, merged
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.extras import OF_DATA, check_installed
from fedsurrogate.common.privacy.accounting import budget_warnings
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.targets.number import Number
from fedsurrogate.common.targets.target import Target

from ..datasets.dataset import Dataset, DataSource, check_named, folder_of, load_all, read_schema
from ..datasets.image_folders import find_table, in_class_folders, is_image, note_depth
from ..datasets.left_out import LeftOut, attempt, is_file
from ..datasets.partition import whole
from ..datasets.source import some
from ..features.site_features import (
    LabelledFeatures,
    dataset_features,
    usable,
    warning_of,
    with_broken,
)
from ..governance.policy import policy_of
from ..node_config import NodeConfig

# Classes that a person reads before confirming them.
MOST_LISTED = 20


def first_look(node: NodeConfig, smallest_site: int) -> list[str]:
    """Look at the data that a node-config names, before the site joins: they are listed once.

    Whether the site joins must not depend on a single record, because the coordinator sees it. So
    warnings do not stop the site. Nor may an answer to a request depend on it: a folder that empties
    later gives noise.

    Args:
        node: the site's settings.
        smallest_site: records that the site must have; 0: whatever is there.

    Returns:
        Warnings about folders without images, or not of classes; and what to write into the settings
        where they name no class.

    Raises:
        DataError: for a wrong file, column or type, for fewer records, such as in a folder that is not
            mounted, or for a class without a record.
        PackageError: for a kind of data whose optional package is not installed.
    """
    if not node.data or node.data == "digits":
        return []
    if node.data in OF_DATA:
        check_installed(OF_DATA[node.data], f"data = {node.data!r} in the node-config")
    records, classes, warnings = list_data(node, needed=bool(smallest_site or node.classes))
    if records < smallest_site:
        raise DataError(
            f"data-dir = {node.data_dir!r} has {records or 'no'} records of kind {node.data!r}, and "
            f"the policy's smallest-site is {smallest_site}; is the disk mounted, and the folder the right "
            "one? To join all the same, set smallest-site in the policy, 0 for none"
        )
    return [*warnings, *check_classes(node, classes)]


def list_data(node: NodeConfig, needed: bool = True) -> tuple[int, set[str], list[str]]:
    """List a site's data once.

    Args:
        node: the site's settings, with data of its own.
        needed: whether tables that cannot be read are an error; a wrong column is one in any case.

    Returns:
        The number of records, as files list them, without a look into images; the classes with a
        record; and warnings about folders without images, or not of classes.

    Raises:
        DataError: for a wrong file, column or type.
    """
    records, classes, warnings = 0, set[str](), list[str]()
    for source in _sources(node):
        read_schema(source)
        try:
            found = _in_folders(source)
        except (DataError, OSError) as error:
            warnings.append(str(error))
            continue
        if found is None:
            try:
                for data in load_all(replace(source, one_by_one=True), 0):
                    records += len(data)
                    classes |= {data.classes[label] for label in set(data.labels.tolist())}
            except (DataError, OSError):
                if needed:
                    raise
            continue
        records += len(found[1])
        classes |= {name for _, name in found[1]}
        try:
            if not found[1]:
                images = "images" if source.kind == "imagefolder" else "files"
                what = f"'{found[0]}' has no {images} in class folders"
                warnings.append(f"{what}; make one folder per class, or a table")
            else:
                note_depth(*found, LeftOut(), () if source.kind == "imagefolder" else None)
        except DataError as error:
            warnings.append(str(error))
    if node.target_columns and node.classes:
        _, classes, _ = list_data(node.model_copy(update={"target_columns": ()}))
    return records, classes, warnings


def classes_to_confirm(node: NodeConfig, found: Collection[str]) -> list[str]:
    """Classes that a person can confirm as all that the site has; none where the settings name them,
    where runs learn other targets, or for names that cannot stand in settings.

    Args:
        node: the site's settings.
        found: classes with a record.
    """
    if node.classes or node.target_columns or len(found) > MOST_LISTED:
        return []
    return [] if set(",\"'$\\#") & set("".join(found)) else sorted(found)


def check_classes(node: NodeConfig, found: Collection[str]) -> list[str]:
    """Check that this site has a record of each class that its own settings name, before it joins.

    Only then. Of a folder of classes each request asks again whether it is there, with a record or
    without.

    Args:
        node: the site's settings.
        found: classes with a record.

    Returns:
        What to write into the settings where they name no class.

    Raises:
        DataError: for a class without a record.
    """
    if not node.data or node.data == "digits":
        return []
    if node.classes:
        check_named(node, sorted(found), "record")
    names = classes_to_confirm(node, found)
    line = ",".join(names)
    return [
        f"classes is not set in the node-config. The data have {some(names)}; if these are all, add "
        f'classes="{line}" (CLASSES={line} in the .env of a kit), and this site stays away when one of them '
        "is gone"
    ][: bool(names)]


@dataclass(frozen=True)
class _Columns(Number):
    """Columns that runs may learn, of which no run has said yet what they mean."""

    gaps = True


def _sources(node: NodeConfig) -> Iterator[DataSource]:
    """The data sets of the site. Where the node-config names columns that runs may learn, their records
    need these, and no class.
    """
    assert node.data
    columns = node.target_columns
    target = _Columns(columns, ((-1.0, 1.0),) * len(columns)) if columns else None
    classes = () if target is None else target.rows
    for name in node.dataset or ("",):
        where = (node.data, node.data_dir, (name,), node.label_column, "", node.patient_column)
        yield DataSource(*where, classes=classes, target=target)


def _in_folders(source: DataSource) -> tuple[Path, Sequence[tuple[Path, str]]] | None:
    """The folder of a data set without a table, and the files in its class folders; None for others."""
    if source.kind not in ("imagefolder", "dicom"):
        return None
    (name,) = source.names
    root, table = find_table(folder_of(source, name), name)
    wanted = is_file if source.kind == "dicom" else is_image
    return None if table is not None else (root, in_class_folders(root, wanted, LeftOut())[0])


def check_records(run: Run, sites: int, dimension: int = 0) -> Sequence[str]:
    """Read the labels and distribute the records as the sites will.

    Weights that have to be fetched are fetched, once for all sites.

    Args:
        run: whose data are read.
        sites: number of sites.
        dimension: of the features of images; 0 if only their backbone knows it.

    Returns:
        The data report in at most three lines, and a warning about sites of a single class and one about
        columns that the run has no frame for, each with the first of the sites.

    Raises:
        DataError, ConfigError: if the data are unusable, have only one class, or leave a site
            without records; or if the message of a site would be larger than max-payload-mib.
        BackboneError: for weights that cannot be had.
    """
    shares = whole(run.settings, run.target, sites)
    there = {
        dataset.classes[i]
        for dataset, _ in shares
        for i in set(dataset.labels[dataset.is_train].tolist())
    }
    if len(there) < 2 and run.target is None:
        names = ", ".join(map(repr, sorted(there))) or "none"
        data = run.settings
        column = "y" if data.data == "safetensors" else f"label-column = {data.label_column!r}"
        raise DataError(
            f"the training records have one class only ({names}), and a classifier needs two; "
            f"check data-dir = {data.data_dir!r}, {column} and classes"
        )
    warnings: list[str] = []
    if run.settings.data != "digits":
        unopened = any(dataset.features is None for dataset, _ in shares)
        warnings += merged([_report(dataset) for dataset, _ in shares]).lines(unopened)
    parts = [(dataset, part) for dataset, each in shares for part in each]
    fewest = min((len(part) for _, part in parts), default=0)
    warnings += budget_warnings(run.settings.epsilon, run.settings.delta, fewest)
    if run.settings.noise_seed:
        warnings.append(
            f"noise-seed = {run.settings.noise_seed}: the privacy noise can be repeated, so this run is "
            "not private"
        )
    lonely, outliers = list[tuple[int, str]](), list[tuple[int, str]]()
    for site, (dataset, part) in enumerate(parts):
        classes = [dataset.classes[i] for i in set(dataset.labels[part].tolist())]
        if not classes:
            raise DataError(
                f"site {site} of {sites} would have no training records; use fewer sites, or "
                "another partition (alpha, classes-per-site)"
            )
        own = dimension if dataset.features is None else dataset.features.shape[1]
        if own:
            rows = len(classes) if run.target is None else len(run.target.rows)
            check_payload(run, own, rows, len(part))
            run.public_frame(own)
        if len(classes) == 1 and run.target is None and run.settings.partition != "classes":
            even = (
                "a larger alpha is" if run.settings.partition == "dirichlet" else "fewer sites are"
            )
            lonely.append((site, f"records of one class only ({classes[0]}); {even} more even"))
        # Of bags, sites warn: their features are means, which are computed there.
        framed = run.frames or run.settings.features.ranges
        if dataset.features is not None and dataset.members is None and not framed:
            chosen = raised(torch.as_tensor(dataset.features[part]).float(), run.power)
            outliers += [(site, warning)] if (warning := warning_of(chosen)) else []
    warnings += [*_in_one(lonely), *_in_one(outliers)]
    if (
        any(dataset.features is None for dataset, _ in shares)
        and not run.settings.weights_path
        and ":" in run.settings.backbone
    ):
        stated = run.settings
        options = options_of(stated.features)
        load_network(stated.backbone, image_size=stated.image_size, options=options)
    return warnings


def _in_one(found: Sequence[tuple[int, str]]) -> list[str]:
    """One warning for what is said of several sites, with the words for the first."""
    more = f" and {len(found) - 1:,} more sites" if len(found) > 1 else ""
    return [f"site {site}{more}: {text}" for site, text in found[:1]]


def _report(dataset: Dataset) -> DataReport:
    """The data report, in which no image is used if none can be opened. Others are opened in the run."""
    if dataset.features is not None or dataset.members is not None:
        return dataset.report
    rows = range(len(dataset))
    opened = (attempt(partial(dataset.open_image, row)) for row in rows)
    if any(not isinstance(each, BaseException) for each in opened):
        return dataset.report
    return with_broken(dataset, rows, "images", reopen=True)


def test_records(
    settings: Settings, power: float, target: Target | None
) -> tuple[LabelledFeatures, tuple[str, ...]]:
    """All test records of a simulation.

    Args:
        settings: of the run whose data are read.
        power: of the features.
        target: of the run; None for classes.

    Returns:
        The records, and the names of their classes.

    Raises:
        FedSurrogateError: for unusable data, or no test record.
    """
    datasets = load_all(DataSource.of_run(settings, target), settings.seed)
    node, parts = NodeConfig(), list[LabelledFeatures]()
    for dataset in datasets:
        rows = (~dataset.is_train).nonzero().flatten()
        features = dataset_features(dataset, settings, node, policy_of(node).cache_mib)
        parts.append(usable(dataset, features, rows, power))
    if not any(len(each.labels) for each in parts):
        raise DataError(f"data-dir = {settings.data_dir!r} has no test records")
    x, labels = (
        torch.cat([getattr(each, name) for each in parts]) for name in ("features", "labels")
    )
    values = None if target is None else torch.cat([each.targets() for each in parts])
    return LabelledFeatures(x, labels, values=values), datasets[0].classes
