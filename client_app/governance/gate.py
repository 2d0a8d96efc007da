"""The gate that every release of a site passes: it checks requests and releases by the policy and
by people's approvals, lets only sealed replies leave where the policy asks for it (`require-seal`), and
charges the ledger.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from filelock import FileLock

from fedsurrogate.common.errors import ConfigError, PolicyError, told_as
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.privacy.accounting import GaussianEvent
from fedsurrogate.common.privacy.mechanism import EXACT_COUNTS, HIDE_CLASSES, VARY_IN_SIZE
from fedsurrogate.common.run import Run
from fedsurrogate.common.security.documents import SignedProposal, check_signed, read_setting
from fedsurrogate.common.security.registrations import parse_receipts
from fedsurrogate.common.security.sealing import read_keys
from fedsurrogate.common.settings import CountingSettings, DataKind
from fedsurrogate.common.wire.records import Info

from ..datasets.dataset import check_class_folders, check_run_classes
from ..datasets.partition import selection
from ..node_config import NodeConfig
from .budget import Charged, Release, check_budget, closed, runs_left, spent
from .ledger import Ledger, budget_of, own_ledger
from .policy import PUBLIC_KINDS, Policy, check_confirmed, policy_of
from .work_limits import SiteLimits, check_work

# By kind of request: values that a sealed run needs to begin. Requests of other kinds are refused.
IN_CLEAR: dict[str, tuple[str, ...]] = {
    "name": (),
    "identification": ("fingerprint", "dimension", "simulated", "key"),
    "surrogate": ("simulated",),
}
# Requests of a run that counts, and the further ones if it is secure aggregation.
COUNTING_REQUESTS = ("name", "surrogate")
SUMMED_COUNTING_REQUESTS = ("identification", "sum-shares", "sum-list", "sum-open")


def check_sealed_run(policy: Policy, sealed: bool, peers: str) -> None:
    """Refuse a run that `require-seal` excludes.

    Args:
        policy: of the site.
        sealed: whether the run encrypts replies for other sites.
        peers: the site's own file of public keys; empty for none.

    Raises:
        PolicyError: for such a run.
    """
    if not policy.require_seal:
        return
    if not sealed:
        raise PolicyError(
            "require-seal = true: the run requests an unencrypted reply (fedpft.seal = false)"
        )
    if not peers:
        raise PolicyError(
            "require-seal = true, but the node-config names no peers: the coordinator could send "
            "its own key as that of another site; set peers to a file with the lines that `site "
            "offline key` prints at the other sites"
        )


def check_sealed_request(policy: Policy, sealed: bool, peers: str, work: str) -> None:
    """Refuse a request whose reply is not encrypted. Called before the message's payload is read.

    Args:
        policy: of the site.
        sealed: whether the run encrypts replies for other sites.
        peers: the site's own file of public keys; empty for none.
        work: kind of request.

    Raises:
        PolicyError: for such a request.
    """
    check_sealed_run(policy, sealed, peers)
    if policy.require_seal and work not in IN_CLEAR:
        raise PolicyError(
            f"require-seal = true: the reply to a request for {work!r} would not be encrypted"
        )


def check_counting(counting: CountingSettings, summed: bool, work: str) -> None:
    """Raise PolicyError for a request that a run which only counts does not need."""
    needed = COUNTING_REQUESTS + (SUMMED_COUNTING_REQUESTS if summed else ())
    if counting.kind != "none" and work not in needed:
        raise PolicyError(
            f"counting.kind = {counting.kind!r}: such a run makes no request for {work!r}"
        )


def in_clear(policy: Policy, work: str, info: Info) -> Info:
    """The numbers in a reply that may leave unencrypted.

    Args:
        policy: of the site.
        work: kind of request.
        info: the numbers in the reply.
    """
    if not policy.require_seal:
        return info
    return {key: value for key, value in info.items() if key in IN_CLEAR[work]}


# In the state folder: what this site's officer has decided, by the digest of a run's settings.
DECISIONS, LOCK = "decisions.json", "decisions.lock"
LONGEST_NAME = 100


@dataclass(frozen=True)
class Decision:
    """What this site's officer has decided about a run.

    Attributes:
        answer: "approved" or "refused".
        officer: name of the person.
        proposal: id of the proposal that the person has read.
        time: ISO 8601.
        text: SHA-256 of that proposal, with its purpose; empty for any with its id.
        expires: its last day; empty for none.

    Raises:
        ValueError, TypeError: the last day is no date.
    """

    answer: Literal["approved", "refused"]
    officer: str
    proposal: str
    time: str
    text: str = ""
    expires: str = ""

    def __post_init__(self) -> None:
        if self.expires:
            date.fromisoformat(self.expires)

    def covers(self, signed: SignedProposal | None, today: date) -> bool:
        """Whether it is about a proposal, and in time. Who chooses an id can choose one twice.

        Args:
            signed: the proposal that came with the run; None where only its settings came.
            today: the day.
        """
        if self.expires and today > date.fromisoformat(self.expires):
            return False
        if signed is None:
            return True
        same_text = self.text in ("", signed.proposal.text_digest())
        return signed.proposal.id == self.proposal and same_text


def after(rounds: int) -> int:
    """Number in the ledger of what follows the last round: the evaluation.

    Args:
        rounds: of training that a run has; zero where its method has none, and one answer.

    Example:
        >>> [after(rounds) for rounds in (0, 1, 20)]
        [2, 2, 21]
    """
    return max(1, rounds) + 1


@dataclass(frozen=True)
class Allowed:
    """Who has allowed a run, for its entries in the ledger.

    Attributes:
        proposal: id of the proposal; empty without one.
        by: in words; empty if nobody was asked.
        rounds: of training that the settings plan; zero where the method has none, and one answer.
            Round 0 is what a site reports before.
    """

    proposal: str = ""
    by: str = ""
    rounds: int = 0

    def check_round(self, number: int) -> None:
        """Raise PolicyError for a round that nobody has proposed."""
        last = after(self.rounds)
        if self.proposal and not 0 <= number <= last:
            raise PolicyError(
                f"proposal {self.proposal[:8]} is for {last - 1} rounds, and this is round {number}"
            )


def who_allows(policy: Policy, folder: Path, state: Path, digest: str, approval: str) -> Allowed:
    """Who has allowed a run.

    Args:
        policy: of the site.
        folder: of the policy file, where its `approvers` are.
        state: the site's state folder, with the decisions of its officer.
        digest: of the run that is asked for, `full_digest`.
        approval: its setting of this name, the signed proposal; empty without one.

    Raises:
        PolicyError: too few have, or this site's officer has refused it.
        ConfigError: a file of the site cannot be read.
    """
    decision = decisions(state).get(digest)
    if decision is not None and decision.answer == "refused":
        raise PolicyError(
            f"{decision.officer}, an officer of this site, has refused this run on "
            f"{decision.time[:10]}"
        )
    signed = _proposal(approval)
    names = _signers(policy, folder, digest, signed) if policy.require_approval else []
    proposal = "" if signed is None else signed.proposal.id
    # An approval is of one proposal, not of all that have its settings.
    if decision is not None and decision.covers(signed, datetime.now(UTC).date()):
        names.append(f"here {decision.officer}")
        proposal = decision.proposal
    elif policy.require_officer:
        raise PolicyError(
            "require-officer = true: no officer of this site has approved this proposal, or its "
            "last day has passed (`site approve`)"
        )
    return Allowed(proposal if names else "", ", ".join(names))


def _signers(policy: Policy, folder: Path, digest: str, signed: SignedProposal | None) -> list[str]:
    fewest, known = policy.require_approval, read_keys(folder / policy.approvers)
    if signed is None:
        raise PolicyError(
            f"require-approval = {fewest}: the run has no signed proposal (`coordinator "
            "approval propose`)"
        )
    try:
        return check_signed(signed, digest, known, fewest, datetime.now(UTC).date())
    except ConfigError as error:
        raise PolicyError(f"require-approval = {fewest}: {error}") from None


def _proposal(approval: str) -> SignedProposal | None:
    """The proposal of a run; None without one. Raises PolicyError."""
    try:
        signed = read_setting(approval) if approval else None
    except ConfigError as error:
        raise PolicyError(str(error)) from None
    if signed is not None and signed.proposal.action != "run":
        raise PolicyError(f"approval: the proposal is to {signed.proposal.action} sites")
    return signed


def decisions(state: Path) -> dict[str, Decision]:
    """What this site's officer has decided, by the digest of a run's settings.

    Args:
        state: the site's state folder.

    Raises:
        ConfigError: the file is there and cannot be read; then no run is allowed.
    """
    file = state / DECISIONS
    try:
        return {key: Decision(**each) for key, each in json.loads(file.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} cannot be read ({type(error).__name__}), so it is not known what this site's "
            "officer has decided; restore it, or remove it and decide again with `site approve`"
        ) from None


def decide(state: Path, digest: str, decision: Decision) -> None:
    """Keep a decision; it replaces an earlier one about the same settings.

    Args:
        state: the site's state folder.
        digest: of the run's settings.
        decision: of the officer.

    Raises:
        ConfigError: the name is empty or too long, or the file cannot be read or written.
    """
    if not (decision.officer.strip().isprintable() and 0 < len(decision.officer) <= LONGEST_NAME):
        raise ConfigError(
            f"officer {decision.officer[:80]!r}: must be a name of 1 to {LONGEST_NAME} characters"
        )
    with told_as(ConfigError, f"{state / DECISIONS} cannot be written", "nothing is decided"):
        state.mkdir(parents=True, exist_ok=True)
        # Of two people who decide at once, neither loses what the other has decided.
        with FileLock(state / LOCK):
            known = decisions(state) | {digest: decision}
            content = {key: asdict(each) for key, each in known.items()}
            replace_file(state / DECISIONS, json.dumps(content, indent=2, sort_keys=True) + "\n")


PUBLIC = NodeConfig()
# A third is written with any number of digits.
SHARE_TOLERANCE = 1e-3


class Gate:
    """One site's policy for one folder of data. The texts of its errors go to the site's own log
    only.

    Attributes:
        policy: what the site allows.
        ledger: of the folder of data.

    Args:
        policy: see the attribute.
        ledger: see the attribute.
        node: the site's settings; of public data, whose runs nobody has to allow, the peers alone.
    """

    def __init__(self, policy: Policy, ledger: Ledger, node: NodeConfig = PUBLIC) -> None:
        self.policy = policy
        self.ledger = ledger
        self._node = node
        self._budget = budget_of(policy, bool(self._node.bag_column))
        # The settings that select the records of the runs that were checked, by their digest.
        self._selections: dict[str, Mapping[str, str]] = {}
        # Who has allowed the runs that were checked, by their digest.
        self._allowed: dict[str, Allowed] = {}

    def check_request(self, run: Run) -> None:
        """Raise PolicyError unless the policy allows this run, LedgerError unless the ledger can be
        charged.

        Called before any work. Raises DataError where the folder of a class is gone that the site's own
        settings name, or where the run writes classes otherwise.
        """
        check_confirmed(self._node, self.policy)
        self._check_policy(run)
        check_class_folders(self._node)
        check_run_classes(self._node, run.settings.classes)
        if not run.private:
            self._selections[run.full_digest] = selection(run, self._node)
        node = self._node
        if node.data not in PUBLIC_KINDS:
            folder = Path(node.policy).expanduser().parent if node.policy else node.state
            allowed = who_allows(
                self.policy, folder, node.state, run.full_digest, run.settings.approval
            )
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
        check_sealed_run(policy, run.settings.fedpft.seal, self._node.peers)
        if policy.require_secure_aggregation and not run.settings.secure_aggregation:
            raise PolicyError(
                "require-secure-aggregation = true: the run would show this site's part alone (secure-aggregation "
                "= false)"
            )
        least = policy.smallest_colluding - SHARE_TOLERANCE
        if run.settings.secure_aggregation and run.settings.colluding < least:
            raise PolicyError(
                f"smallest-colluding = {policy.smallest_colluding:.4g}: the run is safe only "
                f"against colluding = {run.settings.colluding:.4g} of the sites; it needs at least "
                "that share"
            )
        check_work(run.plan.work(len(run.settings.classes), 0), policy, run.settings)
        mechanisms = policy.mechanisms if run.settings.epsilon else ("*",)
        for key, allowed, asked in (
            ("methods", policy.methods, run.method.name),
            ("backbones", policy.backbones, run.settings.backbone),
            ("mechanisms", mechanisms, run.plan.mechanism_name),
        ):
            if not any(fnmatchcase(asked, pattern) for pattern in allowed):
                raise PolicyError(f"{key} = {', '.join(allowed)}: the run requests {asked!r}")
        if not run.settings.epsilon:
            if not (policy.without_dp or self.exact_counts(run)):
                raise PolicyError(
                    "without-dp = false: the run has no differential privacy (epsilon = 0)"
                )
            self._check_model_sums(run)
            if run.settings.secure_aggregation and run.target is not None:
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
                f"smallest-sum = {least}: {sites} sites annotate {name!r}, and the secure aggregation has "
                "no noise"
            )

    def _check_model_sums(self, run: Run) -> None:
        """What is computed at a model that the coordinator chooses is no anonymous sum: it can make
        the model so that one record decides the answer, or two answers that differ by one record.
        So it is with all that a run without noise sends after it has received something, in secure
        aggregation or not. A sealed chain message comes from another hospital, whose key is known.
        """
        allowed = self.policy.exact_sums_at_models or self.exact_counts(run)
        relayed = run.settings.fedpft.seal and self._node.peers
        if run.plan.messages.receives and not (allowed or relayed):
            raise PolicyError(
                "exact-sums-at-models = false: the run has no noise (epsilon = 0), and what this "
                "site sends is computed at what the coordinator sends, such as a model, which can "
                "be made to show single records; the run needs epsilon, or this site's policy "
                "exact-sums-at-models = true"
            )

    def smallest_class(self, mechanism: str) -> int:
        """Number of records that a class needs to be released; one where noise hides which classes
        exist.
        """
        return 1 if mechanism in HIDE_CLASSES else self.policy.smallest_class

    def limits(self, mechanism: str, node: NodeConfig) -> SiteLimits:
        """The limits that policy and node-config set to what a method computes."""
        policy = self.policy
        own = node.max_components, node.max_rank, self.smallest_class(mechanism)
        shown = policy.smallest_cell, policy.show_evaluation
        return SiteLimits(*own, policy.most_classes, *shown)

    def exact_counts(self, run: Run) -> bool:
        """Whether this run's counts may leave without noise although nothing else may."""
        counts = run.plan.counts and not run.settings.epsilon
        return counts and run.method.name in self.policy.exact_counts

    def exact_numbers_may_leave(self, hidden: bool) -> bool:
        """Whether numbers of this site alone, such as accuracies, may leave. hidden: in a private
        run or secure aggregation.
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
        if self._node.data in PUBLIC_KINDS:
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
        return seen.length if (seen := self.ledger.logged()) else 0

    def new_receipt(self, before: int) -> Info:
        """The receipt for a reply; empty unless the ledger has more entries than `before`, their
        number at the request.
        """
        seen = self.ledger.logged()
        if seen is None or seen.length <= before:
            return {}
        return {"receipt": str(seen.receipt(seen.length, seen.last))}

    def has_charged(self, flower_run: str) -> bool:
        """Whether a run has a release in the ledger. Raises LedgerError."""
        return any(entry.get("flower_run") == flower_run for entry in self.ledger.entries())

    def spent(self) -> float:
        """The part of epsilon-total that is spent. Raises LedgerError."""
        return spent(self.ledger.entries(), self._budget)

    def closed(self) -> str:
        """Why no release with noise is allowed any more; empty if there may be one. Raises
        LedgerError.
        """
        return closed(self.ledger.entries(), self._budget)

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
        ledger = Ledger(node.state / "public" / flower_run, name)
        return Gate(policy, ledger, NodeConfig(peers=node.peers))
    return Gate(policy, own, node)


def open_ledger(node: NodeConfig) -> Ledger:
    """Open the ledger of new data, as `site ledger open` does. Raises LedgerError where one was
    open before.
    """
    if (own := own_ledger(node)) is None:
        raise ConfigError(
            f"data = {node.data!r} is public; every run begins its own ledger, so none needs to be "
            "opened"
        )
    own.open()
    return own
