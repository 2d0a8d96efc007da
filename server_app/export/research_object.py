"""A run as a research object: RO-Crate 1.1, a zip of its files with a description in JSON-LD."""

from __future__ import annotations

import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.signed_models.signed_model import SignedModel, save_signed_model
from fedsurrogate.server_app.export.model_card import model_card
from fedsurrogate.server_app.export.pseudonyms import write_pseudonymous
from fedsurrogate.server_app.runs.json_files import read_json

CONTEXT = "https://w3id.org/ro/crate/1.1/context"
# Files that are passed on, with pseudonyms for sites. Surrogates stay: they are releases to the
# coordinator alone.
FILES = {
    "manifest.json": (
        "application/json",
        "Settings, seeds, software versions, backbone fingerprint",
    ),
    "metrics.json": ("application/json", "Results, bytes, privacy"),
    "events.jsonl": ("application/jsonl", "What happened, in order"),
    "evaluation.json": ("application/json", "Evaluation on held-out records of the sites"),
    "report.html": ("text/html", "Report for readers"),
}
MODEL, CARD = "model.fedsurrogate", "README.md"


def write_research_object(model: SignedModel, run: Path, file: Path) -> list[str]:
    """Write a run as a crate. Sites have pseudonyms, and no path of a machine is in any file.

    Args:
        model: the signed model.
        run: the run folder.
        file: to write.

    Returns:
        The names of the files in the crate.

    Raises:
        RunError: for a run that has not ended.
    """
    metrics = read_json(run, "metrics.json")
    if metrics.get("status") in (None, "running"):
        raise RunError(f"{run}: the run has not ended; pass it on when it has")
    with tempfile.TemporaryDirectory() as home:
        # The report shows the name of its folder.
        copy = Path(home) / run.resolve().name
        copy.mkdir()
        write_pseudonymous(run, copy)
        contents = {name: (copy / name).read_bytes() for name in FILES if (copy / name).is_file()}
        manifest = read_json(copy, "manifest.json")
    contents |= {MODEL: save_signed_model(model), CARD: model_card(model, run).encode()}
    described = FILES | {
        MODEL: ("application/octet-stream", "The learned model, signed by the coordinator"),
        CARD: ("text/markdown", "Model card"),
    }
    parts = [
        {
            "@id": name,
            "@type": "File",
            "encodingFormat": described[name][0],
            "description": described[name][1],
        }
        | {"contentSize": str(len(content))}
        for name, content in contents.items()
    ]
    versions = manifest.get("versions")
    software = [
        {
            "@id": f"#{name}",
            "@type": "SoftwareApplication",
            "name": name,
            "softwareVersion": str(version),
        }
        for name, version in (versions.items() if isinstance(versions, dict) else ())
    ]
    crate = {
        "@context": CONTEXT,
        "@graph": [
            *_head(model, manifest, [*contents], [s["@id"] for s in software]),
            *parts,
            *software,
        ],
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ro-crate-metadata.json", json.dumps(crate, indent=2) + "\n")
        for name, content in contents.items():
            archive.writestr(name, content)
    return [*contents]


def _head(
    model: SignedModel, manifest: dict[str, Any], names: list[str], software: list[str]
) -> list[dict[str, Any]]:
    """The descriptor, the data set, and the action that made it."""
    facts = model.manifest
    started = str(manifest.get("started", ""))
    claim = facts.privacy
    privacy = "no differential privacy" if claim is None else f"at each site {claim.in_words()}"
    return [
        {
            "@id": "ro-crate-metadata.json",
            "@type": "CreativeWork",
            "conformsTo": {"@id": "https://w3id.org/ro/crate/1.1"},
            "about": {"@id": "./"},
        },
        {
            "@id": "./",
            "@type": "Dataset",
            "name": facts.name,
            "description": f"A federated run of {facts.method} with {facts.sites} sites, "
            f"{privacy}. Sites have pseudonyms.",
            "datePublished": facts.created,
            "license": "See README.md for the licence of the backbone's weights",
            "hasPart": [{"@id": name} for name in names],
            "mentions": {"@id": "#run"},
        },
        {
            "@id": "#run",
            "@type": "CreateAction",
            "name": f"run {facts.run}",
            "startTime": started,
            "object": {"@id": "manifest.json"},
            "result": [{"@id": name} for name in names],
            "instrument": [{"@id": each} for each in software],
        },
    ]
