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
Sums over the same sites before and after a change of this site's records, by new files or another
split, show the change, so these are refused as well. Training and held-out records are different
ones, and each must stay as they are: an evaluation after training is no change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from client_app.features.site_features import SiteFeatures
from client_app.governance.ledger import dataset_id
from client_app.governance.policy import PUBLIC_KINDS
from client_app.governance.site_limits import SiteLimits
from client_app.node_config import NodeConfig
from common.errors import PolicyError, StateError
from common.files import replace_file
from common.methods.counting import JUDGING
from common.privacy.mechanism import JOINT_SUMS
from common.run import Run

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
    """

    sites: tuple[str, ...]
    sum: str
    records: Mapping[str, str] = field(default_factory=dict)


def applies(mechanism: str, node: NodeConfig) -> bool:
    """Whether the rule holds for a run: joint noise hides every difference, and each such sum is
    charged.

    Args:
        mechanism: name of the run's.
        node: the site's settings.
    """
    return mechanism != JOINT_SUMS and node.data not in PUBLIC_KINDS


def records_in(
    site_features: SiteFeatures, node: NodeConfig, run: Run, limits: SiteLimits
) -> dict[str, str]:
    """Digest of the records that a site adds to a sum, by their kind.

    It covers its files, which of their records these are, and the records that a class needs. With
    another such limit, the difference of two sums would be the small classes of one site.

    Args:
        site_features: records of the site.
        node: the site's settings.
        run: whose sum it is.
        limits: records that a class needs.

    Returns:
        One digest; empty where the sum has noise.
    """
    if run.settings.epsilon:
        return {}
    kind = "held-out" if run.settings.counting.kind in JUDGING else "training"
    least = limits.smallest_cell if run.plan.counts else limits.smallest_class
    return {
        kind: hashlib.sha256(
            f"{site_features.key} {node.label_column} {site_features.selected} {least}".encode()
        ).hexdigest()
    }


@contextmanager
def fixing(
    node: NodeConfig, name: str, sites: Collection[bytes], records: Mapping[str, str]
) -> Iterator[None]:
    """Charge a masked vector in this context, which stores the sites that may be in a sum.

    It stores them on exit, so a release that failed fixes nothing; the vector leaves after that.

    Args:
        node: the site's settings.
        name: of the sum.
        sites: their lasting keys.
        records: see `records_in`.

    Raises:
        PolicyError: on entry, if an earlier sum was over other sites, or other records of this
            kind.
    """
    now = _digests(sites)
    with _locked(node) as file:
        before = _read(file)
        if before is not None:
            _check(before, now)
            _check_records(before, records)
        yield
        _write(
            file,
            Fixed(now, name, records)
            if before is None
            else Fixed(now, "", {**before.records, **records}),
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
        _write(file, Fixed(now, "", before.records))


def forget(node: NodeConfig) -> Path | None:
    """Forget all earlier sums over a site's data. Returns the file that keeps their record; None if
    there were none.
    """
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


def _check_records(before: Fixed, records: Mapping[str, str]) -> None:
    if any(before.records.get(kind, digest) != digest for kind, digest in records.items()):
        raise PolicyError(
            "this site's data have changed since an earlier sum without noise, or the run splits "
            "them otherwise (seed, test-fraction, classes), or its policy now asks for other "
            "numbers of records of a class (smallest-class in training, smallest-cell in counts), "
            f"and the difference of both sums would show the change; {REMEDY}"
        )


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
            records = {"training": records} if records else {}
        return Fixed(
            tuple(map(str, content["sites"])),
            str(content["sum"]),
            {kind: str(records[kind]) for kind in records},
        )
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{file}, which names the sites of earlier sums, is damaged ({type(error).__name__}); "
            f"{REMEDY}"
        ) from None


def _write(file: Path, fixed: Fixed) -> None:
    replace_file(file, json.dumps(asdict(fixed)).encode())


def _digests(sites: Collection[bytes]) -> tuple[str, ...]:
    return tuple(sorted(hashlib.sha256(key).hexdigest()[:32] for key in sites))
