"""Replies of a site: message -> gate -> method -> reply. No maths here; only numbers, codes and
surrogates leave.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from fedsurrogate.common.errors import (
    LOG,
    ConfigError,
    DataError,
    DisputeError,
    FedSurrogateError,
    LedgerError,
    PolicyError,
    SurrogateError,
)
from fedsurrogate.common.extras import check_packages
from fedsurrogate.common.files import stage_file
from fedsurrogate.common.logs import TextLines
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.privacy.gaussian_mechanism import repeatable
from fedsurrogate.common.run import kept_run
from fedsurrogate.common.security.sealing import public_key
from fedsurrogate.common.settings.base import Scalar, parse_overrides
from fedsurrogate.common.signed_models.signed_model import received_model
from fedsurrogate.common.version import own_version
from fedsurrogate.common.wire.model_proto import pack_classifier
from fedsurrogate.common.wire.records import DISPUTED, Info, from_record, to_record
from fedsurrogate.common.wire.tensors import is_name

from .audit.output import check_attacks
from .datasets.dataset import DataSource, load_all
from .datasets.images import remembered
from .features.site_features import (
    SiteFeatures,
    check_addressee,
    in_simulation,
    load_site,
    site_name,
)
from .governance import work_limits
from .governance.gate import Gate, after, check_counting, check_sealed_request, in_clear, open_gate
from .governance.policy import note_policy
from .governance.release import charge_and_release, entry, hold, planned, prepare, without_records
from .governance.work_limits import SiteLimits, check_size, remove_oldest
from .methods.evaluation import (
    check_comparable,
    compare,
    kept_head,
    own_classifier,
    received_classifier,
)
from .methods.job import Job, MethodOutput, SiteRequest
from .model_use.store import keep_received
from .node_config import (
    NodeConfig,
    check_stated,
    close_to_others,
    is_protected,
    not_writable,
    packages_of,
    parse_node_config,
)
from .offline.keys import private_key
from .secure_aggregation import sum_keys, sum_list, sum_open, sum_shares

if TYPE_CHECKING:
    from fedsurrogate.common.wire.records import Record


def named_site(node: NodeConfig, run_config: Mapping[str, Scalar], flower_run: str) -> str:
    """The name that the data give a simulated site; empty where they give none.

    Args:
        node: the site's settings.
        run_config: the run's settings, flat.
        flower_run: id of the run.
    """
    by_column = run_config.get("partition") == "column"
    if node.site or node.data or node.num_partitions < 2 or not by_column:
        return ""
    try:
        # Each request would read the data for them.
        names = remembered(("names", flower_run), lambda: _names(run_config))
    except FedSurrogateError:
        # What is wrong with the data is said where they are used.
        return ""
    return names[node.partition_id] if len(names) == node.num_partitions else ""


def _names(run_config: Mapping[str, Scalar]) -> tuple[str, ...]:
    """In the order in which sites are numbered."""
    run = kept_run(run_config)
    dataset, *others = load_all(DataSource.of_run(run.settings, run.target), run.settings.seed)
    if others or dataset.origin is None:
        return ()
    pairs = zip(dataset.origin, dataset.is_train.tolist(), strict=True)
    names = tuple(sorted({name for name, trains in pairs if trains}))
    return names if all(map(is_name, names)) else ()


LARGEST_MODEL = 2**30
# Requests that may contain a model; the others have no payload.
WITH_MODEL = ("surrogate", "evaluation", "comparison", "sum-shares", "sum-list", "sum-open")

# Number in the ledger of what a site reports before the first round.
BEFORE_ROUNDS = 0

Answer = tuple[bytes | None, Info]


def identify_site(
    stated: Mapping[str, Scalar],
    node_id: int,
    run: tuple[Mapping[str, Scalar], str],
    own: str | None = None,
) -> tuple[NodeConfig, str]:
    """This site's own settings, and its name.

    Args:
        stated: the settings that came with a message, flat.
        node_id: Flower's number for the site.
        run: its settings, flat, and its id.
        own: the node-config with which this site was started; None for a simulated site, which has the
            stated ones.

    Raises:
        ConfigError: for settings that are wrong, or that are stated otherwise than the own ones.
    """
    node = parse_node_config(stated if own is None else parse_overrides([own]))
    if own is not None:
        _open_log(node)
        check_stated(node, stated)
        return node, site_name(node, node_id)
    # Elsewhere the run's settings, which a coordinator writes, decide nothing about files.
    named = named_site(node, *run) if in_simulation() else ""
    return node, named or site_name(node, node_id)


def answer(
    work: str,
    content: Record,
    run_config: Mapping[str, Scalar],
    flower_run: str,
    node: NodeConfig,
    site: str,
) -> Record:
    """The reply to a message.

    Args:
        work: kind of request, a key of WORK.
        content: of the message.
        run_config: the run's settings, flat.
        flower_run: id of the run.
        node: the site's settings.
        site: name of the site.

    Raises:
        FedSurrogateError: and any error of a library.
    """
    close_to_others(node)
    _open_log(node)
    run = kept_run(run_config)
    check_addressee(content, site)
    gate = open_gate(node, run.settings.data, flower_run)
    policy = gate.policy
    note_policy(node, policy)
    if run.settings.site_names and site not in run.settings.site_names:
        raise PolicyError(f"the run asks only {', '.join(run.settings.site_names)}, not this site")
    check_sealed_request(policy, run.settings.fedpft.seal, node.peers, work)
    check_counting(run.settings.counting, run.settings.secure_aggregation, work)
    # Check form and size before reading the content, and count the request before work that takes
    # time.
    payload, info = from_record(content, LARGEST_MODEL if work in WITH_MODEL else 0)
    request = SiteRequest(run, node, site, flower_run=flower_run, payload=payload, info=info)
    work_limits.check_work(run.plan.work(len(run.settings.classes), 0), policy, run.settings)
    work_limits.admit(run.settings, node, policy, flower_run)
    before = gate.check_receipts(info.get("receipts", ""))
    if work != "name":
        # Before any work, and before records are looked at: settings and installed software alone
        # decide this.
        check_packages(packages_of(run, node))
    if work in CHECKED:
        gate.check_request(run)
    job = f"{site} {work} {info.get('round', 1)}"
    once = _one_by_one(node, site) if run.settings.secure_aggregation else nullcontext()
    with once, _noise(run.settings.noise_seed, run.settings.seed, job):
        try:
            payload, reported = WORK[work](request, gate)
        except DisputeError as error:
            # Places in the coordinator's own key list say whom this site does not accept; no text
            # leaves.
            LOG.error("%s: %s", error.code, error)
            return to_record(
                None, {"status": error.code, DISPUTED: list(error.places), "site": site}
            )
    reply: Info = (
        {"status": "ok"}
        | in_clear(policy, work, reported)
        | gate.new_receipt(before)
        | {"site": site, "version": own_version()}
    )
    return to_record(payload, reply if payload is None else reply | {"bytes": len(payload)})


def _noise(noise_seed: int, seed: int, job: str) -> AbstractContextManager[object]:
    """Noise that can be repeated, where a simulation asks for it; a hospital refuses."""
    if not noise_seed:
        return nullcontext()
    if not in_simulation():
        raise ConfigError(
            f"noise-seed = {noise_seed} makes privacy noise that anybody can repeat, and this site is no "
            "simulated one; the run must have noise-seed = 0"
        )
    return repeatable(f"{noise_seed} {seed} {job}")


def _one_by_one(node: NodeConfig, site: str) -> AbstractContextManager[object]:
    """No two steps of secure aggregation at once: each reads this site's state before it signs or reveals
    anything.
    """
    return FileLock(node.state / "sums" / f"{site}.lock")


def _surrogate(request: SiteRequest, gate: Gate) -> Answer:
    run, node = request.run, request.node
    request.check_run()
    prepared = prepare(request, gate)
    made, failure = prepared.made, prepared.failure
    check_attacks(run, node, gate.policy)
    reported: Info = {"simulated": prepared.found.simulated, **made.answer}
    if not (run.settings.epsilon or run.settings.secure_aggregation) or prepared.found.simulated:
        # The duration of the work reveals the number of records, and in a private run no exact
        # number may leave.
        reported |= {"fit-seconds": prepared.fit_seconds, "extract-seconds": prepared.found.seconds}
    if not failure.explained:
        hold(node, failure.text)
    charge_and_release(gate, prepared.release, _staged(made.keep, made.must_keep), made.guard)
    remove_oldest(node, gate.policy.kept_mib)
    return made.payload, reported


def _staged(keep: Mapping[Path, bytes], must_keep: bool) -> dict[Path, Path]:
    """The temporary files of files for the next round, written before this round is charged.

    When one cannot be written, raises LedgerError if the next round needs it, else leaves it out.
    """
    staged: dict[Path, Path] = {}
    for file, content in keep.items():
        try:
            staged[file] = stage_file(file, content)
        except OSError as error:
            if must_keep:
                for temporary in staged.values():
                    temporary.unlink(missing_ok=True)
                raise LedgerError(
                    f"{file} cannot be written ({error}), and the next round needs it"
                ) from None
            LOG.error("%s cannot be written (%s); the next round begins from noise", file, error)
    return staged


def _identification(request: SiteRequest, gate: Gate) -> Answer:
    run, node = request.run, request.node
    request.check_run()
    if run.private and not (run.settings.resume or gate.has_charged(request.flower_run)):
        # What the budget cannot pay for is refused before another site is charged.
        gate.check_planned(planned(request))
    site_features = _features(request, gate, is_protected(run.hides_sites, node))
    dimension = site_features.train.features.shape[1]
    classes = len(run.settings.classes)
    check_size(run.plan.work(classes, dimension), gate.policy, dimension, classes)
    reported: Info = {
        "fingerprint": site_features.fingerprint,
        "dimension": dimension,
        "simulated": site_features.simulated,
    }
    # Which classes a site has may be private; then the run names all classes.
    if site_features.simulated or gate.exact_numbers_may_leave(run.hides_sites):
        limits = SiteLimits(smallest_class=gate.smallest_class(run.plan.mechanism_name))
        facts = _facts(request.job(site_features, limits))
        if facts and not site_features.simulated:
            made = MethodOutput("".join(facts.values()).encode())
            gate.let_out(entry(run, request.flower_run, made, BEFORE_ROUNDS))
        reported |= facts
    if run.settings.fedpft.seal:
        reported["key"] = public_key(private_key(node, request.site)).hex()
    if run.settings.secure_aggregation:
        reported["key"] = sum_keys(request, gate.policy)
    return None, reported


def _features(request: SiteRequest, gate: Gate, unread: bool) -> SiteFeatures:
    """This site's features; unread: those of a site without any record."""
    if unread:
        return without_records(request.run, request.node)
    return load_site(request.run, request.node, gate.policy.cache_mib)


def _facts(job: Job) -> dict[str, str]:
    """The classes of this site, unless the run names them; and the frame of its columns, if these
    need one, and the run's sites train in a common one.
    """
    run = job.run
    facts = {} if run.settings.classes else {"classes": json.dumps(job.classes)}
    if run.plan.kind == "rounds":
        # A site without records to release says so in its first round.
        with suppress(DataError):
            if frame := job.own_frame(run.settings.classes or job.classes):
                facts["frame"] = base64.b64encode(frame).decode()
    return facts


def _head(request: SiteRequest, gate: Gate) -> Answer:
    run = request.run
    if run.settings.epsilon or run.settings.fedpft.seal or run.settings.secure_aggregation:
        raise PolicyError(
            "in a private or sealed run, or secure aggregation, a head that a site trained on its own "
            "records does not leave it"
        )
    if gate.policy.limits_attacks:
        raise PolicyError(
            "the policy limits attacks on releases without privacy, and the head that a site kept "
            "from a chain cannot be attacked before it leaves"
        )
    made = MethodOutput(pack_classifier(kept_head(request.state)))
    gate.let_out(entry(run, request.flower_run, made, after(run.rounds)))
    return made.payload, {}


def _evaluation(request: SiteRequest, gate: Gate) -> Answer:
    run, node = request.run, request.node
    _keep(request, gate)
    silent = bool(node.data) and (
        gate.policy.limits_attacks
        or not gate.policy.exact_sums_at_models
        or not gate.exact_numbers_may_leave(run.hides_sites)
    )
    # No result may leave then, so none is computed. In a private run the model is checked; a
    # generator is kept in any.
    if silent and not (run.private or run.plan.combination.keeps_result):
        return None, {}
    unread = silent and (is_protected(run.private, node) or not run.private)
    site_features = _features(request, gate, unread)
    reported: Info = load(run.plan.combination.evaluate)(request.job(site_features), gate)
    if silent:
        return None, {}
    if run.target is None:
        LOG.info(
            "the model of run %s classifies %s of %s test records of this site correctly",
            run.digest,
            reported["correct"],
            reported["tested"],
        )
    if not site_features.simulated:
        made = MethodOutput(json.dumps(reported).encode())
        gate.let_out(entry(run, request.flower_run, made, after(run.rounds)))
    return None, reported | {"simulated": site_features.simulated}


def _keep(request: SiteRequest, gate: Gate) -> None:
    """Keep the signed model that came with this request, at a site with its own data. It depends on
    no record.
    """
    if request.node.data and (model := received_model(request.payload, request.info)) is not None:
        own = request.run.digest, request.flower_run
        if (model.manifest.run, model.manifest.flower_run) != own:
            raise SurrogateError(
                f"a signed model of run {model.manifest.run!r}, in a request of "
                f"{request.run.digest!r}"
            )
        charged = gate.has_charged(request.flower_run)
        keep_received(request.node, model, charged, gate.policy.kept_mib)


def _comparison(request: SiteRequest, gate: Gate) -> Answer:
    run, node = request.run, request.node
    check_comparable(node)
    if run.plan.combination.personal:
        model = own_classifier(request.job(load_site(run, node, gate.policy.cache_mib)))
    else:
        model = received_classifier(request.payload, "" if run.plan.counts else run.digest)
    return None, compare(model, run, node, baselines=request.info.get("brief") is not True)


def _open_log(node: NodeConfig) -> None:
    """Open the site's own log, a rotating file in its state folder; the console shows the log too.
    Raises StorageError.
    """
    path = node.state / "site.log"
    try:
        node.state.mkdir(parents=True, exist_ok=True)
        if any(
            isinstance(h, RotatingFileHandler) and h.baseFilename == str(path.absolute())
            for h in LOG.handlers
        ):
            return
        # Names of files may hold bytes that are no text.
        handler = RotatingFileHandler(
            path, maxBytes=5_000_000, backupCount=5, encoding="utf-8", errors="backslashreplace"
        )
    except OSError as error:
        raise not_writable(
            "state-dir", node.state, error.strerror or type(error).__name__
        ) from None
    handler.setFormatter(TextLines("%(asctime)s %(levelname)s %(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)


WORK: dict[str, Callable[[SiteRequest, Gate], Answer]] = {
    # The name only, which every reply contains.
    "name": lambda request, gate: (None, {}),
    "surrogate": _surrogate,
    "identification": _identification,
    "sum-shares": lambda request, gate: sum_shares(request, gate.policy),
    "sum-list": lambda request, gate: sum_list(request, gate.policy),
    "sum-open": lambda request, gate: sum_open(request, gate.policy),
    "head": _head,
    "evaluation": _evaluation,
    "comparison": _comparison,
}
# Requests that the policy checks here; `prepare` checks those for a surrogate.
CHECKED = WORK.keys() - {"name", "surrogate", "comparison"}
