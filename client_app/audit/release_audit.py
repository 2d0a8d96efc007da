"""Attacks on the release that this site would make for a run: does it show which records were used?
Nothing leaves.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot

from fedsurrogate.common.errors import MOST_CLASSES, ConfigError, DataError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.models.generators import (
    COUNTS,
    MEANS,
    SUMS,
    AnyGenerator,
    Decoder,
    fresh_generator,
    scaled,
    tensors_of,
)
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.models.training_parts import UncompiledAdam
from fedsurrogate.common.run import Run
from fedsurrogate.common.surrogates.mixtures import in_frame
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, Header
from fedsurrogate.common.wire.model_proto import pack_parameters, unpack_parameters
from fedsurrogate.common.wire.records import unpack_surrogate

from ..datasets.partition import share
from ..features.site_features import LabelledFeatures, SiteFeatures, in_simulation, load_site
from ..governance.policy import policy_of
from ..governance.release import site_function
from ..governance.work_limits import SiteLimits
from ..methods.job import Job
from ..node_config import NodeConfig
from . import membership
from .membership import nearest

# Synthetic embeddings of each class that the black box is asked for.
DRAWN = 500
# Steps to the latent vector that explains a record best, for decoders that are not linear.
STEPS, RATE = 100, 0.05


def generator_of(run: Run, node: NodeConfig, site_features: SiteFeatures) -> AnyGenerator:
    """The generator that this site's code trains in all rounds of a run with one site.

    Nothing is charged or kept. Class means are the sums over the counts, without the shrinkage that
    a coordinator adds to noisy ones.

    Args:
        run: whose rounds are made.
        node: the site's settings.
        site_features: records of the site.
    """
    classes, d = site_features.classes, site_features.train.features.shape[1]
    module = fresh_generator(run.settings, run.method.adversarial, len(classes), d)
    tensors = tensors_of(module)
    header = Header(run.settings.method, run.digest, "audit", site_features.fingerprint, classes)
    with tempfile.TemporaryDirectory(prefix="audit-") as name:
        here = node.model_copy(update={"state_dir": name})
        for number in range(1, run.rounds + 1):
            payload = pack_parameters(Parameters(header, number, tensors))
            info = {"round": number, "confirmed": number - 1, "lineage": "audit"}
            made = site_function(run.plan.combination)(
                Job(run, here, "audit", site_features, payload=payload, info=info)
            )
            for file, content in made.keep.items():
                replace_file(file, content)
            reply = unpack_parameters(made.payload).tensors
            if number > 1:
                tensors = {
                    key: tensor + reply[key] if key in reply else tensor
                    for key, tensor in tensors.items()
                }
                continue
            tensors = tensors | {COUNTS: reply[COUNTS].clamp_min(0)}
            if SUMS in reply:
                tensors |= {MEANS: reply[SUMS] / reply[COUNTS].clamp_min(1)[:, None] * math.sqrt(d)}
    module.load_state_dict(tensors)
    return module


def generator_scores(module: AnyGenerator, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Scores of records by attack; first the strongest, which reads the decoder of a VAE.

    Args:
        module: the generator.
        features: of the records, (n, d).
        labels: indices of classes, (n,).

    Returns:
        Scores (n,) by name of the attack, larger for members.
    """
    features = features.float()
    black = {"closest synthetic embedding (black box)": closest_synthetic(module, features, labels)}
    if not isinstance(module, Decoder):
        return black
    return {
        "likelihood under the decoder (white box)": likelihood(module, features, labels)
    } | black


def closest_synthetic(module: AnyGenerator, features: Tensor, labels: Tensor) -> Tensor:
    """Black box: minus the distance of records from the closest synthetic one of their class.

    Args:
        module: the generator.
        features: of the records, (n, d).
        labels: indices of classes, (n,).

    Returns:
        Scores (n,), larger for members.

    Source: Chen et al. 2020, "GAN-Leaks", section 4.1.
    """
    generator, scores = torch.Generator().manual_seed(0), torch.zeros(len(labels))
    records, classes = scaled(features), len(module.means)
    for label in torch.unique(labels).tolist():
        kinds = one_hot(torch.full((DRAWN,), label), classes).float()
        with torch.no_grad():
            made = module.draw(kinds, generator)
        own = labels == label
        scores[own] = -torch.cdist(records[own], made).amin(1)
    return scores / math.sqrt(features.shape[1])


def likelihood(decoder: Decoder, features: Tensor, labels: Tensor) -> Tensor:
    """White box: log likelihood of records under the decoder.

    Exact for linear maps, whose embeddings are Gaussian in each class. Otherwise the joint log
    likelihood with the latent vector that explains the record best, which Adam looks for from the
    prior's mean. A variance that is not learned is one.

    Args:
        decoder: of the generator.
        features: of the records, (n, d).
        labels: indices of classes, (n,).

    Returns:
        Log likelihoods (n,) in nats.
    """
    records, kinds = scaled(features), torch.eye(len(decoder.means))
    if decoder.layers is None:
        return _exact(decoder, records, labels, kinds)
    return _best(decoder, records, kinds[labels])


def _exact(decoder: Decoder, records: Tensor, labels: Tensor, kinds: Tensor) -> Tensor:
    """With one Gaussian for each class, a row of `kinds`."""
    likelihoods = torch.zeros(len(records))
    with torch.no_grad():
        loadings, spread = decoder.linear.weight[:, : decoder.latent], decoder.log_variance(kinds)
        middle, log_width = decoder.prior_of(kinds)
        mean = decoder(middle, kinds)
        for label in torch.unique(labels).tolist():
            own = labels == label
            diagonal = torch.ones(records.shape[1]) if spread is None else spread[label].exp()
            factor = loadings * (log_width[label] / 2).exp()
            gaussian = torch.distributions.LowRankMultivariateNormal(
                mean[label].double(), factor.double(), diagonal.double()
            )
            likelihoods[own] = gaussian.log_prob(records[own].double()).float()  # type: ignore[no-untyped-call]
    return likelihoods


def _best(decoder: Decoder, records: Tensor, kinds: Tensor) -> Tensor:
    middle, log_width = (part.detach() for part in decoder.prior_of(kinds))
    z = middle.clone().requires_grad_()
    optimiser = UncompiledAdam([z], lr=RATE)

    def losses() -> Tensor:
        squares, spread = (records - decoder(z, kinds)).square(), decoder.log_variance(kinds)
        missed = squares if spread is None else squares / spread.exp() + spread
        misfits: Tensor = (
            missed.sum(1) + ((z - middle).square() / log_width.exp() + log_width).sum(1)
        ) / 2
        return misfits

    for _ in range(STEPS):
        (z.grad,) = torch.autograd.grad(losses().sum(), [z])
        optimiser.step()
    constant = (records.shape[1] + decoder.latent) * math.log(2 * math.pi) / 2
    likelihoods: Tensor = -losses().detach() - constant
    return likelihoods


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
    attack: membership.AttackResult
    attack_name: str
    others: dict[str, membership.AttackResult]
    allowed: float
    excess: dict[str, membership.Excess | None]
    proven: float
    per_class: dict[str, tuple[int, float]]
    nearest: membership.NearestRecords | None
    standing_out: tuple[StandingOut, ...]
    standing_out_count: int
    seconds: float

    @property
    def attacks(self) -> dict[str, membership.AttackResult]:
        """All attacks by name."""
        return {self.attack_name: self.attack} | self.others


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
    if not (run.plan.releases_once or run.plan.training.generates):
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
    kinds: dict[str, list[membership.Matrix]] = {}
    members: list[membership.Mask] = []
    near: list[membership.Near] = []
    # Records with another target than classes are of one group.
    classes = site_features.classes if run.target is None else (run.target.title,)
    sent: AnySurrogate | Parameters | None = None
    usual = membership.usual_distance(site_features.train.features[sample])
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
    trials = {
        name: membership.Trials(np.stack(each), np.stack(members)) for name, each in kinds.items()
    }
    ratios = {name: membership.lira(each) for name, each in trials.items()}
    first = next(iter(trials))
    if isinstance(sent, Parameters) and "weight" in sent.tensors:
        ratios[RMIA] = membership.rmia(trials[first])
    # Sums of a target have two attacks, and a record may stand out in either.
    shown = list(trials.values()) if run.target is not None else [trials[first]]
    inside = trials[first].members
    apart = np.max([membership.distinct(each) for each in shown], axis=0)
    attacks = {name: membership.success(each, inside) for name, each in ratios.items()}
    epsilon, delta = float(run.settings.epsilon or 0), float(run.settings.delta or 0)
    excess = {
        name: membership.largest_excess(each, inside, epsilon, delta) if epsilon else None
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
        allowed=membership.allowed_auc(epsilon, delta),
        excess=excess,
        # For patients with several records the answers are not counted here.
        proven=membership.proven_epsilon(trials[first], delta)
        if len(np.unique(groups)) == len(groups)
        else 0.0,
        per_class=_by_class(ratios[first], inside, site_features.train.labels[sample], classes),
        nearest=membership.summary(near, usual),
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
    inside: membership.Mask,
) -> tuple[AnySurrogate | Parameters | None, dict[str, Tensor], list[membership.Near]]:
    """A release from some of the records, the scores of all that are attacked, and its means."""
    features, labels = train.features[sample], train.labels[sample]
    if run.plan.training.generates:
        return None, generator_scores(generator_of(run, node, own), features, labels), []
    payload = _release(run, node, own)
    if run.target is not None:
        sums = unpack_parameters(payload)
        values = train.targets()[sample]
        return sums, membership.coded_scores(sums, run.target, features, values), []
    surrogate = run.plan.combination.makes_surrogates
    sent = unpack_surrogate(payload) if surrogate else unpack_parameters(payload)
    features, classes = in_frame(features, sent.header.frame), own.classes
    scores = {LIRA: membership.scores_of(sent, classes, features, labels)}
    return sent, scores, nearest(sent, classes, features, labels, torch.from_numpy(inside))


def _groups(train: LabelledFeatures, sample: Tensor) -> NDArray[np.int64]:
    """The unit (n,) of each attacked record: itself, or its patient."""
    if train.units is None:
        return np.arange(len(sample))
    return np.unique([train.units[row] for row in sample.tolist()], return_inverse=True)[1].astype(
        np.int64
    )


def _half(groups: NDArray[np.int64], drawn: np.random.Generator) -> membership.Mask:
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
    job = Job(run, node, "audit", site_features, limits, info={"lineage": "audit"})
    return site_function(run.plan.combination)(job).payload


def _by_class(
    ratios: membership.Matrix, members: membership.Mask, labels: Tensor, classes: Sequence[str]
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
    dataset = share(run, node, in_simulation()).dataset if rows else None
    places = [dataset.where(row) for row in inside] if dataset else []
    return tuple(map(StandingOut, inside, names, places, distances))
