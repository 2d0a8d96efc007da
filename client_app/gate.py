"""The gate: nothing leaves a site but through here. It holds the policy against what is asked, and keeps the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from client_app.budget import Budget, check_budget, runs_left, spent
from client_app.ledger import Ledger, Release, dataset_id
from client_app.policy import PUBLIC_KINDS, Policy, policy_of
from client_app.settings import NodeConfig
from client_app.work_limits import check_size, check_work
from common.accounting import GaussianEvent, gaussian_noise_multiplier
from common.config import RunConfig
from common.errors import PolicyError


class Gate:
    """One site's policy over one folder of data. The texts of its errors are for the site's own log."""

    def __init__(self, policy: Policy, ledger: Ledger) -> None:
        self.policy = policy
        self.ledger = ledger

    def check_request(self, run: RunConfig) -> None:
        """Raise PolicyError unless the policy allows such a run at all. Called before any work is done."""
        policy = self.policy
        check_work(run, policy)
        for key, allowed, asked in (
            ("methods", policy.methods, run.method),
            ("backbones", policy.backbones, run.backbone),
            ("mechanisms", policy.mechanisms if run.epsilon else ("*",), run.mechanism),
        ):
            if not any(fnmatchcase(asked, pattern) for pattern in allowed):
                raise PolicyError(f"{key} = {', '.join(allowed)}: the run asks for {asked!r}")
        if not run.epsilon:
            if not policy.without_dp:
                raise PolicyError("without-dp = false: the run asks for no differential privacy (epsilon = 0)")
            return
        if run.epsilon > policy.epsilon_per_run:
            raise PolicyError(f"epsilon-per-run = {policy.epsilon_per_run:g}: the run asks for epsilon = {run.epsilon:g}")
        if run.delta > policy.delta:
            raise PolicyError(f"delta = {policy.delta:g}: the run asks for delta = {run.delta:g}")

    def check_size(self, run: RunConfig, dimension: int, classes: int) -> None:
        """Raise PolicyError where features of this dimension take more memory than the policy allows."""
        check_size(run, self.policy, dimension, max(classes, len(run.classes)))

    def smallest_class(self, mechanism: str) -> int:
        """Records a class needs to be released; one where noise hides which classes there are."""
        return 1 if mechanism in ("sums", "dp-em", "dp-sgd") else self.policy.smallest_class

    def exact_numbers_may_leave(self, run: RunConfig) -> bool:
        """Whether counts of right answers may leave: not beside differential privacy, whose promise they would break."""
        return self.policy.without_dp and not run.epsilon

    def check(self, release: Release) -> float:
        """Epsilon spent with this release, without letting it out. Raises PolicyError or BudgetError."""
        policy = self.policy
        if release.bytes > policy.largest_payload_mib * 2**20:
            raise PolicyError(f"largest-payload-mib = {policy.largest_payload_mib:g}: the release has {release.bytes} bytes")
        if not release.events and not policy.without_dp:
            raise PolicyError("without-dp = false: the release has no differential privacy")
        return check_budget(self.ledger.entries(), release, self._budget())

    def let_out(self, release: Release) -> float:
        """Record a release in the ledger, flushed; only when this returns may it leave. Returns epsilon spent so far.

        Raises PolicyError, BudgetError or LedgerError, and then nothing may leave.
        """
        self.check(release)
        return self.ledger.charge(release, self._budget())

    def spent(self) -> float:
        """Epsilon of the total that has been used; everything is when it is epsilon-total. Raises LedgerError."""
        return spent(self.ledger.entries(), self._budget())

    def runs_left(self, plan: Sequence[GaussianEvent]) -> int:
        """How many more runs with these releases the total allows. Raises LedgerError."""
        return runs_left(self.ledger.entries(), plan, self._budget())

    def _budget(self) -> Budget:
        policy = self.policy
        return Budget(policy.epsilon_total, policy.delta, policy.epsilon_per_run, policy.without_dp, policy.delta_total)


def one_run(policy: Policy) -> tuple[GaussianEvent, ...]:
    """What the most expensive run of noisy sums releases that a policy allows."""
    return (GaussianEvent(gaussian_noise_multiplier(policy.epsilon_per_run, policy.delta)),)


def open_gate(node: NodeConfig, run: RunConfig, flower_run: str) -> Gate:
    """The gate of this site: its policy file, or the default; and the ledger of its data.

    A share of the run's own data and the bundled digits are public: without a policy file everything may leave, and every
    run begins with a ledger of its own. Raises PolicyError or ConfigError for a bad policy file.
    """
    policy = policy_of(node)
    if node.data in PUBLIC_KINDS:
        name = f"{node.data or run.data}-{node.partition_id}-of-{node.num_partitions}"
        return Gate(policy, Ledger(node.state / "public" / flower_run, name))
    return Gate(policy, Ledger(node.state / "ledgers", dataset_id(node.data, node.data_dir)))
