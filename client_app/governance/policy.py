"""A site's policy: what a release may cost, in a TOML file at the site, and limits of work in
another one next to it. The coordinator can neither see nor change them.

A looser policy than the one that a person has confirmed is not in force: the site refuses every run
until a person confirms it.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from fedsurrogate.common.errors import LOG, ConfigError, PolicyError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.methods.counting import KINDS_OF_COUNTS
from fedsurrogate.common.settings import Names
from fedsurrogate.common.settings.base import parse_settings

from ..node_config import NodeConfig
from .work_limits import NO_WORK_LIMITS, WorkLimits

NO_LIMIT = 1e6
# In the state folder: the policy that is in force, and the digest of its files.
IN_FORCE = "policy.json"
# Next to the policy, where there is one: the keys of WorkLimits.
LIMITS_FILE = "limits.toml"
# Kinds of public data: a share of the run's own data, and the bundled digits.
PUBLIC_KINDS = ("", "digits")


class Policy(WorkLimits):
    """Limits on releases and on work. The defaults hold at a site without a policy file.

    Attributes:
        methods: methods that a run may use; patterns such as '*'
        backbones: backbones that a run may use; patterns such as 'torchvision:*'
        mechanisms: privacy mechanisms that a run may use; 'theorem-4.1' protects less
        without_dp: whether anything may leave without differential privacy
        epsilon_per_run: largest epsilon of one run, all its rounds together
        epsilon_total: largest epsilon of all releases of one folder of data, at delta-total
        delta: largest delta of a run; the total of runs without sampling is computed at it
        delta_total: delta of all releases together; the part above delta is for sampled runs; 0:
            twice delta
        smallest_class: records that a class needs to be released, except with 'sums'
        smallest_site: fewest records in data-dir with which this site joins, so that an empty or
            unmounted folder stays out; taking part then reveals that there are as many; 0: it
            always joins
        exact_counts: counts that may leave without noise although without-dp = false: evaluation,
            survey; epsilon-total does not cover them, and a coordinator that chooses the models can
            find single records in their differences
        smallest_cell: records that a class needs in counts without noise; cells of its decisions
            can be smaller
        show_evaluation: whether results of an evaluation may name this site's own share, with its
            noise
        largest_payload_mib: largest message that may leave, MiB
        require_seal: whether only sealed chains are answered, so all releases are encrypted
        require_secure_aggregation: whether only secure aggregation is answered, so that the
            coordinator never sees this site's part alone
        smallest_sum: fewest sites in secure aggregation, colluding ones included
        smallest_colluding: smallest share of colluding sites against which secure aggregation must
            be safe
        exact_sums_at_models: whether answers that depend on a model from the coordinator (updates,
            residuals, decisions) may leave without noise, in secure aggregation or not; a crafted
            model makes them show single records
        exact_runs_may_differ: whether runs without noise may select other records than the first
            one (split, seed, classes, target, bags); the difference of two such runs shows single
            records
        local_epsilon: largest epsilon of a run in secure aggregation, all rounds, by this site's
            own noise alone; 0 for no limit
        require_approval: how many people must have signed the proposal of a run before it starts; 0
            for none
        approvers: file next to this one with the public keys of the people who may sign; lines of
            `coordinator approval key`
        require_officer: whether an officer of this site must approve each run before it starts,
            with `site approve`
        largest_attack_auc: largest AUC of membership inference on a release without privacy, at the
            upper end of its interval; 1 for no limit
        smallest_nearest_ratio: smallest distance of a released mean from the nearest record used,
            as a share of that from the nearest other record; 0 for no limit
    """

    methods: Names = ("*",)
    backbones: Names = ("*",)
    mechanisms: Names = ("sums", "dp-em", "dp-sgd", "counts")
    without_dp: bool = False
    epsilon_per_run: float = Field(1.0, gt=0, le=NO_LIMIT)
    epsilon_total: float = Field(4.0, gt=0, le=NO_LIMIT)
    delta: float = Field(1e-5, gt=0, le=0.01)
    delta_total: float = Field(0.0, ge=0, le=0.1)
    smallest_class: int = Field(10, ge=1)
    smallest_site: int = Field(1, ge=0)
    exact_counts: Names = ()
    smallest_cell: int = Field(10, ge=1)
    show_evaluation: bool = False
    largest_payload_mib: float = Field(256.0, gt=0, le=4096)
    require_seal: bool = False

    require_secure_aggregation: bool = False
    smallest_sum: int = Field(3, ge=2)
    smallest_colluding: float = Field(1 / 3, ge=0, lt=1)
    exact_sums_at_models: bool = False
    exact_runs_may_differ: bool = False
    local_epsilon: float = Field(0.0, ge=0, le=NO_LIMIT)

    require_approval: int = Field(0, ge=0, le=20)
    approvers: str = Field("approvers.toml", min_length=1)
    require_officer: bool = False

    largest_attack_auc: float = Field(1.0, ge=0.5, le=1)
    smallest_nearest_ratio: float = Field(0.0, ge=0, le=1)

    @property
    def in_words(self) -> str:
        """Its budget, and whether anything leaves without privacy."""
        return f"epsilon {self.epsilon_per_run:g} a run, {self.epsilon_total:g} in all; " + (
            "also without privacy" if self.without_dp else "nothing leaves without privacy"
        )

    @property
    def irrevocable(self) -> str:
        """What may happen under it that no later policy takes back; empty for nothing."""
        if not self.without_dp:
            return ""
        return (
            "without-dp = true lets releases leave without privacy. After the first one no total holds for "
            "this folder of data any more, and once without-dp is false again it can have no private run: "
            "nothing takes that back, nor does a larger epsilon-total"
        )

    @property
    def limits_attacks(self) -> bool:
        """Whether releases without privacy are attacked before they leave."""
        return self.largest_attack_auc < 1 or self.smallest_nearest_ratio > 0

    @model_validator(mode="after")
    def _exact_counts_exist(self) -> Self:
        if wrong := [name for name in self.exact_counts if name not in KINDS_OF_COUNTS]:
            raise ValueError(
                f"exact-counts = {wrong[0][:40]!r}: must be "
                f"{' or '.join(map(repr, KINDS_OF_COUNTS))}"
            )
        return self

    @model_validator(mode="after")
    def _delta_has_two_parts(self) -> Self:
        if self.delta_total and self.delta_total <= self.delta:
            raise ValueError(
                f"delta-total = {self.delta_total:g}: must be above delta = {self.delta:g}, or 0 "
                "for twice that"
            )
        return self


DEFAULT = Policy()
# For public data: shares of a simulation, and the bundled digits.
PUBLIC_DATA = Policy(
    mechanisms=("*",),
    without_dp=True,
    smallest_sum=2,
    smallest_colluding=0.0,
    epsilon_per_run=NO_LIMIT,
    epsilon_total=NO_LIMIT,
    delta=0.01,
    smallest_class=1,
    exact_counts=("evaluation", "survey"),
    exact_sums_at_models=True,
    exact_runs_may_differ=True,
    smallest_cell=1,
    show_evaluation=True,
    **NO_WORK_LIMITS,
)


def policy_of(node: NodeConfig) -> Policy:
    """The policy of a site: its file, or the default; without a file, public data has no limits.

    Raises PolicyError or ConfigError for a bad policy file.
    """
    if node.policy:
        return load_policy(node.policy)
    return PUBLIC_DATA if node.data in PUBLIC_KINDS else DEFAULT


def digest_of_policy(node: NodeConfig) -> str:
    """SHA-256 of a site's policy and limits as their files are now, in hex; empty without a policy, or
    if one cannot be read.
    """
    if not node.policy:
        return ""
    try:
        file = Path(node.policy).expanduser()
        limits = file.with_name(LIMITS_FILE)
        content = file.read_bytes()
        return hashlib.sha256(
            content + (b"\0" + limits.read_bytes() if limits.exists() else b"")
        ).hexdigest()
    except (OSError, ValueError, RuntimeError):
        return ""


# Keys that allow more where they are larger, or true; where they are smaller, or false; and where they
# name more.
LARGER = (
    *("without_dp", "epsilon_per_run", "epsilon_total", "delta", "delta_total", "local_epsilon"),
    *("exact_sums_at_models", "exact_runs_may_differ", "show_evaluation", "largest_attack_auc"),
)
SMALLER = (
    *("smallest_class", "smallest_cell", "smallest_sum", "smallest_colluding"),
    *("smallest_nearest_ratio", "require_approval", "require_officer", "require_seal"),
    "require_secure_aggregation",
)
MORE = ("mechanisms", "exact_counts")


def loosened(before: Policy, now: Policy) -> list[str]:
    """What a policy allows that another one did not; limits of work are none of it.

    Args:
        before: the other one.
        now: the policy.

    Returns:
        Each key that allows more, with both values.

    Example:
        >>> loosened(Policy(), Policy(epsilon_total=8.0, smallest_class=20))
        ['epsilon-total = 8 (was 4)']
    """
    old, new = (_effective(each) for each in (before, now))
    keys = [key for key in LARGER if new[key] > old[key]]
    keys += [key for key in SMALLER if new[key] < old[key]]
    keys += [key for key in MORE if "*" not in old[key] and {*new[key]} - {*old[key]}]
    return [
        f"{key.replace('_', '-')} = {shown(getattr(now, key))} (was {shown(getattr(before, key))})"
        for key in keys
    ]


def _effective(policy: Policy) -> dict[str, Any]:
    """Its values, where 0 stands for another number with that number."""
    return policy.model_dump() | {
        "delta_total": policy.delta_total or 2 * policy.delta,
        "local_epsilon": policy.local_epsilon or NO_LIMIT,
    }


def shown(value: object) -> str:
    """A value as it is shown to a person."""
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value
    # As TOML: large limits stay readable, and can be copied into a policy.
    return f"{value:_}" if isinstance(value, int) else f"{value:g}"


def policy_in_force(node: NodeConfig) -> Policy | None:
    """The policy that a person has confirmed, or that came into force since and is stricter; None
    before the first one. The default, where what is kept of it cannot be read.
    """
    try:
        kept = json.loads((node.state / IN_FORCE).read_text())["policy"]
        known = {key: value for key, value in kept.items() if key in Policy.model_fields}
        return Policy.model_validate(
            {k: tuple(each) if isinstance(each, list) else each for k, each in known.items()}
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return DEFAULT


def unconfirmed(node: NodeConfig, policy: Policy) -> list[str]:
    """What a policy allows and nobody has confirmed, see `loosened`; nothing for public data."""
    if node.data in PUBLIC_KINDS or (before := policy_in_force(node)) is None:
        return []
    return loosened(before, policy)


def check_confirmed(node: NodeConfig, policy: Policy) -> None:
    """Refuse a policy that is looser than the one in force.

    Args:
        node: the site's settings.
        policy: as its file is now.

    Raises:
        PolicyError: that names the keys.
    """
    if keys := unconfirmed(node, policy):
        raise PolicyError(
            f"{node.policy or 'the default policy'} allows more than a person has confirmed: "
            f"{'; '.join(keys)}; every run is refused until `site policy --node-config KIT` has asked for it"
        )


def confirm_policy(node: NodeConfig, policy: Policy, digest: str = "") -> None:
    """Keep a policy that a person has confirmed, or that is no looser, which is in force from then on.

    Args:
        node: the site's settings.
        policy: as it is now.
        digest: of its files, where the log has named it.

    Raises:
        OSError: it cannot be written.
    """
    content = {"sha256": digest, "policy": policy.model_dump(mode="json")}
    replace_file(node.state / IN_FORCE, json.dumps(content, indent=1))


def note_policy(node: NodeConfig, policy: Policy) -> None:
    """Write to this site's log that another policy is in force than at the last request; one that
    nobody has confirmed is not.

    Args:
        node: the site's settings.
        policy: as it is now.
    """
    digest = digest_of_policy(node)
    with suppress(OSError):
        if not digest or unconfirmed(node, policy) or _digest_in_force(node) == digest:
            return
        LOG.info(
            "policy %s is in force from now on (sha256 %s): %s",
            *(node.policy, digest[:16], policy.in_words),
        )
        if policy.irrevocable:
            LOG.warning("%s", policy.irrevocable)
        confirm_policy(node, policy, digest)


def _digest_in_force(node: NodeConfig) -> str:
    try:
        return str(json.loads((node.state / IN_FORCE).read_text())["sha256"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return ""


def load_policy(file: str) -> Policy:
    """Read a policy, and the limits of work next to it.

    Args:
        file: TOML. A list is a TOML list of strings, or one string with names separated by commas.

    Raises:
        PolicyError: when a file cannot be read.
        ConfigError: that names the wrong setting, or the file in which it stands.
    """
    content = _read(file)
    limits = Path(file).expanduser().with_name(LIMITS_FILE)
    if work := [key for key in content if key.replace("-", "_") in WorkLimits.model_fields]:
        raise ConfigError(
            f"policy {file!r}: {', '.join(work)}: limits of work stand in {str(limits)!r} now; move "
            "these lines there, or remove those that are the defaults"
        )
    own = _read(str(limits)) if limits.exists() else {}
    if costs := [key for key in own if key.replace("-", "_") not in WorkLimits.model_fields]:
        raise ConfigError(
            f"{str(limits)!r}: {', '.join(costs)}: no limit of work; there are "
            f"{', '.join(name.replace('_', '-') for name in WorkLimits.model_fields)}, and what a release "
            f"may cost stands in {file!r}"
        )
    for each, keys in ((file, content), (str(limits), own)):
        try:
            parse_settings(Policy, keys)
        except ConfigError as error:
            raise ConfigError(f"policy {each!r}: {error}") from None
    return parse_settings(Policy, content | own)


def _read(file: str) -> dict[str, Any]:
    """The content of one file, with lists as texts and whole numbers as the keys want them."""
    try:
        content: dict[str, Any] = tomllib.loads(Path(file).expanduser().read_text("utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"policy {file!r} is not a TOML file: {error}") from None
    # ValueError: not UTF-8, or no path at all; RuntimeError: the home of a user who does not exist.
    except (OSError, ValueError, RuntimeError) as error:
        raise PolicyError(
            f"policy = {file!r} cannot be read ({error}); nothing leaves without it"
        ) from None
    for key, value in content.items():
        if isinstance(value, list):
            if not value or not all(isinstance(name, str) for name in value):
                raise ConfigError(
                    f"policy {file!r}: {key} = {value!r}: must be a list of texts, at least one"
                )
            content[key] = ",".join(value)
        elif (
            isinstance(value, int)
            and not isinstance(value, bool)
            and Policy.model_fields.get(key.replace("-", "_"))
        ):
            wanted = Policy.model_fields[key.replace("-", "_")].annotation
            content[key] = float(value) if wanted is float else value
    return content
