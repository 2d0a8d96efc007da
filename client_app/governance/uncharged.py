"""Replies that are not charged to the ledger, in a private run or a secure sum: they must not depend
on the data.

The rule: **before a charge, nothing may depend on data.** In a private run every uncharged reply of
a hospital, refusals and their codes included, is a function of public facts and of the site's own
settings: the request, the node-config, the policy, the ledger, the backbone, the installed
software, whether the configured folder can be read, and the schema of its files
(client_app/datasets/schema.py). One more record, a broken record or one of another class changes
none of these.

The mechanism: the site does the same work as if it had no record (`without_records`). A failure in
that work depends on public facts only, and its code may leave. Single records that cannot be used
are left out alone (client_app/datasets/left_out.py, one_record.py), and copies
(client_app/datasets/duplicates.py): whatever one record is, the others are used as they were. A
failure that occurs only with records must not show. The site then writes it to its log and ledger,
shows it in `site doctor` and `site dry-run`, and releases the output of the empty site: pure noise,
charged as always. That is private where the failure has a cause that no single record can have
(client_app/datasets/whole_site.py has the list). Any other failure may be about one record, so it
shows at most once: from then on the records are held (`hold`) until a person has looked. A refusal
would show it for nothing, and a release without records changes by more than one record, so no
coordinator may make it show again: private runs get what a site without records would release, until
a person deletes the file that `why_held` names.

A secure sum without noise keeps the same rule for all replies before the sum is opened: whatever one
hospital's records are, the masked vector has the same form, and only the opened total depends on
them. A site without records, or whose records cannot be used, adds zeros. A class that is too small
for the policy is left out of the vector, and the run learns it, if at all, from the total. Where
records must not be in the sum, because they have changed since an earlier one or lie beyond its
range, the site does not refuse but makes the total random (client_app/secure_sum/steps.py). What
it refuses follows from settings, policy and earlier sums (client_app/secure_sum/same_sites.py).

The one exception is theorem-4.1. Its claim says that class sizes, and which classes a site has, are
public. So a site whose classes are all too small replies with the code `data`. The default policy
refuses this mechanism.

Not covered: the time of a reply, and a process that ends before its reply, for example for lack of
memory. With `site release` a person sees the failure, and no bundle is made until that person
decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from fedsurrogate.client_app.datasets.dataset import DataSource
from fedsurrogate.client_app.datasets.one_record import described, ends_process
from fedsurrogate.client_app.datasets.partition import check_settings
from fedsurrogate.client_app.datasets.schema import read_schema
from fedsurrogate.client_app.datasets.whole_site import SourceError, cause_of
from fedsurrogate.client_app.features.site_features import (
    NO_FEATURES,
    LabelledFeatures,
    SiteFeatures,
    load_site,
    site_backbone,
)
from fedsurrogate.client_app.governance.ledger import dataset_id
from fedsurrogate.client_app.node_config import NodeConfig, packages_of
from fedsurrogate.common.backbones.backbones import Backbone
from fedsurrogate.common.backbones.feature_power import with_power
from fedsurrogate.common.errors import ConfigError, LedgerError
from fedsurrogate.common.extras.needed import check_packages
from fedsurrogate.common.files import replace_file, stage_file
from fedsurrogate.common.run import Run

T = TypeVar("T")
# Larger than what `hold` writes.
ROOM = 4096
log = logging.getLogger("fedsurrogate.site")


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
        log.critical("%s cannot be written (%s): THE RECORDS STAY IN USE", file, error)
        return
    log.critical(
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
    try:
        stage_file(file, bytes(ROOM), durable=False).unlink()
    except OSError as error:
        raise LedgerError(
            f"'{file}' could not be written ({error}), so the records could not be held after a "
            "failure that may be about one of them; make room, and let this user write there"
        ) from None


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
    schema, backbone = read_schema(DataSource.of_node(node, run)), None
    dimension, fingerprint = schema.dimension, schema.fingerprint
    if run.settings.counting.kind == "survey":
        dimension, fingerprint = 1, NO_FEATURES
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
    run: Run,
    node: NodeConfig,
    cache_mib: float,
    work: Callable[[SiteFeatures, NodeConfig], T],
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
        log.error("THE RECORDS ARE NOT USED: %s", held)
        return work(empty, on_cpu), empty, Failure(held)
    check_room(node)
    try:
        site_features = load_site(run, node, cache_mib, backbone)
        if _outline(site_features) != _outline(empty):
            raise SourceError(
                f"the records give {_outline(site_features)}, the site's schema and backbone "
                f"{_outline(empty)}"
            )
        if not len(
            site_features.test.labels
            if run.settings.counting.kind == "evaluation"
            else site_features.train.labels
        ):
            log.error(
                "this site has no usable record of the run's classes; its release is pure noise, "
                "or zeros in a secure sum"
            )
        return work(site_features, node), site_features, Failure()
    except BaseException as error:
        # Not only Exception: libraries call sys.exit, and a panic in a Rust library is a
        # BaseException.
        if ends_process(error):
            raise
        cause = cause_of(error)
        made = work(empty, on_cpu)
        log.exception(
            "THE RECORDS CANNOT BE USED (%s); in this private run or secure sum the site replies as "
            "if it had none: pure noise, or zeros",
            cause or "NO LISTED CAUSE",
        )
        return made, empty, Failure(described(error), explained=bool(cause))


def _outline(site_features: SiteFeatures) -> tuple[str, int, tuple[str, ...]]:
    return site_features.fingerprint, site_features.train.features.shape[1], site_features.classes
