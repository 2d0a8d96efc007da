"""Attacks on the release that this site would make for a run: does it show which records were used?
Nothing leaves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsurrogate.common.errors import MOST_CLASSES, ConfigError, DataError
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import Run
from fedsurrogate.common.surrogates.mixtures import in_frame
from fedsurrogate.common.surrogates.surrogates import AnySurrogate
from fedsurrogate.common.wire.model_proto import unpack_parameters
from fedsurrogate.common.wire.records import unpack_surrogate

from ..features.site_features import LabelledFeatures, SiteFeatures, in_simulation, load_site
from ..governance.policy import policy_of
from ..governance.release import site_function
from ..governance.work_limits import SiteLimits
from ..methods.task import Task
from ..node_config import NodeConfig
from .generators import generator_of, generator_scores
from .membership import (
    AttackResult,
    Excess,
    Mask,
    Matrix,
    Near,
    NearestRecords,
    Trials,
    allowed_auc,
    coded_scores,
    distinct,
    largest_excess,
    lira,
    nearest,
    proven_epsilon,
    rmia,
    scores_of,
    success,
    summary,
    usual_distance,
)

# Fewest and most releases that are made from halves of the records, in pairs of complements.
FEWEST, MOST = 8, 64
# Most records that are attacked. More are drawn at random, so that an audit ends in minutes at a
# large site.
MOST_RECORDS = 4000
# A record stands out if its scores with and without it lie so many standard deviations apart: at
# one false alarm in a thousand, the attack then finds it in more than half of the releases.
STANDS_OUT = 3.1
MOST_NAMED = 20
LIRA, RMIA = "LiRA on the release", "RMIA on the head"
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class StandingOut:
    """A record that the attack finds.

    Attributes:
        row: in its data set.
        class_name: its class.
        where: the record is, at this site.
        distance: see `distinct`.
    """

    row: int
    class_name: str
    where: str
    distance: float


@dataclass(frozen=True)
class ReleaseAudit:
    """What attacks on a release found.

    Attributes:
        method: of the run.
        mechanism: its privacy mechanism; "none" without a claim.
        epsilon: of the claim; 0 without one.
        records: attacked ones.
        of: all training records.
        releases: number of attacked releases.
        attack: the first attack.
        attack_name: its name.
        others: further attacks by name.
        allowed: largest AUC that the claim allows, 1 without one.
        excess: of each attack, how much more it finds than the claim allows; None if it allows
            everything.
        proven: epsilon that the attack refutes, see `proven_epsilon`; 0 for none.
        per_class: number of records and attack AUC by class.
        nearest: means of the releases and the records next to them; None without means.
        standing_out: the records that stand out most.
        standing_out_count: number of records that stand out.
        seconds: that the audit took.
    """

    method: str
    mechanism: str
    epsilon: float
    records: int
    of: int
    releases: int
    attack: AttackResult
    attack_name: str
    others: dict[str, AttackResult]
    allowed: float
    excess: dict[str, Excess | None]
    proven: float
    per_class: dict[str, tuple[int, float]]
    nearest: NearestRecords | None
    standing_out: tuple[StandingOut, ...]
    standing_out_count: int
    seconds: float

    @property
    def attacks(self) -> dict[str, AttackResult]:
        """All attacks by name."""
        return {self.attack_name: self.attack} | self.others

    def facts(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def audit_release(
    run: Run,
    node: NodeConfig,
    seconds: float = 60.0,
    most: int = MOST,
    progress: Progress | None = None,
    seed: int | None = None,
) -> ReleaseAudit:
    """Attack the release of a one-shot method, or a generator that this site trains alone by the
    run's rounds.

    Each release is made by the site's own code from about half of the units, drawn at random, so it
    shows more of a record than the real release would.

    Args:
        run: whose release is attacked.
        node: the site's settings.
        seconds: after these no further pair of releases is made, but there are at least eight.
        most: number of releases.
        progress: is called with the number of releases so far, and `most`.
        seed: of the halves; by default they differ each time.

    Raises:
        ConfigError: for other methods.
        DataError: for too few records.
    """
    if not (run.plan.releases_once or run.plan.training.section == "dpcvae"):
        raise ConfigError(
            f"method = {run.settings.method!r}: an audit attacks releases of one-shot methods and "
            "generators; this one replies to received models"
        )
    started, drawn = time.monotonic(), np.random.default_rng(seed)
    site_features = load_site(run, node, policy_of(node).cache_mib)
    rows = np.arange(len(site_features.train.labels))
    if len(rows) > MOST_RECORDS:
        rows = np.sort(drawn.choice(rows, MOST_RECORDS, replace=False))
    sample = torch.from_numpy(rows)
    groups = _groups(site_features.train, sample)
    if len(np.unique(groups)) < 4:
        raise DataError(f"{len(np.unique(groups))} units of training records; an audit needs four")
    kinds: dict[str, list[Matrix]] = {}
    members: list[Mask] = []
    near: list[Near] = []
    # Records with another target than classes are of one group.
    classes = site_features.classes if run.target is None else (run.target.title,)
    sent: AnySurrogate | Parameters | None = None
    usual = usual_distance(site_features.train.features[sample])
    while len(members) < most and (len(members) < FEWEST or time.monotonic() - started < seconds):
        half = _half(groups, drawn)
        if half.all() or not half.any():
            continue
        for inside in (half, ~half):
            own = _part(site_features, sample[torch.from_numpy(inside)])
            sent, scores, means = _attack(run, node, own, site_features.train, sample, inside)
            near += means
            for name, each in scores.items():
                kinds.setdefault(name, []).append(each.numpy())
            members.append(inside)
            if progress is not None:
                progress(len(members), most)
    trials = {name: Trials(np.stack(each), np.stack(members)) for name, each in kinds.items()}
    ratios = {name: lira(each) for name, each in trials.items()}
    first = next(iter(trials))
    if isinstance(sent, Parameters) and "weight" in sent.tensors:
        ratios[RMIA] = rmia(trials[first])
    # Sums of a target have two attacks, and a record may stand out in either.
    shown = list(trials.values()) if run.target is not None else [trials[first]]
    inside, apart = trials[first].members, np.max([distinct(each) for each in shown], axis=0)
    attacks = {name: success(each, inside) for name, each in ratios.items()}
    epsilon, delta = float(run.settings.epsilon or 0), float(run.settings.delta or 0)
    excess = {
        name: largest_excess(each, inside, epsilon, delta) if epsilon else None
        for name, each in ratios.items()
    }
    return ReleaseAudit(
        method=run.settings.method,
        mechanism=run.plan.mechanism_name if run.settings.epsilon else "none",
        epsilon=epsilon,
        records=len(sample),
        of=len(site_features.train.labels),
        releases=len(inside),
        attack=attacks.pop(first),
        attack_name=first,
        others=attacks,
        allowed=allowed_auc(epsilon, delta),
        excess=excess,
        # For patients with several records the answers are not counted here.
        proven=proven_epsilon(trials[first], delta)
        if len(np.unique(groups)) == len(groups)
        else 0.0,
        per_class=_by_class(ratios[first], inside, site_features.train.labels[sample], classes),
        nearest=summary(near, usual),
        standing_out=_named(run, node, site_features.train, classes, sample, apart),
        standing_out_count=int((apart > STANDS_OUT).sum()),
        seconds=time.monotonic() - started,
    )


def _attack(
    run: Run,
    node: NodeConfig,
    own: SiteFeatures,
    train: LabelledFeatures,
    sample: Tensor,
    inside: Mask,
) -> tuple[AnySurrogate | Parameters | None, dict[str, Tensor], list[Near]]:
    """A release from some of the records, the scores of all that are attacked, and its means."""
    features, labels = train.features[sample], train.labels[sample]
    if run.plan.training.section == "dpcvae":
        return None, generator_scores(generator_of(run, node, own), features, labels), []
    payload = _release(run, node, own)
    if run.target is not None:
        sums, values = unpack_parameters(payload), train.values
        assert values is not None
        return sums, coded_scores(sums, run.target, features, values[sample]), []
    surrogate = run.plan.combination.makes_surrogates
    sent = unpack_surrogate(payload) if surrogate else unpack_parameters(payload)
    features, classes = in_frame(features, sent.header.frame), own.classes
    scores = {LIRA: scores_of(sent, classes, features, labels)}
    return sent, scores, nearest(sent, classes, features, labels, torch.from_numpy(inside))


def _groups(train: LabelledFeatures, sample: Tensor) -> NDArray[np.int64]:
    """The unit (n,) of each attacked record: itself, or its patient."""
    if train.units is None:
        return np.arange(len(sample))
    return np.unique([train.units[row] for row in sample.tolist()], return_inverse=True)[1].astype(
        np.int64
    )


def _half(groups: NDArray[np.int64], drawn: np.random.Generator) -> Mask:
    """Half of the units, each with probability 1/2: a claim holds for one unit, whatever the others
    are.
    """
    return np.asarray((drawn.random(groups.max() + 1) < 0.5)[groups])


def _part(site_features: SiteFeatures, rows: Tensor) -> SiteFeatures:
    """This site with these training records only."""
    train, units = site_features.train, site_features.train.units
    own = replace(
        train,
        features=train.features[rows],
        labels=train.labels[rows],
        units=None if units is None else tuple(units[row] for row in rows.tolist()),
        values=None if train.values is None else train.values[rows],
    )
    return replace(site_features, train=own)


def _release(run: Run, node: NodeConfig, site_features: SiteFeatures) -> bytes:
    """What the site's own code would send if it had only these training records."""
    policy = policy_of(node)
    # Half of the records: a class that the real release has must not vanish here.
    smallest = max(1, policy.smallest_class // 2) if not run.settings.epsilon else 1
    limits = SiteLimits(node.max_components, node.max_rank, smallest, MOST_CLASSES)
    task = Task(run, node, "audit", site_features, limits, info={"lineage": "audit"})
    return site_function(run.plan.combination)(task).payload


def _by_class(
    ratios: Matrix, members: Mask, labels: Tensor, classes: Sequence[str]
) -> dict[str, tuple[int, float]]:
    from sklearn.metrics import roc_auc_score

    result = {}
    for index, name in enumerate(classes):
        own = labels.numpy() == index
        if own.any():
            auc = float(roc_auc_score(members[:, own].ravel(), ratios[:, own].ravel()))
            result[name] = (int(own.sum()), auc)
    return result


def _named(
    run: Run,
    node: NodeConfig,
    train: LabelledFeatures,
    classes: Sequence[str],
    sample: Tensor,
    apart: Any,
) -> tuple[StandingOut, ...]:
    """The records that stand out most, with their places on this site's disk."""
    order = [int(place) for place in np.argsort(-apart) if apart[place] > STANDS_OUT][:MOST_NAMED]
    rows = [int(sample[place]) for place in order]
    inside = rows if train.rows is None else train.rows[rows].tolist()
    names = [classes[int(train.labels[row])] for row in rows]
    distances = [float(apart[place]) for place in order]
    return tuple(map(StandingOut, inside, names, _places(run, node, inside), distances))


def _places(run: Run, node: NodeConfig, rows: list[int]) -> list[str]:
    from ..datasets.partition import share

    dataset = share(run, node, in_simulation()).dataset
    return [dataset.where(row) for row in rows]
