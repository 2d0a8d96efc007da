"""Upper limits of received values; expected errors, and the fixed sentences about them that may
leave a site; and the log in which a site keeps the others.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# What a site logs stays there: it may name files and records.
LOG = logging.getLogger("fedsurrogate.site")
# Largest number of records of one class at a site. A larger count could only serve to get more
# weight.
LARGEST_COUNT = 100_000_000
# Largest feature; variances are limited by its square. Larger values would overflow and spoil the
# model for all sites.
LARGEST_NUMBER = 1e15
# Largest dimension of features.
LARGEST_DIMENSION = 2**24
# Maximum number of classes in a run; maximum length of the name of a class or a backbone.
MOST_CLASSES, LONGEST_NAME = 10_000, 200
# Longest fingerprint of features whose columns have names.
LONGEST_FINGERPRINT = 2**16
# A site's name becomes a file name at the coordinator.
SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Largest parameter of a model that a private run sends to sites. A record's gradient or score does
# not depend on others (client_app/methods/dp/record_gradients.py), but on a GPU the last digit of its
# features may: several images go through the backbone together. Large weights that cancel amplify
# such a digit.
LARGEST_PRIVATE = 1e4


def largest_parameter(private: bool) -> float:
    """The limit of every parameter of a model that is sent to sites."""
    return LARGEST_PRIVATE if private else LARGEST_NUMBER


# A little above a root, so that its rounding does not make a bound too small.
ABOVE = 1 + 1e-12


def norm_of_ones(count: int) -> float:
    """Largest norm of what a record adds that counts once in each of so many histograms."""
    return 1.0 if count == 1 else math.sqrt(count) * ABOVE


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
    """A chain message was changed on its way, or is not for this site."""

    code = "seal"


class DisputeError(SealError):
    """What other sites of secure aggregation have sent cannot be used. places: of these sites in the key
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
    "seal": "the chain message to the site was changed on its way, or not sealed for it by the "
    "site before",
    "state": "the site has lost what it kept of this run, and does not begin it a second time",
    "surrogate": "the site was sent something it cannot read",
    "internal": "the site failed; its own log says why",
}


@contextmanager
def told_as(kind: type[Exception], what: str, then: str) -> Iterator[None]:
    """Raise `kind` for an OSError of the block.

    Args:
        kind: of error.
        what: failed.
        then: what follows of it, or is to be done.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{what} ({error.strerror or error}); {then}") from None
