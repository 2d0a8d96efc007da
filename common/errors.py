"""Expected errors, and the fixed sentences about them that may leave a site."""

from __future__ import annotations

from collections.abc import Sequence


class FedSurrogateError(Exception):
    """Base of all expected errors. The text stays on the machine of the error; only `code` may
    leave a site.
    """

    code = "internal"


class ConfigError(FedSurrogateError):
    """A setting is unknown, of the wrong type or out of range."""

    code = "config"


class PackageError(ConfigError):
    """A setting or a command needs an optional package that is not installed on this machine."""

    code = "package"


class DataError(FedSurrogateError):
    """The site's data is missing, empty or unreadable."""

    code = "data"


class BackboneError(FedSurrogateError):
    """The foundation model cannot be built, or its weights do not fit."""

    code = "backbone"


class SurrogateError(FedSurrogateError):
    """A received surrogate or model is invalid, or not the requested one."""

    code = "surrogate"


class PolicyError(FedSurrogateError):
    """The site's own policy forbids the request."""

    code = "policy"


class BudgetError(FedSurrogateError):
    """A release would exceed the privacy budget of the site's data."""

    code = "budget"


class LedgerError(FedSurrogateError):
    """The record of releases cannot be trusted or written, so nothing may leave."""

    code = "ledger"


class SealError(FedSurrogateError):
    """A relayed message was changed on its way, or is not for this site."""

    code = "seal"


class DisputeError(SealError):
    """What other sites of a secure sum have sent cannot be used. places: of these sites in the key
    list, by name, from 0.
    """

    def __init__(self, text: str, places: Sequence[int]) -> None:
        super().__init__(text)
        self.places = tuple(places)


class StateError(FedSurrogateError):
    """The state that a site keeps between the rounds of a run is missing."""

    code = "state"


class StorageError(FedSurrogateError):
    """A site's own files cannot be written: its disk is full, or it may not write there."""

    code = "storage"


class RunError(FedSurrogateError):
    """The run as a whole cannot continue: no sites, or too few of them."""

    code = "run"


# Messages to the coordinator when a site fails. They are fixed, so no data, paths or names of the
# site can leak.
PUBLIC_SENTENCES = {
    "config": "the site cannot work with these settings",
    "package": "the site lacks a software package that this run needs",
    "data": "the site has no usable data for this run",
    "backbone": "the site cannot load the backbone, or its weights do not fit",
    "policy": "the site's policy does not allow what was asked",
    "budget": "the site's privacy budget does not allow this release",
    "ledger": "the site cannot account for a release at present",
    "storage": "the site cannot write its own files at present",
    "seal": "what was relayed to the site was changed on its way, or not sealed for it by the "
    "site before",
    "state": "the site has lost what it kept of this run, and does not begin it a second time",
    "surrogate": "the site was sent something it cannot read",
    "internal": "the site failed; its own log says why",
}
