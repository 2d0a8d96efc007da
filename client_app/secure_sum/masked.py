"""The release of a site in a secure sum: its statistics as whole numbers, with its share of the
noise, masked.

A site may find that its records must not be in an exact sum: they have changed since an earlier
one, or a number is beyond the range. A refusal would show this of one site. So it takes part, and
withholds the sum: it adds uniformly random numbers, with which the sum is uniformly random itself,
whatever the coordinator does. The sum's last number is zero unless some site has done so.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsurrogate.client_app.methods.task import MethodOutput, SiteStatistic, Task
from fedsurrogate.client_app.secure_sum import same_sites, store
from fedsurrogate.common.errors import SealError
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.methods.secure_sum import WITHHELD
from fedsurrogate.common.privacy.mechanism import JOINT_SUMS
from fedsurrogate.common.secure_sum.fixed_point import BITS, FixedPoint
from fedsurrogate.common.secure_sum.member import mask
from fedsurrogate.common.secure_sum.noise import noise_of_site
from fedsurrogate.common.secure_sum.of_run import local_epsilon, numbers_of, rules_of
from fedsurrogate.common.security.sealing import SEED_BYTES
from fedsurrogate.common.wire.sum_proto import map_digest, pack_masked, pack_state, unpack_delivery

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
    run, name = task.run, store.name_of(task.info)
    combination = run.plan.combination
    state = store.read(run, task.node, name, task.site)
    state.at("shares")
    sites = len(state.members)
    rules = rules_of(run.settings, sites)
    delivered, packed = unpack_delivery(task.payload)
    if map_digest(packed) != state.public:
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
    payload = pack_masked(task.header(run.settings.classes), masked, claim)
    keep = {
        **made.keep,
        store.file_of(task.node, name, task.site): pack_state(replace(after, spare=spare)),
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
