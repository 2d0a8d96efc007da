"""The `site join` command, the only one that a hospital needs to take part."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsurrogate.common.command_line import console
from fedsurrogate.common.errors import ConfigError

from .first_join import installed, prepare
from .options import KitFolder, MaybeNode, node_of, one_text

if TYPE_CHECKING:
    from ..diagnostics.findings import Link
    from ..node_config import NodeConfig

FILES = ("policy", "peers")


def join(
    kit: KitFolder = None,
    node_config: MaybeNode = None,
    superlink: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The coordinator's Fleet API.")
    ] = "",
    root_certificates: Annotated[
        Path | None, typer.Option(help="ca.crt of the site kit, to authenticate the coordinator.")
    ] = None,
    auth_supernode_private_key: Annotated[
        Path | None, typer.Option(help="site.key of the site kit, to authenticate this site.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS: only if all runs on one machine.")
    ] = False,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            help="Ask nothing: confirm the policy and the classes that the data have, and open the ledger of "
            "new data.",
        ),
    ] = False,
    install: Annotated[
        bool, typer.Option("--install", help="Write a service of systemd that joins, and end.")
    ] = False,
) -> None:
    """Take part in a federation until Ctrl-C.

    With the folder of a kit it asks once for the data, the weights, the limits and the classes, checks this
    machine as `site doctor` does, and asks before it opens the ledger. Without a terminal it asks
    nothing, and names what is missing. Only the code installed here runs. Code that arrives with a
    run is never started.

    Example: site join north/

    Waits for a coordinator that is not running yet. Exits with 1 and the reason if this site cannot
    join.
    """
    if kit is not None:
        # A node-config may stand in the environment, of a job or a container.
        if superlink or insecure or root_certificates or auth_supernode_private_key:
            raise ConfigError(
                f"{kit} has the settings and the coordinator's address; leave the other options out"
            )
        ready = prepare(kit, yes)
        if install:
            for line in installed(ready):
                console.print(line, soft_wrap=True)
            return
        _join([ready.node_config()], *ready.link)
        return
    if not (node_config and superlink) or yes or install:
        raise ConfigError(
            "name the folder of this site's kit: site join north/; or give --superlink and --node-config, "
            "without --yes and --install"
        )
    _join(node_config, superlink, root_certificates, auth_supernode_private_key, insecure)


def _join(
    node_config: list[str],
    superlink: str,
    root_certificates: Path | None,
    auth_supernode_private_key: Path | None,
    insecure: bool = False,
) -> None:
    from ..diagnostics.findings import Link
    from ..processes.own_account import own_folder, own_socket
    from ..processes.supervisor import Supervisor, looked_at, site_commands

    check_settings(node := node_of(node_config))
    for warning in looked_at(node):
        _print("join", f"warning: {warning}")
    _check_link(Link.parse(superlink, root_certificates, auth_supernode_private_key), insecure)
    with own_folder() as folder:
        runtime = own_socket(f"unix:{folder}/app")
        link = (superlink, root_certificates, auth_supernode_private_key)
        Supervisor(site_commands(runtime, one_text(node_config), *link), _print).run()


def check_settings(node: NodeConfig) -> None:
    """Refuse a node-config under which this site cannot work, before it connects.

    Raises:
        ConfigError, PolicyError, LedgerError, BackboneError: that names the setting.
    """
    from fedsurrogate.common.backbones.backbone_names import check_weights_file
    from fedsurrogate.common.models.devices import pick_device

    from ..governance.ledger import own_ledger
    from ..governance.policy import check_confirmed, load_policy
    from ..node_config import check_folders
    from ..own_files import close_to_others

    if not node.data:
        raise ConfigError(
            'node-config: data is not set; set it to a kind of data, such as data="imagefolder" '
            'data-dir="/data/xrays"'
        )
    if node.data == "digits" and node.data_dir:
        raise ConfigError(
            f"node-config: data-dir = {node.data_dir!r}, but data = 'digits' is bundled and read from "
            "no folder; set data to the kind of this site's data, or remove data-dir"
        )
    if node.policy:
        check_confirmed(node, load_policy(node.policy))
    folder = Path(node.data_dir).expanduser()
    if node.data != "digits" and not (folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)):
        raise ConfigError(
            f"node-config: data-dir = {node.data_dir!r} is not a folder that user {os.getuid()} "
            f"may read; data = {node.data!r} is read from {folder.absolute()}"
        )
    for key in FILES:
        if name := getattr(node, key.replace("-", "_")):
            _check_readable(f"node-config: {key} =", Path(name))
    if node.weights_path:
        check_weights_file(Path(node.weights_path).expanduser())
    if node.device.startswith("cuda"):
        # Only then: counting GPUs imports torch.
        pick_device(node.device)
    check_folders(node)
    close_to_others(node)
    if (ledger := own_ledger(node)) is not None:
        ledger.check()


def _check_link(link: Link, insecure: bool) -> None:
    if insecure and (link.authority or link.key):
        raise ConfigError(
            "--insecure excludes --root-certificates and --auth-supernode-private-key; leave "
            "--insecure out"
        )
    if not (insecure or link.authority):
        raise ConfigError(
            "--root-certificates is missing: give ca.crt of the site kit; --insecure is for one "
            "machine only"
        )
    for option, file in (
        ("--root-certificates", link.authority),
        ("--auth-supernode-private-key", link.key),
    ):
        if file is not None:
            _check_readable(option, file, "; take it from the site kit")


def _check_readable(what: str, file: Path, remedy: str = "") -> None:
    if not (file.expanduser().is_file() and os.access(file.expanduser(), os.R_OK)):
        place = f"{what} {str(file)!r}"
        raise ConfigError(f"{place} is not a file that user {os.getuid()} may read{remedy}")


def _print(name: str, line: str) -> None:
    console.print(f"{name:<5}| {line}", soft_wrap=True)
