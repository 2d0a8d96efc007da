"""The `site fetch` command: studies from the PACS."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fedsurrogate.common.command_line import Json, console

from .options import print_json


def fetch(
    dicomweb: Annotated[
        str,
        typer.Option(metavar="URL", help="The DICOMweb service, such as https://pacs/dicom-web."),
    ],
    query: Annotated[
        str,
        typer.Option(
            metavar="'KEYWORD=VALUE ...'",
            help="Which series: Modality, StudyDate, BodyPartExamined or other keywords of DICOM.",
        ),
    ],
    labels: Annotated[
        Path,
        typer.Option(
            help="Table with the labels of studies, by StudyInstanceUID, AccessionNumber or PatientID. "
            "Only studies in it are copied; it is copied beside them."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder of the site's data, its data-dir.")],
    env_file: Annotated[
        Path | None,
        typer.Option(
            help="File with FEDSURROGATE_PACS_TOKEN=..., or _USER and _PASSWORD, _CERTIFICATE, _KEY "
            "and _CA, that only you can read; else they are variables of the environment."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Copy studies from the PACS into the folder of the site's data.

    They come through DICOMweb, and nothing leaves. An interrupted command goes on where it stopped when it
    is given again. Needs the extra pacs.

    Example: site fetch --dicomweb https://pacs/dicom-web --query 'Modality=CR
    StudyDate=20240101-20241231' --labels labels.csv --out /data/chest
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
