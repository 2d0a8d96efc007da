"""A site's part of secure aggregation: its keys and shares, its statistics as whole numbers with its share of the
noise, masked, and what it reveals at the end. Its state of each sum is on its disk.

The masked vector is a release like any other. A site may find that its records must not be in an exact
sum: they have changed since an earlier one, or a number is beyond the range. A refusal would show this of
one site. So it takes part, and withholds the sum: it adds uniformly random numbers, with which the sum is
uniformly random itself, whatever the coordinator does. The sum's last number is zero unless some site has
done so.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsurrogate.common.errors import (
    LOG,
    PolicyError,
    SealError,
    StateError,
    SurrogateError,
    told_as,
)
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.methods.method import BITS, WITHHELD, load
from fedsurrogate.common.privacy.mechanism import DISTRIBUTED_SUMS
from fedsurrogate.common.run import Run
from fedsurrogate.common.secure_aggregation import protocol
from fedsurrogate.common.secure_aggregation import rules as sum_rules
from fedsurrogate.common.security.sealing import SEED_BYTES, public_key, read_keys
from fedsurrogate.common.settings import CountingSettings
from fedsurrogate.common.targets.target import LEAST_TOGETHER, Target
from fedsurrogate.common.wire import surrogate_proto
from fedsurrogate.common.wire.records import Info

from .datasets.partition import SELECTING
from .features.site_features import SiteFeatures
from .governance.ledger import dataset_id, own_ledger
from .governance.policy import PUBLIC_KINDS, Policy
from .governance.work_limits import SiteLimits
from .methods.job import Job, MethodOutput, SiteRequest, SiteStatistic
from .node_config import NodeConfig
from .offline.keys import private_key

TRAINING, HELD_OUT = "training", "held-out"
REMEDY = (
    "sum over the same sites, or with epsilon (one distributed noise); `site ledger forget` forgets "
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
    """Whether the rule holds for a run: distributed noise hides every difference, and each such sum is
    charged.

    Args:
        mechanism: name of the run's.
        node: the site's settings.
    """
    return mechanism != DISTRIBUTED_SUMS and node.data not in PUBLIC_KINDS


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
    selected = [getattr(own, key) for key in selecting]
    chosen = {kind: [sorted(own.classes), _least(own.counting, limits), *selected]}
    if run.target is not None:
        # Of two ranges of a number, the difference shows the records beyond the narrower one.
        chosen[kind].append(run.target.public)
        if own.counting.kind == "survey":
            # It leaves out small cells that the sum of a run has, or the other way round.
            chosen[kind].append("cells")
    if any(each.degree for each in run.plan.combination.sums):
        numbers: list[float | str] = [
            own.secure_aggregation_range,
            own.secure_aggregation_records,
            run.power,
        ]
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
        fixed = Fixed(now, name, records, settings)
        if before is not None:
            fixed = Fixed(now, "", {**before.records, **records}, {**before.settings, **settings})
        _write(file, fixed)


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
        ledger.reopen("site ledger forget", 0.0, 0.0, keep=True)
    with _locked(node) as file:
        if file.exists():
            return file.replace(file.with_name(f"{file.name}.{datetime.now(UTC):%Y%m%dT%H%M%S%f}"))
        return None


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
            f"an earlier sum without distributed noise was with other sites ({len(before.sites)} sites, "
            f"now {len(now)}; {len(set(now) ^ set(before.sites))} differ), and several such sums "
            f"may show the part of one site; {REMEDY}"
        )


def _check_settings(before: Fixed, settings: Mapping[str, str]) -> None:
    if _differ(before.settings, settings):
        raise PolicyError(
            "an earlier sum without noise had other settings of what each site adds (classes, "
            "seed, test-fraction or another setting of the split; features.power-transform, features.ranges, "
            "secure-aggregation-range or secure-aggregation-records), or this site's policy then "
            "asked for other numbers of records "
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
    what = f"{file}, which names the sites of earlier sums, cannot be read or written"
    with told_as(StateError, what, IN_STATE_DIR):
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=60):
            yield file


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


def sum_keys(step: SiteRequest, policy: Policy) -> str:
    """Make this site's keys for a new sum; returns them as hexadecimal digits, for its
    identification.

    Args:
        step: a request of a run that the policy allows.
        policy: of the site.

    Raises:
        PolicyError: the policy needs the keys of the other sites, and there are none.
        SurrogateError: for other settings.
    """
    name = _name(step)
    _check_peers(policy, step.node)
    state, member = protocol.begin(
        step.site, private_key(step.node, step.site), sum_rules.context_of(step.run, name)
    )
    create_state(step.node, policy, name, state)
    return surrogate_proto.pack_member(member).hex()


def sum_shares(step: SiteRequest, policy: Policy) -> tuple[bytes | None, Info]:
    """Check the key list; share this site's secrets among its members. Args and errors as
    `sum_keys`.
    """
    name, state = _state(step)
    members, public = surrogate_proto.unpack_members(step.payload or b"")
    rules = sum_rules.rules_of(step.run.settings, len(members))
    _check_colluding(policy, rules)
    _check_local(policy, step.run, rules)
    names = [member.site for member in members]
    _check_together(policy, step.run.target, None if step.run.private else names, rules)
    pinned = read_keys(Path(step.node.peers).expanduser()) if step.node.peers else None
    own = public_key(private_key(step.node, step.site))
    after, dealt = protocol.share(state, members, rules, own, policy.smallest_sum, pinned, public)
    write_state(step.node, name, after)
    return surrogate_proto.pack_dealt(dealt), {"pinned": pinned is not None}


def sum_list(step: SiteRequest, policy: Policy) -> tuple[bytes | None, Info]:
    """Sign the list of the sites in the sum. Args and errors as `sum_keys`."""
    name, state = _state(step)
    summed, _ = surrogate_proto.unpack_list(step.payload)
    rules = sum_rules.rules_of(step.run.settings, len(state.members))
    after, signature = protocol.agree(state, summed, rules, private_key(step.node, step.site))
    names = None if step.run.private else after.summed
    _check_together(policy, step.run.target, names, rules)
    if applies(step.run.plan.mechanism_name, step.node):
        check_summed(step.node, name, after.summed_keys)
    write_state(step.node, name, after)
    return signature, {}


def sum_open(step: SiteRequest, policy: Policy) -> tuple[bytes | None, Info]:
    """Reveal the shares that complete the sum. Args and errors as `sum_keys`."""
    name, state = _state(step)
    _, signatures = surrogate_proto.unpack_list(step.payload)
    after, revealed = protocol.reveal(
        state, signatures, sum_rules.rules_of(step.run.settings, len(state.members))
    )
    if applies(step.run.plan.mechanism_name, step.node):
        settle(step.node, name, after.summed_keys)
    write_state(step.node, name, after)
    return surrogate_proto.pack_revealed(revealed, protocol.spare_seed(state)), {}


def _name(step: SiteRequest) -> str:
    step.check_run()
    if not step.run.settings.secure_aggregation:
        raise SurrogateError("a step of secure aggregation, but secure-aggregation = false")
    return sum_name(step.info)


def _state(step: SiteRequest) -> tuple[str, protocol.SumState]:
    """The name of the sum in a request, and its state at this site."""
    name = _name(step)
    return name, read_state(step.run, step.node, name, step.site)


def _check_colluding(policy: Policy, rules: sum_rules.SumRules) -> None:
    """The gate compares shares; what counts is the number of sites, for which a share is rounded
    down.
    """
    if rules.colluding < (
        least := sum_rules.SumRules.of(rules.members, policy.smallest_colluding, 0.0).colluding
    ):
        raise PolicyError(
            f"smallest-colluding = {policy.smallest_colluding:.4g}: the sum is safe only against "
            f"{rules.colluding} of {rules.members} sites; it must be against {least}, so the run "
            "needs a larger colluding"
        )


def _check_local(policy: Policy, run: Run, rules: sum_rules.SumRules) -> None:
    if (
        policy.local_epsilon
        and run.private
        and rules.honest > 0
        and (local := sum_rules.local_epsilon(run.settings.epsilon, run.mechanism, rules))
        > policy.local_epsilon
    ):
        raise PolicyError(
            f"local-epsilon = {policy.local_epsilon:g}: this site's own noise alone gives epsilon "
            f"{local:.4g} at delta {run.settings.delta:g} among {rules.members} sites; the run "
            "needs a smaller epsilon"
        )


def _check_together(
    policy: Policy, target: Target | None, exact: Sequence[str] | None, rules: sum_rules.SumRules
) -> None:
    """Differences of exact sums, such as of two labels, may be of fewer sites than the sum. All
    honest sites refuse the same list of them, so none is completed.
    """
    fewest = None if target is None or exact is None else target.fewest(exact)
    needed = max(LEAST_TOGETHER + rules.colluding, policy.smallest_sum)
    if fewest is not None and fewest[1] < needed:
        raise PolicyError(
            f"smallest-sum: exactly {fewest[0]!r} is annotated by {fewest[1]} of the sites in this "
            f"secure aggregation, and differences of its sums would show these; {needed} are needed"
        )


def _check_peers(policy: Policy, node: NodeConfig) -> None:
    if policy.require_secure_aggregation and not node.peers:
        raise PolicyError(
            "require-secure-aggregation = true, but the node-config names no peers: the coordinator could "
            "make up all other sites; set peers to a file with the lines that `site offline key` prints at "
            "the other sites"
        )


def masked_sum(job: Job) -> MethodOutput:
    """This site's part of the sum.

    Nothing that leaves depends on its records, except through the sum of all sites. With the noise
    of DP-SGD already in it, no distributed noise is added, and what is beyond the range is cut off.

    Args:
        job: the request, with the delivered shares.

    Raises:
        StateError, SealError: for a step out of order, or shares from another key list.
    """
    run, name = job.run, sum_name(job.info)
    combination = run.plan.combination
    state = read_state(run, job.node, name, job.site)
    state.at("shares")
    sites = len(state.members)
    rules = sum_rules.rules_of(run.settings, sites)
    delivered, packed = surrogate_proto.unpack_delivery(job.payload)
    if surrogate_proto.map_digest(packed) != state.public:
        raise SealError(
            "the model, projection or centre of this secure aggregation is not what all sites have agreed "
            "on"
        )
    made: SiteStatistic = load(combination.site_sums)(replace(job, payload=packed))
    values, claim = made.values, made.claim
    numbers = sum_rules.numbers_of(run.plan, run.settings, sites, job.round)
    fixed = applies(run.plan.mechanism_name, job.node)
    settings = settings_in(run, job.limits, state.public) if fixed else {}
    records = {}
    if fixed and not run.private:
        records = records_in(job.found, job.node.label_column, run.settings.counting, job.limits)
    withheld = ""
    if claim is None:
        values = {**values, WITHHELD.name: torch.zeros(1)}
        withheld = _beyond(values, numbers) or why_changed(job.node, settings, records)
    whole = {each: numbers[each].encode(value) for each, value in values.items()}
    facts: dict[str, float] = {
        "members": sites,
        "colluding": rules.colluding,
        "fewest-in-the-sum": rules.least,
    }
    # Without peers, the coordinator may have made up the other sites, and this site's own noise
    # alone protects it.
    facts["keys-pinned"] = float(bool(job.node.peers))
    spare, distributed = b"", claim is not None and claim.name == DISTRIBUTED_SUMS
    if distributed:
        assert claim is not None
        facts["local-epsilon"] = sum_rules.local_epsilon(run.settings.epsilon, run.mechanism, rules)
        shapes = {each: tuple(value.shape) for each, value in values.items()}
        spare = os.urandom(SEED_BYTES)
        for each, drawn in protocol.noise_of_site(claim, numbers, shapes, rules, spare).items():
            whole[each] = whole[each] + drawn
    vector = np.concatenate([whole[each.name] for each in combination.sums_in(job.round)])
    if withheld:
        LOG.error("THIS SITE WITHHOLDS THE SECURE SUM, for all sites: %s", withheld)
        vector, records, facts = _random(len(vector)), {}, {**facts, WITHHELD.name: 1.0}
    after, masked = protocol.mask(state, delivered, rules, vector)
    guard: Callable[[], AbstractContextManager[object]] = nullcontext
    if fixed:
        keys = [after.by_name[site].public for site in after.shares]
        guard = partial(fixing, job.node, name, keys, settings, records)
    payload = surrogate_proto.pack_masked(job.header(run.settings.classes), masked, claim)
    kept = surrogate_proto.pack_state(replace(after, spare=spare))
    keep = {**made.keep, state_file(job.node, name, job.site): kept}
    return MethodOutput(payload, claim, facts, keep=keep, must_keep=True, guard=guard)


def _beyond(values: dict[str, Tensor], numbers: dict[str, sum_rules.FixedPoint]) -> str:
    """Which number is beyond its range; empty if none is."""
    for name, value in values.items():
        limit = numbers[name].step * numbers[name].largest
        if value.numel() and (not value.isfinite().all() or float(value.abs().max()) > limit):
            return (
                f"{name} of this site's records are beyond {limit:g}; the run needs a larger "
                "secure-aggregation-range or secure-aggregation-records, or, for columns of a table, wider "
                "features.ranges"
            )
    return ""


def _random(count: int) -> NDArray[np.int64]:
    """Uniformly random numbers (count,), of which the last is not zero."""
    drawn = np.frombuffer(os.urandom(BITS // 8 * count), "<u4").astype(np.int64)
    drawn[-1] = 1 + secrets.randbelow(2**BITS - 1)
    return drawn


NAME = re.compile(r"[0-9a-f]{32}")
IN_STATE_DIR = "see state-dir in the node-config"


def sum_name(info: Mapping[str, object]) -> str:
    """The name of the sum in a request. Raises SurrogateError."""
    name = str(info.get("sum", ""))
    if not NAME.fullmatch(name):
        raise SurrogateError(
            f"a request without the name of its secure aggregation ({name[:40]!r})"
        )
    return name


def state_file(node: NodeConfig, name: str, site: str) -> Path:
    """The file with a sum's state."""
    return node.state / "sums" / f"{name}-{site}.pb"


def create_state(node: NodeConfig, policy: Policy, name: str, state: protocol.SumState) -> None:
    """Write the first state of a sum.

    Args:
        node: the site's settings.
        policy: says when old states are removed.
        name: of the sum.
        state: to write.

    Raises:
        StateError: if there was one of this name: then its keys are not made again; or if it cannot
            be written.
    """
    file = state_file(node, name, state.site)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _remove_old(file.parent, policy.most_seconds, int(time.time() // 3600))
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(surrogate_proto.pack_state(state))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        # A file in the place of the folder exists as well.
        if isinstance(error, FileExistsError) and file.exists():
            raise StateError(
                f"the secure aggregation {name!r} has begun at this site; it does not begin a second time"
            ) from None
        raise StateError(f"{file} cannot be written ({error}); {IN_STATE_DIR}") from None


@lru_cache(maxsize=8)
def _remove_old(folder: Path, seconds: float, hour: int) -> None:
    """Remove states of sums; once an hour in a process, since a simulation begins thousands in one folder."""
    late = time.time() - seconds
    with os.scandir(folder) as states:
        for old in states:
            if old.name.endswith(".pb") and old.stat().st_mtime < late:
                Path(old).unlink(missing_ok=True)


def read_state(run: Run, node: NodeConfig, name: str, site: str) -> protocol.SumState:
    """A sum's state.

    Args:
        run: whose sum it is.
        node: the site's settings.
        name: of the sum.
        site: name of the site.

    Raises:
        StateError: if this site did not begin it, or began it with other settings.
    """
    file = state_file(node, name, site)
    try:
        state = surrogate_proto.unpack_state(file.read_bytes())
    except OSError as error:
        raise StateError(
            f"this site has no state of the secure aggregation {name!r} ({type(error).__name__})"
        ) from None
    if state.context != sum_rules.context_of(run, name) or state.site != site:
        raise StateError(
            f"the secure aggregation {name!r} began with other settings than those of this request"
        )
    return state


def write_state(node: NodeConfig, name: str, state: protocol.SumState) -> None:
    """Replace a sum's state, flushed, before the step that it records leaves this site.

    Args:
        node: the site's settings.
        name: of the sum.
        state: to write.

    Raises:
        StateError: if it cannot be written.
    """
    what = "the state of secure aggregation cannot be written"
    with told_as(StateError, what, IN_STATE_DIR):
        replace_file(state_file(node, name, state.site), surrogate_proto.pack_state(state))
