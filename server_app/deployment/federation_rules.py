"""Rules of a federation that bind its own coordinator: how many people must have signed what it
does.

`federation.toml` lies next to the table of registered sites, with `approvals = 1`, and next to it
`approvers.toml` with the public keys of those people. Whoever may change these files can change the
rule; what a coordinator cannot change is the policy of a hospital, which can ask for the same
signatures (`require-approval`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.security.proposals import (
    Action,
    SignedProposal,
    check_signed,
    read_setting,
)
from fedsurrogate.common.security.sealing import read_keys

RULES, APPROVERS = "federation.toml", "approvers.toml"
MOST = 20


def approvals_needed(folder: Path) -> int:
    """How many people must have signed a run, or a change of who is in.

    Args:
        folder: of the rules.

    Returns:
        Zero without rules.

    Raises:
        ConfigError: the file is there and cannot be read.
    """
    file = folder / RULES
    if not file.exists():
        return 0
    try:
        rules = tomllib.loads(file.read_text("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({type(error).__name__})") from None
    number = rules.get("approvals")
    # A truth value is a whole number for Python.
    if set(rules) != {"approvals"} or type(number) is not int or not 0 <= number <= MOST:
        raise ConfigError(
            f"{file}: must be the line approvals = N, with 0 to {MOST} people whose signature is "
            "needed"
        )
    return int(number)


def check_allowed(
    folder: Path, action: Action, digest: str, signed: SignedProposal | None
) -> list[str]:
    """Who has allowed an action of the coordinator.

    Args:
        folder: of the rules.
        action: what it is about to do.
        digest: of that, as `Proposal.digest` computes it.
        signed: the proposal; None without one.

    Returns:
        Their names; none where the federation asks for none and no proposal is given.

    Raises:
        ConfigError: too few have.
    """
    needed = approvals_needed(folder)
    if signed is None:
        if needed:
            raise ConfigError(
                f"{folder / RULES}: approvals = {needed}, so this needs a proposal that {needed} of "
                f"the people in {APPROVERS} have signed: `coordinator propose`, `coordinator "
                "approve`, then the same command with --proposal FILE"
            )
        return []
    if signed.proposal.action != action:
        raise ConfigError(f"the proposal is to {signed.proposal.action}, not to {action}")
    file = folder / APPROVERS
    known: Mapping[str, bytes] = read_keys(file) if needed or file.exists() else {}
    return check_signed(signed, digest, known, needed, datetime.now(UTC).date())


def check_run_allowed(folder: Path, digest: str, approval: str) -> list[str]:
    """Who has allowed a run.

    Args:
        folder: of the rules.
        digest: of the run, `full_digest`.
        approval: its setting of this name; empty without a proposal.

    Returns:
        As `check_allowed`.

    Raises:
        ConfigError: too few have.
    """
    return check_allowed(folder, "run", digest, read_setting(approval) if approval else None)
