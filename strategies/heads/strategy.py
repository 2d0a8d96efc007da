"""One-round methods with heads: every site sends its head once, and the method's rule combines
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedsurrogate.common.methods.method import load
from fedsurrogate.common.models.parameters import Parameters, check_update
from fedsurrogate.common.surrogates.surrogates import class_order
from fedsurrogate.common.wire.model_proto import unpack_parameters
from fedsurrogate.strategies.base.defended import Defended
from fedsurrogate.strategies.base.one_shot import Learned, OneShot
from fedsurrogate.strategies.pooling.columns import moved_parameters
from fedsurrogate.strategies.robustness.defence import defend_heads


class Heads(OneShot[Parameters]):
    """One round in which every site sends one head.

    Attributes:
        most_with_zeros: numbers in a message that leaves zeros out, if these are more than its
            bytes. A small payload must not need far more memory; here at most 16 MB.

    Example:
        >>> import fedsurrogate as fs
        >>> from sklearn.datasets import load_iris
        >>> x, y = load_iris(return_X_y=True)
        >>> strategy = Heads({"method": "ensemble"})
        >>> sent = [fs.fit(x[k::3], y[k::3], site=str(k), method="ensemble") for k in range(3)]
        >>> learned = strategy.learn([strategy.unpack(each.payload) for each in sent], ())
        >>> type(learned.model).__name__, learned.model.header.classes
        ('Ensemble', ('0', '1', '2'))
    """

    most_with_zeros = 2**22

    def parse(self, payload: bytes) -> Parameters:
        """Parse a head. Raises SurrogateError."""
        return unpack_parameters(payload, most=self.most_numbers(payload))

    def check(self, sent: Parameters) -> None:
        """Check size of the numbers, round and records. Raises SurrogateError."""
        check_update(
            sent,
            {name: tuple(tensor.shape) for name, tensor in sent.tensors.items()},
            1,
            private=False,
        )

    def most_numbers(self, payload: bytes) -> int:
        """Limit on the numbers in a message, zeros that are left out included; these take one bit
        each. The head of a site with one class is all zeros, and so are its weights for pixels that
        are always black.
        """
        return max(len(payload), min(8 * len(payload), self.most_with_zeros))

    def dimension(self, sent: Parameters) -> int:
        """Number of columns of the features."""
        fields = self.config.plan.messages.schema()
        name = next(each.name for each in fields if each.shape.split()[-1] == "d")
        return sent.tensors[name].shape[-1]

    def records(self, sent: Parameters) -> int:
        """Number of records that the head was trained on."""
        return sent.records

    def learn(self, sent: Sequence[Parameters], classes: Sequence[str]) -> Learned:
        """Combine the heads.

        Args:
            sent: checked heads, one for each site.
            classes: of the run; all that occur if empty.

        Raises:
            RunError: where no model can be learned.
        """
        known = tuple(classes) or class_order(sent)
        defended = self.defend(sent, known)
        combine = load(self.config.plan.combination.learn)
        own = self.config
        return Learned(combine(defended.kept, known, own.settings, own.defence), defended)

    def moved(self, sent: Parameters, frame: bytes) -> Parameters:
        """A head, or sums and means of features, in another frame; as in the base class."""
        moved = moved_parameters(sent, self.config.plan.messages.schema(), frame)
        return replace(moved, tensors={name: each.float() for name, each in moved.tensors.items()})

    def defend(self, sent: Sequence[Parameters], classes: tuple[str, ...]) -> Defended[Parameters]:
        """Exclude heads that disagree with those of the other sites; cap weights, and bound rows.

        Args:
            sent: checked heads, one for each site.
            classes: of the run.
        """
        return defend_heads(sent, self.config.defence, self.config.settings.max_share)

    def restricted(self, sent: Parameters, classes: Sequence[str]) -> Parameters | None:
        """The rows of these classes.

        Args:
            sent: checked tensors of a site.
            classes: to keep.

        Returns:
            The same with these rows; None if it has none of them.
        """
        rows = torch.tensor([name in classes for name in sent.header.classes])
        if not rows.any():
            return None
        header = replace(
            sent.header, classes=tuple(name for name in sent.header.classes if name in classes)
        )
        own = {
            each.name: sent.tensors[each.name][rows if each.shape[0] == "C" else slice(None)]
            for each in self.config.plan.messages.schema()
        }
        return replace(sent, header=header, tensors=own)
