"""A trained classifier with the methods of a scikit-learn estimator."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsurrogate._arrays import Array, in_own_type, names_of, shown
from fedsurrogate._images import Images, Parts, are_features, backbone_of, computed, of_backbone
from fedsurrogate._inputs import as_features, feature_names, writing
from fedsurrogate._targets import table_of
from fedsurrogate.client_app.model_use.held_out import check_backbone
from fedsurrogate.common.backbones.backbone_names import check_columns, columns_in
from fedsurrogate.common.backbones.networks import options_of
from fedsurrogate.common.backbones.power_transform import power_in, raised
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.identity import check_one_truth, likely_one_warnings
from fedsurrogate.common.models.classifiers import Classifier, scores_alone, target_of_model
from fedsurrogate.common.signed_models.signed_model import SignedModel
from fedsurrogate.common.targets.metrics import answers_of, facts_of, measured, metrics_of
from fedsurrogate.common.targets.registry import TARGETS
from fedsurrogate.common.wire.model_proto import save_model


class Model:
    """A classifier on features (n, d).

    Args:
        classifier: the model itself.
        suspects: sites that the coordinator suspects, with the reason; none by default.
        values: of each site, its labels by class name, as the user has them. Unknown for a model
            that was read from a file.

    Attributes:
        classes_: classes in the order of probabilities, in the type of the labels; where it is
            unknown, integers if all names are, else texts.
        classifier: the model itself.
        suspects: sites that the coordinator suspects, with the reason.

    Example:
        >>> import fedsurrogate as fs
        >>> x, y = [[0.1, 0.9], [0.3, 0.8], [0.9, 0.2], [0.7, 0.1]], [0, 0, 1, 1]
        >>> model = fs.learn([fs.fit(x, y)])
        >>> model.predict([[0.2, 0.9], [0.8, 0.2]]).tolist(), model.score(x, y)
        ([0, 1], 1.0)
    """

    def __init__(
        self,
        classifier: Classifier,
        suspects: dict[str, str] | None = None,
        values: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        if not isinstance(classifier, Classifier):
            raise ConfigError(f"a model of {shown(classifier)}; learn and load make models")
        self.classifier, self._target = classifier, target_of_model(classifier)
        self.suspects = suspects or {}
        self.classes_: Any = in_own_type(classifier.header.classes, *values)
        # Of a file somebody has decided already.
        for each in likely_one_warnings(classifier.header.classes if values else ()):
            warnings.warn(each, stacklevel=3)

    def predict(self, features: Array) -> Any:
        """Class of each record; of a model of another target its number, the probability of each
        label, or the risk.

        Args:
            features: (n, d).

        Returns:
            Classes (n,) in their own type, see `classes_`; numbers (n,), or (n, o) for o outputs.

        Raises:
            DataError: for features of another dimension, or numbers that are not finite.
        """
        if self._target:
            found, outputs = self.answers(features), self.classifier.header.classes
            # Without intervals and curves.
            columns = [found[name] for name in outputs]
            return columns[0] if len(columns) == 1 else np.stack(columns, 1)
        return self.classes_[self._scores(features).argmax(1).numpy()]

    def answers(self, features: Array) -> dict[str, Any]:
        """All that a model of another target than classes says of each record: numbers with the ends
        of their intervals, probabilities of labels, or risk and survival.

        Args:
            features: (n, d).

        Returns:
            By name, (n,) each.

        Raises:
            DataError: for a model of classes, or as `predict`.
        """
        if not self._target:
            raise DataError("the model is of classes; use predict or predict_proba")
        scores, outputs = self._scores(features), self.classifier.header.classes
        found = answers_of(self._target, outputs, scores)
        return {name: column.numpy() for name, column in found.items()}

    def predict_proba(self, features: Array) -> Any:
        """Probabilities of the classes.

        Args:
            features: (n, d).

        Returns:
            Probabilities (n, C); each row sums to one.

        Raises:
            DataError: for features of another dimension, or numbers that are not finite.
        """
        if self._target:
            raise DataError("the model is not of classes; use predict or answers")
        return self._scores(features).softmax(1).float().numpy()

    def decision_function(self, features: Array) -> Any:
        """Scores before they become probabilities, in the order of `classes_`; of another target
        those of its outputs. The scores of a record depend on no other record.

        Args:
            features: (n, d).

        Returns:
            Scores (n, C), also for two classes.

        Raises:
            DataError: for features of another dimension, or numbers that are not finite.
        """
        return self._scores(features).float().numpy()

    def score(self, features: Array, labels: Array) -> float:
        """Share of records whose class is predicted correctly; of other targets R^2, the area under
        the ROC curve, or the concordance.

        Args:
            features: (n, d).
            labels: class names or numbers, (n,); values of another target, (n,) or (n, k).

        Raises:
            DataError: for features of another dimension, another number of labels, or labels that say
                yes and no in other words than the model.
        """
        x, classes = self._features(features), self.classifier.header.classes
        if self._target:
            return self._score(x, labels)
        given = names_of(labels, len(x), known=classes).names
        check_one_truth([classes, set(given)])
        right = [
            classes[guess] == name
            for guess, name in zip(self.classifier.predict(x).tolist(), given, strict=True)
        ]
        return float(np.mean(right))

    def _score(self, x: Tensor, targets: Array) -> float:
        """The mean of the score over outputs for which it is defined."""
        facts = facts_of(self._target)
        table = torch.from_numpy(np.ascontiguousarray(table_of(targets, facts["columns"])))
        if table.shape != (len(x), len(facts["columns"])):
            raise DataError(
                f"y of shape {tuple(table.shape)} for {len(x)} records; the model has the "
                f"columns {', '.join(facts['columns'])}"
            )
        outputs, scores = self.classifier.header.classes, self.classifier.scores(x)
        found = metrics_of(measured(self._target, outputs, scores, table)).values()
        name = TARGETS[facts["name"]].score
        known = [own[name] for own in found if name in own]
        return float(np.mean(known)) if known else float("nan")

    def _scores(self, features: Array) -> Tensor:
        return scores_alone(self.classifier, self._features(features))

    def _features(self, features: Array) -> Tensor:
        """Features as the model needs them: raised to its power. Raises DataError for another
        dimension.
        """
        x, wanted = as_features(features), columns_in(self.classifier.header.fingerprint)
        check_columns(feature_names(features), wanted, "the model")
        if x.shape[1] != self.classifier.dimension:
            raise DataError(
                f"the features have {x.shape[1]} dimensions, and the model needs "
                f"{self.classifier.dimension}; compute them with the backbone and the image size "
                "of the run"
            )
        return raised(x, power_in(self.classifier.header.fingerprint))

    def save(self, path: str | Path) -> Path:
        """Write a safetensors file, as a run folder contains it.

        Args:
            path: of the file, which ends in .safetensors.

        Raises:
            ConfigError: for a file that cannot be written.
        """
        with writing(path, ".safetensors") as file:
            save_model(self.classifier, file)
        return file

    def __repr__(self) -> str:
        kind, names = type(self.classifier).__name__, ", ".join(self.classifier.header.classes)
        what = f" of {names[:80]}" if self._target else f", {len(self.classes_)} classes"
        return f"Model({kind}{what}, dimension {self.classifier.dimension})"


class ImageModel(Model):
    """A model of a signed file. It knows its backbone, so wherever a model takes features (n, d), it
    takes images as well, as in `fedsurrogate.features`. Raises BackboneError for a backbone other
    than the model's, and DataError for images that cannot be read.

    Args:
        model: that was read from the file.
        weights_path: of the backbone, which is loaded when images first come.
        device: of the backbone.

    Attributes:
        signed: the model of the file.
        manifest: facts about the model: classes, privacy, settings of the features.
    """

    def __init__(self, model: SignedModel, weights_path: str = "", device: str = "auto") -> None:
        if not isinstance(model, SignedModel):
            raise ConfigError(f"a model of {shown(model)}; load makes it of a .fedsurrogate file")
        super().__init__(model.classifier)
        self.signed, self.manifest = model, model.manifest
        self._place = weights_path, device
        self._parts: Parts | None = None

    def outlier_scores(self, images: Images) -> Any:
        """Mahalanobis and relative Mahalanobis distances of images.

        Args:
            images: as in `fedsurrogate.features`, or features (n, d).

        Returns:
            Both distances (n, 2); None if the model has no Gaussians.
        """
        scores = self.signed.scores(self._features(images))
        return None if scores is None else torch.stack(scores, 1).numpy()

    def _features(self, features: Images) -> Tensor:
        """Images as features (n, d), before the power; those that are given as they are. Raises
        BackboneError for a backbone other than the model's.
        """
        if are_features(features):
            return super()._features(features)
        self.manifest.check_of_images("this model in Python")
        if self._parts is None:
            own, (weights_path, device) = self.manifest.run_config().settings, self._place
            options = options_of(own.features)
            loaded = backbone_of(own.backbone, weights_path, own.image_size, device, options)
            check_backbone(self.signed, loaded)
            self._parts = of_backbone(loaded)
        # At 16 bits, as a site computes features.
        return super()._features(computed(features, *self._parts)[0].half().float())
