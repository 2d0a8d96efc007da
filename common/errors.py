"""The errors a person can cause or meet, and the little of them that may leave a site."""


class FedSurrogateError(Exception):
    """Base of all expected errors. The text is for the machine it happened on; only `code` may leave a site."""

    code = "internal"


class ConfigError(FedSurrogateError):
    """A setting is unknown, of the wrong type or out of range."""

    code = "config"


class DataError(FedSurrogateError):
    """The data a site was told to use is missing, empty or unreadable."""

    code = "data"


class BackboneError(FedSurrogateError):
    """The foundation model cannot be built, or its weights do not fit."""

    code = "backbone"


class SurrogateError(FedSurrogateError):
    """A surrogate or a model that arrived is not what was asked for."""

    code = "surrogate"


class PolicyError(FedSurrogateError):
    """The site's own policy forbids what was asked."""

    code = "policy"


class BudgetError(FedSurrogateError):
    """A release would exceed the privacy budget of the site's data."""

    code = "budget"


class LedgerError(FedSurrogateError):
    """The record of what left cannot be trusted or written, so nothing may leave."""

    code = "ledger"


class SealError(FedSurrogateError):
    """What was relayed to a site was changed on its way, or is not for it."""

    code = "seal"


class StateError(FedSurrogateError):
    """What a site keeps between the rounds of a run is not there any more."""

    code = "state"


class RunError(FedSurrogateError):
    """The federation as a whole cannot go on: no sites, or too few of them."""

    code = "run"


# What the coordinator is told when a site fails. Fixed sentences: nothing of the site's data, paths or names can slip in.
PUBLIC_SENTENCES = {
    "config": "the site cannot work with these settings",
    "data": "the site has no usable data for this run",
    "backbone": "the site cannot load the backbone, or its weights do not fit",
    "policy": "the site's policy does not allow what was asked",
    "budget": "the site's privacy budget does not allow this release",
    "ledger": "the site cannot account for a release at present",
    "seal": "what was relayed to the site was changed on its way, or not sealed for it by the site before",
    "state": "the site has lost what it kept of this run, and does not begin it a second time",
    "surrogate": "the site was sent something it cannot read",
    "internal": "the site failed; its own log says why",
}
