"""Records whose columns are scaled and shifted, and the oracle of scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

RECORDS, DIMENSION, CLASSES = 240, 6, 3


@dataclass(frozen=True)
class Affine:
    """A change of every column, and further columns without information.

    Attributes:
        powers: of ten, by which columns are scaled.
        shift: of all columns.
        constants: numbers of constant columns.
        noise: deviation of one more column; 0 for none.
    """

    powers: tuple[float, ...]
    shift: float = 0.0
    constants: tuple[float, ...] = ()
    noise: float = 0.0

    def __call__(self, features: Tensor) -> Tensor:
        """Features (n, d + more), float32."""
        columns = features.double() * 10 ** torch.tensor(self.powers, dtype=torch.float64)
        parts = [columns + self.shift]
        parts += [torch.full((len(features), 1), each) for each in self.constants]
        if self.noise:
            drawn = torch.Generator().manual_seed(7)
            parts.append(self.noise * torch.randn(len(features), 1, generator=drawn))
        return torch.cat([each.float() for each in parts], 1)


@st.composite
def affine(draw: st.DrawFn) -> Affine:
    """Changes that leave the information of each column within single precision."""
    shift = draw(st.sampled_from([0.0, 1e4, -3e3]))
    # A column far below its shift has nothing left in single precision, for the oracle as well.
    low = -6.0 if not shift else 0.0
    powers = draw(st.tuples(*[st.floats(low, 6.0)] * DIMENSION))
    if draw(st.booleans()):
        powers = (*powers[:-1], 20.0)
    constants = draw(st.lists(st.sampled_from([0.0, 1e4, -1e12, 1e-9]), max_size=3))
    return Affine(powers, shift, tuple(constants), draw(st.sampled_from([0.0, 1e3])))


def records(seed: int = 0, apart: float = 2.0) -> tuple[Tensor, Tensor]:
    """Clean features (2 RECORDS, DIMENSION) of correlated Gaussian classes, and labels."""
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.arange(2 * RECORDS) % CLASSES
    means = apart * torch.randn(CLASSES, DIMENSION, generator=drawn)
    mixing = torch.eye(DIMENSION) + 0.3 * torch.randn(DIMENSION, DIMENSION, generator=drawn)
    return means[labels] + torch.randn(len(labels), DIMENSION, generator=drawn) @ mixing, labels


def oracle(features: Tensor, labels: Tensor) -> float:
    """Accuracy on the second half of scikit-learn's discriminant analysis of the first."""
    x, y = features.double().numpy(), labels.numpy()
    lda = LinearDiscriminantAnalysis(solver="svd", tol=1e-12).fit(x[:RECORDS], y[:RECORDS])
    return float(lda.score(x[RECORDS:], y[RECORDS:]))
