"""A site's part of a secure sum: its keys and shares, its statistics as whole numbers with its share of the
noise, masked, and what it reveals at the end. Its state of each sum is on its disk.

The masked vector is a release like any other. A site may find that its records must not be in an exact
sum: they have changed since an earlier one, or a number is beyond the range. A refusal would show this of
one site. So it takes part, and withholds the sum: it adds uniformly random numbers, with which the sum is
uniformly random itself, whatever the coordinator does. The sum's last number is zero unless some site has
done so.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.methods.task import MethodOutput, SiteRequest, SiteStatistic, Task
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.client_app.offline.keys import private_key
from fedsurrogate.client_app.secure_sum import same_sites
from fedsurrogate.common.errors import PolicyError, SealError, StateError, SurrogateError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.methods.method import BITS, WITHHELD, load
from fedsurrogate.common.privacy.mechanism import JOINT_SUMS
from fedsurrogate.common.run import Run
from fedsurrogate.common.secure_sum.noise import noise_of_site
from fedsurrogate.common.secure_sum.protocol import (
    SumState,
    agree,
    begin,
    mask,
    reveal,
    share,
    spare_seed,
)
from fedsurrogate.common.secure_sum.rules import (
    FixedPoint,
    SumRules,
    context_of,
    local_epsilon,
    numbers_of,
    rules_of,
)
from fedsurrogate.common.security.sealing import SEED_BYTES, public_key, read_keys
from fedsurrogate.common.targets.target import LEAST_TOGETHER, Target
from fedsurrogate.common.wire import sum_proto
from fedsurrogate.common.wire.records import Info


def sum_keys(step: SiteRequest, policy: Policy) -> str:
    """Make this site's keys for a new sum; returns them as hexadecimal digits, for its
    introduction.

    Args:
        step: a request of a run that the policy allows.
        policy: of the site.

    Raises:
        PolicyError: the policy needs the keys of the other sites, and there are none.
        SurrogateError: for other settings.
    """
    name = _name(step)
    _check_peers(policy, step.node)
    state, member = begin(step.site, private_key(step.node, step.site), context_of(step.run, name))
    create_state(step.node, policy, name, state)
    return sum_proto.pack_member(member).hex()


def sum_shares(step: SiteRequest, policy: Policy) -> tuple[bytes | None, Info]:
    """Check the key list; share this site's secrets among its members. Args and errors as
    `sum_keys`.
    """
    name, state = _state(step)
    members, public = sum_proto.unpack_members(step.payload or b"")
    rules = rules_of(step.run.settings, len(members))
    _check_colluding(policy, rules)
    _check_local(policy, step.run, rules)
    names = [member.site for member in members]
    _check_together(policy, step.run.target, None if step.run.private else names, rules)
    pinned = read_keys(Path(step.node.peers).expanduser()) if step.node.peers else None
    own = public_key(private_key(step.node, step.site))
    after, dealt = share(state, members, rules, own, policy.smallest_sum, pinned, public)
    write_state(step.node, name, after)
    return sum_proto.pack_dealt(dealt), {"pinned": pinned is not None}


def sum_list(step: SiteRequest, policy: Policy) -> tuple[bytes | None, Info]:
    """Sign the list of the sites in the sum. Args and errors as `sum_keys`."""
    name, state = _state(step)
    summed, _ = sum_proto.unpack_list(step.payload)
    rules = rules_of(step.run.settings, len(state.members))
    after, signature = agree(state, summed, rules, private_key(step.node, step.site))
    names = None if step.run.private else after.summed
    _check_together(policy, step.run.target, names, rules)
    if same_sites.applies(step.run.plan.mechanism_name, step.node):
        same_sites.check_summed(step.node, name, after.summed_keys)
    write_state(step.node, name, after)
    return signature, {}


def sum_open(step: SiteRequest, policy: Policy) -> tuple[bytes | None, Info]:
    """Reveal the shares that complete the sum. Args and errors as `sum_keys`."""
    name, state = _state(step)
    _, signatures = sum_proto.unpack_list(step.payload)
    after, revealed = reveal(state, signatures, rules_of(step.run.settings, len(state.members)))
    if same_sites.applies(step.run.plan.mechanism_name, step.node):
        same_sites.settle(step.node, name, after.summed_keys)
    write_state(step.node, name, after)
    return sum_proto.pack_revealed(revealed, spare_seed(state)), {}


def _name(step: SiteRequest) -> str:
    step.check_run()
    if not step.run.settings.secure_sum:
        raise SurrogateError("a step of a secure sum, but secure-sum = false")
    return sum_name(step.info)


def _state(step: SiteRequest) -> tuple[str, SumState]:
    """The name of the sum in a request, and its state at this site."""
    name = _name(step)
    return name, read_state(step.run, step.node, name, step.site)


def _check_colluding(policy: Policy, rules: SumRules) -> None:
    """The gate compares shares; what counts is the number of sites, for which a share is rounded
    down.
    """
    if rules.colluding < (
        least := SumRules.of(rules.members, policy.smallest_colluding, 0.0).colluding
    ):
        raise PolicyError(
            f"smallest-colluding = {policy.smallest_colluding:.4g}: the sum is safe only against "
            f"{rules.colluding} of {rules.members} sites; it must be against {least}, so the run "
            "needs a larger colluding"
        )


def _check_local(policy: Policy, run: Run, rules: SumRules) -> None:
    if (
        policy.local_epsilon
        and run.private
        and rules.honest > 0
        and (local := local_epsilon(run.settings.epsilon, run.mechanism, rules))
        > policy.local_epsilon
    ):
        raise PolicyError(
            f"local-epsilon = {policy.local_epsilon:g}: this site's own noise alone gives epsilon "
            f"{local:.4g} at delta {run.settings.delta:g} among {rules.members} sites; the run "
            "needs a smaller epsilon"
        )


def _check_together(
    policy: Policy, target: Target | None, exact: Sequence[str] | None, rules: SumRules
) -> None:
    """Differences of exact sums, such as of two labels, may be of fewer sites than the sum. All
    honest sites refuse the same list of them, so none is completed.
    """
    fewest = None if target is None or exact is None else target.fewest(exact)
    needed = max(LEAST_TOGETHER + rules.colluding, policy.smallest_sum)
    if fewest is not None and fewest[1] < needed:
        raise PolicyError(
            f"smallest-sum: exactly {fewest[0]!r} is annotated by {fewest[1]} of the sites in this "
            f"secure sum, and differences of its sums would show these; {needed} are needed"
        )


def _check_peers(policy: Policy, node: NodeConfig) -> None:
    if policy.require_secure_sum and not node.peers:
        raise PolicyError(
            "require-secure-sum = true, but the node-config names no peers: the coordinator could "
            "make up all other sites; set peers to a file with the lines that `site key` prints at "
            "the other sites"
        )


log = logging.getLogger("fedsurrogate.site")


def masked_sum(task: Task) -> MethodOutput:
    """This site's part of the sum.

    Nothing that leaves depends on its records, except through the sum of all sites. With the noise
    of DP-SGD already in it, no joint noise is added, and what is beyond the range is cut off.

    Args:
        task: the request, with the delivered shares.

    Raises:
        StateError, SealError: for a step out of order, or shares from another key list.
    """
    run, name = task.run, sum_name(task.info)
    combination = run.plan.combination
    state = read_state(run, task.node, name, task.site)
    state.at("shares")
    sites = len(state.members)
    rules = rules_of(run.settings, sites)
    delivered, packed = sum_proto.unpack_delivery(task.payload)
    if sum_proto.map_digest(packed) != state.public:
        raise SealError(
            "the model, projection or centre of this secure sum is not what all sites have agreed "
            "on"
        )
    made: SiteStatistic = load(combination.site_sums)(replace(task, payload=packed))
    values, claim = made.values, made.claim
    numbers = numbers_of(run.plan, run.settings, sites, task.round)
    fixed = same_sites.applies(run.plan.mechanism_name, task.node)
    settings = same_sites.settings_in(run, task.limits, state.public) if fixed else {}
    records = (
        same_sites.records_in(
            task.found, task.node.label_column, run.settings.counting, task.limits
        )
        if fixed and not run.private
        else {}
    )
    withheld = ""
    if claim is None:
        values = {**values, WITHHELD.name: torch.zeros(1)}
        withheld = _beyond(values, numbers) or same_sites.why_changed(task.node, settings, records)
    whole = {each: numbers[each].encode(value) for each, value in values.items()}
    facts: dict[str, float] = {
        "members": sites,
        "colluding": rules.colluding,
        "fewest-in-the-sum": rules.least,
    }
    # Without peers, the coordinator may have made up the other sites, and this site's own noise
    # alone protects it.
    facts["keys-pinned"] = float(bool(task.node.peers))
    spare, joint = b"", claim is not None and claim.name == JOINT_SUMS
    if joint:
        assert claim is not None
        facts["local-epsilon"] = local_epsilon(run.settings.epsilon, run.mechanism, rules)
        shapes = {each: tuple(value.shape) for each, value in values.items()}
        spare = os.urandom(SEED_BYTES)
        for each, drawn in noise_of_site(claim, numbers, shapes, rules, spare).items():
            whole[each] = whole[each] + drawn
    vector = np.concatenate([whole[each.name] for each in combination.sums_in(task.round)])
    if withheld:
        log.error("THIS SITE WITHHOLDS THE SECURE SUM, for all sites: %s", withheld)
        vector, records, facts = _random(len(vector)), {}, {**facts, WITHHELD.name: 1.0}
    after, masked = mask(state, delivered, rules, vector)
    guard: Callable[[], AbstractContextManager[object]] = nullcontext
    if fixed:
        guard = partial(
            same_sites.fixing,
            task.node,
            name,
            [after.by_name[site].public for site in after.shares],
            settings,
            records,
        )
    payload = sum_proto.pack_masked(task.header(run.settings.classes), masked, claim)
    keep = {
        **made.keep,
        state_file(task.node, name, task.site): sum_proto.pack_state(replace(after, spare=spare)),
    }
    return MethodOutput(payload, claim, facts, keep=keep, must_keep=True, guard=guard)


def _beyond(values: dict[str, Tensor], numbers: dict[str, FixedPoint]) -> str:
    """Which number is beyond its range; empty if none is."""
    for name, value in values.items():
        limit = numbers[name].step * numbers[name].largest
        if value.numel() and (not value.isfinite().all() or float(value.abs().max()) > limit):
            return (
                f"{name} of this site's records are beyond {limit:g}; the run needs a larger "
                "secure-sum-range or secure-sum-records, or, for columns of a table, wider "
                "features.ranges"
            )
    return ""


def _random(count: int) -> NDArray[np.int64]:
    """Uniformly random numbers (count,), of which the last is not zero."""
    drawn = np.frombuffer(os.urandom(BITS // 8 * count), "<u4").astype(np.int64)
    drawn[-1] = 1 + secrets.randbelow(2**BITS - 1)
    return drawn


NAME = re.compile(r"[0-9a-f]{32}")


def sum_name(info: Mapping[str, object]) -> str:
    """The name of the sum in a request. Raises SurrogateError."""
    name = str(info.get("sum", ""))
    if not NAME.fullmatch(name):
        raise SurrogateError(f"a request without the name of its secure sum ({name[:40]!r})")
    return name


def state_file(node: NodeConfig, name: str, site: str) -> Path:
    """The file with a sum's state."""
    return node.state / "sums" / f"{name}-{site}.pb"


def create_state(node: NodeConfig, policy: Policy, name: str, state: SumState) -> None:
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
        for old in file.parent.glob("*.pb"):
            if time.time() - old.stat().st_mtime > policy.most_seconds:
                old.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(sum_proto.pack_state(state))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        # A file in the place of the folder exists as well.
        if isinstance(error, FileExistsError) and file.exists():
            raise StateError(
                f"the secure sum {name!r} has begun at this site; it does not begin a second time"
            ) from None
        raise StateError(
            f"{file} cannot be written ({error}); see state-dir in the node-config"
        ) from None


def read_state(run: Run, node: NodeConfig, name: str, site: str) -> SumState:
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
        state = sum_proto.unpack_state(file.read_bytes())
    except OSError as error:
        raise StateError(
            f"this site has no state of the secure sum {name!r} ({type(error).__name__})"
        ) from None
    if state.context != context_of(run, name) or state.site != site:
        raise StateError(
            f"the secure sum {name!r} began with other settings than those of this request"
        )
    return state


def write_state(node: NodeConfig, name: str, state: SumState) -> None:
    """Replace a sum's state, flushed, before the step that it records leaves this site.

    Args:
        node: the site's settings.
        name: of the sum.
        state: to write.

    Raises:
        StateError: if it cannot be written.
    """
    try:
        replace_file(state_file(node, name, state.site), sum_proto.pack_state(state))
    except OSError as error:
        raise StateError(f"the state of a secure sum cannot be written ({error})") from None
