"""The gate that every release of a site passes: it checks requests and releases by the policy and
charges the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from fedsurrogate.client_app.datasets.partition import selection
from fedsurrogate.client_app.governance.approvals import Allowed, Approvals
from fedsurrogate.client_app.governance.budget import check_budget, runs_left, spent
from fedsurrogate.client_app.governance.entries import Charged, Release
from fedsurrogate.client_app.governance.ledger import Ledger, budget_of, own_ledger
from fedsurrogate.client_app.governance.policy import Policy, policy_of
from fedsurrogate.client_app.governance.sealed_only import check_sealed_run
from fedsurrogate.client_app.governance.site_limits import SiteLimits
from fedsurrogate.client_app.governance.work_limits import check_size, check_work
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import ConfigError, PolicyError
from fedsurrogate.common.methods.method import Work
from fedsurrogate.common.privacy.accounting import GaussianEvent
from fedsurrogate.common.privacy.mechanism import EXACT_COUNTS, HIDE_CLASSES, VARY_IN_SIZE
from fedsurrogate.common.run import Run
from fedsurrogate.common.security.receipts import parse_receipts
from fedsurrogate.common.settings import DataKind
from fedsurrogate.common.wire.records import Info

# A third is written with any number of digits.
SHARE_TOLERANCE = 1e-3


class Gate:
    """One site's policy for one folder of data. The texts of its errors go to the site's own log
    only.

    Attributes:
        policy: what the site allows.
        ledger: of the folder of data.
    """

    def __init__(
        self,
        policy: Policy,
        ledger: Ledger,
        peers: str = "",
        approvals: Approvals | None = None,
        node: NodeConfig | None = None,
    ) -> None:
        self.policy = policy
        self.ledger = ledger
        self._peers = peers
        self._approvals = approvals
        self._node = NodeConfig() if node is None else node
        self._budget = budget_of(policy, bool(self._node.bag_column))
        # The settings that select the records of the runs that were checked, by their digest.
        self._selections: dict[str, Mapping[str, str]] = {}
        # Who has allowed the runs that were checked, by their digest.
        self._allowed: dict[str, Allowed] = {}

    def check_request(self, run: Run) -> None:
        """Raise PolicyError unless the policy allows this run, LedgerError unless the ledger can be
        charged.

        Called before any work.
        """
        self._check_policy(run)
        if not run.private:
            self._selections[run.full_digest] = selection(run, self._node)
        if self._approvals is not None:
            allowed = self._approvals.check(run.full_digest, run.settings.approval)
            if allowed.by and run.maps and not run.settings.features.digest:
                raise PolicyError(
                    "features.digest is empty, so people have not signed which public map the run "
                    "has; propose it with fedpft.public or features.projection"
                )
            self._allowed[run.full_digest] = replace(allowed, rounds=run.rounds)
        self.ledger.check()

    def check_planned(self, release: Release) -> None:
        """Raise BudgetError if the budget cannot pay for a private release, PolicyError if another
        run has used its proposal, or for an exact one that selects other records than an earlier
        one; called before its work.

        The check depends on settings and ledger, never on the data. The charge checks both once
        more.

        Args:
            release: its entry as far as settings fix it, see `release.planned`.
        """
        check_budget(self.ledger.entries(), self._of_site(release), self._budget)

    def _check_policy(self, run: Run) -> None:
        policy = self.policy
        check_sealed_run(policy, run.settings.fedpft.seal, self._peers)
        if policy.require_secure_sum and not run.settings.secure_sum:
            raise PolicyError(
                "require-secure-sum = true: the run would show this site's part alone (secure-sum "
                "= false)"
            )
        if (
            run.settings.secure_sum
            and run.settings.colluding < policy.smallest_colluding - SHARE_TOLERANCE
        ):
            raise PolicyError(
                f"smallest-colluding = {policy.smallest_colluding:.4g}: the run is safe only "
                f"against colluding = {run.settings.colluding:.4g} of the sites; it needs at least "
                "that share"
            )
        check_work(run.plan.work(len(run.settings.classes), 0), policy, run.settings)
        for key, allowed, asked in (
            ("methods", policy.methods, run.method.name),
            ("backbones", policy.backbones, run.settings.backbone),
            (
                "mechanisms",
                policy.mechanisms if run.settings.epsilon else ("*",),
                run.plan.mechanism_name,
            ),
        ):
            if not any(fnmatchcase(asked, pattern) for pattern in allowed):
                raise PolicyError(f"{key} = {', '.join(allowed)}: the run requests {asked!r}")
        if not run.settings.epsilon:
            if not (policy.without_dp or self.exact_counts(run)):
                raise PolicyError(
                    "without-dp = false: the run has no differential privacy (epsilon = 0)"
                )
            self._check_model_sums(run)
            if run.settings.secure_sum and run.target is not None:
                self._check_annotators(run.target.fewest())
            return
        if run.settings.epsilon > policy.epsilon_per_run:
            raise PolicyError(
                f"epsilon-per-run = {policy.epsilon_per_run:g}: the run requests epsilon = "
                f"{run.settings.epsilon:g}"
            )
        if run.settings.delta > policy.delta:
            raise PolicyError(
                f"delta = {policy.delta:g}: the run requests delta = {run.settings.delta:g}"
            )

    def _check_annotators(self, fewest: tuple[str, int] | None) -> None:
        """The exact sum of a label is over the sites that annotate it, as settings say."""
        least = self.policy.smallest_sum
        if fewest is not None and fewest[1] < least:
            name, sites = fewest
            raise PolicyError(
                f"smallest-sum = {least}: {sites} sites annotate {name!r}, and the secure sum has "
                "no noise"
            )

    def _check_model_sums(self, run: Run) -> None:
        """What is computed at a model that the coordinator chooses is no anonymous sum: it can make
        the model so that one record decides the answer, or two answers that differ by one record.
        So it is with all that a run without noise sends after it has received something, in a
        secure sum or not. A sealed relay comes from another hospital, whose key is known.
        """
        allowed = self.policy.exact_sums_at_models or self.exact_counts(run)
        relayed = run.settings.fedpft.seal and self._peers
        if run.plan.messages.receives and not (allowed or relayed):
            raise PolicyError(
                "exact-sums-at-models = false: the run has no noise (epsilon = 0), and what this "
                "site sends is computed at what the coordinator sends, such as a model, which can "
                "be made to show single records; the run needs epsilon, or this site's policy "
                "exact-sums-at-models = true"
            )

    def check_size(self, work: Callable[[int, int], Work], dimension: int, classes: int) -> None:
        """Refuse features of a dimension that takes more memory than the policy allows.

        Args:
            work: of a run, for numbers of classes and dimensions.
            dimension: of the features.
            classes: number of classes.

        Raises:
            PolicyError: if a limit is exceeded.
        """
        check_size(work(classes, dimension), self.policy, dimension, classes)

    def smallest_class(self, mechanism: str) -> int:
        """Number of records that a class needs to be released; one where noise hides which classes
        exist.
        """
        return 1 if mechanism in HIDE_CLASSES else self.policy.smallest_class

    def limits(self, mechanism: str, node: NodeConfig) -> SiteLimits:
        """The limits that policy and node-config set to what a method computes."""
        policy = self.policy
        smallest = self.smallest_class(mechanism)
        return SiteLimits(
            node.max_components,
            node.max_rank,
            smallest,
            policy.most_classes,
            policy.smallest_cell,
            policy.show_evaluation,
        )

    def exact_counts(self, run: Run) -> bool:
        """Whether this run's counts may leave without noise although nothing else may."""
        return (
            run.plan.counts
            and not run.settings.epsilon
            and run.method.name in self.policy.exact_counts
        )

    def exact_numbers_may_leave(self, hidden: bool) -> bool:
        """Whether numbers of this site alone, such as accuracies, may leave. hidden: in a private
        run or a secure sum.
        """
        return self.policy.without_dp and not hidden and not self.policy.require_seal

    def check(self, release: Release) -> float:
        """Epsilon spent if this release were charged; charges nothing. Raises PolicyError or
        BudgetError.
        """
        self._check_form(release)
        return check_budget(self.ledger.entries(), self._of_site(release), self._budget)

    def _check_form(self, release: Release) -> None:
        """Raise PolicyError for a release that is too large, not sealed or without noise."""
        self._check_size(release)
        if self.policy.require_seal and not release.sealed:
            raise PolicyError("require-seal = true: the release is not sealed")
        if not release.events and not self.policy.without_dp and release.mechanism != EXACT_COUNTS:
            raise PolicyError("without-dp = false: the release has no differential privacy")

    def let_out(self, release: Release) -> float:
        """Record a release in the ledger, flushed; it may leave only after this returns.

        Returns:
            Epsilon spent so far.

        Raises:
            PolicyError, BudgetError, LedgerError: and then nothing may leave.
        """
        release = self._of_site(release)
        if release.mechanism not in VARY_IN_SIZE:
            self._check_form(release)
            return self.ledger.charge(release, self._budget)
        # The size reveals how many components exceed the noise, or how many entries are not zero.
        # So it is charged before it decides anything.
        spent = self.ledger.charge(release, self._budget)
        self._check_size(release)
        return spent

    def _of_site(self, release: Release) -> Release:
        """The entry with what this site's settings say: its unit, and which records a release without
        noise is of; and with who has allowed its run. Raises PolicyError if no one has, or for
        another run.
        """
        if release.events:
            release = replace(release, unit=self.unit_of(release))
        else:
            release = replace(release, selection=self._selections.get(release.run, {}))
        if self._approvals is None:
            return release
        allowed = self._allowed.get(release.run, Allowed())
        needed = self.policy.require_approval or self.policy.require_officer
        if needed and release.run not in self._allowed:
            raise PolicyError(f"run {release.run[:16]} was not checked before its release")
        allowed.check_round(release.round)
        return replace(release, proposal=allowed.proposal, allowed_by=allowed.by)

    def unit_of(self, release: Release) -> Charged:
        """What a release with noise protects: its claim calls a bag a record of the run."""
        bag = release.unit == "record" and self._node.protects == "bag"
        return "bag" if bag else release.unit

    def _check_size(self, release: Release) -> None:
        policy = self.policy
        if release.bytes > policy.largest_payload_mib * 2**20:
            raise PolicyError(
                f"largest-payload-mib = {policy.largest_payload_mib:g}: the release has "
                f"{release.bytes} bytes"
            )

    def check_receipts(self, shown: object) -> int:
        """Compare the receipts in a request with the ledger.

        Called before any other step. The result depends on ledger and request, never on records.

        Args:
            shown: the receipts, as they came.

        Returns:
            The ledger's length; 0 for public data.

        Raises:
            SurrogateError: for receipts that cannot be read.
            LedgerError: for a ledger that is older than one of them.
        """
        receipts = parse_receipts(shown)
        if receipts:
            self.ledger.check(receipts)
        return seen.length if (seen := self.ledger.witnessed()) else 0

    def new_receipt(self, before: int) -> Info:
        """The receipt for a reply; empty unless the ledger has more entries than `before`, their
        number at the request.
        """
        seen = self.ledger.witnessed()
        if seen is None or seen.length <= before:
            return {}
        return {"receipt": str(seen.receipt(seen.length, seen.last))}

    def spent(self) -> float:
        """The part of epsilon-total that is spent. Raises LedgerError."""
        return spent(self.ledger.entries(), self._budget)

    def runs_left(self, plan: Sequence[GaussianEvent]) -> int:
        """Number of further runs with these releases that the total allows. Raises LedgerError."""
        return runs_left(self.ledger.entries(), plan, self._budget)


def open_gate(node: NodeConfig, data: DataKind, flower_run: str) -> Gate:
    """The gate of this site: its policy file, or the default; and the ledger of its data.

    The bundled digits and shares of the run's own data are public. Without a policy file everything
    may leave, and every run begins a new ledger.

    Args:
        node: the site's settings.
        data: kind of data of the run.
        flower_run: names the ledger of public data.

    Raises:
        PolicyError, ConfigError: for a bad policy file.
    """
    own, policy = own_ledger(node), policy_of(node)
    if own is None:
        name = f"{node.data or data}-{node.partition_id}-of-{node.num_partitions}"
        return Gate(policy, Ledger(node.state / "public" / flower_run, name), node.peers)
    folder = Path(node.policy).expanduser().parent if node.policy else node.state
    return Gate(policy, own, node.peers, Approvals(policy, folder, node.state), node)


def open_ledger(node: NodeConfig) -> Ledger:
    """Open the ledger of new data, as `site ledger --open` does. Raises LedgerError where one was
    open before.
    """
    if (own := own_ledger(node)) is None:
        raise ConfigError(
            f"data = {node.data!r} is public; every run begins its own ledger, so none needs to be "
            "opened"
        )
    own.open()
    return own
