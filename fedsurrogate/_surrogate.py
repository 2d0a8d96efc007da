"""Surrogates of sites, and a model learned from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fedsurrogate._arrays import Array, names_of
from fedsurrogate._bags import pooled
from fedsurrogate._inputs import as_features, check_budget, config_of, flat_settings, labelled
from fedsurrogate._model import ImageModel, Model
from fedsurrogate._targets import sent_at_once, values_of, with_columns
from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.task import Task
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.backbones.feature_power import raised, with_power
from fedsurrogate.common.errors import ConfigError, SurrogateError
from fedsurrogate.common.methods.method import load as load_target
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.signed_models.signed_model import SUFFIX, read_signed_model
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_files import load_model
from fedsurrogate.common.wire.records import pack_question
from fedsurrogate.strategies import stored_strategy
from fedsurrogate.strategies.pooling.public_mean import read_centre


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
            path: of the file.

        Returns:
            The file.
        """
        file = Path(path)
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
    site: str = "site",
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
            events, also as a structured array.
        site: its name.
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
    config = config_of(method, sent_at_once(with_columns(settings, [(features, labels)])))
    if not config.plan.answers_files:
        raise ConfigError(f"method = {method!r} does not send everything at once; use simulate")
    check_budget(config.settings.epsilon, classes or config.settings.classes or None)
    values: Mapping[str, Any] = {}
    if config.target is None:
        x, y, names, values = labelled(features, labels, classes)
        known = None
    else:
        x = as_features(features)
        known = values_of(labels, len(x), config.target).values
        y, names = torch.zeros(len(x), dtype=torch.int64), config.target.rows
    x = raised(x, config.power)
    units = None if patients is None else tuple(names_of(patients, len(x), "patient").names)
    train = LabelledFeatures(x, y, units, values=known)
    if bags is not None:
        train = pooled(train, names_of(bags, len(x), "bag").names)
    empty = LabelledFeatures(x[:0], y[:0])
    fingerprint = with_power(f"features-{x.shape[1]}", config.power)
    records = SiteFeatures(train, empty, names, fingerprint, 0.0, simulated=False)
    centre = read_centre(config.settings.fedpft.public, config.power)
    task = Task(config, NodeConfig(site=site), site, records, payload=pack_question(centre))
    made = load_target(config.plan.combination.site)(task)
    return replace(_surrogate(made.payload, config), values=values)


def learn(surrogates: Sequence[Surrogate], **settings: Any) -> Model:
    """Learn one model from surrogates, with all checks of a coordinator.

    Args:
        surrogates: of the same method and settings, one of each site.
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
    if not surrogates:
        raise ConfigError("no surrogate to learn from; give at least one")
    config = surrogates[0].config
    changed = flat_settings(config.settings.method, settings)
    chosen = parse_run(config.settings.flat() | changed)
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


def load(path: str | Path, **settings: Any) -> Surrogate | Model:
    """Read a model or a surrogate, as runs and `save` write them.

    Args:
        path: of a model (`.fedsurrogate`, `.safetensors`, or a run folder) or a surrogate (`.pb`).
        settings: of a `.fedsurrogate` file `weights_path` and `device` of its backbone; of a
            surrogate those that it was made with.

    Returns:
        The model or the surrogate. A model of a `.fedsurrogate` file takes images as well as
        features.

    Raises:
        SurrogateError: for a file that cannot be read, or that is no model or surrogate.
        SealError: for a `.fedsurrogate` file whose signature does not fit.
        ConfigError: for settings that do not agree.
    """
    file = Path(path)
    if file.suffix == SUFFIX:
        return ImageModel(read_signed_model(file), **settings)
    if file.is_dir():
        file = file / "model.safetensors"
        if not file.is_file():
            raise SurrogateError(
                f"'{path}' has no model.safetensors: it is no run folder, or its run did not finish"
            )
    if file.suffix == ".safetensors":
        return Model(load_model(file))
    try:
        payload = file.read_bytes()
    except OSError as error:
        raise SurrogateError(
            f"'{path}' cannot be read ({error.strerror}); give a .pb or .safetensors file"
        ) from error
    method = settings.pop("method", "fedpft")
    return _surrogate(payload, config_of(method, settings))


def _surrogate(payload: bytes, config: Run) -> Surrogate:
    """Parse and check a payload. Raises SurrogateError."""
    strategy = stored_strategy(config)(config)
    sent = strategy.unpack(payload)
    return Surrogate(payload, config, sent.header, strategy.records(sent), strategy.dimension(sent))
