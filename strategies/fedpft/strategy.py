"""FedPFT at the coordinator: one round collects mixtures or noisy sums; a head is learned from
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256

from torch import Tensor

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.methods.fedpft import choices
from fedsurrogate.common.run import Run
from fedsurrogate.common.surrogates.class_sums import Sums
from fedsurrogate.common.surrogates.shared_covariances import Gram, StoredGram
from fedsurrogate.common.surrogates.surrogates import (
    AnySurrogate,
    SumsSurrogate,
    Surrogate,
    without_classes,
)
from fedsurrogate.common.wire.records import unpack_surrogate
from fedsurrogate.common.wire.validation import check_surrogate
from fedsurrogate.strategies.base.collection import Recorder
from fedsurrogate.strategies.base.defended import Defended
from fedsurrogate.strategies.base.one_shot import Learned, OneShot
from fedsurrogate.strategies.closed_form.received import of_total
from fedsurrogate.strategies.closed_form.solving import repair_facts
from fedsurrogate.strategies.fedpft.learn import (
    LearnedHead,
    given_shrinkage,
    learn,
    one_gaussian_a_class,
    solution,
)
from fedsurrogate.strategies.fedpft.private_head import learn_from_sums
from fedsurrogate.strategies.flower.settings import Settings
from fedsurrogate.strategies.pooling.columns import moved_surrogate
from fedsurrogate.strategies.pooling.plausibility import check_moments
from fedsurrogate.strategies.pooling.public_mean import read_centre
from fedsurrogate.strategies.pooling.total import Total
from fedsurrogate.strategies.robustness.defence import defend_surrogates


class FedPFT(OneShot[AnySurrogate]):
    """One-shot parametric feature transfer (Beitollahi et al. 2024, algorithm 1).

    Example:
        >>> import fedsurrogate as fs
        >>> from sklearn.datasets import load_iris
        >>> x, y = load_iris(return_X_y=True)
        >>> strategy = FedPFT({"method": "fedpft"})
        >>> sent = [fs.fit(x[k::3], y[k::3], site=str(k), method="fedpft") for k in range(3)]
        >>> learned = strategy.learn([strategy.unpack(each.payload) for each in sent], ())
        >>> type(learned.model).__name__, learned.model.header.classes
        ('Head', ('0', '1', '2'))
    """

    def __init__(
        self,
        config: Settings = None,
        recorder: Recorder | None = None,
        device: str = "",
        centre: Tensor | None = None,
    ) -> None:
        super().__init__(config, recorder, device, centre)
        if centre is None:
            self._centre = read_centre(self.config.settings.fedpft.public, self.config.power)

    def parse(self, payload: bytes) -> AnySurrogate:
        """Parse a surrogate. Raises SurrogateError."""
        return unpack_surrogate(payload)

    def check(self, sent: AnySurrogate) -> None:
        """Check the numbers of a surrogate. Raises SurrogateError."""
        check_surrogate(sent, self.expectation())

    def dimension(self, sent: AnySurrogate) -> int:
        """Dimension of the means."""
        return sent.dimension

    def records(self, sent: AnySurrogate) -> int:
        """Records of all classes together, noisy under privacy."""
        return sum(sent.counts)

    def kept(self, sent: AnySurrogate, stored: Callable[[], bytes]) -> AnySurrogate:
        """The surrogate; a whole covariance is read again when it is needed, so that memory holds
        only one of them.

        Args:
            sent: the checked surrogate.
            stored: reads its stored payload. The covariance is only taken from the bytes that were
                checked: a RunError where they changed, or cannot be read.
        """
        if isinstance(sent, SumsSurrogate) or not isinstance(sent.mixtures.covariance, Gram):
            return sent

        # The checks saw these bytes; a file that changed since then would not be checked again.
        digest, name = sha256(stored()).digest(), sent.header.site

        def read() -> Tensor:
            try:
                payload = stored()
            except OSError as error:
                raise RunError(
                    f"the stored surrogate of site {name!r} cannot be read again ({error.strerror})"
                ) from error
            if sha256(payload).digest() != digest:
                raise RunError(
                    f"the stored surrogate of site {name!r} changed after it was checked; start "
                    "the run again"
                )
            again = unpack_surrogate(payload)
            assert isinstance(again, Surrogate)
            assert isinstance(again.mixtures.covariance, Gram)
            return again.mixtures.covariance.matrix

        variances = sent.mixtures.covariance.variances_per_dimension().clone()
        return replace(
            sent, mixtures=replace(sent.mixtures, covariance=StoredGram(read, variances))
        )

    def moved(self, sent: AnySurrogate, frame: bytes) -> AnySurrogate:
        """Mixtures in another frame; as in the base class."""
        return moved_surrogate(sent, frame)

    def facts(self, sent: AnySurrogate) -> dict[str, object]:
        """Records of each class."""
        return {"counts": dict(zip(sent.header.classes, sent.counts, strict=True))}

    def shared_classes(self, sent: AnySurrogate) -> tuple[str, ...]:
        """The classes of noisy sums, which must be the same at all sites; empty for mixtures."""
        return sent.header.classes if isinstance(sent, SumsSurrogate) else ()

    def learn(self, sent: Sequence[AnySurrogate], classes: Sequence[str]) -> Learned:
        """Learn a head from mixtures or noisy sums, in closed form or on samples.

        Args:
            sent: checked surrogates of one kind, one for each site.
            classes: of the run; all that occur if empty.

        Raises:
            RunError: where no head can be learned.
        """
        self.outcome.surrogates = list(sent)
        learned = learn(sent, self.config, self.device, classes, self._centre)
        facts: dict[str, str | float] = {"solver": learned.solver, **repair_facts(learned.added)}
        if learned.shrinkage is not None:
            facts["shrinkage"] = learned.shrinkage
        if learned.reason:
            facts["reason"] = learned.reason
        return Learned(learned.head, learned.defended, learned, facts)

    def defend(
        self, sent: Sequence[AnySurrogate], classes: tuple[str, ...]
    ) -> Defended[AnySurrogate]:
        """Cap weights; exclude the sites whose class means disagree with those of the other sites.

        Args:
            sent: checked surrogates of one kind, one for each site.
            classes: of the run.
        """
        return defend_surrogates(sent, self.config.defence, self.config.settings.max_share, classes)

    def restricted(self, sent: AnySurrogate, classes: Sequence[str]) -> AnySurrogate | None:
        """The components (mixtures) or rows (noisy sums) of some classes.

        Args:
            sent: a checked surrogate.
            classes: to keep.

        Returns:
            The surrogate with these classes; None where it has none of them.
        """
        return without_classes(sent, classes)


def fedpft_head_from_sum(total: Total, config: Run) -> Learned:
    """A head from the sum over all sites.

    Args:
        total: of a secure sum: counts (C,), sums (C, d) and the folded second moment.
        config: of the run.

    Returns:
        The head, with the public map that the sites applied to their features; and its Gaussians as
        the source of synthetic points.

    Raises:
        RunError: when no class has a record, none stands out from the noise, or no records can have
            these sums.
    """
    how, added = choices(config.settings).solver, 0.0
    if total.claim is not None:
        check_moments(total)
        counts, sums, squares = (
            total.tensors[name].float() for name in ("counts", "sums", "squares")
        )
        pooled = SumsSurrogate(total.header, Sums(counts, sums, squares, total.sigmas), total.claim)
        head, gaussians = learn_from_sums([pooled], "joint", config.settings.fedpft.rank)
    else:
        statistics, header = of_total(total)
        solved = solution(statistics, how, given_shrinkage(config.settings.head))
        head, gaussians, added = solved.head(header), one_gaussian_a_class(statistics), solved.added
    mixtures = Surrogate(head.header, gaussians, total.claim)
    head = total.mapped(head, config.public_frame(total.dimension))
    learned = LearnedHead(head, [mixtures], Defended([]), how, added=added)
    return Learned(head, Defended([]), learned, {"solver": how, **repair_facts(added)})
