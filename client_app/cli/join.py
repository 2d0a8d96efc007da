"""The `site join` command, the only one that a hospital needs to take part; and what it does with a kit
before: ask what is missing, check this machine, open the ledger, write a service.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from fedsurrogate.common.command_line import console
from fedsurrogate.common.errors import BackboneError, ConfigError, DataError, LedgerError

from .options import KitFolder, MaybeNode, RootCertificates, SiteKey, node_of, one_text

if TYPE_CHECKING:
    from ..diagnostics.connection_checks import Link
    from ..kit import Kit
    from ..node_config import NodeConfig

# Exit code of the doctor where only the ledger is missing, because nobody has opened it.
UNOPENED = 3
COMMAND = (sys.executable, "-P", "-m", "fedsurrogate.client_app.cli.main")
UNIT = """\
[Unit]
Description=fedsurrogate: the site in {folder}
Wants=network-online.target
After=network-online.target

[Service]
ExecStart={command}
Restart=on-failure
RestartSec=60
TimeoutStopSec=120

[Install]
WantedBy=default.target
"""


def opened(folder: Path) -> Kit:
    """The kit in a folder; its proxy and form of log hold for this process. Raises ConfigError."""
    from ..kit import read_kit

    kit = read_kit(folder)
    given = {
        "https_proxy": kit.values.get("PROXY"),
        "FEDSURROGATE_LOG": kit.values.get("LOG_FORMAT"),
    }
    os.environ.update({name: value for name, value in given.items() if value})
    return kit


def prepare(folder: Path, yes: bool) -> Kit:
    """Make a kit ready to join.

    Args:
        folder: of the kit.
        yes: whether nothing is asked: the classes that the data have and the policy are confirmed, and
            the ledger of new data is opened.

    Raises:
        ConfigError, LedgerError: something is missing, and nobody can be asked.
        typer.Exit: the doctor has found a fault, or a person has said no.
    """
    from ..governance.gate import open_ledger
    from ..governance.ledger import own_ledger

    kit, asks = opened(folder), sys.stdin.isatty() and not yes
    if asks and not kit.values.get("DATA"):
        kit = _ask(kit)
    node = node_of([kit.node_config()])
    ledger = own_ledger(node)
    if ledger is not None and ledger.is_new and (asks or yes):
        kit = _with_classes(kit, node, asks)
        node = node_of([kit.node_config()])
    confirm_looser(node, yes)
    found = subprocess.run([*COMMAND, "doctor", "--node-config", str(kit.folder)], check=False)
    if found.returncode not in (0, UNOPENED):
        raise typer.Exit(1)
    if ledger is not None and ledger.is_new:
        if asks:
            typer.confirm(
                "Nothing has left yet. Open the ledger of these data, and join", abort=True
            )
        elif not yes:
            raise LedgerError(
                f"the ledger of {node.data_dir} was never opened, so nothing may leave; type `site join "
                f"{shlex.quote(str(kit.folder))}` in a terminal, or with --yes"
            )
        open_ledger(node)
        console.print(f"opened {ledger.path}; keep it and {node.check_log}")
    return kit


def _ask(kit: Kit) -> Kit:
    """Ask a person what the kit cannot know, once."""
    from fedsurrogate.common.backbones.backbone_names import check_weights_file
    from fedsurrogate.common.settings import DataKind

    from ..datasets.image_folders import find_tables
    from ..governance.policy import load_policy
    from ..kit import keep, set_limits

    policy = load_policy(str(kit.policy))
    console.print("Your answers go into .env and policy/policy.toml, where you can change them.")
    while not (data := Path(typer.prompt("Folder of the data")).expanduser().absolute()).is_dir():
        console.print(f"{data} is no folder on this machine")
    kinds = [kind for kind in get_args(DataKind) if kind != "digits"]
    while (
        kind := typer.prompt(f"Their kind ({', '.join(kinds)})", default=_kind(data))
    ) not in kinds:
        console.print(f"{kind!r} is none of these")
    answers = {"DATA": str(data), "DATA_KIND": kind}
    if kind in ("parquet", "safetensors", "slides") or (kind != "dicom" and find_tables(data)):
        answers["LABEL_COLUMN"] = typer.prompt("Column with the class", default="label")
        answers["PATIENT_COLUMN"] = _optional("Column with the patient's ID")
    while weights := _optional("File with the weights of the backbone"):
        file = Path(weights).expanduser().absolute()
        try:
            check_weights_file(file)
        except BackboneError as error:
            console.print(str(error))
            continue
        answers |= {"WEIGHTS": f"/weights/{file.name}", "WEIGHTS_DIR": str(file.parent)}
        break
    answers["RUN_AS"] = f"{os.getuid()}:{os.getgid()}"
    run = typer.prompt("Largest epsilon of one run", default=policy.epsilon_per_run, type=float)
    total = typer.prompt("Of all runs together", default=policy.epsilon_total, type=float)
    kept = keep(kit, answers)
    set_limits(kit.policy, {"epsilon-per-run": run, "epsilon-total": total})
    load_policy(str(kit.policy))
    return kept


def _with_classes(kit: Kit, node: NodeConfig, asks: bool) -> Kit:
    """The kit with the classes of its data, which a person has confirmed."""
    from fedsurrogate.common.settings.base import split_names

    from ..diagnostics.first_look import classes_to_confirm, list_data
    from ..kit import keep

    try:
        names = classes_to_confirm(node, list_data(node)[1])
    except (DataError, OSError):
        return kit  # The doctor reports it.
    if not names:
        return kit
    console.print(
        f"The data in {node.data_dir} have {len(names)} classes: {', '.join(names)}. When one of them is "
        "gone, this site stays away."
    )
    if asks and not typer.confirm("Are these all", default=True):
        written = typer.prompt(
            "All classes, separated by commas; empty to leave it open", default=""
        )
        names = split_names(written)
    return keep(kit, {"CLASSES": ",".join(names)}) if names else kit


def confirm_looser(node: NodeConfig, yes: bool) -> None:
    """Say what a policy allows beyond the one in force, or beyond the default before the first one, and
    ask for it; it is in force from then on.

    Args:
        node: the site's settings.
        yes: whether nothing is asked.

    Raises:
        ConfigError: it allows more, and nobody can be asked.
        typer.Abort: a person has said no.
    """
    from fedsurrogate.common.escapes import for_rows

    from ..governance.ledger import own_ledger
    from ..governance.policy import DEFAULT, confirm_policy, loosened, policy_in_force, policy_of

    policy, before = policy_of(node), policy_in_force(node)
    if (ledger := own_ledger(node)) is None or (before is None and not ledger.is_new):
        # Public data; and of a ledger of an earlier version, this policy is in force.
        return
    if keys := loosened(before or DEFAULT, policy):
        what = "the policy in force" if before else "the default policy"
        console.print(f"{node.policy or 'The policy'} allows more than {what}:")
        for key in keys:
            console.print(for_rows("  ", key, console.width))
        forever = policy.irrevocable or "what leaves under it stays spent"
        console.print(
            f"This cannot be taken back: {forever}. A stricter policy later changes nothing of that.",
            style="yellow",
        )
        if not yes and not sys.stdin.isatty():
            raise ConfigError(
                "nobody has confirmed it; type `site policy` with this site's --node-config in a terminal, "
                "or with --yes"
            )
        if not yes:
            typer.confirm("Let it be in force", abort=True)
    if before != policy:
        confirm_policy(node, policy)


def _optional(question: str) -> str:
    return str(typer.prompt(f"{question}, if there is one", default="", show_default=False))


def _kind(data: Path) -> str:
    """The kind that the names of the first files tell."""
    suffixes = {file.suffix.lower() for file in islice(data.rglob("*"), 1000)}
    kinds = {".parquet": "parquet", ".safetensors": "safetensors", ".dcm": "dicom"}
    return next((kind for suffix, kind in kinds.items() if suffix in suffixes), "imagefolder")


def installed(kit: Kit) -> list[str]:
    """Write a service of this user that joins with a kit.

    Returns:
        What to type.

    Raises:
        ConfigError: the file cannot be written.
    """
    from fedsurrogate.common.errors import told_as
    from fedsurrogate.common.files import replace_file
    from fedsurrogate.common.machine import home_folder

    name = f"fedsurrogate-{kit.values['SITE']}.service"
    file = (
        Path(os.environ.get("XDG_CONFIG_HOME") or home_folder() / ".config") / "systemd/user" / name
    )
    command = " ".join(map(_quoted, [*COMMAND, "join", str(kit.folder)]))
    folder = str(kit.folder).replace("%", "%%")
    with told_as(ConfigError, f"{file} cannot be written", "no service is installed"):
        replace_file(file, UNIT.format(folder=folder, command=command).encode(), mode=0o644)
    return [
        f"wrote {file}; start it, now and with this machine:",
        f"  systemctl --user daemon-reload && systemctl --user enable --now {name}",
        "  loginctl enable-linger",
    ]


def _quoted(word: str) -> str:
    """A word of a command as systemd reads it."""
    for sign, written in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(sign, written)
    return f'"{word}"'


def join(
    kit: KitFolder = None,
    node_config: MaybeNode = None,
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT")] = "",
    root_certificates: RootCertificates = None,
    auth_supernode_private_key: SiteKey = None,
    insecure: Annotated[bool, typer.Option("--insecure")] = False,
    yes: Annotated[bool, typer.Option("--yes")] = False,
    install: Annotated[bool, typer.Option("--install")] = False,
) -> None:
    """Take part in a federation until Ctrl-C.

    With the folder of a kit it asks once for the data, the weights, the limits and the classes, checks this
    machine as `site doctor` does, and asks before it opens the ledger. Without a terminal it asks
    nothing, and names what is missing. Only the code installed here runs. Code that arrives with a
    run is never started.

    Example: site join north/

    Waits for a coordinator that is not running yet. Exits with 1 and the reason if this site cannot
    join.

    Args:
        superlink: The coordinator's Fleet API.
        insecure: No TLS: only if all runs on one machine.
        yes: Ask nothing: confirm the policy and the classes that the data have, and open the ledger
            of new data.
        install: Write a service of systemd that joins, and end.
    """
    from ..diagnostics.connection_checks import Link
    from ..processes.own_account import own_folder, own_socket
    from ..processes.supervisor import Supervisor, looked_at, site_commands

    link = (superlink, root_certificates, auth_supernode_private_key)
    if kit is not None:
        # A node-config may stand in the environment, of a job or a container.
        if insecure or any(link):
            raise ConfigError(
                f"{kit} has the settings and the coordinator's address; leave the other options out"
            )
        ready = prepare(kit, yes)
        if install:
            for line in installed(ready):
                console.print(line)
            return
        node_config, link = [ready.node_config()], ready.link
    elif not (node_config and superlink) or yes or install:
        raise ConfigError(
            "name the folder of this site's kit: site join north/; or give --superlink and --node-config, "
            "without --yes and --install"
        )
    check_settings(node := node_of(node_config))
    for warning in looked_at(node):
        _print("join", f"warning: {warning}")
    _check_link(Link.parse(*link), insecure)
    with own_folder() as folder:
        runtime = own_socket(f"unix:{folder}/app")
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
    from ..node_config import check_folders, close_to_others

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
    if node.peers:
        _check_readable("node-config: peers =", Path(node.peers))
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
    console.print(f"{name:<5}| {line}")
