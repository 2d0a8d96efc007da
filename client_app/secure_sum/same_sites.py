"""Sums without joint noise are over one set of sites: otherwise several of them can be solved for
one site.

The sums over {1, 2, 3}, {1, 2, 4}, {1, 3, 4} and {2, 3, 4} give each part, and those over {1, 2,
3}, {4, 5, 6} and {1, ..., 7} give the seventh. No site sees all of these sets. So a site takes part
in sums over one set of sites only, whatever the settings. If all honest sites do, any two sets are
equal or have no honest site in common; then no combination of sums is about fewer sites than one of
the sets. docs/privacy/secure-sums.md has the argument.

A refused signature is too late: `threshold` others complete the sum. So the set is fixed before the
masked vector leaves. It is that of the sites whose shares were delivered. It becomes smaller only
once, to the sites in this same sum, when the signatures of `threshold` sites prove which these are.
Sums over the same sites with other settings of what each adds, such as classes or a split, show
the difference, so these are refused as well, by settings alone: a refusal only where the settings
select other records would show that a site has such records. Where this site's files have changed
it withholds the sum (masked.py). Training and held-out records are different ones, and each must
stay as they are: an evaluation after training is no change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from fedsurrogate.client_app.datasets.partition import SELECTING
from fedsurrogate.client_app.features.site_features import SiteFeatures
from fedsurrogate.client_app.governance.ledger import dataset_id, own_ledger
from fedsurrogate.client_app.governance.policy import PUBLIC_KINDS
from fedsurrogate.client_app.governance.site_limits import SiteLimits
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import PolicyError, StateError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.privacy.mechanism import JOINT_SUMS
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import CountingSettings

TRAINING, HELD_OUT = "training", "held-out"
REMEDY = (
    "sum over the same sites, or with epsilon (one joint noise); `site forget-sums` forgets "
    "earlier sums, if this hospital accepts that together they may show its own part"
)


@dataclass(frozen=True)
class Fixed:
    """The only sites with which this site sums.

    Attributes:
        sites: digests of their lasting keys.
        sum: name of the sum that fixed them, while the sites of that sum are not proven; otherwise
            empty.
        records: digests of the "training" and of the "held-out" records that were in a sum without
            any noise.
        settings: digests of what selected these records, and of the "numbers" made of them.
    """

    sites: tuple[str, ...]
    sum: str
    records: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)


def applies(mechanism: str, node: NodeConfig) -> bool:
    """Whether the rule holds for a run: joint noise hides every difference, and each such sum is
    charged.

    Args:
        mechanism: name of the run's.
        node: the site's settings.
    """
    return mechanism != JOINT_SUMS and node.data not in PUBLIC_KINDS


def records_in(
    site_features: SiteFeatures, label_column: str, counting: CountingSettings, limits: SiteLimits
) -> dict[str, str]:
    """Digest of the records that a site adds to a sum without noise, by their kind.

    It covers its files, which of their records these are, and the records that a class needs. With
    another such limit, the difference of two sums would be the small classes of one site.

    Args:
        site_features: records of the site.
        label_column: that the site reads.
        counting: what is counted, if the sum is of counts.
        limits: records that a class needs.

    Returns:
        One digest.
    """
    least = _least(counting, limits)
    content = f"{site_features.key} {label_column} {site_features.selected} {least}"
    return {_kind(counting): hashlib.sha256(content.encode()).hexdigest()}


def settings_in(run: Run, limits: SiteLimits, public: bytes) -> dict[str, str]:
    """Digests of the settings that decide what a site adds to a sum, by what they are about.

    With other settings, the difference of two sums would show which records they select. With
    several ranges, or scales of a projection, it would show how large the largest part of a site
    is, and with several powers the numbers of single records. They depend on request and policy
    only.

    Args:
        run: whose sum it is.
        limits: records that a class needs.
        public: digest of the public map, or of the model.

    Returns:
        Digests by kind of records, and of the "numbers"; empty where the sum has noise.
    """
    if run.settings.epsilon:
        return {}
    own, kind = run.settings, _kind(run.settings.counting)
    selecting = ("seed", *SELECTING) if kind == TRAINING else ()
    chosen = {
        kind: [
            sorted(own.classes),
            _least(own.counting, limits),
            *(getattr(own, key) for key in selecting),
        ]
    }
    if run.target is not None:
        # Of two ranges of a number, the difference shows the records beyond the narrower one.
        chosen[kind].append(run.target.public)
        if own.counting.kind == "survey":
            # It leaves out small cells that the sum of a run has, or the other way round.
            chosen[kind].append("cells")
    if any(each.degree for each in run.plan.combination.sums):
        numbers: list[float | str] = [own.secure_sum_range, own.secure_sum_records, run.power]
        if own.features.ranges:
            numbers.append(own.features.ranges)
        # A model changes in every round; sums at one need a word of their own in the policy.
        if run.plan.messages.receives:
            chosen["numbers at models"] = numbers
        else:
            chosen["numbers"] = [*numbers, public.hex()]
    return {
        what: hashlib.sha256(json.dumps(values).encode()).hexdigest()
        for what, values in chosen.items()
    }


def why_changed(node: NodeConfig, settings: Mapping[str, str], records: Mapping[str, str]) -> str:
    """Why this site's records must not be in another sum; empty if they may, or if `fixing` refuses
    the sum for its settings.

    Args:
        node: the site's settings.
        settings: see `settings_in`.
        records: see `records_in`.

    Raises:
        StateError: if the record of earlier sums cannot be read.
    """
    with _locked(node) as file:
        before = _read(file)
    if before is None or _differ(before.settings, settings):
        return ""
    return _why_changed(before, records)


@contextmanager
def fixing(
    node: NodeConfig,
    name: str,
    sites: Collection[bytes],
    settings: Mapping[str, str],
    records: Mapping[str, str],
) -> Iterator[None]:
    """Charge a masked vector in this context, which stores the sites that may be in a sum.

    It stores them on exit, so a release that failed fixes nothing; the vector leaves after that.

    Args:
        node: the site's settings.
        name: of the sum.
        sites: their lasting keys.
        settings: see `settings_in`.
        records: see `records_in`; empty for a sum that is withheld.

    Raises:
        PolicyError: on entry, if an earlier sum was over other sites, or had other settings.
        StateError: on entry, if another sum has fixed other records since `why_changed`.
    """
    now = _digests(sites)
    with _locked(node) as file:
        before = _read(file)
        if before is not None:
            _check(before, now)
            _check_settings(before, settings)
            if why := _why_changed(before, records):
                raise StateError(why)
        yield
        _write(
            file,
            Fixed(now, name, records, settings)
            if before is None
            else Fixed(now, "", {**before.records, **records}, {**before.settings, **settings}),
        )


def check_summed(node: NodeConfig, name: str, sites: Collection[bytes]) -> None:
    """Refuse a sum over other sites than may be in it.

    Args:
        node: the site's settings.
        name: of the sum.
        sites: their lasting keys.

    Raises:
        PolicyError: for other sites.
        StateError: if the sums of this site were forgotten after this one began.
    """
    with _locked(node) as file:
        _check_list(_read(file), name, _digests(sites))


def settle(node: NodeConfig, name: str, sites: Collection[bytes]) -> None:
    """Store the sites of a sum, proven by signatures, before it is opened.

    Args:
        node: the site's settings.
        name: of the sum.
        sites: their lasting keys.

    Raises:
        PolicyError: for other sites.
        StateError: if the sums of this site were forgotten after this one began.
    """
    now = _digests(sites)
    with _locked(node) as file:
        before = _read(file)
        _check_list(before, name, now)
        assert before is not None
        _write(file, replace(before, sites=now, sum=""))


def forget(node: NodeConfig) -> Path | None:
    """Forget all earlier sums over a site's data, and which records earlier runs without noise have
    selected. Returns the file that keeps the record of the sums; None if there were none.
    """
    ledger = own_ledger(node)
    if ledger is not None and ledger.entries():
        ledger.reopen("site forget-sums", 0.0, 0.0, keep=True)
    with _locked(node) as file:
        return (
            file.replace(file.with_name(f"{file.name}.{datetime.now(UTC):%Y%m%dT%H%M%S%f}"))
            if file.exists()
            else None
        )


def _check_list(before: Fixed | None, name: str, now: tuple[str, ...]) -> None:
    if before is None:
        raise StateError(
            "the sums of this site were forgotten after this one began; begin a new one"
        )
    if before.sum != name or not set(now) <= set(before.sites):
        _check(before, now)


def _check(before: Fixed, now: tuple[str, ...]) -> None:
    if now != before.sites:
        raise PolicyError(
            f"an earlier sum without joint noise was with other sites ({len(before.sites)} sites, "
            f"now {len(now)}; {len(set(now) ^ set(before.sites))} differ), and several such sums "
            f"may show the part of one site; {REMEDY}"
        )


def _check_settings(before: Fixed, settings: Mapping[str, str]) -> None:
    if _differ(before.settings, settings):
        raise PolicyError(
            "an earlier sum without noise had other settings of what each site adds (classes, "
            "seed, test-fraction or another setting of the split; features.power, features.ranges, "
            "secure-sum-range or secure-sum-records), or this site's policy then asked for other numbers of records "
            "of a class (smallest-class in training, smallest-cell in counts), and the difference "
            f"of both sums would show single records; {REMEDY}"
        )


def _why_changed(before: Fixed, records: Mapping[str, str]) -> str:
    if not _differ(before.records, records):
        return ""
    return (
        "its data have changed since an earlier sum without noise, and the difference of both sums "
        f"would show the change; {REMEDY}"
    )


def _differ(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    return any(before.get(kind, digest) != digest for kind, digest in now.items())


def _kind(counting: CountingSettings) -> str:
    return HELD_OUT if counting.kind == "evaluation" else TRAINING


def _least(counting: CountingSettings, limits: SiteLimits) -> int:
    """Records that a class needs to be in the sum."""
    return limits.smallest_class if counting.kind == "none" else limits.smallest_cell


@contextmanager
def _locked(node: NodeConfig) -> Iterator[Path]:
    from filelock import FileLock

    file = node.state / "sums" / f"{dataset_id(node.data, node.data_dir)}.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=60):
            yield file
    except OSError as error:
        raise StateError(
            f"{file}, which names the sites of earlier sums, cannot be read or written ({error})"
        ) from None


def _read(file: Path) -> Fixed | None:
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text())
        records = content["records"]
        if isinstance(records, str):
            # Of a version that knew no sums over held-out records.
            records = {TRAINING: records} if records else {}
        return Fixed(
            tuple(map(str, content["sites"])),
            str(content["sum"]),
            {kind: str(records[kind]) for kind in records},
            # Versions that refused by the records alone have none.
            {str(what): str(digest) for what, digest in content.get("settings", {}).items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(
            f"{file}, which names the sites of earlier sums, is damaged ({type(error).__name__}); "
            f"{REMEDY}"
        ) from None


def _write(file: Path, fixed: Fixed) -> None:
    replace_file(file, json.dumps(asdict(fixed)).encode())


def _digests(sites: Collection[bytes]) -> tuple[str, ...]:
    return tuple(sorted(hashlib.sha256(key).hexdigest()[:32] for key in sites))
