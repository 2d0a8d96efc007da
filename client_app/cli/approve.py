"""The `site approve` command: an officer of this site decides about a run before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedsurrogate.client_app.cli.options import Node, node_of
from fedsurrogate.common.command_line import console


def approve(
    file: Annotated[Path, typer.Argument(help="The coordinator's file of `coordinator propose`.")],
    officer: Annotated[str, typer.Option(help="Your name; the ledger will have it.")],
    node_config: Node,
    refuse: Annotated[
        bool, typer.Option("--refuse", help="Refuse this run: this site will not answer it.")
    ] = False,
) -> None:
    """Approve or refuse a run for this site, before it starts. Nothing leaves.

    A refusal always holds. An approval is needed where the policy says require-officer = true, and
    stands in the ledger with each release of the run. A later decision replaces an earlier one.
    """
    from datetime import UTC, datetime

    from fedsurrogate.client_app.governance.approvals import Decision, decide
    from fedsurrogate.common.errors import ConfigError
    from fedsurrogate.common.escapes import for_terminal, in_one_row
    from fedsurrogate.common.privacy.budget_remarks import budget_remarks
    from fedsurrogate.common.security.proposals import read_proposal

    node = node_of(node_config)
    proposal = read_proposal(file).proposal
    if proposal.action != "run":
        raise ConfigError(f"{file} is a proposal to {proposal.action} sites, not of a run")
    run = proposal.run()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    answer: Literal["refused", "approved"] = "refused" if refuse else "approved"
    text, expires = proposal.text_digest(), proposal.expires
    decision = Decision(answer, officer, proposal.id, now, text, expires)
    decide(node.state, proposal.digest(), decision)
    own = run.settings
    privacy = f"epsilon {own.epsilon:g}, delta {own.delta:g}" if own.epsilon else "no privacy"
    console.print(
        f"{decision.answer} by {for_terminal(officer)}: {own.method}, {privacy}, until "
        f"{proposal.expires}, purpose: {in_one_row(proposal.purpose)}",
        soft_wrap=True,
        markup=False,
    )
    # How many records there are is known where they are: `site dry-run` and `site.log` say it.
    for odd in budget_remarks(own.epsilon, own.delta):
        console.print(f"warning: {odd}", soft_wrap=True)
