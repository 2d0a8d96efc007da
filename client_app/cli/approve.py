"""The `site approve`, `enrol`, `settings`, `policy` and `ledger forget` commands: what a person at a
site decides or looks up.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedsurrogate.common.command_line import Json, console

from .options import (
    LISTS_ALL,
    ConfirmPolicy,
    MaybeNode,
    Node,
    complete_node_keys,
    node_of,
    print_json,
)


def approve(
    file: Path,
    officer: Annotated[str, typer.Option()],
    node_config: Node,
    refuse: Annotated[bool, typer.Option("--refuse")] = False,
) -> None:
    """Approve or refuse a run for this site, before it starts.

    Nothing leaves. A refusal always holds. An approval is needed where the policy says require-officer = true, and
    stands in the ledger with each release of the run. A later decision replaces an earlier one.

    Args:
        file: The coordinator's file of `coordinator approval propose`.
        officer: Your name; the ledger will have it.
        refuse: Refuse this run: this site will not answer it.
    """
    from datetime import UTC, datetime

    from fedsurrogate.common.errors import ConfigError
    from fedsurrogate.common.escapes import for_rows, for_terminal
    from fedsurrogate.common.privacy.accounting import budget_warnings
    from fedsurrogate.common.security.documents import read_proposal

    from ..governance.gate import Decision, decide

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
        f"{proposal.expires}\n{for_rows('purpose   ', proposal.purpose, console.width)}"
    )
    # How many records there are is known where they are: `site check` and `site.log` say it.
    for warning in budget_warnings(own.epsilon, own.delta):
        console.print(f"warning: {warning}")


def enrol(
    name: Annotated[str, typer.Argument(metavar="SITE")],
    hospital: Annotated[str, typer.Option(prompt="The hospital's name")],
    contact: Annotated[str, typer.Option(prompt="An e-mail address for the coordinator")],
    out: Path | None = None,
) -> None:
    """Make this site's key, and a request for the coordinator.

    The key stays here; the request holds no secret. A key that is there is kept: the command also
    renews a site whose certificate ends. The coordinator compares the fingerprint with you, such as by
    telephone, and sends back a kit.

    Example: site enrol north --hospital 'St. Mary' --contact it@mary.example

    Asks for what is not given.

    Args:
        name: This site's name in the federation.
        hospital: The hospital's name, in words.
        contact: An e-mail address, for the coordinator.
        out: The site's folder, into which its kit is unpacked; default: ./SITE.
    """
    from fedsurrogate.common.errors import ConfigError, told_as
    from fedsurrogate.common.files import replace_file
    from fedsurrogate.common.security import enrolment
    from fedsurrogate.common.security.documents import in_groups

    enrolment.check_site_name(name)
    folder = out or Path(name)
    credentials, request = folder / "certificates", folder / f"{name}.csr"
    with told_as(ConfigError, f"{folder} cannot be written", "give another with --out"):
        enrolment.new_node_key(credentials, name)
        key = enrolment.read_node_key(credentials / enrolment.KEY)
        content = enrolment.new_request(name, hospital, contact, key)
        replace_file(request, content, mode=enrolment.READABLE)
    lines = {
        credentials / enrolment.KEY: "stays here; make a copy of it, and show it to no one",
        credentials / enrolment.PUBLIC: "its public half",
        request: "for the coordinator; it holds no secret",
    }
    for file, words in lines.items():
        console.print(f"  {file}: {words}")
    console.print(
        f"fingerprint  {in_groups(enrolment.read_request(content).fingerprint())}\n"
        "read it out when the coordinator calls; then unpack the kit next to this folder:\n"
        f"  tar xzf {name}.tar.gz           the first time; then: site join {shlex.quote(str(folder))}\n"
        f"  tar xzf {name}.tar.gz {name}/certificates    to renew: settings and policy stay as they are"
    )


def settings(
    key: Annotated[str, typer.Argument(metavar="[KEY]", autocompletion=complete_node_keys)] = "",
    as_json: Json = False,
) -> None:
    """Explain the settings of a site, its node-config.

    Shows meaning, default, range and unit.

    Example: site settings data-dir

    Args:
        key: A setting, such as data-dir.
    """
    from dataclasses import asdict

    from fedsurrogate.common.help import model_descriptions, setting_tables

    from ..node_config import NodeConfig

    rows = model_descriptions(NodeConfig, key, LISTS_ALL)
    if as_json:
        shown = [{k: v for k, v in asdict(row).items() if k != "methods"} for row in rows]
        print_json(shown)
        return
    for table in setting_tables(rows, key):
        console.print(table)


def policy(
    file: Annotated[Path | None, typer.Argument()] = None,
    node_config: MaybeNode = None,
    yes: ConfirmPolicy = False,
    as_json: Json = False,
) -> None:
    """Check a policy file, or the default policy, and show its limits.

    Of the node-config's policy it asks for what that allows beyond the one in force: until a person has
    confirmed it, every run is refused. Exits with 1 if the file is wrong, or nobody can be asked.

    Args:
        file: A policy file; without one, that of the node-config.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table
    from rich.text import Text

    from fedsurrogate.common.help import meanings

    from ..governance.policy import DEFAULT, Policy, load_policy, shown
    from ..governance.work_limits import WorkLimits
    from .join import confirm_looser

    node = node_of(node_config) if file is None and node_config else None
    if node is not None and node.policy:
        file = Path(node.policy)
    found = load_policy(str(file)) if file else DEFAULT
    if as_json:
        print_json(found.model_dump(by_alias=True))
        if node is not None:
            confirm_looser(node, yes)
        return
    narrow = Column("value", overflow="fold", max_width=max(14, console.width // 5))
    table = Table(Column("key", no_wrap=True), narrow, "meaning", box=SIMPLE_HEAD)
    for name in (*Policy.__annotations__, *WorkLimits.model_fields):
        value, default = getattr(found, name), getattr(DEFAULT, name)
        own, other = ("", "") if value == default else ("bold", f"; default: {shown(default)}")
        meaning = f"{meanings(Policy)[name]}{other}"
        table.add_row(name.replace("_", "-"), Text(shown(value), style=own), meaning)
    console.print(table)
    if found.irrevocable:
        console.print(f"cannot be taken back: {found.irrevocable}", style="yellow")
    if file:
        console.print(f"{file} is fine", style="green")
    else:
        console.print("these values hold at a site without a policy file")
    if node is not None:
        confirm_looser(node, yes)


def forget(
    node_config: Node,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            prompt="Several exact sums with different sites may together show this hospital's own "
            "part, and exact runs over different records single ones. Forget",
        ),
    ],
) -> None:
    """Forget which sites and records were in sums without noise.

    The site keeps two facts: the sites of its secure aggregation without distributed noise, and the records
    that its runs without noise have selected.

    The next such sum may be with other sites, or over changed data, and the next run without noise may
    select other records. The old record is kept under another name; the ledger notes the decision.

    Args:
        yes: Accept that further sums and runs without noise, together with earlier ones, may show
            this hospital's own part, or single records.
    """
    from ..secure_aggregation import forget as forget_sums

    if not yes:
        raise typer.Abort
    kept = forget_sums(node_of(node_config))
    console.print(f"forgotten; the record is kept in {kept}" if kept else "nothing to forget")
