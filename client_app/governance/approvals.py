"""Who has allowed a run before it starts: people of the federation, by their signatures, and an
officer of this site.

The policy decides who is needed. An officer's refusal holds whatever the policy asks for. Both are
functions of settings and of this site's own files, so a refusal shows nothing of the data.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Literal

from filelock import FileLock

from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.common.errors import ConfigError, PolicyError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.security.proposals import SignedProposal, check_signed, read_setting
from fedsurrogate.common.security.sealing import read_keys

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


class Approvals:
    """The rules of a site about who allows a run.

    Args:
        policy: of the site.
        folder: of the policy file, where its `approvers` are.
        state: the site's state folder, with the decisions of its officer.
    """

    def __init__(self, policy: Policy, folder: Path, state: Path) -> None:
        self._policy, self._folder, self._state = policy, folder, state

    def check(self, digest: str, approval: str) -> Allowed:
        """Who has allowed a run.

        Args:
            digest: of the run that is asked for, `full_digest`.
            approval: its setting of this name, the signed proposal; empty without one.

        Raises:
            PolicyError: too few have, or this site's officer has refused it.
            ConfigError: a file of the site cannot be read.
        """
        decision = decisions(self._state).get(digest)
        if decision is not None and decision.answer == "refused":
            raise PolicyError(
                f"{decision.officer}, an officer of this site, has refused this run on "
                f"{decision.time[:10]}"
            )
        signed = _proposal(approval)
        names = self._signers(digest, signed) if self._policy.require_approval else []
        proposal = "" if signed is None else signed.proposal.id
        # An approval is of one proposal, not of all that have its settings.
        if decision is not None and decision.covers(signed, datetime.now(UTC).date()):
            names.append(f"here {decision.officer}")
            proposal = decision.proposal
        elif self._policy.require_officer:
            raise PolicyError(
                "require-officer = true: no officer of this site has approved this proposal, or its "
                "last day has passed (`site approve`)"
            )
        return Allowed(proposal if names else "", ", ".join(names))

    def _signers(self, digest: str, signed: SignedProposal | None) -> list[str]:
        fewest = self._policy.require_approval
        known = read_keys(self._folder / self._policy.approvers)
        if signed is None:
            raise PolicyError(
                f"require-approval = {fewest}: the run has no signed proposal (`coordinator "
                "propose`)"
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
    try:
        state.mkdir(parents=True, exist_ok=True)
        # Of two people who decide at once, neither loses what the other has decided.
        with FileLock(state / LOCK):
            known = decisions(state) | {digest: decision}
            content = {key: asdict(each) for key, each in known.items()}
            replace_file(state / DECISIONS, json.dumps(content, indent=2, sort_keys=True) + "\n")
    except OSError as error:
        raise ConfigError(f"{state / DECISIONS} cannot be written ({error.strerror})") from None
