"""The `site` command: join a federation, and control what leaves this hospital."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedsurrogate.common.command_line import (
    Json,
    RunSettings,
    console,
    new_app,
    print_error,
    run_command,
    run_config_of,
)
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.files import owner_only

from ..processes.own_account import take_arguments
from .approve import approve, enrol, forget, policy, settings
from .check import check, doctor, metrics
from .evaluate import adapt, evaluate, predict
from .generator import generator_app
from .join import confirm_looser, join
from .models import backup, fetch, models_app, restore
from .options import ConfirmPolicy, Node, node_of, one_text, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from ..node_config import NodeConfig


app = new_app("A site of a federation: join it, and control what leaves this hospital.", "site")
ledger_app = new_app("The releases of this site's data, and what is left of the budget.")
offline_app = new_app("Answer requests that come as files.")
app.add_typer(ledger_app, name="ledger")
app.add_typer(models_app, name="models")
app.add_typer(generator_app, name="generator")
app.add_typer(offline_app, name="offline")
for command in (
    enrol, join, doctor, settings, policy, approve, check, predict, evaluate, adapt, fetch, backup, restore,
):  # fmt: skip
    app.command()(command)
app.command(hidden=True)(metrics)
ledger_app.command()(forget)


@app.command("app", hidden=True)
def run_app(
    runtime: Annotated[str, typer.Option(metavar="unix:/PATH")],
    node_config: Node,
    joined: Annotated[bool, typer.Option("--joined")] = False,
) -> None:
    """Run the tasks of a SuperNode with the code installed here; code that arrives with a run is
    never started.

    `site join` starts this command. Start it by hand next to `site node`, in its own container. Its
    own node-config holds, whatever the SuperNode says. It looks at the site's data first, and `site
    node` joins when they are as many as the policy's smallest-site; otherwise it ends with the
    reason, to be started again.

    Args:
        runtime: The SuperNode's Runtime API, in a folder of this user's.
        joined: As `site join` starts it: the data were looked at.
    """
    from ..processes.app_process import serve

    serve(runtime, one_text(node_config), joined)


@app.command(
    "node", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def run_node(
    context: typer.Context,
    runtime: Annotated[str, typer.Option(metavar="unix:/PATH")],
    retry: Annotated[float, typer.Option(min=0, metavar="SECONDS")] = 0.0,
) -> None:
    """Start this site's SuperNode, which starts no app, on a Unix socket. Takes the other arguments
    of flower-supernode.

    `site join` does without it. It is for an app in a container of its own, which so needs no
    network. It joins when that app, `site app`, has found the site's data.

    Example: site node --runtime unix:/runtime/app --superlink fl.example.org:9092
    --root-certificates ca.crt --auth-supernode-private-key site.key

    Args:
        runtime: The socket to which `site app` connects.
        retry: Start again this long after an error; 0: end with it.
    """
    from ..processes.supervisor import serve_node

    serve_node(runtime, context.args, retry)


def _with_data(node_config: list[str]) -> NodeConfig:
    node = node_of(node_config)
    if node.data_dir and not Path(node.data_dir).expanduser().exists():
        raise ConfigError(
            f"data-dir = {node.data_dir!r} is not there, and a ledger belongs to data; name their "
            "folder as the site's own node-config does"
        )
    return node


@ledger_app.command("open")
def open_new(node_config: Node, yes: ConfirmPolicy = False) -> None:
    """Open the ledger of new data, once; without it nothing leaves.

    Asks first for a policy that allows more than the default.
    """
    from ..governance.gate import open_ledger

    node = _with_data(node_config)
    confirm_looser(node, yes)
    opened = open_ledger(node)
    console.print(f"opened {opened.path}; its check log is in {node.check_log}")
    warning = "keep both, and never restore an older copy of either: it lacks later releases"
    console.print(warning)


@ledger_app.command()
def show(node_config: Node, as_json: Json = False) -> None:
    """Show the releases of this site's data, and what is left of the budget.

    Exits with 1 if the ledger is not open, damaged, or older than its check log; nothing leaves then.
    """
    from fedsurrogate.common.run import parse_run

    from ..governance.budget import non_private_releases
    from ..governance.gate import open_gate
    from ..governance.policy import PUBLIC_KINDS, policy_of
    from ..governance.release import verdict

    node = _with_data(node_config)
    # The most expensive run of noisy sums that the policy allows.
    classes = ",".join(node.classes) or "a,b"
    policy = policy_of(node)
    run = parse_run({"epsilon": policy.epsilon_per_run, "delta": policy.delta, "classes": classes})
    gate = open_gate(node, run.settings.data, "")
    entries, found = gate.ledger.entries(), verdict(run, gate, node)
    shown = {
        "ledger": str(gate.ledger.path),
        "epsilon": found.spent,
        "epsilon_total": policy.epsilon_total,
        "epsilon_left": found.left,
        "delta": policy.delta,
        "delta_total": policy.delta_total or 2 * policy.delta,
        "runs_left": found.runs_left,
        "refusal": found.refusal,
        "without_privacy": non_private_releases(entries),
        "entries": entries,
    }
    if as_json:
        print_json(shown)
        return
    if entries:
        console.print(ledger_table(entries))
    else:
        console.print(f"nothing has left yet; the ledger is {gate.ledger.path}")
    if node.data in PUBLIC_KINDS:
        runs = sorted(gate.ledger.path.parent.glob(f"*/{gate.ledger.path.name}"))
        public = "public data: every run has its own ledger, and no budget adds them up"
        console.print("\n  ".join([public, *map(str, runs)]))
        return
    of_total = (
        f"spent epsilon {found.spent:.4g} of {policy.epsilon_total:g} at delta {policy.delta:g}"
    )
    usual = f"of noisy sums at epsilon-per-run = {policy.epsilon_per_run:g}"
    holds = f"the total holds at delta {shown['delta_total']:g}, for any later requests"
    left = f"{of_total}, {found.left:.4g} left; {gate.ledger.path}"
    fits = f"{found.runs_left} more runs {usual} fit; {holds}"
    if found.refusal:
        fits = f"a run {usual} would be refused: {found.refusal}; `site check` asks about another"
    console.print(f"{left}\n{fits}")


def ledger_table(entries: Sequence[dict[str, Any]]) -> Table:
    """Table of a ledger's entries, a row for each run's rounds of one noise. Its five columns fit into
    80 characters; long cells are folded.
    """
    from rich.table import Column, Table

    names = ("when (UTC)", "run", "what", "privacy", "sent")
    table = Table(*(Column(name, overflow="fold") for name in names), show_lines=True)
    rows: dict[str, list[dict[str, Any]]] = {}
    for place, entry in enumerate(entries):
        # Each round of a private run states what the whole run costs.
        alike: object = place
        if entry["kind"] == "release" and entry["events"]:
            alike = [entry[key] for key in OF_A_RUN]
        rows.setdefault(json.dumps(alike), []).append(entry)
    for together in rows.values():
        table.add_row(*_row(together))
    return table


OF_A_RUN = ("flower_run", "method", "mechanism", "unit", "epsilon", "delta", "sigmas")


def _row(rounds: Sequence[dict[str, Any]]) -> list[str]:
    from fedsurrogate.common.escapes import human_bytes

    entry, last = rounds[0], rounds[-1]
    when = entry["time"][:19].replace("T", " ")
    budget = f"epsilon {entry['epsilon']:g}, delta {entry['delta']:g}"
    if entry["kind"] == "decision":
        return [when, "", "a person's decision", f"{entry['reason']}; {budget}", ""]
    noise = "".join(f", {name} {sigma:.3g}" for name, sigma in entry["sigmas"].items())
    claim = f"{entry['mechanism']}, a {entry['unit']}: {budget}; noise{noise[1:]}"
    privacy = claim if entry["events"] else "none"
    if allowed_by := entry.get("allowed_by"):
        privacy += f"; allowed by {allowed_by}"
    sent = f"{human_bytes(sum(each['bytes'] for each in rounds))}, sha256 {last['sha256'][:12]}"
    number = f"round {entry['round']}" if entry["round"] else "before round 1"
    if len(rounds) > 1:
        number = f"{len(rounds)} rounds, {entry['round']} to {last['round']}"
    return [when, entry["flower_run"], f"{entry['method']}, {number}", privacy, sent]


@ledger_app.command()
def reopen(
    node_config: Node,
    reason: Annotated[str, typer.Option(prompt="Why")],
    epsilon_spent: Annotated[float, typer.Option(min=0, prompt="Epsilon spent")],
    keep: Annotated[bool, typer.Option("--keep")] = False,
    seen: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Decide about a ledger that is damaged or lost, or that its check log contradicts.

    Begins a new ledger with a new check log. The old files are kept under other names, which the new
    ledger lists.

    Args:
        reason: The reason; it is written to the new ledger.
        epsilon_spent: Epsilon to count as spent, at the policy's delta; --keep adds it.
        keep: Keep the entries: the ledger is intact, its check log is not.
        seen: With --keep: entries that the coordinator has seen, as the error says, so that the
            missing ones count as spent.
    """
    from fedsurrogate.common.settings import Settings

    from ..governance.gate import open_gate

    gate = open_gate(node_of(node_config), Settings().data, "")
    gate.ledger.reopen(reason, epsilon_spent, gate.policy.delta, keep, seen)
    spent = f"epsilon {epsilon_spent:g}"
    what = (
        f"the ledger continues, with {spent} more" if keep else f"a new ledger begins with {spent}"
    )
    console.print(f"{what} spent: {gate.ledger.path}")


@offline_app.command()
def key(node_config: Node) -> None:
    """Show this site's public key.

    It is a line of the coordinator's keys file, and of the `peers` files of other sites. The
    private key is created when first needed and stays in the state folder.
    """
    from fedsurrogate.common.security.sealing import public_key

    from ..offline.keys import key_name, private_key

    node = node_of(node_config)
    name = key_name(node)
    print(f'{name} = "{public_key(private_key(node, name)).hex()}"')


@offline_app.command()
def release(
    request: Path,
    node_config: Node,
    out: Annotated[Path, typer.Option()],
    as_json: Json = False,
) -> None:
    """Answer a request in a signed file.

    This needs no network connection to the coordinator. The request must be signed with the
    coordinator's key in the node-config (coordinator-key), and is answered only once. A release is
    charged to the ledger, and is byte for byte the same as over the network.

    Args:
        request: A file of `coordinator offline request` or `coordinator offline exchange`.
        out: The bundle or reply to write, for the coordinator.
    """
    from fedsurrogate.common.escapes import human_bytes

    from ..offline.answers import is_message, release_to, reply_to

    if is_message(request):
        facts, line = {"file": str(out)}, reply_to(out, request, node_of(node_config))
    else:
        made = release_to(out, request, node_of(node_config))
        shown = ("bytes", "sha256", "epsilon", "delta")
        facts = {"file": str(out), **{key: getattr(made, key) for key in shown}}
        budget = f"epsilon {made.epsilon:g}, delta {made.delta:g}"
        budget = budget if made.events else "no differential privacy"
        line = f"{out}: {human_bytes(made.bytes)}, {budget}; it is in the ledger"
    text = json.dumps(facts, indent=2) if as_json else line
    console.print(text)


@app.command(hidden=True)
def features(
    out: Annotated[Path, typer.Option()],
    node_config: Node,
    run_config: RunSettings = None,
    part: Literal["all", "train", "test"] = "all",
) -> None:
    """Write the features of a folder of images to a file, for public images (fedpft.public) or for
    later use.

    Names every image that cannot be read, and exits with 0 if there are others.

    Args:
        out: The safetensors file to write: x, y, and the backbone's fingerprint.
        part: Which images: all of them, or those of one part of their split.
    """
    import torch
    from safetensors.torch import save_file

    from ..datasets.partition import share
    from ..features.site_features import dataset_features, usable
    from ..governance.policy import policy_of

    run, node = run_config_of(run_config), node_of(node_config)
    site_share = share(run, node)
    dataset = site_share.dataset
    computed = dataset_features(dataset, run.settings, node, policy_of(node).cache_mib)
    parts = {"train": site_share.train, "test": site_share.test}
    rows = torch.cat([*parts.values()]).sort().values if part == "all" else parts[part]
    records = usable(dataset, computed, rows)
    metadata = {"fingerprint": computed.fingerprint, "classes": ",".join(dataset.classes)}
    save_file(
        {"x": records.features.half().contiguous(), "y": records.labels.contiguous()}, out, metadata
    )
    for row in rows[~torch.as_tensor(computed.ok)[rows]].tolist():
        print_error(f"cannot be read, and is left out: {dataset.where(row)}")
    lost = len(rows) - len(records.labels)
    left = f"; {lost} images left out" if lost else ""
    facts = f"{len(records.labels)} features of dimension {records.features.shape[1]}"
    console.print(f"{facts}: {out}{left}")


@owner_only()
def main() -> None:
    """Entry point. What a command writes, what it starts and its arguments are for this account
    only.
    """
    run_command(_app_unseen)


def _app_unseen() -> None:
    take_arguments(2)
    app()


if __name__ == "__main__":
    main()
