"""What a claim has to state was subtracted before the clip, also in runs of earlier versions."""

from __future__ import annotations

from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.privacy.own_mean import as_stored
from fedsurrogate.common.run import Run


def due_centre(run: Run, claim: Mechanism | None, dimension: int, centre: str = "") -> str:
    """What a claim has to state; in a stored run of an earlier version, what that version stated.

    Args:
        run: which may be stored.
        claim: of a message.
        dimension: of the features.
        centre: digest of the public centre, or empty.
    """
    earlier = claim is not None and run.stored_as not in ("", run.full_digest[:16])
    stated = claim.centre if earlier and claim is not None else ""
    return as_stored(stated, run.plan.subtracted(dimension, centre))
