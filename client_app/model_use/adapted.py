"""A site's own version of a shared model, and the file that keeps it in the site's state folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fedsurrogate.client_app.model_use.store import models_folder
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import SealError, SurrogateError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.models.classifiers import Classifier
from fedsurrogate.common.signed_models.signed_model import SignedModel, digest_of
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.answers import checked_target


@dataclass(frozen=True)
class Adapted(Classifier):
    """Scores of a shared model times slopes, plus linear ones of the features.

    Attributes:
        shared: the shared model.
        slope: of its scores, (o,), or (1,) for all of them.
        weight: of features as the shared model takes them, (o, k).
        bias: (o,).
        target: what the scores mean where they are not of classes, as JSON; empty for classes.
    """

    shared: Classifier
    slope: Tensor
    weight: Tensor
    bias: Tensor
    target: str = ""

    @property
    def header(self) -> Header:  # type: ignore[override]
        """The header of the shared model."""
        return self.shared.header

    @property
    def dimension(self) -> int:
        """Dimension of the features."""
        return self.shared.dimension

    @property
    def own(self) -> dict[str, Tensor]:
        """The site's own part."""
        return {"slope": self.slope, "weight": self.weight, "bias": self.bias}

    def arrays(self) -> dict[str, Tensor]:
        """Tensors of the shared model, and of the site's own part."""
        return {f"shared.{name}": each for name, each in self.shared.arrays().items()} | self.own

    def prepare(self, features: Tensor) -> Tensor:
        """Features in the form that the shared model needs."""
        return self.shared.prepare(features)

    def scores(self, features: Tensor) -> Tensor:
        """Scores (n, o)."""
        added = self.prepare(features).double() @ self.weight.double().T + self.bias.double()
        return self.slope.double() * self.shared.scores(features).double() + added


def adapted_file(node: NodeConfig, model: SignedModel) -> Path:
    """The file of a site's own version of a model."""
    return models_folder(node) / f"{model.manifest.name}.adapted.safetensors"


def store_adapted(node: NodeConfig, model: SignedModel, own: Adapted, how: str) -> Path:
    """Store the site's own version of a model.

    It holds what was learned from the site's records, and must stay there.

    Args:
        node: the site's settings.
        model: the shared one.
        own: the site's version of it.
        how: it was chosen, in words.

    Returns:
        The file.
    """
    from safetensors.torch import save

    tensors = {name: tensor.contiguous() for name, tensor in own.own.items()}
    metadata = {"how": how, "of": model.manifest.tensors, "target": own.target}
    file = adapted_file(node, model)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    replace_file(file, save(tensors, metadata | {"digest": _digest(tensors, metadata)}))
    return file


def adapted_classifier(node: NodeConfig | None, model: SignedModel) -> Adapted | None:
    """The site's own version of a model.

    Args:
        node: the site's settings; None without any.
        model: the shared one.

    Returns:
        The version; None if the site has none.

    Raises:
        SealError: for a changed file, or one of an earlier version.
    """
    from safetensors import SafetensorError, safe_open

    if node is None or not (file := adapted_file(node, model)).is_file():
        return None
    try:
        with safe_open(file, "pt") as content:
            metadata = content.metadata() or {}
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        if (
            metadata.pop("digest") != _digest(tensors, metadata)
            or metadata["of"] != model.manifest.tensors
        ):
            raise ValueError("its digest does not fit")
        target = checked_target(metadata["target"], model.classifier.header.classes)
        return Adapted(model.classifier, **tensors, target=target)
    except SurrogateError as error:
        raise SealError(f"{file}: {error}; remove it, and run `site adapt` again") from None
    # RuntimeError, TypeError: torch cannot represent a side of zero next to a huge one.
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise SealError(
            f"{file} was changed, is damaged or of an earlier version ({error}); remove it, and run "
            "`site adapt` again"
        ) from None


def _digest(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    return digest_of(tensors) + json.dumps(sorted(metadata.items()))
