"""The sum over all sites that a secure sum gives to a method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.surrogates.public_map import PublicMap
from fedsurrogate.common.surrogates.surrogates import Header


@dataclass(frozen=True)
class Total:
    """Tensors summed over all sites.

    Attributes:
        header: of the run, with all its classes.
        tensors: the sums, float64, by name.
        sigmas: standard deviation of the noise in every entry, by tensor; empty without privacy.
        claim: of every site; None without privacy.
        public: what was done with the features before all else.
        rounding: by tensor, most that rounding to whole steps has changed an entry.
        usual_rounding: by tensor, the standard deviation of this change.
    """

    header: Header
    tensors: Mapping[str, Tensor]
    sigmas: Mapping[str, float] = field(default_factory=dict)
    claim: Mechanism | None = None
    public: PublicMap = field(default_factory=PublicMap)
    rounding: Mapping[str, float] = field(default_factory=dict)
    usual_rounding: Mapping[str, float] = field(default_factory=dict)

    @property
    def dimension(self) -> int:
        """Columns of the sites' features before the public map."""
        projection = self.public.projection
        return (self.tensors["sums"] if projection is None else projection).shape[1]

    def mapped(self, head: Head, frame: bytes) -> Head:
        """A head of the summed features, as one of the sites' own: with what was done before all else.

        Args:
            head: that was learned from the sums.
            frame: of the columns, in which sites put their features first; empty for none.
        """
        header = replace(head.header, frame=frame)
        public = self.public
        return replace(head, header=header, projection=public.projection, centre=public.centre)
