"""Labelled records that a model has not been trained on: this site's own test records, or a new
labelled folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.common.backbones.backbone_names import shown
from fedsurrogate.common.backbones.backbones import Backbone
from fedsurrogate.common.backbones.power_transform import power_in, with_power
from fedsurrogate.common.errors import BackboneError, ConfigError, DataError
from fedsurrogate.common.models.classifiers import class_indices
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import DataKind
from fedsurrogate.common.signed_models.signed_model import SignedModel

from ..datasets.dataset import Dataset, DataSource, load_all
from ..datasets.left_out import OF_NO_CLASS
from ..datasets.partition import share
from ..datasets.source import bags_of
from ..features.site_features import dataset_features, site_backbone, usable
from ..governance.policy import policy_of
from ..node_config import NodeConfig

# Distinct numbers of a column above which it is divided into four groups of equal size.
MOST_NUMBERS = 12
Part = Literal["train", "test"]


@dataclass(frozen=True)
class HeldOut:
    """Labelled records that a model has not been trained on.

    Attributes:
        features: (n, d).
        labels: indices of the model's classes, (n,).
        patients: of each record, if known.
        groups: the values of columns, by name.
        where: what the records are, in words.
        left_out: number of records of the model's classes that cannot be used.
        values: of the target, (n, k), float64; None for classes.
    """

    features: Tensor
    labels: Tensor
    patients: tuple[str, ...] | None
    groups: Mapping[str, Sequence[str]]
    where: str
    left_out: int = 0
    values: Tensor | None = None


@dataclass(frozen=True)
class Source:
    """Where labelled records are.

    Attributes:
        folder: a new labelled folder, all of whose records count; empty for the site's own.
        kind: of the new folder; empty: that of the site's own data, or image files.
        label_column: of the new folder.
        patient_column: of the new folder; empty for none.
        columns: for groups.
        known_only: leave out records of classes that the model does not know.
        bag_column: of the new folder; empty for that of the site's own data.
        simulated: the run of a simulation, whose records are meant; None for a site's own.
    """

    folder: str = ""
    kind: DataKind | Literal[""] = ""
    label_column: str = "label"
    patient_column: str = ""
    columns: tuple[str, ...] = ()
    known_only: bool = False
    bag_column: str = ""
    simulated: Run | None = None


def bag_column_of(model: SignedModel, given: str, node: NodeConfig) -> str | None:
    """What names the bag of an image, for a model of bags; None for a model of images.

    Args:
        model: the shared one.
        given: by a person; empty for the site's own.
        node: the site's settings.

    Raises:
        ConfigError: for a column that a model of images cannot use.
    """
    if model.manifest.run_config().settings.features.bag != "none":
        return given or node.bag_column
    if given:
        raise ConfigError(
            f"--bag-column {given!r}: model {model.manifest.name!r} was learned from single images, "
            "not from bags; leave it out"
        )
    return None


def check_backbone(model: SignedModel, backbone: Backbone) -> None:
    """Refuse a backbone that is not the model's, by its fingerprint.

    Args:
        model: the shared one.
        backbone: of this site.

    Raises:
        BackboneError: for another backbone.
    """
    found = backbone.fingerprint_at(model.manifest.dimension)
    check_features(model, found, f"{backbone.name!r} here has")


def check_features(model: SignedModel, fingerprint: str, what: str = "the features are of") -> None:
    """The same for stored features, of a backbone with this fingerprint. Raises BackboneError."""
    wanted = model.manifest.fingerprint
    if with_power(fingerprint, power_in(wanted)) != wanted:
        settings = ", ".join(f"{key} = {each}" for key, each in model.manifest.settings.items())
        raise BackboneError(
            f"the model is for a backbone with fingerprint {shown(wanted)}, but {what} "
            f"{shown(fingerprint)}; the model's settings are {settings}; check weights-path"
        )


def held_out(model: SignedModel, node: NodeConfig, source: Source, part: Part = "test") -> HeldOut:
    """Records to judge a model with.

    Args:
        model: the shared one.
        node: the site's settings.
        source: of the records.
        part: of the site's own records.

    Raises:
        DataError: when there is none, or one of a class that the model does not know.
    """
    run, own = source.simulated or model.manifest.run_config(), source.simulated is None
    if source.folder:
        where = "a labelled folder, from which the run must not have learned"
        kind = source.kind or ("" if node.data == "digits" else node.data) or "imagefolder"
        column = bag_column_of(model, source.bag_column, node)
        wanted = DataSource(
            kind,
            source.folder,
            label_column=source.label_column,
            patient_column=source.patient_column,
            frames=node.dicom_frames,
            classes=() if run.target else tuple(model.manifest.classes),
            target=run.target,
            whole=True,
            bags=bags_of(kind, run.settings.features.bag, column),
        )
        (dataset,) = load_all(wanted, run.settings.seed)
        rows = torch.arange(len(dataset))
    else:
        where = f"{'this site' if own else 'the simulation'}'s {part} records".replace(
            "train ", "training "
        )
        target = run.target
        wanted = DataSource.of_node(node, run) if own else DataSource.of_run(run.settings, target)
        found = share(run, node, not own)
        dataset, rows = found.dataset, found.test if part == "test" else found.train
        if dataset.drawn and own and model.manifest.privacy is not None:
            if part == "test":
                raise DataError(
                    "no held-out records: the data name no test split, and in a private run all "
                    "records train; give labelled records that the run has not seen with --data-dir"
                )
            rows = torch.arange(len(dataset))
    if not len(rows):
        raise DataError(
            f"no held-out records in {dataset.name!r}; give labelled records with --data-dir"
        )
    if dataset.members is not None:
        where += ", each a bag of images"
    groups = {
        name: _column(wanted, name, node, run.settings.seed, dataset) for name in source.columns
    }
    return _of_rows(model, node, dataset, rows, (source, where, groups))


def _column(
    source: DataSource, name: str, node: NodeConfig, seed: int, dataset: Dataset
) -> Sequence[str]:
    """The value of a column for every record."""
    datasets = load_all(replace(source, site_column=name), seed)
    origin = datasets[node.partition_id if len(datasets) > 1 else 0].origin
    if origin is None or len(origin) != len(dataset):
        raise DataError(
            f"the column {name!r} cannot be read for each of the {len(dataset)} records"
        )
    return origin


def _of_rows(
    model: SignedModel,
    node: NodeConfig,
    dataset: Dataset,
    rows: Tensor,
    more: tuple[Source, str, Mapping[str, Sequence[str]]],
) -> HeldOut:
    source, where, groups = more
    classes, run = model.manifest.classes, source.simulated or model.manifest.run_config()
    labels = class_indices(classes, dataset.classes)[dataset.labels]
    if dataset.values is not None:
        labels = torch.zeros_like(labels)
    unknown = labels[rows] < 0
    if unknown.any() and not source.known_only:
        names = sorted({dataset.classes[i] for i in dataset.labels[rows][unknown].tolist()})
        raise DataError(
            f"{int(unknown.sum())} records of classes that the model does not know: "
            f"{', '.join(names)[:200]}; it knows {', '.join(classes)[:200]}; leave these records "
            "out with --known-only, or correct the labels"
        )
    backbone = None
    if dataset.features is None:
        check_backbone(model, backbone := site_backbone(run.settings, node))
    features = dataset_features(dataset, run.settings, node, policy_of(node).cache_mib, backbone)
    if backbone is None:
        check_features(model, features.fingerprint)
    found = usable(dataset, features, rows[~unknown], power_in(model.manifest.fingerprint))
    assert found.rows is not None
    kept = found.rows.tolist()
    if not kept:
        raise DataError(f"no usable held-out record in {dataset.name!r}")
    columns = {name: _grouped([values[i] for i in kept]) for name, values in groups.items()}
    others = [each.why for each in dataset.left_out if OF_NO_CLASS in each.why]
    if unknown.any():
        others.append(f"{int(unknown.sum())} of classes that it does not know")
    if others:
        where += f", of the model's classes only (it is wrong for all others: {'; '.join(others)})"
    left = int((~unknown).sum()) - len(kept)
    return HeldOut(found.features, labels[kept], found.units, columns, where, left, found.values)


def _grouped(values: list[str]) -> list[str]:
    """Values of a column; many different numbers become four groups of about equal size."""
    if len(set(values)) <= MOST_NUMBERS:
        return values
    try:
        numbers = np.array([float(value) for value in values])
    except ValueError:
        return values
    edges = np.unique(np.quantile(numbers, [0.25, 0.5, 0.75]))
    bounds = [float(numbers.min()), *edges.tolist(), float(numbers.max())]
    return [
        f"{bounds[i]:g} to {bounds[i + 1]:g}" for i in np.searchsorted(edges, numbers, side="left")
    ]
