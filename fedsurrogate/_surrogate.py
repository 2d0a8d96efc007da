"""Surrogates of sites, and a model learned from them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, overload

import torch

from fedsurrogate import _inputs
from fedsurrogate._arrays import Array, names_of, pooled, shown
from fedsurrogate._model import ImageModel, Model
from fedsurrogate._targets import sent_at_once, values_of, with_target_columns
from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.backbones.backbone_names import with_columns
from fedsurrogate.common.backbones.power_transform import raised, with_power
from fedsurrogate.common.errors import ConfigError, SurrogateError
from fedsurrogate.common.methods.method import load as load_target
from fedsurrogate.common.privacy.accounting import (
    GaussianEvent,
    budget_warnings,
    calibrate,
    epsilon_spent,
)
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.signed_models.signed_model import SUFFIX, read_signed_model
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import load_model
from fedsurrogate.common.wire.records import pack_public_mean
from fedsurrogate.strategies import stored_strategy
from fedsurrogate.strategies.pooling.class_means import read_centre

# The name of a site that the user gave none.
UNNAMED = "site"
Loaded = TypeVar("Loaded", bound="Surrogate | Model")


@dataclass(frozen=True, repr=False)
class Surrogate:
    """What a site sends.

    Attributes:
        payload: canonical bytes.
        config: holds the settings that it was made with.
        header: origin.
        records: number of the records that it stands for.
        dimension: of the features.
        values: the classes by name, as the user has them: predictions have their type. Empty for a
            surrogate that was read from a file.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> sent = fit(*load_iris(return_X_y=True), site="north")
        >>> isinstance(sent.payload, bytes), sent.header.site
        (True, 'north')
    """

    payload: bytes
    config: Run
    header: Header
    records: int
    dimension: int
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def site(self) -> str:
        """Name of the site."""
        return self.header.site

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of its classes."""
        return self.header.classes

    def save(self, path: str | Path) -> Path:
        """Write the bytes that a site would send.

        Args:
            path: of the file, which ends in .pb.

        Returns:
            The file.

        Raises:
            ConfigError: for a file that cannot be written.
        """
        with _inputs.writing(path, ".pb") as file:
            file.write_bytes(self.payload)
        return file

    def __repr__(self) -> str:
        own = self.config.settings
        budget = f"epsilon {own.epsilon:g}" if own.epsilon else "no privacy"
        return (
            f"Surrogate(site {self.site!r}, {own.method}, {len(self.classes)} classes, dimension "
            f"{self.dimension}, {len(self.payload)} bytes, {budget})"
        )


def fit(
    features: Array,
    labels: Array,
    *,
    site: str = UNNAMED,
    classes: Sequence[object] | None = None,
    patients: Sequence[object] | None = None,
    bags: Sequence[object] | None = None,
    method: str = "fedpft",
    **settings: Any,
) -> Surrogate:
    """Make what a site would send for its records.

    No gate and no ledger is involved: nothing counts how often you release.

    Args:
        features: (n, d).
        labels: (n,), class names or numbers; predictions have their type. With another `target`,
            its values: labels (n, L) of 1, 0 and NaN, numbers (n,) or (n, r), or times (n, 2) with
            events, also as a structured array. Columns of a data frame may have any order: outputs
            of the model are in the order of their names, see `classes_`.
        site: its name; `learn` numbers sites without one.
        classes: all classes of the run, required with `epsilon`.
        patients: (n,), whose record each is: with `epsilon` they are the unit of privacy, else
            records are.
        bags: (n,), of which unit each record is an image: the images of one are one record, the mean
            of their features.
        method: a one-shot method.
        settings: of the run, such as `epsilon` and `delta`, or of the method, such as `rank`.

    Returns:
        What the site would send.

    Raises:
        ConfigError: for settings that do not agree, or a method that does not send everything at
            once.
        DataError: for features or labels that cannot be used.

    Example:
        >>> import torch
        >>> x = torch.rand(8, 2, generator=torch.Generator().manual_seed(0))
        >>> surrogate = fit(x, ["nevus", "melanoma"] * 4, site="north")
        >>> surrogate.classes, surrogate.records, surrogate.dimension
        (('melanoma', 'nevus'), 8, 2)
    """
    if classes is not None:
        settings = settings | {"classes": classes}
    if bags is not None:
        settings = settings | {"features__bag": "mean"}
    named = with_target_columns(settings, [(features, labels)], alone=True)
    config = parse_run(_inputs.flat_settings(method, sent_at_once(named)))
    if not config.plan.answers_files:
        raise ConfigError(f"method = {method!r} does not send everything at once; use simulate")
    if config.settings.noise_seed:
        raise ConfigError(
            "noise_seed repeats the noise of a simulation; use simulate, or leave it out"
        )
    epsilon = config.settings.epsilon
    if epsilon and not (classes or config.settings.classes):
        raise ConfigError(
            f"epsilon = {epsilon:g} without classes: the list of a site's classes would show which "
            "ones it has; name all classes of the run, such as classes=range(10)"
        )
    values: Mapping[str, Any] = {}
    if config.target is None:
        x, y, names, values = _inputs.labelled(features, labels, classes)
        known = None
    else:
        x = _inputs.as_features(features)
        known = values_of(labels, len(x), config.target)
        y, names = torch.zeros(len(x), dtype=torch.int64), config.target.rows
    x = raised(x, config.power)
    units = None if patients is None else tuple(names_of(patients, len(x), "patient").names)
    train = LabelledFeatures(x, y, units, values=known)
    if bags is not None:
        train = pooled(train, names_of(bags, len(x), "bag").names)
    empty = LabelledFeatures(x[:0], y[:0])
    columned = with_columns(f"features-{x.shape[1]}", _inputs.feature_names(features))
    fingerprint = with_power(columned, config.power)
    records = SiteFeatures(train, empty, names, fingerprint, 0.0, simulated=False)
    for warning in budget_warnings(epsilon, config.settings.delta, len(x)):
        warnings.warn(warning, stacklevel=3)
    centre = read_centre(config.settings.fedpft.public, config.power)
    job = Job(config, NodeConfig(site=site), site, records, payload=pack_public_mean(centre))
    made = load_target(config.plan.combination.site)(job)
    return replace(_surrogate(made.payload, config), values=values)


def learn(surrogates: Sequence[Surrogate], **settings: Any) -> Model:
    """Learn one model from surrogates, with all checks of a coordinator.

    Args:
        surrogates: a list of those of the same method and settings, one of each site. Those of
            sites without a name are named site-1, site-2, and so on.
        settings: those of the coordinator, such as `head__epochs`.

    Returns:
        The model.

    Raises:
        ConfigError: without surrogates, or for settings that do not agree.
        RunError: if nothing can be learned.
        SurrogateError: for a surrogate that the coordinator does not use.

    Example:
        >>> import torch
        >>> x = torch.rand(16, 2, generator=torch.Generator().manual_seed(0))
        >>> names = ["nevus", "melanoma"] * 4
        >>> model = learn([fit(x[:8], names, site="north"), fit(x[8:], names, site="south")])
        >>> model.classes_.tolist(), model.predict_proba(x).shape
        (['melanoma', 'nevus'], (16, 2))
    """
    surrogates = _named_apart(_listed(surrogates))
    config = surrogates[0].config
    if settings.get("method", config.settings.method) != config.settings.method:
        raise ConfigError(
            f"method = {shown(settings['method'])}: the surrogates are of method "
            f"{config.settings.method!r}; fit them with the other"
        )
    changed = _inputs.flat_settings(config.settings.method, settings)
    chosen = parse_run(config.settings.flat() | changed)
    _check_one_run(surrogates, chosen.document["settings"])
    strategy = stored_strategy(chosen)(chosen)
    # Imported here, as in `simulate`: Flower takes as long to import as all of this package.
    from fedsurrogate.server_app.deployment.local_engine import quiet

    with quiet():
        strategy.learn_from([(each.site, (each.site, each.payload)) for each in surrogates])
    suspects = {}
    for site in strategy.outcome.sites.values():
        if site.suspect:
            suspects[site.name] = site.suspect
        elif site.fate != "used":
            raise SurrogateError(f"surrogate of site {site.name!r}: {site.reason}")
    model = strategy.outcome.model
    assert model is not None
    return Model(model, suspects, [each.values for each in surrogates])


def _listed(surrogates: object) -> list[Surrogate]:
    """Surrogates of one method. Raises ConfigError for anything else, or for none."""
    if isinstance(surrogates, Surrogate):
        raise ConfigError(
            "learn takes a list of surrogates; for one alone write learn([surrogate])"
        )
    if isinstance(surrogates, str | bytes) or not isinstance(surrogates, Iterable):
        raise ConfigError(f"{shown(surrogates)} is no list of surrogates; give what fit returns")
    listed = list(surrogates)
    if not listed:
        raise ConfigError("no surrogate to learn from; give at least one")
    for number, each in enumerate(listed):
        if not isinstance(each, Surrogate):
            raise ConfigError(
                f"number {number} of the list is {shown(each)}; give surrogates, as fit and load "
                "return them"
            )
        own, first = each.config.settings.method, listed[0].config.settings.method
        if own != first:
            raise ConfigError(
                f"the surrogate of site {each.site!r} is of method {own!r}, that of site "
                f"{listed[0].site!r} of {first!r}; fit all with one method"
            )
    return listed


def _check_one_run(surrogates: Sequence[Surrogate], wanted: Mapping[str, Any]) -> None:
    """Raise SurrogateError for a surrogate that was made with other settings than the run's, with the
    first that differs.
    """
    for each in surrogates:
        own = each.config.document["settings"]
        # The classes of another target follow from its settings.
        for key in sorted(own.keys() | wanted.keys(), key=lambda key: (key == "classes", key)):
            if own.get(key) != wanted.get(key):
                raise SurrogateError(
                    f"surrogate of site {each.site!r}: {key} = {shown(own.get(key))}, but here "
                    f"{key} = {shown(wanted.get(key))}; fit all sites of a run with the "
                    "same settings, and names in the same order"
                )


def _named_apart(surrogates: Sequence[Surrogate]) -> list[Surrogate]:
    """Surrogates of sites without a name, numbered where there are several."""
    unnamed = {each.payload for each in surrogates if each.site == UNNAMED}
    # The same bytes twice are one site by mistake, which the coordinator refuses.
    if len(unnamed) < 2 or len(unnamed) < sum(each.site == UNNAMED for each in surrogates):
        return list(surrogates)
    taken = {each.site for each in surrogates}
    names = (name for number in count(1) if (name := f"{UNNAMED}-{number}") not in taken)
    return [_renamed(each, next(names)) if each.site == UNNAMED else each for each in surrogates]


def _renamed(surrogate: Surrogate, site: str) -> Surrogate:
    """The same under another name. Every message has its header in the same field, and of a field
    that stands twice in protocol buffers the last one counts.
    """
    name = pb.Surrogate(header=pb.Header(site=site)).SerializeToString()
    return replace(
        surrogate, payload=surrogate.payload + name, header=replace(surrogate.header, site=site)
    )


@overload
def load(path: str | Path, kind: type[Loaded], **settings: Any) -> Loaded: ...


@overload
def load(path: str | Path, kind: None = None, **settings: Any) -> Surrogate | Model: ...


def load(path: str | Path, kind: type[Any] | None = None, **settings: Any) -> Surrogate | Model:
    """Read a model or a surrogate, as runs and `save` write them.

    Args:
        path: of a model (`.fedsurrogate`, `.safetensors`, or a run folder) or a surrogate (`.pb`).
        kind: `Model` or `Surrogate`, where only that will do: the result then has this type, for
            type checkers too.
        settings: of a `.fedsurrogate` file `weights_path` and `device` of its backbone; of a
            surrogate those that it was made with.

    Returns:
        The model or the surrogate. A model of a `.fedsurrogate` file takes images as well as
        features.

    Raises:
        SurrogateError: for a file that cannot be read, or that is no model or surrogate, or not of
            the kind.
        SealError: for a `.fedsurrogate` file whose signature does not fit.
        ConfigError: for settings that do not agree.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from sklearn.datasets import load_iris
        >>> x, y = load_iris(return_X_y=True)
        >>> with TemporaryDirectory() as folder:
        ...     file = learn([fit(x, y)]).save(f"{folder}/model.safetensors")
        ...     model = load(f"{folder}/model.safetensors")
        >>> model.score(x, y) > 0.9
        True
    """
    if not (kind is None or (isinstance(kind, type) and issubclass(kind, Model | Surrogate))):
        raise ConfigError(f"kind = {shown(kind)}: must be Model, ImageModel or Surrogate")
    found = _loaded(path, settings)
    if kind is not None and not isinstance(found, kind):
        raise SurrogateError(f"'{path}' has a {type(found).__name__}, and no {kind.__name__}")
    return found


def _loaded(path: str | Path, settings: dict[str, Any]) -> Surrogate | Model:
    """As `load`."""
    file = Path(path)
    if not str(path):
        raise SurrogateError("path is empty; name a file or a run folder")
    if not file.exists():
        raise SurrogateError(
            f"'{path}' does not exist; name a run folder, or a file that ends in {SUFFIX}, "
            ".safetensors (models) or .pb (a surrogate)"
        )
    if file.suffix == SUFFIX:
        _only(("weights_path", "device"), settings, SUFFIX)
        return ImageModel(read_signed_model(file), **settings)
    if file.is_dir():
        file = file / "model.safetensors"
        if not file.is_file():
            raise SurrogateError(
                f"'{path}' has no model.safetensors: it is no run folder, or its run did not finish"
            )
    if file.suffix == ".safetensors":
        _only((), settings, ".safetensors")
        return Model(load_model(file))
    try:
        payload = file.read_bytes()
    except OSError as error:
        raise SurrogateError(
            f"'{path}' cannot be read ({error.strerror}); give a .pb or .safetensors file"
        ) from error
    run = parse_run(_inputs.flat_settings(settings.get("method", "fedpft"), settings))
    try:
        return _surrogate(payload, run)
    except SurrogateError as error:
        raise SurrogateError(
            f"'{path}': {error}; load it with the method and the settings that it was made with"
        ) from None


def _only(known: Sequence[str], settings: Mapping[str, Any], suffix: str) -> None:
    """Raise ConfigError for a setting that a file of this kind does not take."""
    if unknown := sorted(settings.keys() - set(known)):
        takes = " and ".join(known) or "none"
        raise ConfigError(f"a {suffix} file takes no setting {unknown[0]!r}, but {takes}")


def _surrogate(payload: bytes, config: Run) -> Surrogate:
    """Parse and check a payload. Raises SurrogateError."""
    strategy = stored_strategy(config)(config)
    sent = strategy.unpack(payload)
    return Surrogate(payload, config, sent.header, strategy.records(sent), strategy.dimension(sent))


def epsilon(
    noise_multiplier: float, delta: float, *, sample_rate: float = 1.0, steps: int = 1
) -> float:
    """Epsilon at `delta` of Gaussian releases together, for adding or removing one record.

    Args:
        noise_multiplier: standard deviation of the noise over the L2 sensitivity.
        delta: in (0, 1).
        sample_rate: of Poisson samples; 1 for all records.
        steps: number of releases.

    Returns:
        Epsilon: exact for a sample rate of 1, else by dp-accounting's privacy loss distributions.

    Raises:
        ConfigError: for numbers out of their range.

    Source:
        Balle & Wang 2018.

    Example:
        >>> round(epsilon(noise_multiplier=4.0, delta=1e-5), 3)
        0.926
    """
    return epsilon_spent([GaussianEvent(noise_multiplier, sample_rate, steps)], delta)


def noise_multiplier(
    epsilon: float, delta: float, *, sample_rate: float = 1.0, steps: int = 1
) -> float:
    """The smallest noise multiplier with which releases stay within (epsilon, delta).

    The inverse of `epsilon`.

    Args:
        epsilon: of all releases together.
        delta: of all releases together.
        sample_rate: of Poisson samples; 1 for all records.
        steps: number of releases.

    Returns:
        Standard deviation of the noise over the L2 sensitivity.

    Raises:
        ConfigError: for numbers out of their range.

    Example:
        >>> round(noise_multiplier(epsilon=1.0, delta=1e-5), 3)
        3.731
    """
    return calibrate(epsilon, delta, sample_rate, steps)


def noisy(
    features: Array,
    labels: Array,
    *,
    classes: Sequence[object],
    epsilon: float,
    delta: float,
    **settings: Any,
) -> Surrogate:
    """Noisy class sums of a site's records: `fit` with a budget.

    Covered: one record more or less (one patient with `patients`), for this one release. Not
    covered: further releases of the same records, which compose, and the backbone's own training
    data.

    Args:
        features: (n, d).
        labels: (n,), class names or integers.
        classes: all classes of the run.
        epsilon: of this release.
        delta: of this release.
        settings: further arguments of `fit`.

    Returns:
        What the site would send.

    Raises:
        ConfigError: for settings that do not agree.
        DataError: for features or labels that cannot be used.

    Example:
        >>> x, y = [[0.1, 0.9], [0.3, 0.8], [0.9, 0.2]], [0, 0, 1]
        >>> noisy(x, y, classes=range(3), epsilon=1.0, delta=1e-5).classes
        ('0', '1', '2')
    """
    return fit(features, labels, classes=classes, epsilon=epsilon, delta=delta, **settings)
