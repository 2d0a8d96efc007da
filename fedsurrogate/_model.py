"""A trained classifier with the methods of a scikit-learn estimator."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsurrogate._arrays import Array, in_own_type, names_of
from fedsurrogate._images import Images, are_features, backbone_of, computed
from fedsurrogate._inputs import as_features, feature_names, shown, writing
from fedsurrogate._targets import answers, is_of_target, predictions, score
from fedsurrogate.client_app.model_use.held_out import check_backbone
from fedsurrogate.common.backbones.backbone_names import check_columns, columns_in
from fedsurrogate.common.backbones.backbones import Backbone
from fedsurrogate.common.backbones.networks import options_of
from fedsurrogate.common.backbones.power_transform import power_in, raised
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.identity import check_one_truth, likely_one_warnings
from fedsurrogate.common.models.classifiers import Classifier, scores_alone
from fedsurrogate.common.signed_models.signed_model import SignedModel
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
        self.classifier = classifier
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
        x = self._features(features)
        if is_of_target(self.classifier):
            return predictions(self.classifier, x)
        return self.classes_[scores_alone(self.classifier, x).argmax(1).numpy()]

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
        if not is_of_target(self.classifier):
            raise DataError("the model is of classes; use predict or predict_proba")
        return answers(self.classifier, self._features(features))

    def predict_proba(self, features: Array) -> Any:
        """Probabilities of the classes.

        Args:
            features: (n, d).

        Returns:
            Probabilities (n, C); each row sums to one.

        Raises:
            DataError: for features of another dimension, or numbers that are not finite.
        """
        if is_of_target(self.classifier):
            raise DataError("the model is not of classes; use predict or answers")
        return scores_alone(self.classifier, self._features(features)).softmax(1).float().numpy()

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
        return scores_alone(self.classifier, self._features(features)).float().numpy()

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
        if is_of_target(self.classifier):
            return score(self.classifier, x, labels)
        given = names_of(labels, len(x), known=classes).names
        check_one_truth([classes, set(given)])
        right = [
            classes[guess] == name
            for guess, name in zip(self.classifier.predict(x).tolist(), given, strict=True)
        ]
        return float(np.mean(right))

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
        kind = type(self.classifier).__name__
        if is_of_target(self.classifier):
            names = ", ".join(self.classifier.header.classes)
            return f"Model({kind} of {names[:80]}, dimension {self.classifier.dimension})"
        return f"Model({kind}, {len(self.classes_)} classes, dimension {self.classifier.dimension})"


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
        self._backbone: Backbone | None = None

    def outlier_scores(self, images: Images) -> Any:
        """Mahalanobis and relative Mahalanobis distances of images.

        Args:
            images: as in `fedsurrogate.features`, or features (n, d).

        Returns:
            Both distances (n, 2); None if the model has no Gaussians.
        """
        scores = self.signed.scores(self._features(images))
        return None if scores is None else torch.stack(scores, 1).numpy()

    def _features(self, features: Array) -> Tensor:
        return super()._features(self._prepared(features))

    def _prepared(self, images: Images) -> Array:
        """Features (n, d), before the power; those that are given as they are. Raises BackboneError
        for a backbone other than the model's.
        """
        if are_features(images):
            return images
        self.manifest.check_of_images("this model in Python")
        if self._backbone is None:
            own, (weights_path, device) = self.manifest.run_config().settings, self._place
            options = options_of(own.features)
            loaded = backbone_of(own.backbone, weights_path, own.image_size, device, options)
            check_backbone(self.signed, loaded)
            self._backbone = loaded
        # At 16 bits, as a site computes features.
        return computed(images, self._backbone).half().float()
