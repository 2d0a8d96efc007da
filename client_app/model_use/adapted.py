"""A site's own version of a shared model: its parts, and the file that keeps it in the site's state
folder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedsurrogate.client_app.model_use.store import models_folder
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import SealError, SurrogateError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.models.classifiers import Classifier, Head, target_of_model
from fedsurrogate.common.privacy.own_mean import ALL, KEPT, REMOVED
from fedsurrogate.common.signed_models.signed_model import SignedModel, digest_of
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.answers import checked_target

HEAD, NEIGHBOURS = "head", "neighbours"


@dataclass(frozen=True)
class Neighbours(Classifier):
    """Class probabilities from the nearest own records, weighted by distance.

    Attributes:
        header: of the shared model.
        memory: the site's own features, (m, d), of norm one.
        labels: indices of classes, (m,).
        count: number of neighbours.

    Source: kNN-Per, Marfoq et al. 2022.
    """

    header: Header
    memory: Tensor
    labels: Tensor
    count: int

    @property
    def dimension(self) -> int:
        """Dimension of the features."""
        return self.memory.shape[1]

    def arrays(self) -> dict[str, Tensor]:
        """Its records."""
        return {"memory": self.memory, "labels": self.labels}

    def scores(self, features: Tensor) -> Tensor:
        """Logarithms of the probabilities (n, C), a thousand records at a time."""
        rows = [
            self._probabilities(part)
            for part in torch.split(normalize(features.float(), dim=1), 1000)
        ]
        return torch.cat(rows).clamp_min(1e-6).log()

    def _probabilities(self, unit: Tensor) -> Tensor:
        distances, index = torch.cdist(unit, self.memory).topk(
            min(self.count, len(self.memory)), largest=False
        )
        weights = (-distances / distances.mean().clamp_min(1e-9)).softmax(1)
        empty = torch.zeros(len(unit), len(self.header.classes))
        return empty.scatter_add_(1, self.labels[index], weights)


@dataclass(frozen=True)
class Adapted(Classifier):
    """A mixture of class probabilities of a shared model and the site's own part.

    Attributes:
        shared: the shared model.
        own: the site's own part.
        share: weight of the own part, in [0, 1].
    """

    shared: Classifier
    own: Classifier
    share: float

    @property
    def header(self) -> Header:  # type: ignore[override]
        """The header of the shared model."""
        return self.shared.header

    @property
    def dimension(self) -> int:
        """Dimension of the features."""
        return self.shared.dimension

    def arrays(self) -> dict[str, Tensor]:
        """Tensors of both parts, and the share."""
        parts = {f"shared.{name}": tensor for name, tensor in self.shared.arrays().items()}
        parts |= {f"own.{name}": tensor for name, tensor in self.own.arrays().items()}
        return parts | {"share": torch.tensor([self.share])}

    def prepare(self, features: Tensor) -> Tensor:
        """Features in the form that the shared model needs."""
        return self.shared.prepare(features)

    def scores(self, features: Tensor) -> Tensor:
        """Logarithms of the mixed probabilities (n, C)."""
        own, shared = (
            part.scores(features).double().softmax(1) for part in (self.own, self.shared)
        )
        return (self.share * own + (1 - self.share) * shared).clamp_min(1e-30).log()


def adapted_file(node: NodeConfig, model: SignedModel) -> Path:
    """The file of a site's own version of a model."""
    return models_folder(node) / f"{model.manifest.name}.adapted.safetensors"


def store_adapted(
    node: NodeConfig, model: SignedModel, own: Classifier, share: float, how: str
) -> Path:
    """Store the site's own part of a model.

    It holds what was learned from the site's records, and must stay there.

    Args:
        node: the site's settings.
        model: the shared one.
        own: the site's part.
        share: its weight.
        how: it was chosen, in words.

    Returns:
        The file.
    """
    from safetensors.torch import save

    tensors = {name: tensor.contiguous() for name, tensor in own.arrays().items()}
    kind = NEIGHBOURS if isinstance(own, Neighbours) else HEAD
    metadata = {"kind": kind, "share": f"{share:.6f}", "how": how, "of": model.manifest.tensors}
    metadata["count"] = str(own.count) if isinstance(own, Neighbours) else "0"
    metadata["clip"] = json.dumps(own.clip if isinstance(own, Head) else None)
    metadata["own-mean"] = json.dumps(own.own_mean if isinstance(own, Head) else ALL)
    metadata["target"] = target_of_model(own)
    metadata["digest"] = _digest(tensors, metadata)
    file = adapted_file(node, model)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    replace_file(file, save(tensors, metadata))
    return file


def adapted_classifier(node: NodeConfig | None, model: SignedModel) -> Classifier | None:
    """The site's own version of a model.

    Args:
        node: the site's settings; None without any.
        model: the shared one.

    Returns:
        The version; None if the site has none.

    Raises:
        SealError: for a changed file.
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
        header = model.classifier.header
        own: Classifier
        if metadata["kind"] == NEIGHBOURS:
            own = Neighbours(header, tensors["memory"], tensors["labels"], int(metadata["count"]))
        else:
            weight, bias, centre = tensors["weight"], tensors["bias"], tensors.get("centre")
            own = Head(
                header,
                weight,
                bias,
                json.loads(metadata["clip"]),
                centre,
                tensors.get("projection"),
                checked_target(metadata.get("target", ""), header.classes),
                _own_mean(metadata),
            )
        if target_of_model(own):
            return own
        return Adapted(model.classifier, own, float(metadata["share"]))
    except SurrogateError as error:
        raise SealError(f"{file}: {error}; remove it, and run `site adapt` again") from None
    # RuntimeError, TypeError: torch cannot represent a side of zero next to a huge one.
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise SealError(
            f"{file} was changed or is damaged ({error}); remove it, and run `site adapt` again"
        ) from None


def _own_mean(metadata: dict[str, str]) -> float:
    """The weight of the own mean; files of earlier versions say whether it is left out."""
    if "own-mean" not in metadata:
        return REMOVED if metadata.get("without-mean", "") == "true" else ALL
    if (weight := json.loads(metadata["own-mean"])) not in (ALL, KEPT, REMOVED):
        raise ValueError(f"own-mean = {weight}")
    return float(weight)


def _digest(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    return digest_of(tensors) + json.dumps(sorted(metadata.items()))
