"""A site's features, computed from its data and the run's backbone; their frame of columns; and the
site's name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedsurrogate.common.backbones.backbone_names import OWN_BACKBONE, place_in
from fedsurrogate.common.backbones.backbones import Backbone, load_backbone
from fedsurrogate.common.backbones.networks import options_of
from fedsurrogate.common.backbones.own_backbones import own_backbone
from fedsurrogate.common.backbones.power_transform import with_power
from fedsurrogate.common.data_report import DataReport, Loss
from fedsurrogate.common.errors import LOG, BackboneError, ConfigError, DataError, told_as
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.image_histograms import Histogram, histograms_of, maker_among
from fedsurrogate.common.machine import usable_cores
from fedsurrogate.common.models.devices import pick_device
from fedsurrogate.common.privacy.accounting import budget_warnings
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.surrogates.mixtures import LARGEST, SMALLEST, Frame, in_frame
from fedsurrogate.common.wire.records import INFO

from ..datasets.dataset import Dataset
from ..datasets.images import SIDE, of_pixels
from ..datasets.left_out import NoRecordsError, SourceError, attempt, described
from ..datasets.partition import share
from ..datasets.records import Facts
from ..node_config import NodeConfig, is_protected
from .extraction import MIB, Features, chunks, extract, written

if TYPE_CHECKING:
    from fedsurrogate.common.wire.records import Record


def image_cells(dataset: Dataset, histograms: Mapping[str, Histogram]) -> Tensor:
    """The cell of each record in each histogram; of a bag those of its first image.

    What a file does not state, and all of a broken one, is unknown. A record decides its own cells
    alone.

    Args:
        dataset: the records.
        histograms: by name, Q.

    Returns:
        (n, Q), float32.
    """
    if dataset.members is not None and dataset.whole is not None and dataset.rows is not None:
        places, images = dataset.rows.tolist(), dataset.whole
    else:
        places, images = list(range(len(dataset))), dataset
    with ThreadPoolExecutor(max(1, usable_cores())) as pool:
        facts = pool.map(partial(_facts, images), places)
        rows = [[_cell(name, own, each) for name, each in histograms.items()] for own in facts]
    return torch.tensor(rows, dtype=torch.float32).reshape(len(places), len(histograms))


def _facts(dataset: Dataset, row: int) -> Facts:
    describe, facts = dataset.describe, Facts()
    for read in (
        None if describe is None else partial(describe, row),
        None if dataset.opener is None else lambda: of_pixels(dataset.open_image(row, SIDE)),
    ):
        own = {} if read is None else attempt(read)
        facts |= {} if isinstance(own, BaseException) else own
    return facts


def _cell(name: str, facts: Facts, histogram: Histogram) -> int:
    value = facts.get(name)
    if name == "maker" and isinstance(value, str):
        value = maker_among(value, histogram.names)
    return histogram.cell(value)


def log_once(report: DataReport, node: NodeConfig) -> None:
    """Write a report to the log, unless it is the one that was written last for this source.

    Every request reads the records, mostly in a process of its own: a file in the site's state
    remembers what was written. It never leaves the site, and no error of it decides anything.

    Args:
        report: of the records.
        node: the site's settings.
    """
    source = hashlib.sha256(repr((node.data_dir, report.source)).encode()).hexdigest()[:16]
    file = node.state / f"data-report-{source}.json"
    text = json.dumps(report.facts(), indent=1)
    try:
        if file.is_file() and file.read_text(encoding="utf-8") == text:
            return
        node.state.mkdir(parents=True, exist_ok=True)
        replace_file(file, text.encode(), durable=False)
    except (OSError, ValueError):
        LOG.debug("'%s' cannot be written", file)
    lost = logging.WARNING if report.left_out or report.warnings else logging.INFO
    LOG.log(lost, "%s", report.lines()[0])
    for each in report.left_out:
        LOG.log(lost, "left out: %s", each.why)
    for warning in report.warnings:
        LOG.log(lost, "warning: %s", warning)


# Distance of a column from zero, in its own range. At 16 bits a mean is off by a 4,000th of it.
FAR = 64.0
# The largest number, over the range of the median column; and that over the range below which a
# tenth of the columns lie. Features of backbones stay below 8.
UNEQUAL = 32.0
# The largest number, over the smallest range. With few records some columns vary little by chance,
# so it counts from so many records on; features of backbones then stay below 300.
SMALLEST_SHARE, ENOUGH = 512.0, 32
# Range of the median column, from which on squares leave what messages and solvers hold. Features of
# backbones stay between 2^-7 and 2^7.
LEAST, MOST = 2.0**-13, 2.0**13
# Squared norm of the mean record, over the mean squared distance from it. Gradients and sums of squares
# then see little but the mean. Features of backbones stay below 3.
FAR_TOGETHER = 8.0
# Mean squared norm of the features in a frame that only shifts them: a bias, whose feature is 1, then
# learns about as fast as the weights of the largest directions.
SQUARED_NORM = 10.0
# Of these records the ranges are found.
SAMPLE = 8192
# A column varies if this share of the records differs from the others, by more than rounding.
SHARE, ROUNDING = 0.05, 2.0**-20


def frame_of(features: Tensor) -> Frame | None:
    """The mean and the deviation of every column, if any column is an outlier, or all are tiny or huge; the
    mean and one scale for all columns, if only their means together are far from zero.

    Args:
        features: of the training records, (n, d).

    Returns:
        The frame; None where 16 bits hold all columns, as those of most backbones.

    Example:
        >>> drawn = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
        >>> frame_of(drawn) is None, frame_of(drawn + torch.tensor([0.0, 1e4, 0.0])) is None
        (True, False)
        >>> frame_of(1e-9 * drawn) is None
        False
        >>> frame_of(drawn + 9.0).scale.unique().numel()
        1
    """
    unequal = bool(outlier_columns(features)) or _tiny_or_huge(features)
    if not (unequal or _far_together(features)):
        return None
    count = len(features)
    total = torch.zeros(features.shape[1], dtype=torch.float64)
    for rows in chunks(*features.shape):
        total += features[rows].cpu().double().sum(0)
    # The offset is exact in single precision, so the deviation is around the offset that is sent.
    mean = (total / count).float().double()
    squares = torch.zeros_like(total)
    for rows in chunks(*features.shape):
        squares += (features[rows].cpu().double() - mean).square().sum(0)
    deviation = (squares / count).sqrt().float().double()
    if not unequal:
        one_scale = (deviation.square().sum() / SQUARED_NORM).sqrt().float().double()
        deviation = torch.full_like(deviation, float(one_scale))
    # Subnormal numbers in single precision stay as they are.
    deviation = torch.where(deviation < SMALLEST, 0.0, deviation)
    return Frame(mean, deviation) if float(mean.abs().max()) <= LARGEST else None


def _tiny_or_huge(features: Tensor) -> bool:
    """Whether the usual column is, which a privacy clip and public ranges do not mind."""
    few = features[:SAMPLE].cpu()
    if not few.numel():
        return False
    least, most = (each.double() for each in few.aminmax(dim=0))
    ranges = (most - least)[most > least]
    return bool(len(ranges)) and not LEAST <= float(ranges.median()) <= MOST


def _far_together(features: Tensor) -> bool:
    """Whether the mean of all columns is far from zero, beside what the records differ by."""
    few = features[:SAMPLE].cpu().double()
    if len(few) < 2:
        return False
    variance, mean = torch.var_mean(few, dim=0, correction=0)
    return float(mean.square().sum()) > FAR_TOGETHER * float(variance.sum())


def framed(features: Tensor, frame: bytes, folder: Path | None) -> Tensor:
    """Features in a frame.

    Args:
        features: (n, d).
        frame: of their columns; empty: the features stay as they are.
        folder: for a file to which they are written chunk by chunk; None: they stay in memory.

    Returns:
        Features (n, d), float32.

    Raises:
        SurrogateError: for a frame of other columns.
    """
    if not frame or folder is None:
        return in_frame(features, frame)
    parts = (in_frame(features[rows], frame) for rows in chunks(*features.shape))
    return written(parts, features.shape[1], folder)


def outlier_columns(features: Tensor) -> list[int]:
    """Columns that take part of the 16 bits from others, or lose their own.

    Args:
        features: of the records, (n, d).

    Returns:
        Indices, the worst first; empty for features that need no frame.

    Example:
        >>> drawn = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
        >>> outlier_columns(drawn * torch.tensor([1.0, 1e-4, 1.0]))
        [1]
    """
    few = features[:SAMPLE].cpu().float()
    if len(few) < 2 or not few.shape[1]:
        return []
    least, most = (each.double() for each in few.aminmax(dim=0))
    sizes, ranges = torch.maximum(least.abs(), most.abs()), most - least
    varies = _varying(few, ROUNDING * sizes)
    if not varies.any():
        return []
    own, largest = ranges[varies], float(sizes.max())
    usual, lower = float(own.median()), float(own.quantile(0.1))
    outlier = varies & (sizes > FAR * ranges)
    outlier |= sizes > UNEQUAL * usual
    if usual > UNEQUAL * lower:
        outlier |= varies & (ranges * UNEQUAL < usual)
    if len(few) >= ENOUGH:
        outlier |= varies & (ranges * SMALLEST_SHARE < largest)
    # How far a column is from the median one, in either direction.
    apart = torch.maximum(sizes / usual, usual / ranges.clamp_min(1e-300)).masked_fill(
        ~outlier, 0.0
    )
    return [int(index) for index in apart.argsort(descending=True)[: int(outlier.sum())]]


def _varying(records: Tensor, least: Tensor) -> Tensor:
    """Whether the numbers of a column between which all but SHARE at each end lie are further apart
    than a bound.

    Args:
        records: (n, d), float32.
        least: the bound of each column, (d,), float64.

    Returns:
        True or False for each column, (d,).
    """
    low, high = (1 + round(share * (len(records) - 1)) for share in (SHARE, 1 - SHARE))
    # Enough records on both sides of the mean decide most columns, in a fifth of the time of ranks.
    mean = records.mean(0).double()
    below, above = (mean - least).float(), (mean + least).float()
    varies = above.double() - below.double() > least
    varies &= (records <= below).sum(0) >= low
    varies &= (records >= above).sum(0) > len(records) - high
    if len(rest := (~varies).nonzero().flatten()):
        columns = records[:, rest].T.contiguous()
        ends = [columns.kthvalue(rank).values.double() for rank in (low, high)]
        varies[rest] = ends[1] - ends[0] > least[rest]
    return varies


def warning_of(features: Tensor) -> str:
    """What a person must know where a run puts outlier columns into no frame; empty without any.

    Args:
        features: of the training records, (n, d).

    Example:
        >>> drawn = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
        >>> warning_of(drawn + torch.tensor([0.0, 0.0, 1e4]))[:51]
        'column 2 of the features (counted from 0) has numbe'
        >>> warning_of(drawn)
        ''
    """
    if not (outlier := outlier_columns(features)):
        return ""
    worst = features[:SAMPLE, outlier[0]].double()
    more = f", and {len(outlier) - 1} more are such outliers" if len(outlier) > 1 else ""
    return (
        f"column {outlier[0]} of the features (counted from 0) has numbers from {float(worst.min()):.4g} "
        f"to {float(worst.max()):.4g}, unlike the others{more}; this run holds all columns on one "
        "scale, so rounding, clip or noise leaves little of the smaller ones. Give columns of a like "
        "size: let the run shift and divide them by public ranges, with features.ranges = 'low,high; "
        "low,high; ...' (plausible values of each column, in their order, not taken from the data), "
        "or, where the method has no use for these, do so at all sites alike"
    )


# Stands for a backbone's fingerprint where only labels are counted.
NO_FEATURES = "labels-only"
# Of a number in single precision.
BYTES = 4
# Images that are opened again to say what is wrong with them, and faults that are named.
MOST_REOPENED, MOST_FAULTS = 16, 4


@dataclass(frozen=True)
class LabelledFeatures:
    """Features of records, with labels.

    Attributes:
        features: (n, d).
        labels: (n,), indices into the site's classes.
        units: patient of each record, (n,), if the data have IDs.
        rows: indices of the records in their data set, (n,), for the site's own use.
        folder: where features are, mapped from a file, if memory is not to hold all of them; None
            if it holds them.
        values: of the target, (n, k), float64; None for classes.
    """

    features: Tensor
    labels: Tensor
    units: tuple[str, ...] | None = None
    rows: Tensor | None = None
    folder: Path | None = None
    values: Tensor | None = None

    def targets(self) -> Tensor:
        """The values, (n, k). Raises DataError without them."""
        if self.values is None:
            raise DataError("the records have no values of the run's target")
        return self.values


@dataclass(frozen=True)
class SiteFeatures:
    """A site's input to a method.

    Attributes:
        train: training records.
        test: held-out records.
        classes: names of the site's classes.
        fingerprint: of the backbone.
        seconds: time to compute or load the features.
        simulated: whether the data are a share of the run's own, not a hospital's.
        report: what became of the site's records.
        key: identifies the content of the data set, as its files show it.
        selected: digest of which of its records train, or are held out, if the run evaluates a
            model on these.
    """

    train: LabelledFeatures
    test: LabelledFeatures
    classes: tuple[str, ...]
    fingerprint: str
    seconds: float
    simulated: bool
    report: DataReport = field(default_factory=lambda: DataReport("", 0))
    key: str = ""
    selected: str = ""


def site_name(node: NodeConfig, node_id: int) -> str:
    """The site's name in the run: its own setting, its partition, or Flower's number for it.

    Args:
        node: the site's settings.
        node_id: Flower's number for the site.

    Example:
        >>> site_name(NodeConfig(site="north"), 7), site_name(NodeConfig(), 7)
        ('north', 'node-7')
    """
    if node.site:
        return node.site
    return str(node.partition_id) if node.num_partitions > 1 else f"node-{node_id}"


def check_addressee(request: Record, site: str) -> None:
    """Refuse a request if the coordinator registered this site's key under another name.

    It would refuse the reply. So nothing is charged for a refused reply. The check depends on the
    request and the site's settings only. A coordinator without a table of registered sites sends no
    names.

    Args:
        request: perhaps with the name.
        site: this site's own name.

    Raises:
        ConfigError: if the names differ.
    """
    info = request.config_records.get(INFO)
    registered = site if info is None else info.get("site", site)
    if registered != site:
        raise ConfigError(
            f"this site is called {site!r}, but the coordinator has registered its key as "
            f"{str(registered)[:64]!r}; set `site` in the node-config to that name, or ask the "
            "coordinator to register the key under this one"
        )


def in_simulation() -> bool:
    """Whether this process is a worker of Flower's simulation, or simulates sites itself. The
    process decides this, never a message.
    """
    ray = sys.modules.get("ray")
    engine = sys.modules.get("fedsurrogate.server_app.deployment.local_engine")
    return bool(ray and ray.is_initialized()) or bool(engine and engine.running())


def load_site(
    run: Run, node: NodeConfig, cache_mib: float, backbone: Backbone | None = None
) -> SiteFeatures:
    """Features of this site's train and test records.

    Args:
        run: that asks for them.
        node: the site's settings.
        cache_mib: the most that the site keeps of computed features, MiB.
        backbone: the run's backbone if it is already loaded.

    Raises:
        DataError: for records that cannot be used.
        BackboneError: for a backbone that cannot be used.
        ConfigError: for settings that do not fit each other.
    """
    part, protected = share(run, node, in_simulation()), is_protected(run.private, node)
    # In secure aggregation without noise such a site adds zeros, and its files are still compared.
    hidden = is_protected(run.hides_sites, node)
    if not len(part.dataset) and (protected or not hidden):
        raise NoRecordsError(
            f"no record of the classes {', '.join(run.settings.classes)[:200]} in "
            f"{part.dataset.name!r}"
        )
    own = run.settings.counting
    surveyed = own.kind == "survey"
    if surveyed:
        features = no_features(len(part.dataset))
        if own.images:
            cells = image_cells(part.dataset, histograms_of(own.images, own.image_bins))
            features = replace(features, x=cells)
    else:
        features = dataset_features(part.dataset, run.settings, node, cache_mib, backbone)
    read = partial(
        usable,
        part.dataset,
        features,
        power=1.0 if surveyed else run.power,
        folder=node.cache,
        most_mib=node.features_in_memory_mib,
    )
    train, test = read(part.train), read(part.test)
    if node.unit != "patient" or (protected and node.protects != "patient"):
        train = replace(train, units=None)
    elif protected and train.units is None:
        raise SourceError(
            f"{part.dataset.name!r} has no patient IDs, but this site protects patients; set "
            "patient-column"
        )
    if not (len(train.labels) or hidden or run.settings.counting.kind == "evaluation"):
        raise DataError(
            f"no usable training record among {len(part.train)} in {part.dataset.name!r}"
        )
    # A simulation has warned of it before it began.
    budget = run.settings.epsilon, run.settings.delta
    for warning in [] if part.simulated else budget_warnings(*budget, len(train.labels)):
        _warn_once(warning)
    unread = set(part.train.tolist()) - set(train.rows.tolist() if train.rows is not None else ())
    what = "images" if part.dataset.members is None else "bags"
    report = with_broken(part.dataset, sorted(unread), f"of {len(part.train)} training {what}")
    report = with_lost_images(report, features)
    log_once(report, node)
    fingerprint = with_power(features.fingerprint, run.power)
    dataset = part.dataset
    # Places among the records of all classes: places among those of the run's classes name other
    # records with other classes.
    rows = (test if run.settings.counting.kind == "evaluation" else train).rows
    assert rows is not None
    places = rows if dataset.rows is None else dataset.rows[rows]
    selected = hashlib.sha256(places.numpy().tobytes()).hexdigest()
    if not (run.frames or run.settings.features.ranges or surveyed):
        _warn_of_outliers(train.features, (dataset.key, fingerprint, selected))
    found = fingerprint, features.seconds, part.simulated, report
    return SiteFeatures(train, test, dataset.classes, *found, dataset.key, selected)


def with_broken(
    dataset: Dataset, broken: Sequence[int], what: str, reopen: bool = False
) -> DataReport:
    """The data report of a data set whose images have been opened.

    Args:
        dataset: the records.
        broken: indices of those without features.
        what: they are, behind their number.
        reopen: whether some are opened again, to say what is wrong with them. A hospital's log has
            that already, and how long a reply takes must not depend on it.
    """
    report = dataset.report
    if not broken:
        return report
    why = (
        f"{len(broken)} {what} cannot be read, or have no finite features, such as "
        f"{examples_of(dataset, broken) if reopen else dataset.where(broken[0])}"
    )
    return replace(
        report, used=report.used - len(broken), left_out=(*report.left_out, Loss(why, len(broken)))
    )


def examples_of(dataset: Dataset, broken: Sequence[int]) -> str:
    """Some images that cannot be used, one for each fault that is found when they are opened again.

    Args:
        dataset: the records.
        broken: their indices, at least one.
    """
    if dataset.features is not None or dataset.members is not None:
        return dataset.where(broken[0])
    found: dict[str, str] = {}
    for row in broken[:: -(-len(broken) // MOST_REOPENED)]:
        fault = attempt(partial(dataset.open_image, row))
        why = str(fault) if isinstance(fault, DataError) else ""
        why = described(fault) if isinstance(fault, BaseException) and not why else why
        # Faults that differ by their numbers or names are of one kind.
        kind = re.sub(r"\d+|'.*'", "", why)
        found.setdefault(kind, f"{dataset.where(row)} ({why})" if why else dataset.where(row))
    return "; ".join([*found.values()][:MOST_FAULTS])


def with_lost_images(report: DataReport, features: Features) -> DataReport:
    """The report with the number of images that are left out of their bags.

    Args:
        report: of records.
        features: of these.
    """
    if features.images_ok is None or features.images_ok.all():
        return report
    lost = int((~features.images_ok).sum())
    warning = f"{lost} images cannot be read, and are left out of their bags"
    return replace(report, warnings=(*report.warnings, warning))


# What `warning_of` has said of features, by their data, fingerprint and records: every request asks again.
_warnings: dict[tuple[str, ...], str] = {}


def _warn_of_outliers(features: Tensor, key: tuple[str, ...]) -> None:
    """It stays here: on the site's own log, or the terminal of a simulation."""
    if key not in _warnings:
        _warnings[key] = warning_of(features)
    if warning := _warnings[key]:
        _warn_once(warning)


@cache
def _warn_once(text: str) -> None:
    LOG.warning("%s", text)


def no_features(count: int) -> Features:
    """The features of records of which labels alone are counted. Those of a survey of images are the
    cells of `image_cells`.
    """
    return Features(
        torch.zeros(count, 1), torch.ones(count, dtype=torch.bool), NO_FEATURES, 0.0, cached=False
    )


def dataset_features(
    dataset: Dataset,
    settings: Settings,
    node: NodeConfig,
    cache_mib: float,
    backbone: Backbone | None = None,
) -> Features:
    """Features of every record of a data set, from the cache if possible.

    Args:
        dataset: the records.
        settings: of the run; they name the backbone.
        node: the site's settings.
        cache_mib: the most that the site keeps of computed features, MiB.
        backbone: the run's if it is already loaded.
    """
    load = partial(site_backbone, settings, node)
    return extract(dataset, backbone or load, node.cache, most_mib=cache_mib, load=load)


def site_backbone(settings: Settings, node: NodeConfig, device: str = "") -> Backbone:
    """The run's backbone with this site's weights.

    Args:
        settings: of the run; they name the backbone.
        node: the site's settings.
        device: empty for the site's.

    Raises:
        BackboneError, ConfigError: for a backbone that cannot be loaded.
    """
    device = device or site_device(settings.device, node)
    if settings.backbone == OWN_BACKBONE:
        # The function, which is code, comes from the site's own settings only.
        if not node.backbone:
            raise BackboneError(
                f"the run uses backbone = {OWN_BACKBONE!r}, but this site's node-config names "
                "none; set backbone = 'python:PACKAGE.MODULE:FUNCTION' there"
            )
        return own_backbone(node.backbone, settings.image_size, device)
    # A coordinator must not name a file on a hospital's disk, so its weights-path is used in a
    # simulation only.
    weights = node.weights_path or ("" if node.data else settings.weights_path)
    if node.data and not weights and (place := place_in(settings.backbone)):
        raise BackboneError(
            f"the run uses backbone = {settings.backbone!r}; {place!r} is a place on another machine, so "
            "set weights-path in this site's node-config to its own copy"
        )
    options = options_of(settings.features, download=node.download_weights or not node.data)
    return load_backbone(settings.backbone, weights, settings.image_size, device, options)


def site_device(device: str, node: NodeConfig) -> str:
    """The device of this site: its own setting, otherwise the run's `device`."""
    return pick_device(node.device if node.device != "auto" else device)


def usable(
    dataset: Dataset,
    features: Features,
    rows: Tensor,
    power: float = 1.0,
    folder: Path | None = None,
    most_mib: float = math.inf,
) -> LabelledFeatures:
    """The features of some rows, raised to a power.

    Records whose image is broken, or whose power overflows, are left out.

    Args:
        dataset: all records.
        features: of all records.
        rows: indices of the chosen records.
        power: of the features.
        folder: for a file; None: they stay in memory.
        most_mib: larger features are not in memory, but in a file in `folder`.

    Raises:
        DataError: if the file cannot be written.
    """
    rows = rows[torch.as_tensor(features.ok)[rows]]
    dimension = features.x.shape[1]
    large = folder is not None and len(rows) * dimension * BYTES > most_mib * MIB
    good: list[Tensor] = []

    def read(some: Tensor) -> Tensor:
        x = features.of(some, power)
        good.append(x.isfinite().all(1))
        return x if good[-1].all() else x[good[-1]]

    if folder is None or not large:
        x = read(rows)
    else:
        what = f"features cannot be written to cache-dir '{folder}'"
        with told_as(SourceError, what, "make room there"):
            x = written(
                (read(rows[part]) for part in chunks(len(rows), dimension)), dimension, folder
            )
    if not (finite := torch.cat(good)).all():
        rows = rows[finite]
    units = None if dataset.patients is None else tuple(dataset.patients[i] for i in rows.tolist())
    values = None if dataset.values is None else dataset.values[rows]
    return LabelledFeatures(x, dataset.labels[rows], units, rows, folder if large else None, values)
