"""The node-config: a site's own settings. The coordinator can neither see nor change them.
And the files that this software keeps at a site: no other account of the machine may read them.

A program of a site makes them so (`owner_only`). An earlier version let the umask decide; what it
left is closed when the site next works.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import translate
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from fedsurrogate.common.errors import ConfigError, StorageError
from fedsurrogate.common.extras import packages_for
from fedsurrogate.common.machine import CACHE, STATE, home_folder, user_folder, why_not_writable
from fedsurrogate.common.privacy.accounting import Unit
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import CountingSettings, DataKind, Device, Names, Section
from fedsurrogate.common.settings.base import MiB, Name, Range, Scalar, parse_settings
from fedsurrogate.common.settings.base import Unit as Quantity

# Treatment of a DICOM file that holds several images.
Frames = Literal["refuse", "first", "middle", "all"]
SiteName = Annotated[
    Name,
    Range(
        "empty, or at most 64 letters, digits, dots, dashes and underscores, no punctuation first"
    ),
]
Shares = Annotated[int, Quantity("shares")]
Components = Annotated[int, Quantity("components")]


def _is_reference(name: str) -> str:
    if name and not re.fullmatch(r"python:[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        raise ValueError(
            "must name a function as python:PACKAGE.MODULE:FUNCTION; other backbones are named by "
            "the run, not by a site"
        )
    return name


class NodeConfig(Section):
    """Keys of `flower-supernode --node-config`. `site settings` prints them.

    Attributes:
        site: Name of this site; empty for a number.
        partition_id: Index of this site's share of public data, in a simulation.
        num_partitions: Number of shares into which public data are divided.
        data: Kind of this site's data; empty makes the site a share of the run's own data, for
            simulations.
        data_dir: Folder of this site's data.
        dataset: Files or folders in data-dir that are this site's; empty for all.
        held_out_dir: Folder of labelled records that no run trains on, of the same kind, for
            evaluations; data-dir itself means the test split that its files name.
        label_column: Column of a table that holds the class of a record.
        classes: Classes that this site's records have, as a person has confirmed them. If one is
            gone, the site does not join; of folders of classes it also refuses every run.
        patient_column: Column of a table that holds the patient ID; patients are then protected.
        bag_column: Column of a table, or tensor, that names the bag of an image, where a run pools
            bags; of DICOM also study, series or patient, of a folder without a table folder.
        target_columns: Columns that runs may learn where they learn no class: labels, numbers, or
            time and event; a run names those that it learns.
        unit: Unit of privacy if the data have patient IDs; record protects each image alone, so a
            patient with several images is protected less, and bag each bag of bag-column, so all
            private runs must pool bags. All private runs on data-dir have one unit.
        dicom_frames: What is done with a DICOM file that holds several images; all takes each,
            where a run pools bags.
        policy: File of limits on releases; empty for the default policy, which answers private runs
            only.
        peers: File with the public keys of other sites, for sealed chains.
        coordinator_key: Public key of the coordinator whose signed requests this site answers:
            hexadecimal digits, or a file that contains them.
        weights_path: File of the backbone's weights at this site, or folder with them and their
            configuration; empty for those that its library has fetched here before.
        download_weights: Whether weights of a backbone that are not on this machine are fetched
            from where they are published. Simulated sites always may.
        backbone: A backbone of this site's own, for runs with backbone = own: a function without
            arguments that returns a torch module, or a module and a transform.
        device: Processor or GPU of this site; auto uses the run's setting. With cuda, all GPUs of
            the machine compute the features of many images, with cuda:N one.
        cache_dir: Folder for computed features; empty for fedsurrogate in the folder that
            XDG_CACHE_HOME names, or in ~/.cache without it.
        features_in_memory_mib: Features that stay in memory; those of a larger site are on disk in
            cache-dir, and their sums and mixtures are computed in chunks.
        state_dir: Folder for log, ledgers, keys and other state; empty for fedsurrogate in the
            folder that XDG_STATE_HOME names, or in ~/.local/state without it.
        check_log_dir: Folder for the check logs of the ledgers, never restored together with
            state-dir; empty for check-log next to the policy, or ~/.config/fedsurrogate/check-log
            without one.
        max_components: Most components of a mixture that this site sends, for a slow connection; 0
            for no limit.
        max_rank: Largest rank of a covariance that this site sends, for a slow connection; 0 for no
            limit.
    """

    site: SiteName = Field("", max_length=64, pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$")
    partition_id: int = Field(0, ge=0)
    num_partitions: Shares = Field(1, ge=1)
    data: DataKind | Literal[""] = ""
    data_dir: str = ""
    dataset: Names = ()
    held_out_dir: str = ""
    label_column: Name = "label"
    classes: Names = ()
    patient_column: Name = ""
    bag_column: Name = ""
    target_columns: Names = ()
    unit: Literal["patient", "record", "bag"] = "patient"
    dicom_frames: Frames = "refuse"
    policy: str = ""
    peers: str = ""
    coordinator_key: str = ""
    weights_path: str = ""
    download_weights: bool = False
    backbone: Annotated[
        str, AfterValidator(_is_reference), Range("empty, or python:PACKAGE.MODULE:FUNCTION")
    ] = Field("", max_length=200)
    device: Device = "auto"
    cache_dir: str = ""
    features_in_memory_mib: MiB = Field(128, ge=1)
    state_dir: str = ""
    check_log_dir: str = ""
    max_components: Components = Field(0, ge=0)
    max_rank: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _partition_exists(self) -> Self:
        if self.partition_id >= self.num_partitions:
            raise ValueError(
                f"partition-id = {self.partition_id} must be below num-partitions = "
                f"{self.num_partitions}"
            )
        return self

    @model_validator(mode="after")
    def _data_have_a_kind(self) -> Self:
        # Without it the site would read the bundled digits. Kits name the folder of every kind.
        given = {"data-dir": self.data_dir, "dataset": ",".join(self.dataset)}
        given |= {"held-out-dir": self.held_out_dir}
        if not self.data and (named := [key for key, value in given.items() if value]):
            raise ValueError(
                f"{named[0]} = {given[named[0]]!r}, but data is not set; set data to the kind of this "
                "site's data, such as data = 'imagefolder' for one folder of images per class, or "
                f"remove {' and '.join(named)}"
            )
        return self

    @property
    def protects(self) -> Unit | Literal["bag"]:
        """The unit of privacy at a site with its own data; it depends on these settings only, not
        on the data.
        """
        if self.unit == "patient":
            return "patient" if self.patient_column or self.data == "dicom" else "record"
        return self.unit

    @property
    def held_out_apart(self) -> bool:
        """Whether all records of held-out-dir are held out, because it is not data-dir."""
        return (
            Path(self.held_out_dir).expanduser().resolve()
            != Path(self.data_dir).expanduser().resolve()
        )

    @property
    def cache(self) -> Path:
        """Folder for computed features."""
        return Path(self.cache_dir).expanduser() if self.cache_dir else user_folder(CACHE)

    @property
    def state(self) -> Path:
        """Folder for the site's log, ledgers and other state."""
        return Path(self.state_dir).expanduser() if self.state_dir else user_folder(STATE)

    @property
    def check_log(self) -> Path:
        """Folder for the check logs of the ledgers; it must not be lost or restored together with
        `state`.
        """
        if self.check_log_dir:
            return Path(self.check_log_dir).expanduser()
        if self.policy:
            return Path(self.policy).expanduser().parent / "check-log"
        return home_folder() / ".config/fedsurrogate/check-log"


def not_writable(key: str, folder: Path, why: str) -> StorageError:
    """The error for a folder that this user may not write, with what to do.

    Args:
        key: of the node-config, state-dir or cache-dir.
        folder: that it names.
        why: it cannot be written.
    """
    variable = {"state-dir": STATE, "cache-dir": CACHE}[key]
    return StorageError(
        f"{key} = {str(folder)!r} cannot be written ({why}); set {key} in the node-config, or the "
        f"variable {variable} of the environment, to a folder that user {os.getuid()} may write"
    )


def data_present(node: NodeConfig) -> bool:
    """Whether the site's folder of data has anything in it. A folder that is not mounted is empty."""
    if not node.data_dir:
        return True
    try:
        with os.scandir(Path(node.data_dir).expanduser()) as found:
            return any(True for _ in found)
    except OSError:
        return False


def check_folders(node: NodeConfig) -> None:
    """Raise StorageError unless the site's folders for state and features can be written; they
    are created.
    """
    for key, folder in (("state-dir", node.state), ("cache-dir", node.cache)):
        if why := why_not_writable(folder):
            raise not_writable(key, folder, why)


def is_protected(private: bool, node: NodeConfig) -> bool:
    """Whether a private run uses records of a hospital.

    Then the rule of client_app/governance/release.py holds. False for public data: the bundled
    digits, and a share of the run's own data.

    Args:
        private: whether the run has a privacy budget.
        node: the site's settings.

    Example:
        >>> [is_protected(True, NodeConfig(data=kind)) for kind in ("dicom", "digits")]
        [True, False]
    """
    return private and node.data not in ("", "digits")


def judges(counting: CountingSettings, node: NodeConfig) -> bool:
    """Whether a run evaluates a model on a hospital's own held-out records."""
    return counting.kind == "evaluation" and node.data not in ("", "digits")


def packages_of(run: Run, node: NodeConfig) -> list[tuple[str, str]]:
    """Optional packages that this site needs for a run; from settings alone.

    Args:
        run: that needs them.
        node: the site's settings.

    Returns:
        Each package with the setting that needs it.
    """
    # Of a hospital's own records no accuracy may leave then, so the hospital computes none.
    hidden = bool(node.data) and run.hides_sites
    return list(
        packages_for(run.settings, run.plan, node.data or run.settings.data, judges=not hidden)
    )


def check_held_out(counting: CountingSettings, node: NodeConfig) -> None:
    """Raise ConfigError for an evaluation at a hospital that names no held-out records."""
    if judges(counting, node) and not node.held_out_dir:
        raise ConfigError(
            "held-out-dir is empty, so this site has no held-out records to evaluate a model on; "
            "set it to a folder of labelled records that no run trains on"
        )


def parse_node_config(flat: Mapping[str, Scalar]) -> NodeConfig:
    """Parse a node-config. Raises ConfigError with a one-line message."""
    return parse_settings(NodeConfig, flat)


def check_stated(node: NodeConfig, stated: Mapping[str, Scalar]) -> None:
    """Refuse a message that comes with other settings than this site's own.

    Args:
        node: the settings with which this site was started.
        stated: those that came with a message, flat. A SuperNode needs none; then they are empty.

    Raises:
        ConfigError: that names the keys that are stated otherwise.

    Example:
        >>> check_stated(NodeConfig(data="digits"), {"data": "digits", "device": "auto"})
    """
    given = parse_node_config(stated) if stated else node
    keys = [key for key in NodeConfig.model_fields if getattr(given, key) != getattr(node, key)]
    if keys:
        raise ConfigError(
            f"{', '.join(keys).replace('_', '-')}: the SuperNode states other settings than this app was "
            "started with, and only those hold; start the SuperNode without --node-config; if nobody "
            "gave it one, find out which program states them"
        )


# All that this software keeps in each folder. Others' files there stay as they are: a person may
# have named a folder that holds more.
IN_STATE = (
    "audit.key",
    "audited",
    "data-report-*.json",
    "decisions.json",
    "decisions.lock",
    "disclosures",
    "generators",
    "held",
    "keys",
    "ledgers",
    "models",
    "policy.json",
    "public",
    "replies",
    "requests.json*",
    "runs",
    "site.log*",
    "sums",
)
IN_CACHE = ("features",)
IN_CHECK_LOG = ("*.answered*", "*.witness*")
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def own_files(node: NodeConfig, reachable: bool = False) -> Iterator[str]:
    """Paths of all files and folders that this software keeps at a site, without following links.

    Args:
        node: the site's settings.
        reachable: only those that lie in no folder that is closed to other accounts. A site works for
            years, and looks at every request.
    """

    def entered(path: str) -> bool:
        with suppress(OSError):
            mode = os.lstat(path).st_mode
            return not stat.S_ISLNK(mode) and bool(mode & OTHERS or not reachable)
        return False

    for folder, patterns in (
        (node.state, IN_STATE),
        (node.cache, IN_CACHE),
        (node.check_log, IN_CHECK_LOG),
    ):
        _, within, loose = next(os.walk(folder), ("", [], []))
        own = filter(_any_of(patterns).match, (*within, *loose))
        for each in (f"{folder}/{name}" for name in own):
            yield each
            for inner, folders, files in os.walk(each) if entered(each) else ():
                yield from (f"{inner}/{name}" for name in (*folders, *files))
                folders[:] = [name for name in folders if entered(f"{inner}/{name}")]


@cache
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)))


def readable_by_others(node: NodeConfig) -> list[Path]:
    """Files and folders of a site that the mode lets other accounts read, write or list."""
    found = []
    for path in own_files(node, reachable=True):
        with suppress(OSError):
            mode = os.lstat(path).st_mode
            if mode & OTHERS and not stat.S_ISLNK(mode):
                found.append(Path(path))
    return found


def close_to_others(node: NodeConfig) -> None:
    """Take the rights of other accounts from files of an earlier version, as far as they are this
    account's.
    """
    for path in readable_by_others(node):
        with suppress(OSError):
            path.chmod(stat.S_IMODE(path.lstat().st_mode) & ~OTHERS)
