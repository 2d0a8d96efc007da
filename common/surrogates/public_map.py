"""The public map of a secure sum: features x become projection @ (x - centre) before all else. No
site's data are in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError


@dataclass(frozen=True)
class PublicMap:
    """The map from features x to projection @ (x - centre).

    Attributes:
        projection: (k, d); None if there is none.
        centre: (d,); None if there is none.

    Example:
        >>> public = PublicMap(torch.tensor([[1.0, 1.0]]), torch.tensor([1.0, 2.0]))
        >>> public.apply(torch.tensor([[1.0, 2.0], [4.0, 6.0]])).tolist()
        [[0.0], [7.0]]
    """

    projection: Tensor | None = None
    centre: Tensor | None = None

    def apply(self, features: Tensor) -> Tensor:
        """The mapped features.

        Args:
            features: (n, d).

        Returns:
            Features (n, k); (n, d) without a projection.

        Raises:
            SurrogateError: for a map of another dimension. The error depends on the request and the
                backbone only.
        """
        for what, part in (("centre", self.centre), ("projection", self.projection)):
            if part is not None and part.shape[-1] != features.shape[1]:
                raise SurrogateError(
                    f"a {what} of {part.shape[-1]} dimensions; features here have "
                    f"{features.shape[1]}"
                )
        if self.centre is not None:
            features = features - self.centre.to(features)
        if self.projection is None:
            return features
        matrix = self.projection.to(features)
        # One record at a time: the rounding of a product of matrices may depend on the other
        # records.
        return (
            torch.stack([matrix @ row for row in features])
            if len(features)
            else features.new_zeros(0, len(matrix))
        )
