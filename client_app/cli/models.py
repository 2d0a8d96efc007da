"""The `site models`, `backup` and `restore` commands: what this site keeps, which model is in use, and all
of it in one file.

The `site fetch` command: studies from the PACS.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsurrogate.common.command_line import Json, console, new_app
from fedsurrogate.common.errors import ConfigError

from .options import KitFolder, MaybeNode, Node, node_of, print_json


def backup(
    file: Path,
    kit: KitFolder = None,
    node_config: MaybeNode = None,
) -> None:
    """Write ledger, keys, models and settings of this site into a file.

    No image and no features are in it, and no check log of the ledger: that stays on its own disk, and
    shows later whether this backup is older than what has left.

    Example: site backup north-2026-11-29.backup north/

    Args:
        file: The file to write; only you can read it.
    """
    from fedsurrogate.common.settings.base import parse_overrides

    from ..backup import write_backup
    from ..kit import read_kit

    if kit is not None:
        node_config = [read_kit(kit).node_config()]
    if not node_config:
        raise ConfigError(
            "name the folder of this site's kit: site backup FILE north/; or give --node-config"
        )
    count = write_backup(file, kit, parse_overrides(node_config))
    console.print(f"{file}: {count} files; it holds this site's keys, in clear")


def restore(
    file: Path,
    kit: KitFolder = None,
) -> None:
    """Restore a backup, and hold its ledger against the check log.

    It goes to where the site was, or into the folder of a kit, which is made if it is missing. Settings
    and policy that are there stay. If the check log knows of more releases than the backup, or is lost,
    nothing leaves until a person states what is missing. Exits with 1 then.

    Example: site restore north-2026-11-29.backup north/

    Args:
        file: A file of `site backup`.
    """
    from ..backup import restore_backup

    node, files, kept, refusals = restore_backup(file, kit)
    console.print(f"restored {len(files)} files; the state is in {node.state}")
    if kept:
        console.print(
            f"{len(kept)} files of settings were there and stay as they are: "
            f"{', '.join(sorted(each.name for each in kept))}"
        )
    if not refusals:
        if any(each.suffix == ".jsonl" for each in files):
            console.print("the ledger agrees with its check log: nothing has left since")
        else:
            console.print("no ledger is in it: none was open")
        return
    raise ConfigError(
        f"{'; '.join(refusals)}\nThe releases since this backup are missing. Look up what they cost, at "
        "the coordinator or in old logs, and type `site ledger reopen --keep` with this site's --node-config"
    )


models_app = new_app("The models of this site: list, add, put one in use, go back.")


@models_app.command("list")
def list_kept(node_config: Node, as_json: Json = False) -> None:
    """List the models that this site keeps."""
    from rich.table import Column, Table

    from fedsurrogate.common.errors import FedSurrogateError

    from ..model_use.store import models_folder, nothing_in_use, read_index, read_kept

    node = node_of(node_config)
    index = read_index(node)
    rows: list[dict[str, Any]] = []
    for name, kept in index.models.items():
        row: dict[str, Any] = {
            "name": name,
            "in_use": name == index.in_use,
            "arrived": kept.arrived,
            "source": kept.source,
        }
        try:
            model = read_kept(node, name)
            facts = model.manifest
            claim = "none" if facts.privacy is None else facts.privacy.in_words()
            row |= {
                "classes": facts.classes,
                "backbone": facts.settings["backbone"],
                "privacy": claim,
            }
            row |= {"fingerprint": facts.fingerprint, "signer": model.signer, "state": "intact"}
        except FedSurrogateError as error:
            row |= {"state": str(error)}
        rows.append(row)
    if as_json:
        print_json({"folder": str(models_folder(node)), "models": rows})
        return
    if not rows:
        console.print(f"no model is kept in {models_folder(node)}; runs bring theirs")
        return
    table = Table(
        *(Column(name, overflow="fold") for name in ("", "model", "for", "privacy", "signed by")),
        show_lines=True,
    )
    for row in rows:
        intact = row["state"] == "intact"
        use = ", ".join(row["classes"]) + f"; {row['backbone']}" if intact else row["state"]
        mark = "*" if row["in_use"] else ""
        table.add_row(mark, row["name"], use, row.get("privacy", ""), row.get("signer", ""))
    console.print(table)
    console.print(f"* in use; all in {models_folder(node)}")
    if not index.in_use:
        console.print(nothing_in_use(index), style="yellow")


@models_app.command()
def add(
    file: Path,
    node_config: Node,
    signer: Annotated[str, typer.Option(metavar="HEX")] = "",
    use_it: Annotated[bool, typer.Option("--use")] = False,
) -> None:
    """Keep a model file that was brought by a person.

    Its signature must fit the coordinator's key. Commands take it when they name none only after
    --use, or `site models use`.

    Args:
        file: A model file, written by a run or by `coordinator export`.
        signer: Public key of the coordinator, if the node-config has no coordinator-key.
        use_it: Put it in use as well.
    """
    from fedsurrogate.common.signed_models.signed_model import read_signed_model

    from ..model_use.store import keep_model, trusted_keys, use_model

    node = node_of(node_config)
    try:
        trusted = frozenset({bytes.fromhex(signer)}) if signer else trusted_keys(node)
    except ValueError:
        raise ConfigError(
            f"--signer {signer[:40]!r}: must be the digits that `coordinator sites key` prints"
        ) from None
    if not trusted:
        raise ConfigError(
            "this site knows no coordinator's key, so the file could come from anyone; set "
            "coordinator-key in the node-config to the output of `coordinator sites key` there, or give "
            "it with --signer"
        )
    name = keep_model(node, read_signed_model(file, trusted), "file")
    console.print(f"kept as {name}")
    if use_it:
        _report_use(name, use_model(node, name))


@models_app.command()
def use(
    node_config: Node,
    name: Annotated[str, typer.Argument(metavar="[NAME]")] = "",
) -> None:
    """Put a kept model in use: commands take it when they name none.

    No model is in use before a person decides it, also not the first one.

    Args:
        name: The name of a kept model; it may be left out if only one is kept.
    """
    from ..model_use.store import only_kept, use_model

    node = node_of(node_config)
    name = name or only_kept(node)
    _report_use(name, use_model(node, name))


@models_app.command()
def back(node_config: Node) -> None:
    """Go back to the model that was in use before."""
    from ..model_use.store import go_back

    console.print(f"in use: {go_back(node_of(node_config))}")


def _report_use(name: str, before: str) -> None:
    console.print(f"in use: {name}" + (f"; before: {before}" if before not in ("", name) else ""))


def fetch(
    dicomweb: Annotated[str, typer.Option(metavar="URL")],
    query: Annotated[str, typer.Option(metavar="'KEYWORD=VALUE ...'")],
    labels: Annotated[Path, typer.Option()],
    out: Annotated[Path, typer.Option()],
    env_file: Path | None = None,
    as_json: Json = False,
) -> None:
    """Copy studies from the PACS into the folder of the site's data.

    They come through DICOMweb, and nothing leaves. An interrupted command goes on where it stopped when it
    is given again. Needs the extra pacs.

    Example: site fetch --dicomweb https://pacs/dicom-web --query 'Modality=CR
    StudyDate=20240101-20241231' --labels labels.csv --out /data/chest

    Args:
        dicomweb: The DICOMweb service, such as https://pacs/dicom-web.
        query: Which series: Modality, StudyDate, BodyPartExamined or other keywords of DICOM.
        labels: Table with the labels of studies, by StudyInstanceUID, AccessionNumber or PatientID.
            Only studies in it are copied; it is copied beside them.
        out: The folder of the site's data, its data-dir.
        env_file: File with FEDSURROGATE_PACS_TOKEN=..., or _USER and _PASSWORD, _CERTIFICATE, _KEY
            and _CA, that only you can read; else they are variables of the environment.
    """
    from fedsurrogate.common.errors import DataError

    from ..datasets import pacs

    client = pacs.client_of(dicomweb, pacs.settings_of(os.environ, env_file))
    wanted, table = pacs.read_query(query), pacs.read_labels(labels)
    studies = pacs.search(client, wanted)
    stopped: DataError | None = None
    try:
        with console.status(f"{len(studies)} studies") as status:
            for at, _ in enumerate(pacs.fetch(client, studies, table, out), 1):
                status.update(f"{at} of {len(studies)} studies")
    except DataError as error:
        stopped = error
    found = pacs.counts(studies, table) | {"table": str(out / pacs.FETCHED / pacs.TABLE)}
    if as_json:
        print_json(found)
    else:
        console.print(
            f"{found['studies']} studies match: {found['copied']} copied now ({found['images']} images), "
            f"{found['earlier']} copied earlier"
        )
        left = {f"refused: {why}": count for why, count in found["refused"].items()}
        for key in ("not looked at", "labels without a study"):
            left[key] = found[key]
        for text, count in left.items():
            if count:
                console.print(f"{count} {text}", style="yellow")
        console.print(found["table"])
    if stopped is not None:
        raise stopped
