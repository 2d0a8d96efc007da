"""The commands `coordinator approval propose`, `approve` and `key`: what is to be done is written down,
and other people sign it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click
import typer

from fedsurrogate.common.command_line import console
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.escapes import for_rows
from fedsurrogate.common.files import READABLE, kept_secret, replace_file

from .options import RunSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedsurrogate.common.security.documents import Action, Proposal
    from fedsurrogate.common.settings.base import Scalar

ProposalFile = Annotated[
    Path | None,
    typer.Option(
        "--proposal", metavar="FILE", help="A proposal that enough people have signed, if needed."
    ),
]
ProposeFile = Annotated[
    Path | None,
    typer.Option(
        "--propose",
        metavar="FILE",
        help="Ask the sites nothing: write down what would be asked, for people who allow it.",
    ),
]
Purpose = Annotated[str, typer.Option(help="With --propose: what it is for, in words.")]
# Options that a proposal decides.
BUDGET = ("epsilon", "delta", "secure_aggregation")


def propose(
    out: Annotated[Path, typer.Argument(metavar="FILE")],
    purpose: Annotated[str, typer.Option()],
    run_config: RunSettings = None,
    what: Literal["run", "register", "unregister"] = "run",
    folder: Path | None = None,
    site: str = "",
    days: Annotated[int, typer.Option(min=1, max=3650)] = 30,
) -> None:
    """Write down what is to be done, for people who allow it: a run with its settings, or keys.

    Example: coordinator approval propose spring.json --purpose 'pneumonia, spring' -c 'epsilon=1.0 ...'

    Args:
        out: The file to write.
        purpose: What it is for, in words.
        what: A run, or keys of sites to let in or to revoke.
        folder: For keys: the folder that `coordinator sites certs` has made.
        site: For unregister: the site.
        days: Days within which it may be started.
    """
    from ..runs.presets import typed_settings

    if what == "run":
        given = typed_settings(run_config)
        content: Mapping[str, Scalar] = {k: v for k, v in given.items() if k != "approval"}
    else:
        content = keys_of(folder, site if what == "unregister" else None)
        if not content:
            raise ConfigError(f"all keys in {folder} are registered already")
    write_proposal(out, what, content, purpose, days)


def write_proposal(
    out: Path, action: Action, content: Mapping[str, Scalar], purpose: str, days: int = 30
) -> None:
    """Write a proposal, and print it.

    Args:
        out: the file.
        action: what is proposed.
        content: its settings, flat, or keys.
        purpose: in words.
        days: within which it may be started.

    Raises:
        ConfigError: settings that do not agree, or a file that cannot be written.
    """
    from fedsurrogate.common.security.documents import Proposal, SignedProposal

    from ..lifecycle.before_start import own_folders, with_map_digest

    if action == "run":
        # Another process starts it later, perhaps in another folder.
        own = own_folders("", str(content.get("resume", "")))
        content = with_map_digest({**content, **own}, chosen=True)
    proposal = Proposal.fresh(action, content, purpose, days)
    # Before it is signed: settings that do not agree are refused here.
    proposal.digest()
    try:
        replace_file(out, SignedProposal(proposal).text() + "\n", mode=READABLE)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror})") from None
    show_proposal(proposal)
    console.print(
        f"{out}: send it to the people who decide; `coordinator approval approve` signs it"
    )


def settings_of(proposal: Path | None, given: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The settings that a proposal names, with itself as `approval`, and others that are given."""
    from fedsurrogate.common.security.documents import read_proposal

    if proposal is None:
        return dict(given)
    signed = read_proposal(proposal)
    return {**signed.proposal.content, **given, "approval": signed.setting()}


def as_proposed(settings: Mapping[str, Scalar], proposal: Path | None) -> dict[str, Scalar]:
    """What a command that counts asks for: with a proposal its settings, of the same thing.

    Args:
        settings: that the command has computed.
        proposal: a file of `--propose`; None without one.

    Raises:
        ConfigError: the proposal is of something else, or a budget is given as well.
    """
    if proposal is None:
        return dict(settings)
    proposed = settings_of(proposal, {})
    for key in ("counting.kind", "counting.digest", "counting.images"):
        if proposed.get(key) != settings.get(key):
            raise ConfigError(
                f"{proposal} proposes {key} = {proposed.get(key)!r}, and this command asks for "
                f"{settings.get(key)!r}; make a proposal for it with --propose"
            )
    source = click.get_current_context().get_parameter_source
    for name in BUDGET:
        if source(name) is click.core.ParameterSource.COMMANDLINE:
            raise ConfigError(
                f"--{name.replace('_', '-')}: {proposal} has the budget that people have signed; "
                "leave the option out"
            )
    return proposed


def check_run_signed(settings: Mapping[str, Scalar], authority: Path | None) -> None:
    """Raise ConfigError if the federation asks for signatures that a run has not.

    Args:
        settings: of the run, flat.
        authority: the certificate, in the folder of `coordinator sites certs`; None without TLS.
    """
    from fedsurrogate.common.security.documents import Proposal

    from ..deployment.audit_log import check_run_allowed
    from ..deployment.supernodes import table_file

    if authority is not None:
        digest = Proposal.fresh("run", settings, "this command", 1).digest()
        rules = table_file(authority.parent).parent
        check_run_allowed(rules, digest, str(settings.get("approval", "")))


def keys_of(folder: Path | None, site: str | None) -> dict[str, Scalar]:
    """Fingerprints of keys by site, as a proposal about them has them.

    Args:
        folder: of `coordinator sites certs`.
        site: one site, to revoke its key; None for all keys that are not registered yet.

    Raises:
        ConfigError: no folder is given, or it has no such key.
    """
    from ..deployment.certificates import site_fingerprints
    from ..deployment.supernodes import not_registered

    if folder is None:
        raise ConfigError("name the folder of the keys with --folder")
    if site is None:
        return dict(not_registered(folder))
    keys = site_fingerprints(folder)
    if site not in keys:
        raise ConfigError(f"{folder} has no key of site {site[:80]!r}")
    return {site: keys[site]}


def show_proposal(proposal: Proposal) -> None:
    """Print what a proposal is about."""
    rows = {
        "proposal": f"{proposal.id}, to {proposal.action}, until {proposal.expires}",
        "purpose": proposal.purpose,
        "digest": proposal.digest(),
    }
    if proposal.action == "run":
        own = proposal.run().settings
        rows["privacy"] = (
            f"epsilon {own.epsilon:g}, delta {own.delta:g}" if own.epsilon else "NONE: epsilon = 0"
        )
    for name, text in rows.items():
        console.print(for_rows(f"{name:<10}", text, console.width), markup=False)
    for key, value in sorted(proposal.content.items()):
        row = for_rows(" " * 10, f"{key} = {value}", console.width)
        console.print(row, markup=False)


def approve(
    file: Path,
    key: Annotated[Path, typer.Option()],
    yes: Annotated[bool, typer.Option("--yes")] = False,
) -> None:
    """Show a proposal, and sign it with your key: you allow it.

    What you sign is what is shown: a run with other settings that change its releases needs another
    proposal.

    Args:
        file: A file of `coordinator approval propose`.
        key: Your key, of `coordinator approval key`.
        yes: Sign without asking.
    """
    from fedsurrogate.common.security.documents import read_approver_key, read_proposal

    signed = read_proposal(file)
    show_proposal(signed.proposal)
    private = read_approver_key(key)
    if not (yes or typer.confirm("Allow this?")):
        raise typer.Exit(1)
    # Others may have signed while this person read, or changed what was read.
    now = read_proposal(file)
    if now.proposal != signed.proposal:
        raise ConfigError(f"{file} was changed while you read it; read it again")
    signed = now.sign(private)
    replace_file(file, signed.text() + "\n", mode=READABLE)
    console.print(f"signed; {file} has {len(signed.signatures)} signatures")


def approver(
    file: Path,
    name: Annotated[str, typer.Option()],
) -> None:
    """Make a key with which you allow runs, and print the line that others need to know it.

    The line goes into approvers.toml of the federation and of hospitals that ask for signatures.

    Args:
        file: The file of the private key, made if missing.
        name: Your name, as others see it.
    """
    from fedsurrogate.common.security.sealing import SEED_BYTES, public_key

    try:
        private = kept_secret(file, SEED_BYTES)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror})") from None
    if len(private) != SEED_BYTES:
        raise ConfigError(f"{file} is there, and is no key of `coordinator approval key`")
    print(f"{json.dumps(name, ensure_ascii=False)} = {json.dumps(public_key(private).hex())}")
