"""What an answer may depend on before it is charged to the ledger.

The rule: **what may depend on data before a charge: nothing.** In a private run every answer of a hospital that is not
charged, refusals and their codes included, is a function of public things and of the site's own settings: the request, the
node-config, the policy, the ledger, the backbone, whether the configured folder can be read, and the schema of its files
(client_app/datasets/schema.py). One record more, a broken one or one of another class changes none of these.

The mechanism: the same work is done for a site without a single record (`without_records`). What fails there as well is a
function of public things, and its code may leave. A failure that the empty site does not have must not show: the site
writes it to its log and to its ledger, shows it in `site doctor` and `site dry-run`, and releases what the empty site would,
pure noise, charged as always. Single records that cannot be used are left out before that (client_app/datasets/left_out.py).

The one exception is theorem-4.1. Its own claim says that class sizes, and which classes a site has, are public, so a site
whose classes are all too small answers `data`. The default policy refuses this mechanism.

Not covered: when a site answers, and that its process may end before it does, for want of memory say. A person who runs
`site release` sees the failure itself and no bundle is made: nothing is answered until that person decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from client_app.datasets.dataset import DataSource
from client_app.datasets.partition import check_settings
from client_app.datasets.schema import read_schema
from client_app.features.site_features import LabelledFeatures, SiteFeatures, load_site, site_backbone
from client_app.node_config import NodeConfig
from common.config.run_config import RunConfig
from common.errors import ConfigError, DataError
from common.models.backbones import Backbone

T = TypeVar("T")
# Stands among a release's facts in the ledger; facts stay at the site.
FALLBACK = "made-without-records"
log = logging.getLogger("fedsurrogate.site")


def without_records(run: RunConfig, node: NodeConfig) -> SiteFeatures:
    """This site as it would be without a single record: backbone, dimension and classes, from settings and schema alone.

    Raises ConfigError, DataError or BackboneError, each a function of public things.
    """
    return _empty(run, node)[0]


def _empty(run: RunConfig, node: NodeConfig) -> tuple[SiteFeatures, Backbone | None]:
    """The same, and the backbone, where the data are images."""
    check_settings(run, node)
    schema, backbone = read_schema(DataSource.of_node(node, run)), None
    dimension, fingerprint = schema.dimension, schema.fingerprint
    if not dimension:
        backbone = site_backbone(run, node)
        check_dimension(backbone)
        dimension, fingerprint = backbone.dim, backbone.fingerprint
    units = () if node.protects == "patient" else None
    none = LabelledFeatures(torch.zeros(0, dimension), torch.zeros(0, dtype=torch.int64), units)
    site = SiteFeatures(none, replace(none, units=None), run.classes, fingerprint, 0.0, simulated=False)
    return site, backbone


def check_dimension(backbone: Backbone) -> None:
    """Raise ConfigError for a backbone whose dimension is that of the images: it would tell of them."""
    if not backbone.dim:
        raise ConfigError(
            f"backbone = {backbone.name!r} with image-size = 0: the dimension would depend on the images, which a private "
            "run must not show; set image-size"
        )


def with_records(
    run: RunConfig, node: NodeConfig, work: Callable[[SiteFeatures, NodeConfig], T]
) -> tuple[T, SiteFeatures, str]:
    """Do `work` on this site's records; where that fails, do it without records.

    Returns the result, the site it was made of, and what failed, empty where nothing did. Raises only what the work without
    records raises. work: must leave nothing behind that a second call would stumble over.
    """
    empty, backbone = _empty(run, node)
    try:
        found = load_site(run, node, backbone)
        if _outline(found) != _outline(empty):
            raise DataError(f"the records give {_outline(found)}, the site's schema and backbone {_outline(empty)}")
        if not len(found.train.labels):
            log.error("this site has no training record of the run's classes; what leaves is pure noise")
        return work(found, node), found, ""
    except BaseException as error:
        # Not only what is an Exception: libraries call sys.exit, and a panic in one written in Rust is none.
        if isinstance(error, KeyboardInterrupt) or _told_to_end(error):
            raise
        failure = f"{type(error).__name__}: {error}"
        # On the processor: a GPU that has failed once may fail at anything that follows.
        made = work(empty, node.model_copy(update={"device": "cpu"}))
        log.exception("THE RECORDS CANNOT BE USED; in this private run the site answers as if it had none: pure noise")
        return made, empty, failure


def _outline(found: SiteFeatures) -> tuple[str, int, tuple[str, ...]]:
    return found.fingerprint, found.train.features.shape[1], found.classes


def _told_to_end(error: BaseException) -> bool:
    """Whether Flower ends this process, as it does on a signal; then nothing more is worked out, and nothing charged."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = "" if place is None else str(place.tb_frame.f_globals.get("__name__"))
    return isinstance(error, SystemExit) and where.startswith("flwr.")
