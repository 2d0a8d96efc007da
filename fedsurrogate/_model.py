"""A trained classifier with the methods of a scikit-learn estimator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.backbones.backbones import Backbone
from common.backbones.feature_power import power_in, raised, with_power
from common.errors import BackboneError, DataError
from common.models.classifiers import Classifier
from common.signed_models.signed_model import SignedModel
from common.wire.model_files import save_model
from fedsurrogate._data import Images
from fedsurrogate._images import are_features, backbone_of, computed
from fedsurrogate._inputs import Array, as_features, as_labels


class Model:
    """A classifier on features (n, d).

    classes_: class names in the order of probabilities; integers if all names are. classifier: the model itself.
    """

    def __init__(self, classifier: Classifier, suspects: dict[str, str] | None = None) -> None:
        self.classifier = classifier
        self.suspects = suspects or {}
        names = classifier.header.classes
        whole = all(name.lstrip("-").isdigit() and str(int(name)) == name for name in names)
        self.classes_: Any = np.array([int(name) for name in names]) if whole else np.array(names)

    def predict(self, features: Array) -> Any:
        """Class of each record: (n,)."""
        return self.classes_[self.classifier.predict(self._features(features)).numpy()]

    def predict_proba(self, features: Array) -> Any:
        """Probabilities (n, C) of the classes; each row sums to one."""
        with torch.no_grad():
            return self.classifier.scores(self._features(features)).softmax(1).numpy()

    def score(self, features: Array, labels: Array) -> float:
        """Share of records whose class is predicted correctly."""
        x = as_features(features)
        names = as_labels(labels, len(x))
        right = [str(found) == name for found, name in zip(self.predict(x), names, strict=True)]
        return float(np.mean(right))

    def _features(self, features: Array) -> Tensor:
        """Features as the model needs them: raised to its power. Raises DataError for another dimension."""
        found = as_features(features)
        if found.shape[1] != self.classifier.dimension:
            raise DataError(
                f"the features have {found.shape[1]} dimensions, and the model needs {self.classifier.dimension}; compute "
                "them with the backbone and the image size of the run"
            )
        return raised(found, power_in(self.classifier.header.fingerprint))

    def save(self, path: str | Path) -> Path:
        """Write a safetensors file, as a run folder contains it."""
        file = Path(path)
        save_model(self.classifier, file)
        return file

    def __repr__(self) -> str:
        kind = type(self.classifier).__name__
        return f"Model({kind}, {len(self.classes_)} classes, dimension {self.classifier.dimension})"


class ImageModel(Model):
    """A model of a signed file. It knows its backbone, so it takes images as well as features (n, d).

    manifest: facts about the model: classes, privacy, settings of the features. weights_path, device: of the backbone, which
    is loaded when images first come.
    """

    def __init__(self, model: SignedModel, weights_path: str = "", device: str = "auto") -> None:
        super().__init__(model.classifier)
        self.signed, self.manifest = model, model.manifest
        self._place = weights_path, device
        self._backbone: Backbone | None = None

    def predict(self, images: Images) -> Any:
        """Class of each image, or of each row of features: (n,)."""
        return super().predict(self._prepared(images))

    def predict_proba(self, images: Images) -> Any:
        """Probabilities (n, C) of the classes; each row sums to one."""
        return super().predict_proba(self._prepared(images))

    def score(self, images: Images, labels: Array) -> float:
        """Share of images whose class is predicted correctly."""
        return super().score(self._prepared(images), labels)

    def outlier_scores(self, images: Images) -> Any:
        """Mahalanobis and relative Mahalanobis distances (n, 2); None if the model has no Gaussians."""
        found = self.signed.scores(self._features(self._prepared(images)))
        return None if found is None else torch.stack(found, 1).numpy()

    def _prepared(self, images: Images) -> Tensor:
        """Features (n, d), before the power. Raises BackboneError for a backbone other than the model's."""
        if are_features(images):
            return as_features(images)
        if self._backbone is None:
            run, (weights_path, device) = self.manifest.run_config(), self._place
            loaded = backbone_of(run.settings.backbone, weights_path, run.settings.image_size, device)
            wanted = self.manifest.fingerprint
            if (found := with_power(loaded.fingerprint_at(self.manifest.dimension), power_in(wanted))) != wanted:
                raise BackboneError(
                    f"the model is for a backbone with fingerprint {wanted[:16]}, but {run.settings.backbone!r} here has "
                    f"{found[:16]}; give the file of its weights as weights_path"
                )
            self._backbone = loaded
        # At 16 bits, as a site computes features.
        return computed(images, self._backbone).half().float()
