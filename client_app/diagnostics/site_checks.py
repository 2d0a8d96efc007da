"""Checks that this machine can be a site: folders, policy, ledger, keys, data, backbone, programs
that would start code of a run, and the cost of a run; and a site's figures for Prometheus.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import torch

from fedsurrogate.common.backbones.backbone_names import check_weights_file
from fedsurrogate.common.backbones.backbones import Backbone
from fedsurrogate.common.backbones.library_output import compare_with_library
from fedsurrogate.common.backbones.power_transform import with_power
from fedsurrogate.common.costs import costs
from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.common.extras import check_packages
from fedsurrogate.common.machine import available_memory, usable_cores, why_not_writable
from fedsurrogate.common.metrics_page import disk_series, series
from fedsurrogate.common.models.devices import gpus_of
from fedsurrogate.common.run import Run
from fedsurrogate.common.security.sealing import read_keys
from fedsurrogate.common.version import own_version

from ..datasets.dataset import Dataset, DataSource, check_run_classes, read_schema
from ..datasets.left_out import attempt
from ..datasets.partition import SiteShare, share
from ..datasets.source import some
from ..features.device_processes import in_parts
from ..features.site_features import examples_of, site_backbone, site_device
from ..governance.gate import Gate, open_gate
from ..governance.ledger import own_ledger
from ..governance.policy import NO_LIMIT, check_confirmed, policy_of
from ..governance.release import FALLBACK, check_dimension, verdict, why_held
from ..node_config import NodeConfig, is_protected, packages_of, readable_by_others
from ..offline.keys import coordinator_key
from ..processes.app_report import LEDGER, AppReport
from .connection_checks import Finding, State
from .first_look import check_classes, list_data

if TYPE_CHECKING:
    from prometheus_client import Metric


PROGRAM, STARTER = "flower-supernode", "flower-superexec"
# Names by which the text after `python -m` or `python -c` starts each program.
MODULES = {
    PROGRAM: r"flwr\.supernode\b|\bflower_supernode\b",
    STARTER: r"flwr\.supercore\.cli\b|\bflower_superexec\b",
}
# Linux keeps the first 15 characters of a program's name.
SHOWN = (PROGRAM[:15], STARTER[:15])
REMEDY = (
    "stop it, and start the site with `site join`, which runs only the code that is installed here"
)


def check_isolation() -> Finding:
    """Check the command lines of all processes that this user can see."""
    import psutil

    seen: dict[str, list[int]] = {}
    try:
        for process in psutil.process_iter():
            try:
                command = process.cmdline()
            except psutil.AccessDenied:
                hidden = process.name().startswith(SHOWN)
                seen.setdefault("hidden" if hidden else "", []).append(process.pid)
            except psutil.NoSuchProcess:
                continue
            else:
                seen.setdefault(_kind(command), []).append(process.pid)
    except (psutil.Error, OSError, RuntimeError) as error:
        facts = f"the processes of this machine cannot be listed ({type(error).__name__})"
        remedy = (
            f"make sure that no {PROGRAM} runs without --isolation process; `site join` starts none"
        )
        return Finding("isolation", "WARN", facts, remedy)
    listed = {kind: ", ".join(map(str, processes)) for kind, processes in seen.items()}
    foreign = (
        ("bare", f"{PROGRAM} runs without --isolation process"),
        ("starter", f"{STARTER} --plugin-type clientapp runs"),
    )
    if found := [f"{runs} (process {listed[kind]})" for kind, runs in foreign if kind in listed]:
        facts = f"{', '.join(found)}: it starts code that a run brings"
        return Finding("isolation", "FAIL", facts, REMEDY)
    if "hidden" in listed:
        which = f"{PROGRAM} or {STARTER} (process {listed['hidden']})"
        remedy = "ask its user whether it runs with --isolation process, and starts no apps itself"
        facts = f"the command line of {which} cannot be read"
        return Finding("isolation", "WARN", facts, remedy)
    if "isolated" in listed:
        facts = f"every {PROGRAM} here runs with --isolation process"
    else:
        facts = f"no {PROGRAM} runs here, and no {STARTER} for client apps"
    return Finding("isolation", "PASS", facts)


def _kind(command: Sequence[str]) -> str:
    if is_supernode(command):
        return "isolated" if is_isolated(command) else "bare"
    return "starter" if starts_client_apps(command) else ""


def is_supernode(command: Sequence[str]) -> bool:
    """Whether a command line starts a SuperNode, as a program or through a Python interpreter
    (script, module or code).
    """
    return _starts(command, PROGRAM)


def starts_client_apps(command: Sequence[str]) -> bool:
    """Whether a command line starts a SuperExec that runs client apps, with the code that they
    bring.
    """
    # An option may be shortened as long as it stays unique.
    chosen = [value for option, value in _options(command) if option.startswith("--pl")]
    return _starts(command, STARTER) and "clientapp" in chosen


def is_isolated(command: Sequence[str]) -> bool:
    """Whether the SuperNode starts no apps itself: every `--isolation` on its command line is
    `process`.
    """
    return {value for option, value in _options(command) if option == "--isolation"} == {"process"}


def _options(command: Sequence[str]) -> list[tuple[str, str]]:
    """Options and their values, in both of the forms in which they may be written."""
    joined = [each.partition("=")[::2] for each in command if each.startswith("--") and "=" in each]
    return [*joined, *pairwise(command)]


def _starts(command: Sequence[str], program: str) -> bool:
    """An editor or a shell may have the program's name in a later argument than a program has."""
    if command and PurePath(command[0]).name.startswith(("python", "pypy")):
        # Options of the interpreter come first; what it runs is the first that is none of them, or
        # follows -m or -c.
        line = " ".join(".".join(part.split()) for part in command[1:])
        letters = r"-[^\sWXmc-]*"
        before = rf"(?:{letters}[WX](?:\s+\S+|\S+)\s+|--\S+\s+(?:default|always|never)?\s*|{letters}\s+)*"
        found = re.match(rf"{before}(?:{letters}[mc]\s*(\S+)|([^\s-]\S*))", line)
        run, script = (found[1] or "", found[2] or "") if found else ("", "")
        return PurePath(script).stem == program or bool(re.search(MODULES[program], run))
    return any(PurePath(part).stem == program for part in command[:3])


GIB = 2**30
LEAST_DISK, LITTLE_DISK, LITTLE_MEMORY = 0.2 * GIB, 5 * GIB, 4 * GIB
MEASURED_IMAGES, MOST_CLASSES_SHOWN = 48, 12
# State, facts and remedy of a finding.
Outcome = tuple[State, str, str]
DATA = (
    "see data, data-dir and the columns in the node-config; in a kit DATA, DATA_KIND and LABEL_COLUMN in "
    ".env"
)
NAMES = "rename the folders or labels of this site as the run has them, or agree on others with the coordinator"
PEERS = (
    "set peers in the node-config (PEERS in the .env of a kit) to a file with the lines that `site offline key` "
    "prints there"
)
COORDINATOR = "take coordinator.pub from the site kit, or the output of `coordinator sites key` at the coordinator"
SPENT = "nothing more may leave; only a person may raise epsilon-total"
REPAIR = "every release is refused until it is repaired; see `site ledger show`"
OPEN = "`site join KIT` asks whether to open it; or type `site ledger open` once, with the same --node-config"
CLOSE = "`site join`, or the next request, closes those of this user; for others' files: chmod -R go-rwx"
BURNED_IN = "a model may learn a name in the pixels; black it out, or leave these images (BurnedInAnnotation) out"


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
    gate = partial(open_gate, node, run.settings.data, "doctor")
    own = own_ledger(node) is not None
    for key, folder, holds in (
        ("cache-dir", node.cache, "features"),
        ("state-dir", node.state, "the privacy ledger"),
        ("check-log-dir", node.check_log, "the ledger's check log"),
    )[: 3 if own else 2]:
        yield _found(key, "", partial(_folder, key, folder, holds))
    yield _found("other accounts", "see state-dir", lambda: _other_accounts(node))
    yield from _machine(run.settings.device, node)
    yield _found("policy", "see `site policy`", lambda: _policy(gate(), node))
    yield _found("ledger", REPAIR, lambda: _ledger(gate()))
    if node.peers or _demanded(gate):
        yield _found("peers", PEERS, lambda: _peers(gate, node))
    if node.coordinator_key:
        yield _found("requests", COORDINATOR, lambda: _requests(node))
    yield _found("packages", "", lambda: _packages(run, node))
    part: list[SiteShare] = []
    yield _found("data", DATA, lambda: _data(run, node, part))
    dimension = 0
    if part and part[0].dataset.features is None:
        loaded: list[Backbone] = []
        remedy = "see weights-path in the node-config; in a kit WEIGHTS and WEIGHTS_DIR in .env"
        yield _found("backbone", remedy, lambda: _backbone(run, node, part[0], fingerprint, loaded))
        if loaded:
            dimension = loaded[0].dim
            yield _found("time", "check the images", lambda: _time(part[0], loaded[0]))
    elif part:
        dimension = part[0].dataset.features.shape[1]  # type: ignore[union-attr]
        if fingerprint:
            shown = with_power(part[0].dataset.fingerprint, run.power)
            yield Finding("backbone", *_same(shown, with_power(fingerprint, run.power), "backbone"))
    if not run_named:
        remedy = "give the coordinator's planned settings with -c"
        yield Finding("a run", "WARN", "no settings of a run are given", remedy)
    elif part:
        remedy = "see `site policy` and `site ledger show`"
        yield _found("a run", remedy, lambda: _run(run, gate(), node, part[0], dimension))


def _found(what: str, remedy: str, check: Callable[[], Outcome]) -> Finding:
    """The finding of a check, which fails by an error, too."""
    try:
        return Finding(what, *check())
    except FedSurrogateError as error:
        return Finding(what, "FAIL", str(error), remedy)
    except Exception as error:
        return Finding(what, "FAIL", f"{type(error).__name__}: {error}", remedy)


def _folder(key: str, folder: Path, holds: str) -> Outcome:
    if why := why_not_writable(folder):
        remedy = f"give a folder for {holds} that user {os.getuid()} may write, as {key} in the "
        return "FAIL", f"{folder} cannot be written ({why})", f"{remedy}node-config"
    free = shutil.disk_usage(folder).free
    facts = f"{folder} can be written, {free / GIB:.1f} GiB free"
    if free >= LITTLE_DISK:
        return "PASS", facts, ""
    return "FAIL" if free < LEAST_DISK else "WARN", facts, f"free disk space; it is for {holds}"


def _other_accounts(node: NodeConfig) -> Outcome:
    if not (found := readable_by_others(node)):
        return "PASS", "none can read what is kept here", ""
    facts = f"they may read {len(found)} files or folders of this site, such as {found[0]}"
    return "WARN", facts, CLOSE


def _machine(wanted: str, node: NodeConfig) -> Iterator[Finding]:
    free, cores = available_memory(), usable_cores()
    little = free < LITTLE_MEMORY
    remedy = "4 GiB are enough for most backbones" if little else ""
    facts = f"{free / GIB:.1f} GiB free, {cores} cores"
    yield Finding("memory", "WARN" if little else "PASS", facts, remedy)
    try:
        device = site_device(wanted, node)
    except FedSurrogateError as error:
        yield Finding("GPU", "FAIL", str(error), "set device in the node-config")
        return
    if not device.startswith("cuda"):
        asked = "cpu" in (node.device, wanted)
        slow = "large backbones are slow on a CPU; check the driver with nvidia-smi, or set "
        remedy = "" if asked else f'{slow}device="cpu"'
        yield Finding("GPU", "PASS" if asked else "WARN", f"none is used; device {device}", remedy)
        return
    for each in gpus_of(torch.device(device)) or (device,):
        left, total = torch.cuda.mem_get_info(each)
        free_there = f"{left / GIB:.1f} of {total / GIB:.1f} GiB free"
        yield Finding("GPU", "PASS", f"{torch.cuda.get_device_name(each)}, {free_there}")


def _policy(gate: Gate, node: NodeConfig) -> Outcome:
    if node.data in ("", "digits") and not node.policy:
        return "PASS", "public data: everything may leave", ""
    check_confirmed(node, gate.policy)
    if node.policy:
        facts = f"{node.policy}: {gate.policy.in_words}"
        if gate.policy.irrevocable:
            return "WARN", facts, gate.policy.irrevocable
        return "PASS", facts, ""
    remedy = "set policy in the node-config to a file of your own"
    return "WARN", f"the default: {gate.policy.in_words}", remedy


def _ledger(gate: Gate) -> Outcome:
    if gate.ledger.is_new:
        return "FAIL", "these data have none, so nothing may leave", OPEN
    entries, spent, total = gate.ledger.entries(), gate.spent(), gate.policy.epsilon_total
    allowed = f" of {total:g}" if total < NO_LIMIT else ""
    facts = f"{len(entries)} releases so far, epsilon {spent:.4g}{allowed} spent"
    if noise := sum(FALLBACK in entry.get("facts", {}) for entry in entries):
        facts += f"; {noise} of them WITHOUT ANY RECORD, pure noise, because the records could not be used"
    if spent >= total:
        return "FAIL", facts, SPENT
    if why := gate.closed():
        return "WARN", facts, f"no private run is possible: {why}"
    remedy = "site.log in state-dir has the error; correct it before the next run"
    return ("WARN", facts, remedy) if noise else ("PASS", facts, "")


def _demanded(gate: Callable[[], Gate]) -> str:
    """What the policy demands that needs the keys of other sites."""
    try:
        policy = gate().policy
    except FedSurrogateError:
        return ""  # Another check reports the policy.
    sums = "require-secure-aggregation" if policy.require_secure_aggregation else ""
    return "require-seal" if policy.require_seal else sums


def _peers(gate: Callable[[], Gate], node: NodeConfig) -> Outcome:
    if node.peers:
        names = ", ".join(sorted(read_keys(Path(node.peers).expanduser())))
        return "PASS", f"{node.peers} has the keys of {names or 'no site'}", ""
    facts = f"{_demanded(gate)} = true, but the keys of other sites are not set: this site refuses "
    return "FAIL", f"{facts}every run", PEERS


def _requests(node: NodeConfig) -> Outcome:
    return "PASS", f"answered if signed with the key {coordinator_key(node).hex()[:16]}...", ""


def _packages(run: Run, node: NodeConfig) -> Outcome:
    check_packages(needed := packages_of(run, node))
    names = ", ".join(package for package, _ in needed)
    return "PASS", names or "no optional package is needed", ""


def _data(run: Run, node: NodeConfig, part: list[SiteShare]) -> Outcome:
    protected = is_protected(run.private, node)
    if protected:
        read_schema(DataSource.of_node(node, run))
    check_run_classes(node, run.settings.classes)
    records = share(run, node)
    part.append(records)
    unconfirmed = _unconfirmed(run.settings.classes, node, records.dataset)
    if protected and (held := why_held(node)):
        return "FAIL", f"private runs use no record: {held}", "see site.log"
    dataset = records.dataset
    facts, empty = _counted(records)
    smallest = policy_of(node).smallest_site
    if run.settings.classes and not len(dataset) and (there := list_data(node)[1]):
        return "FAIL", f"{facts}; the data have the classes {some(sorted(there))}", NAMES
    if len(dataset) < smallest and node.data not in ("", "digits"):
        facts += f"; the policy's smallest-site is {smallest}, so this site stays away"
        place = f"mount or fill data-dir = {node.data_dir!r}"
        return "FAIL", facts, f"{place}, or lower smallest-site in the policy"
    if not len(records.train):
        facts = "; ".join([facts, *dataset.report.lines()[1:]])
        return "FAIL", facts, "without training records only noise leaves, or nothing"
    lacks = f"no training record of class {empty!r}; check its name if you expect records"
    if dataset.left_out or dataset.warnings:
        private = " in this private run" if protected else ""
        if dataset.left_out:
            facts += f"; LEFT OUT{private}: {'; '.join(each.why for each in dataset.left_out)}"
        if dataset.warnings:
            facts += f"; WARNING: {'; '.join(dataset.warnings)}"
        correct = "correct these records; they are not reported to the coordinator"
        return "WARN", facts, correct if empty is None else lacks
    if count := dataset.burned_in:
        facts += f"; {count} images have text burned into their pixels, as their headers state"
        return "WARN", facts, BURNED_IN
    return ("PASS", facts, "; ".join(unconfirmed)) if empty is None else ("WARN", facts, lacks)


def _unconfirmed(chosen: Sequence[str], node: NodeConfig, dataset: Dataset) -> list[str]:
    """What to write into the settings about classes. Of a run's own classes no other is in its data."""
    if chosen:
        return check_classes(node, list_data(node)[1]) if node.classes else []
    return check_classes(node, {dataset.classes[at] for at in set(dataset.labels.tolist())})


def _counted(records: SiteShare) -> tuple[str, str | None]:
    """Records by class, patients and bags; and a class without a training record."""
    dataset = records.dataset
    counts = torch.bincount(dataset.labels[records.train], minlength=len(dataset.classes)).tolist()
    by_class = dict(zip(dataset.classes, counts, strict=True))
    named = [f"{name} {count}" for name, count in by_class.items()]
    more = f" and {len(named) - MOST_CLASSES_SHOWN} more" if len(named) > MOST_CLASSES_SHOWN else ""
    facts = f"{len(records.train)} training and {len(records.test)} test records: "
    facts += ", ".join(named[:MOST_CLASSES_SHOWN]) + more
    if (owners := dataset.patients) is not None:
        facts += f"; {len({owners[row] for row in records.train.tolist()})} patients"
    if bags := dataset.report.bags:
        facts += f"; {bags}"
    return facts, next((name for name, count in by_class.items() if not count), None)


def _backbone(
    run: Run, node: NodeConfig, part: SiteShare, fingerprint: str, loaded: list[Backbone]
) -> Outcome:
    if node.weights_path:
        # A run without weights needs none, but `site join` refuses a file that is not there.
        check_weights_file(Path(node.weights_path).expanduser())
    loaded.append(backbone := site_backbone(run.settings, node))
    if is_protected(run.private, node):
        check_dimension(backbone)
    dimension = backbone.dim or _first_dimension(part, backbone)
    own = with_power(backbone.fingerprint_at(dimension), run.power)
    facts = f"{run.settings.backbone}, {backbone.in_words}fingerprint {own}"
    if (compared := _compared(part, backbone)) is not None:
        words, same = compared
        facts += f"; {words}"
        if same is False:
            return (
                "FAIL",
                facts,
                "the files may be damaged, or of another version; fetch them again",
            )
    if fingerprint:
        return _same(own, with_power(fingerprint, run.power), facts)
    return "PASS", facts, ""


def _compared(part: SiteShare, backbone: Backbone) -> tuple[str, bool | None] | None:
    """The comparison of the first image that can be read with the backbone's own library."""
    for row in range(len(part.dataset)):
        image = attempt(partial(part.dataset.open_image, row))
        if not isinstance(image, BaseException):
            return compare_with_library(backbone, backbone.preprocess(image))
    return None


def _first_dimension(part: SiteShare, backbone: Backbone) -> int:
    """The dimension of the first image that can be read; 0 if there is none."""
    rows = range(len(part.dataset))
    with closing(in_parts(part.dataset.open_image, [rows], backbone, 1)) as pieces:
        return next((piece.features.shape[1] for piece in pieces if piece.features is not None), 0)


def _same(own: str, wanted: str, facts: str) -> Outcome:
    if own == wanted:
        return "PASS", f"{facts}, as the coordinator's", ""
    remedy = "use the coordinator's weights, image-size and backbone"
    return "FAIL", f"{facts}; this site has {own}, the coordinator {wanted}", remedy


def _time(part: SiteShare, backbone: Backbone) -> Outcome:
    """Estimate the time for all images from that for the first ones."""
    started, done, rows = time.perf_counter(), 0, range(len(part.dataset))
    broken: list[int] = []
    with closing(in_parts(part.dataset.open_image, [rows], backbone, MEASURED_IMAGES)) as pieces:
        for piece in pieces:
            done += len(piece.rows)
            broken += [row for row, _ in piece.broken]
            if done + len(broken) >= MEASURED_IMAGES:
                break
    tried = done + len(broken)
    minutes = (time.perf_counter() - started) / max(1, tried) * len(rows) / 60
    where = " on one GPU" if len(gpus_of(backbone.device)) > 1 else ""
    facts = f"about {math.ceil(minutes)} min for the features of {len(rows)} images{where}, once; "
    facts += "then cached"
    named = f", such as {examples_of(part.dataset, broken)}" if broken else ""
    if not done:
        facts = f"none of the first {len(broken)} images can be read{named}"
        return "FAIL", facts, "check the images"
    if broken:
        facts += f"; {len(broken)} of the first {tried} images cannot be read{named}"
        return "WARN", facts, "check the images"
    return "PASS", facts, ""


def _run(run: Run, gate: Gate, node: NodeConfig, part: SiteShare, dimension: int) -> Outcome:
    """Whether the policy allows this run, and what it costs in bytes and epsilon."""
    found = verdict(run, gate, node, len(part.train))
    facts, own = f"method {run.settings.method}", run.settings
    if dimension:
        cost = costs(run, dimension, len(part.dataset.classes), len(part.train), 1)[0]
        sent = f"{cost.up / 1e6:.3g} MB up and {cost.down / 1e6:.3g} MB down"
        facts += f", {sent} in {cost.rounds} rounds"
    if found.refusal:
        return "FAIL", f"{facts}: {found.refusal}", "see `site policy` and `site ledger show`"
    if run.mechanism is None:
        return "PASS", f"{facts}, no differential privacy, which the policy allows", ""
    facts += (
        f", epsilon {own.epsilon:g} where {found.left:.4g} is left: {found.runs_left} such runs fit"
    )
    return "WARN" if found.warnings else "PASS", facts, "; ".join(found.warnings)


USER = "`site metrics`"


class SiteCollector:
    """The figures of a site, as a `prometheus_client` collector.

    Args:
        report: what gives them at each request; None if the site's app does not answer.
        of_app: whether a running app reports, and not this process.
    """

    def __init__(self, report: Callable[[], AppReport | None], of_app: bool) -> None:
        self._report, self._of_app = report, of_app

    def collect(self) -> Iterable[Metric]:
        """All current metrics."""

        def figure(name: str, help_text: str, *values: float) -> Metric:
            return series(name, help_text, (), [((), value) for value in values])

        found = self._report()
        yield figure("app_up", "1 if the site's app answers.", found is not None)
        if self._of_app:
            help_text = "1 if the app found the data that the policy's smallest-site asks for, and so joins."
            yield figure("data_found", help_text, found is not None and found.found_data)
        if found is None:
            return
        yield series(
            "site_info", "The site, and the version of this page.", ("site", "version"),
            [((found.site, own_version()), 1.0)],
        )  # fmt: skip
        help_text = "1 if the folder of data has anything in it; a run on an empty one gets noise."
        yield figure("data_present", help_text, found.data_present)
        for name, help_text in LEDGER.items():
            yield figure(name, help_text, *([found.ledger[name]] if name in found.ledger else ()))
        yield from disk_series(found.disks)
