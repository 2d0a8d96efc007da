"""The steps of a secure sum at a site, apart from the masked vector, which is a release like any
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.methods.task import SiteRequest
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.client_app.offline.keys import private_key
from fedsurrogate.client_app.secure_sum import same_sites, store
from fedsurrogate.common.errors import PolicyError, SurrogateError
from fedsurrogate.common.run import Run
from fedsurrogate.common.secure_sum.member import (
    SumState,
    agree,
    begin,
    reveal,
    share,
    spare_seed,
)
from fedsurrogate.common.secure_sum.of_run import context_of, local_epsilon, rules_of
from fedsurrogate.common.secure_sum.rules import SumRules
from fedsurrogate.common.security.sealing import public_key, read_keys
from fedsurrogate.common.targets.target import LEAST_TOGETHER, Target
from fedsurrogate.common.wire.records import Info
from fedsurrogate.common.wire.sum_proto import (
    pack_dealt,
    pack_member,
    pack_revealed,
    unpack_list,
    unpack_members,
)


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
    store.create(step.node, policy, name, state)
    return pack_member(member).hex()


def sum_shares(step: SiteRequest, policy: Policy) -> tuple[bytes | None, Info]:
    """Check the key list; share this site's secrets among its members. Args and errors as
    `sum_keys`.
    """
    name, state = _state(step)
    members, public = unpack_members(step.payload or b"")
    rules = rules_of(step.run.settings, len(members))
    _check_colluding(policy, rules)
    _check_local(policy, step.run, rules)
    names = [member.site for member in members]
    _check_together(policy, step.run.target, None if step.run.private else names, rules)
    pinned = read_keys(Path(step.node.peers).expanduser()) if step.node.peers else None
    own = public_key(private_key(step.node, step.site))
    after, dealt = share(state, members, rules, own, policy.smallest_sum, pinned, public)
    store.write(step.node, name, after)
    return pack_dealt(dealt), {"pinned": pinned is not None}


def sum_list(step: SiteRequest, policy: Policy) -> tuple[bytes | None, Info]:
    """Sign the list of the sites in the sum. Args and errors as `sum_keys`."""
    name, state = _state(step)
    summed, _ = unpack_list(step.payload)
    rules = rules_of(step.run.settings, len(state.members))
    after, signature = agree(state, summed, rules, private_key(step.node, step.site))
    names = None if step.run.private else after.summed
    _check_together(policy, step.run.target, names, rules)
    if same_sites.applies(step.run.plan.mechanism_name, step.node):
        same_sites.check_summed(step.node, name, after.summed_keys)
    store.write(step.node, name, after)
    return signature, {}


def sum_open(step: SiteRequest, policy: Policy) -> tuple[bytes | None, Info]:
    """Reveal the shares that complete the sum. Args and errors as `sum_keys`."""
    name, state = _state(step)
    _, signatures = unpack_list(step.payload)
    after, revealed = reveal(state, signatures, rules_of(step.run.settings, len(state.members)))
    if same_sites.applies(step.run.plan.mechanism_name, step.node):
        same_sites.settle(step.node, name, after.summed_keys)
    store.write(step.node, name, after)
    return pack_revealed(revealed, spare_seed(state)), {}


def _name(step: SiteRequest) -> str:
    step.check_run()
    if not step.run.settings.secure_sum:
        raise SurrogateError("a step of a secure sum, but secure-sum = false")
    return store.name_of(step.info)


def _state(step: SiteRequest) -> tuple[str, SumState]:
    """The name of the sum in a request, and its state at this site."""
    name = _name(step)
    return name, store.read(step.run, step.node, name, step.site)


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
