"""The ledger of a site's own data, and the budget that its policy gives to them. Imports no torch."""

from __future__ import annotations

from fedsurrogate.client_app.governance.budget import Budget
from fedsurrogate.client_app.governance.ledger import Ledger, dataset_id
from fedsurrogate.client_app.governance.policy import PUBLIC_KINDS, Policy
from fedsurrogate.client_app.governance.witness import Witness
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.privacy.accounting import GaussianEvent, gaussian_noise_multiplier


def own_ledger(node: NodeConfig) -> Ledger | None:
    """The ledger of a site's own data, which has a witness and is opened once; None for public
    data.
    """
    if node.data in PUBLIC_KINDS:
        return None
    dataset = dataset_id(node.data, node.data_dir)
    return Ledger(node.state / "ledgers", dataset, Witness(node.witness, dataset, node.state))


def budget_of(policy: Policy, bags: bool = False) -> Budget:
    """The limits of a policy on one folder of data; bags: see `Budget`."""
    return Budget(
        policy.epsilon_total,
        policy.delta,
        policy.epsilon_per_run,
        policy.without_dp,
        policy.delta_total,
        policy.exact_runs_may_differ,
        bags,
    )


def one_run(policy: Policy) -> tuple[GaussianEvent, ...]:
    """The release of the most expensive run of noisy sums that a policy allows."""
    return (GaussianEvent(gaussian_noise_multiplier(policy.epsilon_per_run, policy.delta)),)
