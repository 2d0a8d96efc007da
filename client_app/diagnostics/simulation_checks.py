"""Checks of a simulation before it starts: labels and their distribution, whether any image can be
opened, and the backbone's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from fedsurrogate.common.backbones.backbones import load_network
from fedsurrogate.common.backbones.networks import options_of
from fedsurrogate.common.backbones.power_transform import raised
from fedsurrogate.common.costs import check_payload
from fedsurrogate.common.data_report import DataReport, merged
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.privacy.accounting import budget_warnings
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.targets.target import Target

from ..datasets.dataset import Dataset, DataSource, load_all
from ..datasets.left_out import attempt
from ..datasets.partition import whole
from ..features.site_features import (
    LabelledFeatures,
    dataset_features,
    usable,
    warning_of,
    with_broken,
)
from ..governance.policy import policy_of
from ..node_config import NodeConfig


def check_records(run: Run, sites: int, dimension: int = 0) -> Sequence[str]:
    """Read the labels and distribute the records as the sites will.

    Weights that have to be fetched are fetched, once for all sites.

    Args:
        run: whose data are read.
        sites: number of sites.
        dimension: of the features of images; 0 if only their backbone knows it.

    Returns:
        The data report in at most three lines, and warnings about sites of a single class and about
        columns that the run has no frame for.

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
            warnings.append(
                f"site {site} has training records of one class only ({classes[0]}); a larger "
                "alpha is more even"
            )
        # Of bags, sites warn: their features are means, which are computed there.
        framed = run.frames or run.settings.features.ranges
        if dataset.features is not None and dataset.members is None and not framed:
            chosen = raised(torch.as_tensor(dataset.features[part]).float(), run.power)
            warnings += [f"site {site}: {warning}"] if (warning := warning_of(chosen)) else []
    if (
        any(dataset.features is None for dataset, _ in shares)
        and not run.settings.weights_path
        and ":" in run.settings.backbone
    ):
        stated = run.settings
        options = options_of(stated.features)
        load_network(stated.backbone, image_size=stated.image_size, options=options)
    return warnings


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
