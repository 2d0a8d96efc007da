"""A release before it leaves: a method's packed output, and its entry for the ledger; and replies
that are not charged, which must not depend on the data. And whether this site would take part in a run, the
one answer of gate, doctor and `site check`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from fedsurrogate.common.backbones.backbones import Backbone
from fedsurrogate.common.backbones.power_transform import with_power
from fedsurrogate.common.errors import LOG, ConfigError, FedSurrogateError, LedgerError, told_as
from fedsurrogate.common.extras import check_packages
from fedsurrogate.common.files import put_in_place, replace_file, stage_file
from fedsurrogate.common.methods.method import Combination, load
from fedsurrogate.common.privacy.accounting import budget_warnings
from fedsurrogate.common.privacy.mechanism import EXACT_COUNTS
from fedsurrogate.common.run import Run

from ..datasets.dataset import DataSource, read_schema
from ..datasets.left_out import SourceError, cause_of, described, ends_process
from ..datasets.partition import check_settings
from ..features.site_features import (
    NO_FEATURES,
    LabelledFeatures,
    SiteFeatures,
    load_site,
    site_backbone,
)
from ..methods.job import Job, MethodOutput, SiteRequest
from ..node_config import NodeConfig, is_protected, packages_of
from .budget import Release
from .gate import Gate
from .ledger import dataset_id
from .work_limits import check_size

T = TypeVar("T")
# Larger than what `hold` writes.
ROOM = 4096


def hold(node: NodeConfig, failure: str) -> None:
    """Let no private run use the records from now on.

    Args:
        node: the site's settings.
        failure: that nothing explains.
    """
    file = _file(node)
    try:
        replace_file(file, f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC: {failure}\n")
    except OSError as error:
        LOG.critical("%s cannot be written (%s): THE RECORDS STAY IN USE", file, error)
        return
    LOG.critical(
        "NO CAUSE IN THE LIST EXPLAINS THIS FAILURE (%s), so it may be about a single record. "
        "Private runs use no record from now on. Report it, correct the cause, then delete '%s'",
        failure,
        file,
    )


def check_room(node: NodeConfig) -> None:
    """Refuse a private run, before records are looked at, where a failure could not be held.

    Otherwise a defect that one record triggers would show in every run: on a full disk, or in a
    folder that cannot be written.

    Args:
        node: the site's settings.

    Raises:
        LedgerError: whatever the records are.
    """
    file = _file(node)
    with told_as(
        LedgerError,
        f"'{file}' could not be written",
        "so the records could not be held after a failure that may be about one of them; make "
        "room, and let this user write there",
    ):
        stage_file(file, bytes(ROOM), durable=False).unlink()


def why_held(node: NodeConfig) -> str:
    """Why private runs use no record, and what ends this; empty if they do.

    Args:
        node: the site's settings.
    """
    file = _file(node)
    if not file.exists():
        return ""
    failure = file.read_text(errors="replace").strip()
    return (
        f"held since {failure}; nothing explains this failure, so it may be about a single record: "
        f"correct the cause, then delete '{file}'"
    )


def _file(node: NodeConfig) -> Path:
    return node.state / "held" / f"{dataset_id(node.data, node.data_dir)}.txt"


# Name of a fact in a ledger entry; facts stay at the site.
FALLBACK = "made-without-records"


def without_records(run: Run, node: NodeConfig) -> SiteFeatures:
    """This site without any record: backbone, dimension and classes, from settings and schema
    alone.

    Args:
        run: that asks for it.
        node: the site's settings.

    Raises:
        ConfigError, PackageError, DataError, BackboneError: each a function of public facts.
    """
    return _empty(run, node)[0]


def _empty(run: Run, node: NodeConfig) -> tuple[SiteFeatures, Backbone | None]:
    """As `without_records`; also the backbone if the data are images."""
    check_settings(run.settings, node)
    # With records alone a missing package would look like records that cannot be used.
    check_packages(packages_of(run, node))
    (dimension, fingerprint), backbone = read_schema(DataSource.of_node(node, run)), None
    if run.settings.counting.kind == "survey":
        dimension, fingerprint = max(1, len(run.settings.counting.images)), NO_FEATURES
    if not dimension:
        backbone = site_backbone(run.settings, node)
        check_dimension(backbone)
        dimension, fingerprint = backbone.dim, backbone.fingerprint
    fingerprint = with_power(fingerprint, run.power)
    units = () if node.protects == "patient" else None
    columns = 0 if run.target is None else len(run.target.columns)
    none = LabelledFeatures(
        torch.zeros(0, dimension),
        torch.zeros(0, dtype=torch.int64),
        units,
        values=None if run.target is None else torch.zeros(0, columns, dtype=torch.float64),
    )
    site = SiteFeatures(
        none, replace(none, units=None), run.settings.classes, fingerprint, 0.0, simulated=False
    )
    return site, backbone


def check_dimension(backbone: Backbone) -> None:
    """Raise ConfigError for a backbone whose dimension depends on the images: it would reveal their
    size.
    """
    if not backbone.dim:
        raise ConfigError(
            f"backbone = {backbone.name!r} with image-size = 0: the dimension would depend on the "
            "images, which a private run must not show; set image-size"
        )


class Failure(NamedTuple):
    """Why records were not used.

    Attributes:
        text: for the site itself; empty if they were used.
        explained: whether it has a cause that no single record can have. Otherwise the records must
            be held before a release leaves, see `hold`.
    """

    text: str = ""
    explained: bool = True


def with_records(
    run: Run, node: NodeConfig, cache_mib: float, work: Callable[[SiteFeatures, NodeConfig], T]
) -> tuple[T, SiteFeatures, Failure]:
    """Do `work` on this site's records; if that fails, do it without records.

    Raises only the errors of the work without records.

    Args:
        run: that asks for it.
        node: the site's settings.
        cache_mib: the most that the site keeps of computed features, MiB.
        work: it may be called twice, so it must not leave state that breaks a second call.

    Returns:
        The result, the site features it was made from, and the failure, empty if there was none.
    """
    empty, backbone = _empty(run, node)
    # On the CPU: a GPU that has failed once may fail again.
    on_cpu = node.model_copy(update={"device": "cpu"})
    if held := why_held(node):
        LOG.error("THE RECORDS ARE NOT USED: %s", held)
        return work(empty, on_cpu), empty, Failure(held)
    check_room(node)
    try:
        site_features = load_site(run, node, cache_mib, backbone)
        if _outline(site_features) != _outline(empty):
            raise SourceError(
                f"the records give {_outline(site_features)}, the site's schema and backbone "
                f"{_outline(empty)}"
            )
        judges = run.settings.counting.kind == "evaluation"
        if not len((site_features.test if judges else site_features.train).labels):
            LOG.error(
                "this site has no usable record of the run's classes; its release is pure noise, "
                "or zeros in secure aggregation"
            )
        return work(site_features, node), site_features, Failure()
    except BaseException as error:
        # Not only Exception: libraries call sys.exit, and a panic in a Rust library is a
        # BaseException.
        if ends_process(error):
            raise
        cause = cause_of(error)
        made = work(empty, on_cpu)
        LOG.exception(
            "THE RECORDS CANNOT BE USED (%s); in this private run or secure aggregation the site replies as "
            "if it had none: pure noise, or zeros",
            cause or "NO LISTED CAUSE",
        )
        return made, empty, Failure(described(error), explained=bool(cause))


def _outline(site_features: SiteFeatures) -> tuple[str, int, tuple[str, ...]]:
    return site_features.fingerprint, site_features.train.features.shape[1], site_features.classes


# Folder of the disclosure sheets, in the state folder.
DISCLOSURES = "disclosures"


@dataclass(frozen=True)
class Prepared:
    """A payload before its release.

    Attributes:
        made: what may leave.
        release: its entry for the ledger.
        found: the site's features that it was made from.
        fit_seconds: the time that it took.
        failure: why it was made without records in a private run. It stays at the site.
    """

    made: MethodOutput
    release: Release
    found: SiteFeatures
    fit_seconds: float
    failure: Failure


def prepare(request: SiteRequest, gate: Gate, affordable: bool = True) -> Prepared:
    """Make the requested payload; nothing leaves and nothing is charged.

    Args:
        request: what is asked for.
        gate: of the site.
        affordable: whether to refuse, before any work, a release that the budget cannot pay for.

    Raises:
        FedSurrogateError: for a request that the site refuses or cannot serve.
    """
    run, node = request.run, request.node
    gate.check_request(run)
    if affordable:
        gate.check_planned(planned(request))
    limits = gate.limits(run.plan.mechanism_name, node)

    def make(site_features: SiteFeatures, node: NodeConfig) -> tuple[MethodOutput, int, float]:
        named = max(len(site_features.classes), len(run.settings.classes))
        dimension = site_features.train.features.shape[1]
        check_size(run.plan.work(named, dimension), gate.policy, dimension, named)
        started, job = time.perf_counter(), replace(request, node=node).job(site_features, limits)
        return site_function(run.plan.combination)(job), job.round, time.perf_counter() - started

    if is_protected(run.hides_sites, node):
        (made, number, seconds), site_features, failure = with_records(
            run, node, gate.policy.cache_mib, make
        )
    else:
        site_features, failure = load_site(run, node, gate.policy.cache_mib), Failure()
        made, number, seconds = make(site_features, node)
    if failure.text:
        made = replace(made, facts=made.facts | {FALLBACK: 1.0})
    release = replace(
        entry(run, request.flower_run, made, number), disclosure=disclosure_of(node, run.digest)
    )
    if gate.exact_counts(run):
        release = replace(release, mechanism=EXACT_COUNTS)
    return Prepared(made, release, site_features, seconds, failure)


def entry(run: Run, flower_run: str, made: MethodOutput, number: int = 1) -> Release:
    """The ledger's entry for the output of a round.

    Args:
        run: whose settings made it.
        flower_run: id of the run.
        made: the output; without a claim it is a release without privacy.
        number: of the round, from one.
    """
    claim = made.claim
    noise = claim.noise if claim else {}
    return Release(
        run=run.full_digest,
        flower_run=flower_run,
        method=run.method.name,
        round=number,
        mechanism=claim.name if claim else "none",
        events=(claim.event(number),) if claim else (),
        unit=claim.unit if claim else "record",
        epsilon=claim.epsilon if claim else 0.0,
        delta=claim.delta if claim else 0.0,
        sigmas={name: sigma for name, (sigma, _) in noise.items()},
        sensitivities={name: sensitivity for name, (_, sensitivity) in noise.items()},
        facts=made.facts,
        bytes=len(made.payload),
        sha256=hashlib.sha256(made.payload).hexdigest(),
        sealed=made.sealed,
        sample_rate=run.trained.sample_rate if run.plan.mechanism_name == "dp-sgd" else 1.0,
        rounds=claim.rounds if claim else 0,
        opens=bool(claim) and run.plan.messages.first is not None,
    )


def disclosure_of(node: NodeConfig, run: str) -> str:
    """The address of the newest disclosure sheet for a run, relative to the state folder; empty if
    there is none.
    """
    sheets = sorted(
        (node.state / DISCLOSURES).glob(f"{run}-*.json"),
        key=lambda file: (file.stat().st_mtime_ns, file.name),
    )
    return f"{DISCLOSURES}/{sheets[-1].stem}" if sheets else ""


def planned(request: SiteRequest) -> Release:
    """The entry of a release before any work: run, round and noise. It depends on settings and
    request only. Raises SurrogateError for a round below one.
    """
    run, number = request.run, request.round
    claim = run.mechanism_for("patient" if request.node.protects == "patient" else "record")
    return entry(run, request.flower_run, MethodOutput(b"", claim), number)


def site_function(combination: Combination) -> Callable[[Job], MethodOutput]:
    """The function that computes a site's part of the run's method."""
    function: Callable[[Job], MethodOutput] = load(combination.site)
    return function


def charge_and_release(
    gate: Gate,
    release: Release,
    staged: Mapping[Path, Path],
    guard: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Charge a release, then give its staged files their final names.

    Staged files are deleted if the release may not leave.

    Args:
        gate: that charges it.
        release: its entry.
        staged: the temporary file of each file.
        guard: see `MethodOutput`.

    Raises:
        LedgerError: if a file cannot get its name.
    """
    try:
        with guard():
            gate.let_out(release)
            for file, temporary in staged.items():
                # Flushed before the release leaves: after a power failure, a site must not mask a
                # second vector with the same masks.
                with told_as(
                    LedgerError, f"{file} cannot be written", "the charged release does not leave"
                ):
                    put_in_place(temporary, file)
    except BaseException:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Verdict:
    """The gate's answer to a run.

    Attributes:
        refusal: why it would refuse the run; empty if it would let it begin.
        spent: the part of epsilon-total that is spent.
        total: epsilon-total.
        runs_left: such runs that fit; None without privacy.
        warnings: of budget, in words.
    """

    refusal: str
    spent: float
    total: float
    runs_left: int | None
    warnings: tuple[str, ...]

    @property
    def left(self) -> float:
        """The part of epsilon-total that is left."""
        return max(0.0, self.total - self.spent)


def verdict(run: Run, gate: Gate, node: NodeConfig, records: int = 0) -> Verdict:
    """Ask the gate what it does with each request of a run, and before each release.

    Nothing is computed, charged or sent. It depends on settings, policy and ledger, never on records.

    Args:
        run: of the coordinator.
        gate: of this site.
        node: the site's settings.
        records: number of training records, for a warning about delta; 0 if it is not known.

    Raises:
        LedgerError: the ledger cannot be trusted.
    """
    own, refusal, left = run.settings, "", None
    try:
        gate.check_request(run)
        gate.check_planned(planned(SiteRequest(run, node, node.site, flower_run="check", info={})))
    except FedSurrogateError as error:
        refusal = str(error)
    warnings = budget_warnings(own.epsilon, own.delta, records)
    if run.mechanism is not None:
        left = gate.runs_left(run.mechanism.events)
        if not left and not refusal:
            warnings = ["some of its rounds would be refused: ask for a smaller epsilon", *warnings]
    return Verdict(refusal, gate.spent(), gate.policy.epsilon_total, left, tuple(warnings))
