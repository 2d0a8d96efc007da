"""Which optional packages the settings of a run need at a site, so that a missing one is reported
before the run starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from fedsurrogate.common.extras.packages import EXTRAS, check_installed

if TYPE_CHECKING:
    from fedsurrogate.common.methods.method import Plan
    from fedsurrogate.common.settings import Settings

# By kind of data. A table next to images needs one only if it is there, which the settings do not
# say.
OF_DATA = {"parquet": "pyarrow", "dicom": "pydicom"}


def check_packages(needed: Iterable[tuple[str, str]]) -> None:
    """Raise PackageError if a package of `packages_for` is missing; the error names its setting and
    how to install it.
    """
    for package, setting in needed:
        check_installed(package, setting)


def packages_for(
    settings: Settings, plan: Plan, data: str, judges: bool
) -> Iterator[tuple[str, str]]:
    """Optional packages that a site needs for a run, from settings alone.

    Args:
        settings: Of the run.
        plan: Of the run.
        data: Kind of the site's data: its own, or in a simulation the run's.
        judges: Whether the site evaluates the result of the run on its own test records.

    Returns:
        Each package with the setting that needs it.
    """
    if data in OF_DATA:
        yield OF_DATA[data], f"data = {data!r}"
    library = settings.backbone.partition(":")[0]
    # Stored features need no backbone, nor do the labels that a survey counts.
    if library in EXTRAS and data != "safetensors" and settings.counting.kind != "survey":
        yield library, f"backbone = {settings.backbone!r}"
    for package in (*plan.packages, *(plan.judging_packages if judges else ())):
        yield package, f"method = {settings.method!r}"
