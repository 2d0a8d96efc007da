"""The records of a site: its own, or in simulation its share of the run's data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsurrogate.common.errors import LOG, ConfigError, DataError
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import Settings, kebab
from fedsurrogate.common.targets.target import Target

from ..node_config import NodeConfig, check_held_out, is_protected, judges
from .dataset import Dataset, DataSource, group, load_all
from .images import remembered
from .left_out import SourceError

PREFERRED_MINIMUM = 10
DRAWS = 11  # for each minimum
# Settings of a run that select which of its records a site uses.
SELECTING = ("test_fraction", "partition", "alpha", "classes_per_site", "site_column")
# Of a data source: where it is, how it is read, and what has another name in the settings; and how a
# split is drawn, of which held-out records have none.
NOT_SELECTING = {
    "kind",
    "folder",
    "names",
    "bags",
    "one_by_one",
    "noisy",
    "patients_protected",
    "whole",
}
DRAWING = {"test_fraction", "site_column"}
# Characters of a value in a ledger.
LONGEST_SHOWN = 80


@dataclass(frozen=True, eq=False)
class SiteShare:
    """Records of one site.

    Attributes:
        dataset: with the records of all sites, in simulation.
        train: ascending indices into `dataset`.
        test: ascending indices into `dataset`.
        simulated: whether the site is simulated.
    """

    dataset: Dataset
    train: Tensor
    test: Tensor
    simulated: bool


def share(run: Run, node: NodeConfig, in_simulation: bool = False) -> SiteShare:
    """The records of a site.

    A site whose node-config sets `data` uses its own data; no setting of the run can change that.
    Otherwise it simulates site `partition_id` of `num_partitions` on the bundled digits, or in
    simulation any data.

    Args:
        run: that asks for them.
        node: the site's settings.
        in_simulation: whether this process simulates sites.

    Raises:
        DataError: for unusable data, or a site without any.
        ConfigError: if the run does not fit the site's settings.
    """
    if not node.data and run.settings.data != "digits" and not in_simulation:
        raise DataError(
            "data is not set in this site's node-config, and the run's own (data = "
            f"{run.settings.data!r}) is used only in simulation; set data and data-dir in the "
            "node-config"
        )
    source = (
        DataSource.of_node(node, run) if node.data else DataSource.of_run(run.settings, run.target)
    )
    check_settings(run.settings, node)
    if judges(run.settings.counting, node):
        (dataset,) = load_all(source, run.settings.seed)
        return SiteShare(dataset, torch.arange(0), _held_out(dataset, node), simulated=False)
    if is_protected(run.private, node):
        (dataset,) = load_all(source, run.settings.seed)
        train, test = _indices(dataset.is_train), _indices(~dataset.is_train)
        # In a drawn split one more patient would move others, and the noise does not cover that. So
        # all records train.
        if dataset.drawn:
            train, test = torch.arange(len(dataset)), test[:0]
        return SiteShare(dataset, train, test, simulated=False)
    datasets = load_all(source, run.settings.seed)
    if len(datasets) > 1:
        _one_dataset_a_site(source.names, node.num_partitions)
        dataset = datasets[node.partition_id]
        train, test = _indices(dataset.is_train), _indices(~dataset.is_train)
    else:
        (dataset,) = datasets
        trains, tests = _parts(dataset, run.settings, node.num_partitions)
        train, test = trains[node.partition_id], tests[node.partition_id]
    # As at a hospital, so that the digits give the results of a real deployment. A survey counts
    # all records, but in secure aggregation without noise those that train: its difference from the sum
    # of a training run would show the others.
    surveyed = run.settings.counting.kind == "survey" and (
        run.settings.epsilon or not run.settings.secure_aggregation
    )
    if node.data and dataset.drawn and (surveyed if run.plan.counts else run.settings.epsilon):
        train, test = torch.cat([train, test]).sort().values, test[:0]
    if not len(train) and not is_protected(run.hides_sites, node):
        raise DataError(
            f"site {node.partition_id} of {node.num_partitions} has no training records; use fewer "
            "sites"
        )
    return SiteShare(dataset, train, test, simulated=not node.data)


def _held_out(dataset: Dataset, node: NodeConfig) -> Tensor:
    if node.held_out_apart:
        return torch.arange(len(dataset))
    if dataset.drawn:
        raise SourceError(
            f"no held-out records: held-out-dir is data-dir, but {dataset.name!r} names no test "
            "split; put labelled records that no run trains on into a folder of their own"
        )
    return _indices(~dataset.is_train)


def check_settings(settings: Settings, node: NodeConfig) -> None:
    """Refuse a run that does not fit a site's settings; reads no file.

    Args:
        settings: of the run that asks for records.
        node: the site's settings.

    Raises:
        ConfigError, DataError: if they do not fit.
    """
    check_held_out(settings.counting, node)
    if settings.epsilon and node.data and not settings.classes:
        raise ConfigError(
            "classes is empty; a private run must name all classes, because a site's own list "
            "would show which classes it has"
        )
    if not is_protected(bool(settings.epsilon), node):
        return
    _check_unit(settings.features.bag, node)
    if len(node.dataset) > 1:
        _one_dataset_a_site(node.dataset, node.num_partitions)
    elif node.num_partitions > 1:
        raise ConfigError(
            f"num-partitions = {node.num_partitions}: the split of a folder among sites depends on "
            "all records, so no privacy guarantee would hold; give each site its own folder"
        )


def _check_unit(bag: str, node: NodeConfig) -> None:
    """Refuse a private run whose noise protects another unit than the site's ledger counts. Of
    patients it protects all images and bags.
    """
    pools = bag != "none" and bool(node.bag_column)
    if node.protects == "patient" or pools == (node.protects == "bag"):
        return
    run, site = ("bags", "single images") if pools else ("single images", "bags")
    raise ConfigError(
        f"features.bag = {bag!r} and bag-column = {node.bag_column!r}: the run protects "
        f"{run}, and this site {site} (unit), which it would protect less; run with features.bag = 'mean' "
        "at sites with unit = 'bag' and a bag-column, and without it at others"
    )


def selection(run: Run, node: NodeConfig) -> dict[str, str]:
    """The settings that select a site's records, in words: runs in which one of them differs may
    differ by a single record.

    Args:
        run: that asks for records.
        node: the site's settings.

    Returns:
        By the name of the setting and of the records; empty for a share of the run's own data.
    """
    if not node.data:
        return {}
    source, own = DataSource.of_node(node, run), run.settings
    judged = judges(own.counting, node)
    left_out = NOT_SELECTING | (DRAWING if judged else set())
    chosen: dict[str, object] = {
        each.name: getattr(source, each.name)
        for each in fields(DataSource)
        if each.name not in left_out
    }
    chosen |= {
        "dataset": source.names,
        "classes": sorted(source.classes),
        "target": run.target and run.target.public,
        "features.bag": own.features.bag,
        "bag-column": source.bags or "",
    }
    if not judged:
        chosen["seed"] = own.seed
    if node.num_partitions > 1:
        chosen |= {key: getattr(own, key) for key in SELECTING}
    kind = "held-out" if judged else "training"
    return {f"{kebab(name)} ({kind})": _shown(value) for name, value in chosen.items()}


def _shown(value: object) -> str:
    text = ", ".join(value) if isinstance(value, list | tuple) else str(value)
    if len(text) <= LONGEST_SHOWN:
        return text or "empty"
    return f"{text[:LONGEST_SHOWN]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()})"


def whole(
    settings: Settings, target: Target | None, num_sites: int
) -> list[tuple[Dataset, list[Tensor]]]:
    """All data of the run, for baselines in simulation.

    Args:
        settings: of the run whose data are loaded.
        target: of the run.
        num_sites: number of sites.

    Returns:
        Each data set with the training records of its sites.

    Raises:
        DataError: for unusable data, or if all records of a private run are left out.
    """
    source = DataSource.of_run(settings, target)
    datasets = load_all(source, settings.seed)
    for dataset in datasets:
        if not len(dataset):
            raise DataError("; ".join(dataset.report.lines()))
    if len(datasets) > 1:
        _one_dataset_a_site(settings.dataset, num_sites)
        return [(dataset, [_indices(dataset.is_train)]) for dataset in datasets]
    (dataset,) = datasets
    return [(dataset, _train_parts(dataset, settings, num_sites))]


def partition(
    labels: Tensor, origin: Sequence[str] | None, settings: Settings, num_sites: int
) -> list[Tensor]:
    """Distribute records to sites by the run's partition settings.

    The same seed gives the same parts in any process. If sites x classes-per-site is below the
    number of classes, records of classes without a site are left out.

    Args:
        labels: (n,) int64.
        origin: value of the site column per record; None without one.
        settings: of the run.
        num_sites: number of sites.

    Returns:
        For each site ascending indices into `labels`, disjoint.

    Raises:
        DataError, ConfigError: if the settings do not fit the data.
    """
    if num_sites > len(labels):
        raise DataError(
            f"{num_sites} sites cannot share {len(labels)} training records; use at most "
            f"{len(labels)} sites"
        )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(settings.seed))
    if settings.partition == "column":
        parts = _by_column(origin, settings.site_column, num_sites)
    elif settings.partition == "classes":
        parts = _by_classes(labels, order, settings.classes_per_site, settings.seed, num_sites)
    elif settings.partition == "dirichlet":
        parts = _by_dirichlet(labels, order, settings.alpha, settings.seed, num_sites)
    else:
        parts = list(order.tensor_split(num_sites))
    return [part.sort().values for part in parts]


def split_test(
    train_parts: Sequence[Tensor], labels: Tensor, test: Tensor, origin: Sequence[str] | None = None
) -> list[Tensor]:
    """Distribute test records to sites: each class in proportion to its training records at the
    sites.

    Numbers are rounded by largest remainders. The parts are disjoint and contain all test records
    of classes with training records.

    Args:
        train_parts: of each site, indices into `labels`.
        labels: (n,).
        test: indices into `labels`.
        origin: value of the site column per record; a record then goes to the site with its value.

    Returns:
        For each site ascending indices into `labels`.

    Example:
        >>> labels = torch.tensor([0, 0, 0, 0, 0])
        >>> train = [torch.tensor([0, 1]), torch.tensor([2])]
        >>> parts = split_test(train, labels, torch.tensor([3, 4]))
        >>> [part.tolist() for part in parts]
        [[3], [4]]
    """
    if origin is not None:
        values = [{origin[i] for i in part.tolist()} for part in train_parts]
        return [
            torch.tensor([i for i in test.tolist() if origin[i] in own], dtype=torch.int64)
            for own in values
        ]
    dealt: list[list[Tensor]] = [[] for _ in train_parts]
    most = len(labels.bincount())
    table = torch.stack([labels[part].bincount(minlength=most) for part in train_parts])
    for label in labels[test].bincount().nonzero().flatten():
        members = test[labels[test] == label]
        counts = table[:, label]
        total = int(counts.sum())
        if total:
            quotas = counts * len(members)
            whole_numbers, remainders = quotas // total, quotas % total
            left = len(members) - int(whole_numbers.sum())
            whole_numbers[remainders.argsort(descending=True, stable=True)[:left]] += 1
            for site, piece in enumerate(torch.split(members, whole_numbers.tolist())):
                dealt[site].append(piece)
    return [torch.cat(pieces).sort().values if pieces else test[:0] for pieces in dealt]


def _one_dataset_a_site(names: Sequence[str], num_sites: int) -> None:
    if len(names) != num_sites:
        raise DataError(
            f"dataset names {len(names)} data sets ({', '.join(names)}), one a site, but there are "
            f"{num_sites} sites (num-partitions); make the numbers equal, or name one data set"
        )


def _parts(
    dataset: Dataset, settings: Settings, num_sites: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Training and test records of each site. Every request of a simulation asks for all of them, so those
    of the last few settings are kept.
    """

    def parts() -> tuple[list[Tensor], list[Tensor]]:
        trains = _train_parts(dataset, settings, num_sites)
        return trains, _test_parts(dataset, trains, settings.partition == "column")

    if num_sites == 1:
        return parts()
    drawn = settings.partition, settings.seed, settings.alpha, settings.classes_per_site
    numbers = (each.numpy().tobytes() for each in (dataset.strata, dataset.is_train))
    names = (each and tuple(each) for each in (dataset.origin, dataset.patients))
    found: tuple[list[Tensor], list[Tensor]] = remembered(
        ("parts", num_sites, *drawn, *numbers, *names), parts
    )
    return found


def _train_parts(dataset: Dataset, settings: Settings, num_sites: int) -> list[Tensor]:
    train, origin = _indices(dataset.is_train), dataset.origin
    if num_sites == 1:
        return [train]
    if dataset.patients is not None and settings.partition != "column":
        # All records of a patient go to one site, by the class of the first record, so no patient
        # is at two sites.
        first, of = group([dataset.patients[i] for i in train.tolist()])
        if num_sites > len(first):
            raise DataError(
                f"{num_sites} sites cannot share {len(first)} patients with training records, each "
                f"at one site; use at most {len(first)} sites"
            )
        dealt = partition(dataset.strata[train][first], None, settings, num_sites)
        return [train[torch.isin(of, part)] for part in dealt]
    train_origin = None if origin is None else [origin[i] for i in train.tolist()]
    return [
        train[part] for part in partition(dataset.strata[train], train_origin, settings, num_sites)
    ]


def _test_parts(dataset: Dataset, parts: Sequence[Tensor], by_column: bool) -> list[Tensor]:
    test, labels = _indices(~dataset.is_train), dataset.strata
    if len(parts) == 1:
        return [test]
    if by_column:
        return split_test(parts, labels, test, dataset.origin)
    if dataset.patients is None:
        return split_test(parts, labels, test)
    # Files may split a patient's records: the test records then follow the training records. Other
    # patients stay whole.
    following = split_test(parts, labels, test, dataset.patients)
    rest = test[~torch.isin(test, torch.cat(following))]
    first, of = group([dataset.patients[i] for i in rest.tolist()])
    dealt = split_test(parts, labels, rest[first])
    whole_patients = [rest[torch.isin(rest[first], part)[of]] for part in dealt]
    return [torch.cat(pair).sort().values for pair in zip(following, whole_patients, strict=True)]


def _indices(mask: Tensor) -> Tensor:
    return mask.nonzero().flatten()


def _by_dirichlet(
    labels: Tensor, order: Tensor, alpha: float, seed: int, num_sites: int
) -> list[Tensor]:
    """Draw shares of every class from Dirichlet(alpha), again until each site has ten records, if
    possible.

    The draws are those of flwr_datasets' DirichletPartitioner without `self_balancing`. It is the
    default, needs no optional package and no import of four seconds, and distributes any number of
    records: theirs refuses where a site would have too few.
    """
    keys = labels[order]
    members = [order[keys == label] for label in torch.unique(keys)]
    parts: list[Tensor] = []
    for minimum in (PREFERRED_MINIMUM, 3, 1, 0):
        drawn = np.random.default_rng(seed)
        for _ in range(DRAWS):
            parts = _dirichlet_parts(members, drawn.dirichlet, [alpha] * num_sites)
            if min(map(len, parts)) >= minimum:
                break
        else:
            LOG.info(
                "alpha = %g leaves some site with fewer than %d training records", alpha, minimum
            )
            continue
        break
    if min(map(len, parts)) > 0:
        return parts
    # An empty site gets a random record of the largest.
    shuffled = [part.tolist() for part in parts]
    for records in shuffled:
        drawn.shuffle(records)
    for site in range(num_sites):
        if not shuffled[site]:
            shuffled[site] = [max(shuffled, key=len).pop(0)]
    return [torch.tensor(records) for records in shuffled]


def _dirichlet_parts(
    members: Sequence[Tensor],
    draw: Callable[[list[float]], NDArray[np.float64]],
    alphas: list[float],
) -> list[Tensor]:
    """Cut the records of each class in shares that are drawn for it."""
    pieces = []
    for records in members:
        ends = (draw(alphas).cumsum() * len(records)).astype(int)[:-1]
        pieces.append(records.tensor_split(torch.from_numpy(ends)))
    return [torch.cat(part) for part in zip(*pieces, strict=True)]


def _by_classes(
    labels: Tensor, order: Tensor, each: int, seed: int, num_sites: int
) -> list[Tensor]:
    """Give each site `each` classes in turn, and split a class evenly among its sites.

    flwr_datasets' PathologicalPartitioner may leave classes without a site although sites have
    room: 5 sites of 2 classes get 6 of 10 classes when assigned in order, and otherwise a random
    number. Here they get all 10, disjoint.
    """
    generator = torch.Generator().manual_seed(seed)
    classes = labels.bincount().nonzero().flatten()
    if each > len(classes):
        raise ConfigError(
            f"classes-per-site = {each}, but the training data has {len(classes)} classes; use "
            "fewer"
        )
    dealt = classes[torch.randperm(len(classes), generator=generator)]
    places = torch.arange(num_sites * each)
    holders = [places[c :: len(classes)] // each for c in range(len(classes))]
    parts: list[list[Tensor]] = [[] for _ in range(num_sites)]
    for label, sites in zip(dealt, holders, strict=True):
        members = order[labels[order] == label]
        if len(sites) > len(members):
            raise DataError(
                f"class {int(label)} has {len(members)} training records for {len(sites)} sites; "
                f"use fewer sites or a smaller classes-per-site than {each}"
            )
        for site, piece in zip(
            sites.tolist(), members.tensor_split(max(1, len(sites))), strict=False
        ):
            parts[site].append(piece)
    return [torch.cat(pieces) for pieces in parts]


def _by_column(origin: Sequence[str] | None, name: str, num_sites: int) -> list[Tensor]:
    if origin is None:
        raise DataError("partition = 'column', but the data has no site column; set site-column")
    values = sorted(set(origin))
    if len(values) != num_sites:
        raise ConfigError(
            f"column {name!r} has {len(values)} values ({', '.join(values[:5])}), but there "
            f"are {num_sites} sites; run with {len(values)}"
        )
    column = np.asarray(origin)
    return [torch.from_numpy(np.flatnonzero(column == value)) for value in values]
