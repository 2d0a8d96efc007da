"""Limits of policy and site on the work, memory and disk that a coordinator may use at this site;
checked before any work.

All checks depend on the run's settings, the site's own settings and the clock, never on the data.
So a refusal reveals nothing about a record. That is why a run is limited by the time since its
first request, not by its computing time: that would reveal the number of records.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from fedsurrogate.common.errors import LOG, MOST_CLASSES, PolicyError, StorageError, told_as
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.methods.method import Work
from fedsurrogate.common.settings import BackboneSettings, Section, Settings

from ..node_config import NodeConfig


@dataclass(frozen=True)
class SiteLimits:
    """Limits that the site sets itself.

    Attributes:
        components: most components of a mixture; 0: the run's settings hold.
        rank: largest rank of a covariance; 0: the run's settings hold.
        smallest_class: records that a class needs to be released.
        most_classes: largest number of classes in a received model.
        smallest_cell: records that a class needs in exact counts.
        show_evaluation: whether this site's own share of an evaluation may be shown.
    """

    components: int = 0
    rank: int = 0
    smallest_class: int = 1
    most_classes: int = MOST_CLASSES
    smallest_cell: int = 1
    show_evaluation: bool = True


NO_LIMITS = SiteLimits()


MIB = 2**20
BETWEEN_ROUNDS, RECEIVED = ("runs",), ("models", "generators")


def remove_oldest(node: NodeConfig, most_mib: float) -> None:
    """Remove the files between rounds that were written first, until the others fit; the newest one
    always stays.

    Args:
        node: the site's settings.
        most_mib: of all these files, MiB.
    """
    total = 0.0
    newest_first = sorted(_files(node, BETWEEN_ROUNDS), reverse=True)
    for number, (_, size, file) in enumerate(newest_first):
        total += size
        if number and total > most_mib * MIB:
            Path(file).unlink(missing_ok=True)
            LOG.warning("%s is removed: kept-mib = %g in the policy", file, most_mib)


def has_room(node: NodeConfig, most_mib: float, more: int) -> bool:
    """Whether another received model or generator may be kept; states in the log if it may not.

    Args:
        node: the site's settings.
        most_mib: of all of them, MiB.
        more: its size in bytes.
    """
    fits = sum(size for _, size, _ in _files(node, RECEIVED)) + more <= most_mib * MIB
    if not fits:
        LOG.error(
            "a received model is not kept: all of them would take more than kept-mib = %g in the "
            "policy; remove old ones in %s",
            most_mib,
            " or ".join(f"'{node.state / name}'" for name in RECEIVED),
        )
    return fits


def _files(node: NodeConfig, folders: tuple[str, ...]) -> Iterator[tuple[int, int, str]]:
    """Time of the last change, size and path of every file."""
    for folder in folders:
        for within, _, names in os.walk(node.state / folder):
            for file in (f"{within}/{name}" for name in names):
                with suppress(FileNotFoundError):
                    status = os.lstat(file)
                    yield status.st_mtime_ns, status.st_size, file


UNLIMITED = 10**12
HOUR, DAY = 3600.0, 86_400.0
# Number of runs whose first request is stored; the oldest are deleted first.
RUNS_KEPT = 10_000
REQUESTS_FILE = "requests.json"


class WorkLimits(Section):
    """Keys of the policy that bound work, memory and disk.

    Attributes:
        most_classes: classes that a run may name
        longest_class_name: characters of a class name
        largest_image_size: image-size of a run, pixels
        largest_dimension: numbers in the features of one image
        largest_width: width, hidden and latent size of a model
        most_components: components of a mixture, one class
        largest_rank: rank of a covariance
        most_synthetic: synthetic records or images that a site must keep in a run
        most_numbers: estimated count of numbers in model, gradients and statistics of a run
        most_rounds: rounds of a run
        most_steps: steps of training in one round
        most_passes: passes over the training records in one round
        most_seconds: seconds from the first request of a run to its last
        requests_per_run: requests that one run may make
        requests_per_hour: requests of all runs in an hour
        extractions_per_day: backbones and image sizes in a day; each makes the site compute all
            features anew
        cache_mib: computed features kept on disk, MiB; least recently used go first
        kept_mib: largest size of files between rounds, of which the oldest go first, and of
            received models, of which further ones are not kept; MiB each
    """

    most_classes: int = Field(1000, ge=1)
    longest_class_name: int = Field(200, ge=1)
    largest_image_size: int = Field(1024, ge=1)
    largest_dimension: int = Field(8192, ge=1)
    largest_width: int = Field(2048, ge=1)
    most_components: int = Field(100, ge=1)
    largest_rank: int = Field(512, ge=1)
    most_synthetic: int = Field(1_000_000, ge=1)
    most_numbers: int = Field(2_000_000_000, ge=1)
    most_rounds: int = Field(1000, ge=1)
    most_steps: int = Field(20_000, ge=1)
    most_passes: int = Field(1000, ge=1)
    most_seconds: float = Field(3 * DAY, gt=0)
    requests_per_run: int = Field(10_000, ge=1)
    requests_per_hour: int = Field(1000, ge=1)
    extractions_per_day: int = Field(8, ge=1)
    cache_mib: float = Field(20_480.0, gt=0)
    kept_mib: float = Field(20_480.0, gt=0)


# For public data, such as the shares of a simulation.
NO_WORK_LIMITS: dict[str, Any] = {
    name: float("inf") if field.annotation is float else UNLIMITED
    for name, field in WorkLimits.model_fields.items()
}


def check_work(work: Work, limits: WorkLimits, settings: Settings) -> None:
    """Check a run before its data are read: dimensions that only the data tell are left out.

    Args:
        work: of the run's plan, without a dimension.
        limits: of the site.
        settings: of the run.

    Raises:
        PolicyError: for settings that need more work or memory than the limits allow.
    """
    channels = {"pixels": 1, "pixels:rgb": 3}.get(settings.backbone, 0)
    _check_limits(
        limits,
        most_classes=len(settings.classes),
        longest_class_name=max(map(len, settings.classes), default=0),
        largest_image_size=settings.image_size,
        most_rounds=work.rounds,
        largest_dimension=channels * settings.image_size**2,
        most_steps=work.steps,
        most_passes=work.passes,
        largest_width=work.width,
        most_components=work.components,
        largest_rank=work.rank,
        most_synthetic=work.synthetic,
    )


def check_size(work: Work, limits: WorkLimits, dimension: int, classes: int) -> None:
    """Refuse features that need more memory than the limits allow.

    Called as soon as the dimension is known; the backbone decides it, not the data.

    Args:
        work: of the run at this size.
        limits: of the site.
        dimension: of the features.
        classes: number of classes.

    Raises:
        PolicyError: for the first limit that is exceeded.
    """
    _check_limits(
        limits,
        largest_dimension=dimension,
        most_classes=classes,
        most_synthetic=work.synthetic,
        most_numbers=work.numbers,
    )


def admit(images: BackboneSettings, node: NodeConfig, limits: WorkLimits, flower_run: str) -> None:
    """Count a request, on disk, before its work.

    Counts are in the state folder, because an app may start anew for every message.

    Args:
        images: of the run that makes the request; computations of features are counted by them.
        node: the site's settings.
        limits: of the site.
        flower_run: id of the run; requests are counted by it.

    Raises:
        PolicyError: if the counts exceed the limits.
        StorageError: if they cannot be written.
    """
    if limits.requests_per_run >= UNLIMITED:
        return
    from filelock import FileLock

    file, now = node.state / REQUESTS_FILE, time.time()
    features = hashlib.sha256(repr((images.backbone, images.image_size)).encode()).hexdigest()[:16]
    what = f"{str(file)!r}, which counts requests, cannot be written"
    with told_as(StorageError, what, "nothing is done"):
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=60):
            counts = _counted(_read_counts(file), features, limits, flower_run, now)
            replace_file(file, json.dumps(counts), durable=False)


def _counted(
    counts: dict[str, Any], features: str, limits: WorkLimits, flower_run: str, now: float
) -> dict[str, Any]:
    first, number = counts["runs"].get(flower_run, (now, 0))
    recent = [at for at in counts["requests"] if now - HOUR < at <= now]
    extractions = {key: at for key, at in counts["extractions"].items() if now - DAY < at <= now}
    extractions[features] = now
    _check_limits(
        limits,
        most_seconds=max(0.0, now - first),
        requests_per_run=number + 1,
        requests_per_hour=len(recent) + 1,
        extractions_per_day=len(extractions),
    )
    runs = counts["runs"] | {flower_run: (first, number + 1)}
    kept = sorted(runs.items(), key=lambda item: item[1][0])[-RUNS_KEPT:]
    return {"runs": dict(kept), "requests": [*recent, now], "extractions": extractions}


def _read_counts(file: Any) -> dict[str, Any]:
    """The stored counts. A file that cannot be read counts as empty, because it protects computing
    time, not data.
    """
    empty: dict[str, Any] = {"runs": {}, "requests": [], "extractions": {}}
    try:
        counts = json.loads(file.read_text())
        whole = all(isinstance(counts[key], type(value)) for key, value in empty.items())
        return {key: counts[key] for key in empty} if whole else empty
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return empty


def _check_limits(limits: WorkLimits, **asked: float) -> None:
    """Raise PolicyError for the first value above the limit of the same name."""
    for name, value in asked.items():
        if value > (allowed := getattr(limits, name)):
            raise PolicyError(f"{name.replace('_', '-')} = {allowed:g}: the run requests {value:g}")
