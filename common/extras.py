"""Optional packages: which extra has which, which ones the settings of a run need at a site, and
one error where one is missing. Every import of an optional package goes through this module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import PackageError

if TYPE_CHECKING:
    from .methods.method import Plan
    from .settings import Settings


# By the name that Python imports: the extra in pyproject.toml that installs it.
EXTRAS = {
    "ray": "simulation",
    "torchvision": "backbones",
    "open_clip": "backbones",
    "timm": "backbones",
    "huggingface_hub": "backbones",
    "ot": "generators",
    "pyarrow": "tables",
    "pydicom": "dicom",
    "h5py": "slides",
    "dicomweb_client": "pacs",
    "matplotlib": "plots",
    "pandas": "pandas",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "prometheus_client": "monitor",
    "mlflow": "mlflow",
    "sksurv": "survival",
    "lifelines": "survival",
    "statsmodels": "survival",
}
# Names at the package index, where they differ from those that Python imports.
DISTRIBUTIONS = {
    "open_clip": "open_clip_torch",
    "ot": "POT",
    "sksurv": "scikit-survival",
    "mlflow": "mlflow-skinny",
    "dicomweb_client": "dicomweb-client",
}
# The names of the extras of the archive that deploy/install.sh installed.
PACKED = Path(sys.prefix, "packed-extras.txt")
# pydicom finds these by itself, and nothing imports them.
DECODERS = "dicom-decoders"


def install_command(extra: str) -> str:
    """The command that installs an extra. Where an archive for machines without internet was installed,
    pip has no index: the command that packs another one.
    """
    try:
        packed = PACKED.read_text().split()
    except OSError:
        return f"pip install 'fedsurrogate[{extra}]'"
    names = " ".join(dict.fromkeys([*packed, extra]))
    return f"make airgap EXTRAS='{names}' where the archive of this installation was packed"


def is_installed(package: str) -> bool:
    """Whether Python finds a package. Imports nothing, which for some takes seconds."""
    try:
        found = find_spec(package)
    except ValueError:
        # It is imported, and was not found by a search.
        return True
    # A folder without Python code, such as one of the user's that has this name by chance, has no
    # origin.
    return found is not None and found.origin is not None


def check_installed(package: str, user: str, otherwise: str = "") -> None:
    """Raise PackageError if an optional package is missing.

    Args:
        package: A key of `EXTRAS`.
        user: What needs it, such as the setting with its value; the subject of the sentence.
        otherwise: What a person can do instead of installing it, such as "use --engine local".

    Raises:
        PackageError: The package is not installed here.
    """
    if not is_installed(package):
        raise missing(package, user, otherwise)


@contextmanager
def needed_for(user: str) -> Iterator[None]:
    """Import optional packages inside: `with needed_for("the plot of a sweep"): import matplotlib`.

    Args:
        user: As for `check_installed`.

    Raises:
        PackageError: A package of `EXTRAS` is not installed here. Any other error of an import
            stays as it is: a package that is damaged, or lacks one of its own, is not missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS or (error.name != package and is_installed(package)):
            raise
        raise missing(package, user) from None


def missing(package: str, user: str, otherwise: str = "") -> PackageError:
    """The error for a missing package; arguments as for `check_installed`."""
    name = DISTRIBUTIONS.get(package, package)
    instead = f", or {otherwise}" if otherwise else ""
    return PackageError(
        f"{user} needs the package {name}, which is not installed here; run "
        f"{install_command(EXTRAS[package])}{instead}"
    )


# The package that builds a backbone, by what stands before its colon, where that has another name.
BUILT_BY = {"hf": "timm", "onnx": "onnxruntime"}
# Kinds of data with stored features, which need no backbone.
OF_FEATURES = ("safetensors", "slides")
# By kind of data. A table next to images needs one only if it is there, which the settings do not
# say.
OF_DATA = {"parquet": "pyarrow", "dicom": "pydicom", "slides": "h5py"}


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
    library = BUILT_BY.get(library, library)
    # Nor do the labels that a survey counts.
    if library in EXTRAS and data not in OF_FEATURES and settings.counting.kind != "survey":
        yield library, f"backbone = {settings.backbone!r}"
    for package in plan.judging_packages if judges else ():
        yield package, f"method = {settings.method!r}"
