"""A site that demands sealing (`require-seal` in its policy): what it refuses, and the little it says in clear.

Such a site takes part in sealed chains only (`fedpft.seal`), and everything of its data leaves it encrypted for the sites
that its `peers` file lists. In clear leave a status code, its name, the length of what it passes on, and the values of
`IN_CLEAR`; and after a release its receipt, which says how many entries the site's ledger has (governance/witness.py).
"""

from __future__ import annotations

from client_app.governance.policy import Policy
from common.config.run_config import RunConfig
from common.errors import PolicyError
from common.wire.records import Info

# By kind of request: values without which a sealed run cannot begin. Requests of other kinds are refused.
IN_CLEAR: dict[str, tuple[str, ...]] = {
    "name": (),
    "introduction": ("fingerprint", "dimension", "simulated", "key"),
    "surrogate": ("simulated",),
}


def check_sealed_run(policy: Policy, run: RunConfig, peers: str) -> None:
    """Raise PolicyError for a run that the site's demand for sealing rules out. peers: the site's own file of keys."""
    if not policy.require_seal:
        return
    if not run.fedpft.seal:
        raise PolicyError("require-seal = true: the run asks for an answer in clear (fedpft.seal = false)")
    if not peers:
        raise PolicyError(
            "require-seal = true, but the node-config names no peers: the coordinator could give its own key for that of "
            "another site; set peers to a file with the lines that `site key` prints at the other sites"
        )


def check_work(policy: Policy, run: RunConfig, peers: str, work: str) -> None:
    """Raise PolicyError for a request whose answer is in clear. Called before anything of the message is read."""
    check_sealed_run(policy, run, peers)
    if policy.require_seal and work not in IN_CLEAR:
        raise PolicyError(f"require-seal = true: the answer to a request for {work!r} would leave in clear")


def in_clear(policy: Policy, work: str, info: Info) -> Info:
    """What may leave of the numbers that go along with an answer."""
    if not policy.require_seal:
        return info
    return {key: value for key, value in info.items() if key in IN_CLEAR[work]}
