"""Checks that this machine can be a site: folders, policy, ledger, data, backbone, and the cost of
a run.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import torch
from torch import Tensor

from fedsurrogate.client_app.datasets.dataset import Dataset, DataSource
from fedsurrogate.client_app.datasets.partition import SiteShare, share
from fedsurrogate.client_app.datasets.schema import read_schema
from fedsurrogate.client_app.diagnostics.findings import Finding
from fedsurrogate.client_app.diagnostics.key_checks import check_keys
from fedsurrogate.client_app.features.parts import in_parts
from fedsurrogate.client_app.features.site_features import (
    examples_of,
    site_backbone,
    site_device,
)
from fedsurrogate.client_app.governance.gate import open_gate
from fedsurrogate.client_app.governance.held import why_held
from fedsurrogate.client_app.governance.own_ledger import own_ledger
from fedsurrogate.client_app.governance.policy import NO_LIMIT, policy_of
from fedsurrogate.client_app.governance.uncharged import FALLBACK, check_dimension
from fedsurrogate.client_app.node_config import NodeConfig, is_protected, packages_of
from fedsurrogate.client_app.own_files import readable_by_others
from fedsurrogate.common.backbones.backbones import Backbone
from fedsurrogate.common.backbones.feature_power import with_power
from fedsurrogate.common.costs import costs
from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.common.extras.needed import check_packages
from fedsurrogate.common.machine.cores import usable_cores
from fedsurrogate.common.machine.memory import available_memory
from fedsurrogate.common.models.devices import gpus_of
from fedsurrogate.common.privacy.budget_remarks import budget_remarks
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import DataKind

GIB = 2**30
LEAST_DISK, LITTLE_DISK = 0.2 * GIB, 5 * GIB
LITTLE_MEMORY = 4 * GIB
MEASURED_IMAGES = 48
MOST_CLASSES_SHOWN = 12


def check_site(
    run: Run, node: NodeConfig, fingerprint: str = "", run_named: bool = True
) -> Iterator[Finding]:
    """Check all that a run needs, and change nothing.

    Args:
        run: a planned run, or defaults.
        node: the site's settings.
        fingerprint: of the coordinator's backbone; empty if unknown.
        run_named: whether `run` is a planned run; only then are its policy and budget checked.
    """
    yield from _folders(node)
    yield _guarded("other accounts", "see state-dir", lambda: _other_accounts(node))
    yield from _machine(run.settings.device, node)
    yield _guarded("policy", "see `site policy check`", lambda: _policy(run.settings.data, node))
    yield _guarded(
        "ledger",
        "every release is refused until it is repaired; see `site ledger`",
        lambda: _ledger(run.settings.data, node),
    )
    yield from check_keys(run.settings.data, node)
    yield _guarded("packages", "", lambda: _packages(run, node))
    part: list[SiteShare] = []
    dimension = 0
    yield _guarded(
        "data",
        "see data, data-dir and the columns in the node-config; in a kit DATA, DATA_KIND and "
        "LABEL_COLUMN in .env",
        lambda: _data(run, node, part),
    )
    if part and part[0].dataset.features is None:
        backbones: list[Backbone] = []
        yield _guarded(
            "backbone",
            "see weights-path in the node-config",
            lambda: _backbone(run, node, part[0], fingerprint, backbones),
        )
        if backbones:
            dimension = backbones[0].dim
            yield _guarded("time", "check the images", lambda: _time(part[0], backbones[0]))
    elif part and fingerprint:
        own, wanted = (
            with_power(each, run.power) for each in (part[0].dataset.fingerprint, fingerprint)
        )
        yield _same(own, wanted, "backbone")
    if not run_named:
        yield Finding(
            "a run",
            "WARN",
            "no settings of a run are given",
            "give the coordinator's planned settings with -c",
        )
    elif part:
        yield _guarded(
            "a run",
            "see `site policy check` and `site ledger`",
            lambda: _run(run, node, part[0], dimension),
        )


def _guarded(what: str, remedy: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except FedSurrogateError as error:
        return Finding(what, "FAIL", str(error), remedy)
    except Exception as error:
        return Finding(what, "FAIL", f"{type(error).__name__}: {error}", remedy)


def _folders(node: NodeConfig) -> Iterator[Finding]:
    folders = [
        ("cache-dir", node.cache, "features"),
        ("state-dir", node.state, "the privacy ledger"),
    ]
    if own_ledger(node) is not None:
        folders.append(("witness-dir", node.witness, "the ledger's witness"))
    for what, folder, holds in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder):
                free = shutil.disk_usage(folder).free
        except OSError as error:
            remedy = (
                f"give a folder for {holds} that user {os.getuid()} may write, as {what} in "
                "the node-config"
            )
            yield Finding(what, "FAIL", f"{folder} cannot be written ({error.strerror})", remedy)
            continue
        facts = f"{folder} can be written, {free / GIB:.1f} GiB free"
        if free < LITTLE_DISK:
            yield Finding(
                what,
                "FAIL" if free < LEAST_DISK else "WARN",
                facts,
                f"free disk space; it is for {holds}",
            )
        else:
            yield Finding(what, "PASS", facts)


def _other_accounts(node: NodeConfig) -> Finding:
    found = readable_by_others(node)
    if not found:
        return Finding("other accounts", "PASS", "none can read what is kept here")
    return Finding(
        "other accounts",
        "WARN",
        f"they may read {len(found)} files or folders of this site, such as {found[0]}",
        "`site join`, or the next request, closes those of this user; for others' files: "
        "chmod -R go-rwx",
    )


def _machine(wanted: str, node: NodeConfig) -> Iterator[Finding]:
    free, cores = available_memory(), usable_cores()
    facts = f"{free / GIB:.1f} GiB free, {cores} cores"
    if free < LITTLE_MEMORY:
        yield Finding("memory", "WARN", facts, "4 GiB are enough for most backbones")
    else:
        yield Finding("memory", "PASS", facts)
    try:
        device = site_device(wanted, node)
    except FedSurrogateError as error:
        yield Finding("GPU", "FAIL", str(error), "set device in the node-config")
        return
    if not device.startswith("cuda"):
        asked = "cpu" in (node.device, wanted)
        remedy = (
            ""
            if asked
            else "large backbones are slow on a CPU; check the driver with nvidia-smi, or set "
            'device="cpu"'
        )
        yield Finding("GPU", "PASS" if asked else "WARN", f"none is used; device {device}", remedy)
        return
    for each in gpus_of(torch.device(device)) or (device,):
        left, total = torch.cuda.mem_get_info(each)
        yield Finding(
            "GPU",
            "PASS",
            f"{torch.cuda.get_device_name(each)}, {left / GIB:.1f} of {total / GIB:.1f} GiB free",
        )


def _policy(data: DataKind, node: NodeConfig) -> Finding:
    policy = open_gate(node, data, "doctor").policy
    if node.data in ("", "digits") and not node.policy:
        return Finding("policy", "PASS", "public data: everything may leave")
    facts = policy.in_words
    if not node.policy:
        return Finding(
            "policy",
            "WARN",
            f"the default: {facts}",
            "set policy in the node-config to a file of your own",
        )
    return Finding("policy", "PASS", f"{node.policy}: {facts}")


def _ledger(data: DataKind, node: NodeConfig) -> Finding:
    gate = open_gate(node, data, "doctor")
    entries, spent = gate.ledger.entries(), gate.spent()
    total = gate.policy.epsilon_total
    allowed = f" of {total:g}" if total < NO_LIMIT else ""
    facts = f"{len(entries)} releases so far, epsilon {spent:.4g}{allowed} spent"
    if noise := sum(FALLBACK in entry.get("facts", {}) for entry in entries):
        facts += (
            f"; {noise} of them WITHOUT ANY RECORD, pure noise, because the records could "
            "not be used"
        )
    if spent >= total:
        return Finding(
            "ledger", "FAIL", facts, "nothing more may leave; only a person may raise epsilon-total"
        )
    if noise:
        return Finding(
            "ledger",
            "WARN",
            facts,
            "site.log in state-dir has the error; correct it before the next run",
        )
    return Finding("ledger", "PASS", facts)


def _packages(run: Run, node: NodeConfig) -> Finding:
    check_packages(needed := packages_of(run, node))
    names = ", ".join(package for package, _ in needed)
    return Finding("packages", "PASS", names or "no optional package is needed")


def _data(run: Run, node: NodeConfig, part: list[SiteShare]) -> Finding:
    protected = is_protected(run.private, node)
    if protected:
        read_schema(DataSource.of_node(node, run))
    records = share(run, node)
    part.append(records)
    if protected and (held := why_held(node)):
        return Finding("data", "FAIL", f"private runs use no record: {held}", "see site.log")
    dataset = records.dataset
    counts = torch.bincount(dataset.labels[records.train], minlength=len(dataset.classes)).tolist()
    named = [f"{name} {count}" for name, count in zip(dataset.classes, counts, strict=True)]
    more = f" and {len(named) - MOST_CLASSES_SHOWN} more" if len(named) > MOST_CLASSES_SHOWN else ""
    facts = (
        f"{len(records.train)} training and {len(records.test)} test records: "
        f"{', '.join(named[:MOST_CLASSES_SHOWN])}{more}"
    )
    facts += _units(dataset, records.train)
    smallest = policy_of(node).smallest_site
    if len(dataset) < smallest and node.data not in ("", "digits"):
        return Finding(
            "data",
            "FAIL",
            f"{facts}; the policy's smallest-site is {smallest}, so this site stays away",
            f"mount or fill data-dir = {node.data_dir!r}, or lower smallest-site in the policy",
        )
    if not len(records.train):
        return Finding(
            "data",
            "FAIL",
            "; ".join([facts, *dataset.report.lines()[1:]]),
            "without training records only noise leaves, or nothing",
        )
    if dataset.left_out or dataset.odd:
        private = " in this private run" if protected else ""
        losses = [each.why for each in dataset.left_out]
        whole = [f"LEFT OUT{private}: {'; '.join(losses)}"] if losses else []
        whole += [f"ODD: {'; '.join(dataset.odd)}"] if dataset.odd else []
        empty = [name for name, count in zip(dataset.classes, counts, strict=True) if not count]
        remedy = "correct these records; they are not reported to the coordinator"
        if empty:
            remedy = (
                f"no training record of class {empty[0]!r}; check its name if you expect records"
            )
        return Finding("data", "WARN", "; ".join([facts, *whole]), remedy)
    if dataset.burned_in:
        return Finding(
            "data",
            "WARN",
            f"{facts}; {dataset.burned_in} images have text burned into their pixels, as their "
            "headers state",
            "a model may learn a name in the pixels; black it out, or leave these images "
            "(BurnedInAnnotation) out",
        )
    if empty := [name for name, count in zip(dataset.classes, counts, strict=True) if not count]:
        return Finding(
            "data",
            "WARN",
            facts,
            f"no training record of class {empty[0]!r}; check its name if you expect records",
        )
    return Finding("data", "PASS", facts)


def _units(dataset: Dataset, rows: Tensor) -> str:
    """How many patients, and bags of images, some records are of."""
    owners = dataset.patients
    whose = set() if owners is None else {owners[row] for row in rows.tolist()}
    patients = "" if owners is None else f"; {len(whose)} patients"
    return patients + (f"; {bags}" if (bags := dataset.report.bags) else "")


def _backbone(
    run: Run, node: NodeConfig, part: SiteShare, fingerprint: str, backbones: list[Backbone]
) -> Finding:
    loaded = site_backbone(run.settings, node)
    backbones.append(loaded)
    if is_protected(run.private, node):
        check_dimension(loaded)
    own = with_power(loaded.fingerprint_at(loaded.dim or _first_dimension(part, loaded)), run.power)
    facts = f"{run.settings.backbone}, fingerprint {own}"
    return (
        _same(own, with_power(fingerprint, run.power), facts)
        if fingerprint
        else Finding("backbone", "PASS", facts)
    )


def _first_dimension(part: SiteShare, backbone: Backbone) -> int:
    """The dimension of the first image that can be read; 0 if there is none."""
    with closing(
        in_parts(part.dataset.open_image, [range(len(part.dataset))], backbone, 1)
    ) as pieces:
        return next((piece.features.shape[1] for piece in pieces if piece.features is not None), 0)


def _same(own: str, wanted: str, facts: str) -> Finding:
    if own == wanted:
        return Finding("backbone", "PASS", f"{facts}, as the coordinator's")
    remedy = "use the coordinator's weights, image-size and backbone"
    return Finding(
        "backbone", "FAIL", f"{facts}; this site has {own}, the coordinator {wanted}", remedy
    )


def _time(part: SiteShare, backbone: Backbone) -> Finding:
    """Estimate the time for all images from that for the first ones."""
    started, done = time.perf_counter(), 0
    broken: list[int] = []
    with closing(
        in_parts(part.dataset.open_image, [range(len(part.dataset))], backbone, MEASURED_IMAGES)
    ) as pieces:
        for piece in pieces:
            done += len(piece.rows)
            broken += [row for row, _ in piece.broken]
            if done + len(broken) >= MEASURED_IMAGES:
                break
    seconds = (time.perf_counter() - started) / max(1, done + len(broken)) * len(part.dataset)
    where = " on one GPU" if len(gpus_of(backbone.device)) > 1 else ""
    facts = (
        f"about {math.ceil(seconds / 60)} min for the features of {len(part.dataset)} "
        f"images{where}, once; then cached"
    )
    named = f", such as {examples_of(part.dataset, broken)}" if broken else ""
    if not done:
        found = f"none of the first {len(broken)} images can be read{named}"
        return Finding("time", "FAIL", found, "check the images")
    if broken:
        return Finding(
            "time",
            "WARN",
            f"{facts}; {len(broken)} of the first {done + len(broken)} images cannot be read{named}",
            "check the images",
        )
    return Finding("time", "PASS", facts)


def _run(run: Run, node: NodeConfig, part: SiteShare, dimension: int) -> Finding:
    """Check whether the policy allows this run, and compute its cost in bytes and epsilon."""
    gate, features = open_gate(node, run.settings.data, "doctor"), part.dataset.features
    gate.check_request(run)
    size, dimension = (
        f"method {run.settings.method}",
        dimension if features is None else features.shape[1],
    )
    if dimension:
        cost = costs(run, dimension, len(part.dataset.classes), len(part.train), 1)[0]
        size += (
            f", {cost.up / 1e6:.3g} MB up and {cost.down / 1e6:.3g} MB down in {cost.rounds} rounds"
        )
    if run.mechanism is None:
        return Finding("a run", "PASS", f"{size}, no differential privacy, which the policy allows")
    fits = gate.runs_left(run.mechanism.events)
    left = max(0.0, gate.policy.epsilon_total - gate.spent())
    facts = (
        f"{size}, epsilon {run.settings.epsilon:g} where {left:.4g} is left: {fits} such runs fit"
    )
    if not fits:
        return Finding(
            "a run",
            "WARN",
            facts,
            "some or all of its rounds would be refused: ask for a smaller epsilon",
        )
    if odd := budget_remarks(run.settings.epsilon, run.settings.delta, len(part.train)):
        return Finding("a run", "WARN", facts, "; ".join(odd))
    return Finding("a run", "PASS", facts)
