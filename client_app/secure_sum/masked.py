"""The release of a site in a secure sum: its statistics as whole numbers, with its share of the
noise, masked.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
from torch import Tensor

from client_app.methods.task import MethodOutput, SiteSums, Task
from client_app.secure_sum import same_sites, store
from common.errors import DataError, SealError
from common.methods.method import load
from common.privacy.mechanism import JOINT_SUMS
from common.secure_sum.fixed_point import FixedPoint
from common.secure_sum.member import mask
from common.secure_sum.noise import noise_of_site
from common.secure_sum.of_run import local_epsilon, numbers_of, rules_of
from common.security.sealing import SEED_BYTES
from common.wire.sum_proto import map_digest, pack_masked, pack_state, unpack_delivery


def masked_sum(task: Task) -> MethodOutput:
    """This site's part of the sum.

    Nothing that leaves depends on its records, except through the sum of all sites. With the noise
    of DP-SGD already in it, no joint noise is added, and what is beyond the range is cut off.

    Args:
        task: the request, with the delivered shares.

    Raises:
        StateError, SealError: for a step out of order, or shares from another key list.
        DataError: without privacy, for records beyond the settings' bounds.
    """
    run, name = task.run, store.name_of(task.info)
    combination = run.plan.combination
    state = store.read(run, task.node, name, task.site)
    sites = len(state.members)
    rules = rules_of(run.settings, sites)
    delivered, packed = unpack_delivery(task.payload)
    if map_digest(packed) != state.public:
        raise SealError(
            "the model, projection or centre of this secure sum is not what all sites have agreed "
            "on"
        )
    values, claim, kept = SiteSums(*load(combination.site_sums)(replace(task, payload=packed)))
    numbers = numbers_of(run, max(1, sites), task.round)
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
    if claim is None:
        _check_range(values, numbers)
    elif joint:
        facts["local-epsilon"] = local_epsilon(run, rules)
        shapes = {each: tuple(value.shape) for each, value in values.items()}
        spare = os.urandom(SEED_BYTES)
        for each, drawn in noise_of_site(claim, numbers, shapes, rules, spare).items():
            whole[each] = whole[each] + drawn
    vector = np.concatenate([whole[each.name] for each in combination.sums_in(task.round)])
    after, masked = mask(state, delivered, rules, vector)
    guard: Callable[[], AbstractContextManager[object]] = nullcontext
    if same_sites.applies(run.plan.mechanism_name, task.node):
        records = same_sites.records_in(task.found, task.node, run, task.limits)
        guard = partial(
            same_sites.fixing,
            task.node,
            name,
            [after.by_name[site].public for site in after.shares],
            records,
        )
    payload = pack_masked(task.header(run.settings.classes), masked, claim)
    keep = {
        **kept,
        store.file_of(task.node, name, task.site): pack_state(replace(after, spare=spare)),
    }
    return MethodOutput(payload, claim, facts, keep=keep, must_keep=True, guard=guard)


def _check_range(values: dict[str, Tensor], numbers: dict[str, FixedPoint]) -> None:
    for name, value in values.items():
        limit = numbers[name].step * numbers[name].largest
        if value.numel() and (not value.isfinite().all() or float(value.abs().max()) > limit):
            raise DataError(
                f"{name} of this site's records are beyond {limit:g}; the run needs a larger "
                "secure-sum-range or secure-sum-records"
            )
