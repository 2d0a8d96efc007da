"""The `site adapt` command: a model of the site's own. Nothing leaves."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from fedsurrogate.common.command_line import Json, console
from fedsurrogate.common.errors import StateError

from .evaluate import LabelColumn, LabelledKind, PatientColumn
from .options import MaybeNode, node_of
from .predict import ModelArgument


def adapt(
    model: ModelArgument = "in-use",
    node_config: MaybeNode = None,
    data_dir: Annotated[
        str, typer.Option(help="Labelled records; else the training records of this site.")
    ] = "",
    data: LabelledKind = None,
    label_column: LabelColumn = "label",
    patient_column: PatientColumn = "",
    store: Annotated[
        bool, typer.Option("--store", help="Use the chosen model at this site from now on.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Go back to the shared model.")] = False,
    as_json: Json = False,
) -> None:
    """Adapt a shared model to this site's own records.

    Only if that is significantly better. Nothing leaves. Compares by cross-validation: the shared
    model, its scores moved, scaled, or corrected by a ridge on own records.
    """
    from fedsurrogate.common.models.classifiers import target_of_model
    from fedsurrogate.common.targets.metrics import facts_of

    from ..model_use.adaptation import adapt as compare
    from ..model_use.adaptation import adapted_file, store_adapted
    from ..model_use.held_out import Source, held_out
    from ..model_use.store import opened

    named = opened(model, node_of(node_config) if node_config else None)
    signed, node = named.model, named.site()
    file = adapted_file(node, signed)
    if remove:
        if not file.is_file():
            raise StateError(f"this site has no version of its own of {signed.manifest.name}")
        file.unlink()
        console.print(f"removed {file}; the shared model is in use", soft_wrap=True)
        return
    kind: Any = "" if data is None else data.value
    source = Source(
        data_dir, kind, label_column, patient_column, known_only=True, simulated=named.simulated
    )
    named.check_records(data_dir)
    held = held_out(signed, node, source, "train")
    adaptation = compare(signed.classifier, held)
    stored = None
    if store and adaptation.own is not None:
        stored = store_adapted(node, signed, adaptation.own, adaptation.chosen)
    if as_json:
        facts = {
            "chosen": adaptation.chosen,
            "reason": adaptation.reason,
            "share": float(adaptation.own is not None),
            "stored": stored and str(stored),
        }
        print(
            json.dumps(
                facts
                | {
                    "judged": [asdict(each) for each in adaptation.judged],
                    "records": len(held.labels),
                },
                indent=2,
            )
        )
        return
    if named.note:
        console.print(named.note, style="dim", soft_wrap=True)
    from rich.table import Table

    of_numbers = facts_of(target_of_model(signed.classifier)).get("name") == "regression"
    table = Table(
        "candidate",
        "accuracy",
        "gain in squared error" if of_numbers else "gain in likelihood",
        "95 % interval",
        title=f"{len(held.labels)} records",
    )
    for each in adaptation.judged:
        limits = "" if each.name == "shared" else f"{each.low:+.3f} to {each.high:+.3f}"
        right = "" if each.accuracy is None else f"{each.accuracy:.1%}"
        table.add_row(each.name, right, f"{each.gain:+.3f}", limits)
    console.print(table)
    console.print(f"chosen: {adaptation.chosen}; {adaptation.reason}", soft_wrap=True)
    if stored is not None:
        console.print(
            f"in use at this site: {stored}; `site adapt --remove` goes back", soft_wrap=True
        )
    elif adaptation.own is not None:
        console.print("give --store to use it at this site", soft_wrap=True)
