"""Rules of a site that requires sealing (`require-seal` in its policy): refused requests, and
unencrypted values.

Such a site takes part in sealed chains only (`fedpft.seal`). Everything derived from its data is
encrypted for the sites in its `peers` file. Unencrypted are a status code, its name, the length of
its payload, the values of `IN_CLEAR`, and after a release its receipt, which contains the number of
entries in the site's ledger (governance/ledger.py).
"""

from __future__ import annotations

from fedsurrogate.common.errors import PolicyError
from fedsurrogate.common.settings import CountingSettings
from fedsurrogate.common.wire.records import Info

from .policy import Policy

# By kind of request: values that a sealed run needs to begin. Requests of other kinds are refused.
IN_CLEAR: dict[str, tuple[str, ...]] = {
    "name": (),
    "identification": ("fingerprint", "dimension", "simulated", "key"),
    "surrogate": ("simulated",),
}
# Requests of a run that counts, and the further ones if it is secure aggregation.
COUNTING_REQUESTS, SUMMED_COUNTING_REQUESTS = (
    ("name", "surrogate"),
    ("identification", "sum-shares", "sum-list", "sum-open"),
)


def check_sealed_run(policy: Policy, sealed: bool, peers: str) -> None:
    """Refuse a run that `require-seal` excludes.

    Args:
        policy: of the site.
        sealed: whether the run encrypts replies for other sites.
        peers: the site's own file of public keys; empty for none.

    Raises:
        PolicyError: for such a run.
    """
    if not policy.require_seal:
        return
    if not sealed:
        raise PolicyError(
            "require-seal = true: the run requests an unencrypted reply (fedpft.seal = false)"
        )
    if not peers:
        raise PolicyError(
            "require-seal = true, but the node-config names no peers: the coordinator could send "
            "its own key as that of another site; set peers to a file with the lines that `site "
            "offline key` prints at the other sites"
        )


def check_work(policy: Policy, sealed: bool, peers: str, work: str) -> None:
    """Refuse a request whose reply is not encrypted. Called before the message's payload is read.

    Args:
        policy: of the site.
        sealed: whether the run encrypts replies for other sites.
        peers: the site's own file of public keys; empty for none.
        work: kind of request.

    Raises:
        PolicyError: for such a request.
    """
    check_sealed_run(policy, sealed, peers)
    if policy.require_seal and work not in IN_CLEAR:
        raise PolicyError(
            f"require-seal = true: the reply to a request for {work!r} would not be encrypted"
        )


def check_counting(counting: CountingSettings, summed: bool, work: str) -> None:
    """Raise PolicyError for a request that a run which only counts does not need."""
    if counting.kind != "none" and work not in (
        *COUNTING_REQUESTS,
        *(SUMMED_COUNTING_REQUESTS if summed else ()),
    ):
        raise PolicyError(
            f"counting.kind = {counting.kind!r}: such a run makes no request for {work!r}"
        )


def in_clear(policy: Policy, work: str, info: Info) -> Info:
    """The numbers in a reply that may leave unencrypted.

    Args:
        policy: of the site.
        work: kind of request.
        info: the numbers in the reply.
    """
    if not policy.require_seal:
        return info
    return {key: value for key, value in info.items() if key in IN_CLEAR[work]}
