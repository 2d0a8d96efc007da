"""Models that this site keeps: signed files in its state folder, which one is in use, the one
before, and the one that a command names.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter

from fedsurrogate.common.errors import ConfigError, SealError, StateError, SurrogateError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.models.classifiers import target_of_model
from fedsurrogate.common.run import Run
from fedsurrogate.common.signed_models.signed_model import (
    SUFFIX,
    SignedModel,
    is_name,
    is_run_folder,
    is_simulated,
    own_model,
    read_signed_model,
    save_signed_model,
    settings_of_run,
)

from ..governance.work_limits import has_room
from ..node_config import NodeConfig
from ..offline.keys import coordinator_key

INDEX = "index.json"
IN_USE = "in-use"
# Earlier models in use that `site models back` can return to.
MOST_BACK = 100

log = logging.getLogger("fedsurrogate.site")


@dataclass(frozen=True)
class Kept:
    """A kept model.

    Attributes:
        sha256: of its file.
        key: that signed it, hexadecimal.
        arrived: when it came.
        source: whether a run or a person brought it.
    """

    sha256: str
    key: str
    arrived: str
    source: str


@dataclass(frozen=True)
class Index:
    """All kept models.

    Attributes:
        models: by name.
        in_use: name of the one in use; empty for none.
        before: those in use before it, the latest last.
    """

    models: dict[str, Kept] = field(default_factory=dict)
    in_use: str = ""
    before: tuple[str, ...] = ()


def models_folder(node: NodeConfig) -> Path:
    """The folder of this site's models."""
    return node.state / "models"


def read_index(node: NodeConfig) -> Index:
    """The index of the kept models. Raises StateError if it is damaged."""
    file = models_folder(node) / INDEX
    try:
        content = json.loads(file.read_text())
        whole = dict.fromkeys(("models", "in_use", "before")) | content
        index = TypeAdapter(Index).validate_python(whole)
        if not all(map(is_name, index.models)):
            raise ValueError("a name that no model has")
        for each in index.models.values():
            bytes.fromhex(each.key)
        return index
    except FileNotFoundError:
        return Index()
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise StateError(
            f"{file} cannot be read ({type(error).__name__}); remove it, and add the models again "
            "with `site models add`"
        ) from None


def trusted_keys(node: NodeConfig) -> frozenset[bytes]:
    """Keys of coordinators whose models this site accepts from a file.

    They are the one in its node-config, or, without one, those that signed the models of its own
    runs.

    Raises:
        ConfigError: for a key that cannot be read.
    """
    if node.coordinator_key:
        return frozenset({coordinator_key(node)})
    return frozenset(bytes.fromhex(kept.key) for kept in read_index(node).models.values())


def keep_model(node: NodeConfig, model: SignedModel, source: str) -> str:
    """Keep a verified model as a file of its own, atomically. None is in use before a person decides
    it, the first one neither.

    Args:
        node: the site's settings.
        model: to keep.
        source: "run" or "file".

    Returns:
        Its name.

    Raises:
        SealError: for a key other than the one in the node-config.
        StateError: for another model of the same name.
    """
    if node.coordinator_key and model.key != coordinator_key(node):
        raise SealError(
            f"the model is signed by key {model.signer}..., not by the coordinator-key in this "
            "site's node-config; compare it with the output of `coordinator sites key` there"
        )
    name, content = model.manifest.name, save_signed_model(model)
    with _changing(node) as index:
        known = index.models.get(name)
        if known is not None and _manifest_of(node, name) != model.manifest.signed_bytes():
            raise StateError(f"this site has another model called {name!r}; remove it first")
        if known is None:
            replace_file(models_folder(node) / f"{name}{SUFFIX}", content)
            now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
            kept = Kept(hashlib.sha256(content).hexdigest(), model.key.hex(), now, source)
            _write(node, Index(index.models | {name: kept}, index.in_use, index.before))
    return name


def use_model(node: NodeConfig, name: str) -> str:
    """Put a kept model in use.

    Args:
        node: the site's settings.
        name: of the model.

    Returns:
        The name of the one before.

    Raises:
        StateError: for a model that is not kept.
    """
    read_kept(node, name)
    with _changing(node) as index:
        before = (
            index.before
            if index.in_use in ("", name)
            else (*index.before, index.in_use)[-MOST_BACK:]
        )
        _write(node, Index(index.models, name, before))
        return index.in_use


def go_back(node: NodeConfig) -> str:
    """Put the model in use that was in use before; return its name. Raises StateError if there is
    none.
    """
    with _changing(node) as index:
        if not index.before:
            raise StateError(
                "no model was in use before this one; `site models list` lists those that are kept"
            )
        *rest, name = index.before
        read_kept(node, name)
        _write(node, Index(index.models, name, tuple(rest)))
        return name


def read_kept(node: NodeConfig, name: str) -> SignedModel:
    """Read and verify a kept model.

    Args:
        node: the site's settings.
        name: of the model.

    Raises:
        StateError: for an unknown name.
        SealError: for a changed file.
    """
    index = read_index(node)
    if (kept := index.models.get(name)) is None:
        raise StateError(
            f"this site keeps no model {name!r}; it keeps: {', '.join(index.models) or 'none'}"
        )
    file = models_folder(node) / f"{name}{SUFFIX}"
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise StateError(
            f"{file} cannot be read ({error.strerror}); add it again with `site models add FILE`"
        ) from None
    if digest != kept.sha256:
        raise SealError(
            f"{file} was changed after it was kept; get it again, and add it with `site models add "
            "FILE`"
        )
    return read_signed_model(file, frozenset({bytes.fromhex(kept.key)}))


def open_model(name: str, node: NodeConfig | None) -> SignedModel:
    """A model by its file's path, by the name under which it is kept, or the one in use ("in-use").

    A file must be signed by a key that this site trusts, if it trusts any.

    Args:
        name: of the model, or path of its file.
        node: the site's settings; None without any.

    Raises:
        ConfigError: for a name without a node-config.
        StateError: for a model that is not kept.
        SealError: for a changed file, or another key.
    """
    file = Path(name).expanduser()
    if name.endswith(SUFFIX) or file.is_file():
        trusted = frozenset[bytes]() if node is None else trusted_keys(node)
        return read_signed_model(file, trusted or None)
    if node is None:
        raise ConfigError(
            f"{name!r} is no file; to name a model that this site keeps, give --node-config"
        )
    if name == IN_USE and not (name := read_index(node).in_use):
        raise StateError(nothing_in_use(read_index(node)))
    return read_kept(node, name)


def nothing_in_use(index: Index) -> str:
    """Why no model is in use, and how a person puts one in use."""
    if not index.models:
        return (
            "no model is in use at this site, and it keeps none; `site models add FILE --use` adds "
            "one, and runs bring theirs"
        )
    *_, latest = index.models
    return (
        f"no model is in use at this site: a person decides it; it keeps {', '.join(index.models)}; "
        f"put one in use with `site models use {latest}`"
    )


def only_kept(node: NodeConfig) -> str:
    """The name of the only model that is kept. Raises StateError if there are none or several."""
    names = list(read_index(node).models)
    if len(names) != 1:
        raise StateError(
            f"this site keeps {', '.join(names) or 'no model'}; "
            + ("name one of them" if names else "`site models add FILE` adds one")
        )
    return names[0]


def keep_received(node: NodeConfig, model: SignedModel, took_part: bool, most_mib: float) -> None:
    """Keep the model at the end of a run.

    A failure is only logged: the reply must not depend on this site's state.

    Args:
        node: the site's settings.
        model: received.
        took_part: whether this site has taken part in the run; otherwise the model is not kept.
        most_mib: of all received models, MiB.
    """
    if not took_part:
        log.error(
            "a model of run %s, in which this site has taken no part, is not kept",
            model.manifest.flower_run,
        )
        return
    if not has_room(node, most_mib, len(save_signed_model(model))):
        return
    try:
        name = keep_model(node, model, "run")
    except (OSError, SealError, StateError, ConfigError, SurrogateError) as error:
        log.error("the model of run %s is not kept: %s", model.manifest.flower_run, error)
    else:
        log.info(
            "kept the model of run %s as %s; it is not used before a person puts it in use with "
            "`site models use %s`",
            model.manifest.flower_run,
            name,
            name,
        )


def _manifest_of(node: NodeConfig, name: str) -> bytes:
    try:
        return read_kept(node, name).manifest.signed_bytes()
    except (SealError, StateError, SurrogateError):
        return b""


@contextmanager
def _changing(node: NodeConfig) -> Iterator[Index]:
    """The index, while no other process changes it."""
    from filelock import FileLock

    folder = models_folder(node)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with FileLock(folder / ".lock"):
        yield read_index(node)


def _write(node: NodeConfig, index: Index) -> None:
    content = json.dumps(asdict(index), indent=2) + "\n"
    replace_file(models_folder(node) / INDEX, content.encode())


# In a run folder: what `--store` keeps where no node-config names a state folder.
STORED = "site"


@dataclass(frozen=True)
class OpenedModel:
    """A model, and where its site's settings and records are.

    Attributes:
        model: the shared one.
        node: settings of the site; None where none are given, and the model is a file.
        run: the run folder that was named; None for another name.
        simulated: the run, if its records are those of a simulation on this machine.
    """

    model: SignedModel
    node: NodeConfig | None
    run: Path | None = None
    simulated: Run | None = None

    @property
    def note(self) -> str:
        """What a person should know about trust; empty for a file or a kept model."""
        if self.run is None:
            return ""
        return f"model of {self.run}, your own folder: used as it is, without a coordinator's key"

    def uncalibrated(self, temperature: float) -> bool:
        """Whether its probabilities of classes are used as they were learned.

        Args:
            temperature: that the site has stored for it; 1 without one.
        """
        return temperature == 1 and not target_of_model(self.model.classifier)

    def site(self) -> NodeConfig:
        """Settings of the site, for what needs them.

        Raises:
            ConfigError: if none are given.
        """
        if self.node is None:
            raise ConfigError(
                "--node-config is missing; the site's records and state folder are in it. For a "
                "simulation on this machine name its run folder instead, which needs none"
            )
        return self.node

    def check_records(self, folder: str) -> None:
        """Refuse a run folder without records on this machine.

        Args:
            folder: with labelled records; empty for those of the site or run.

        Raises:
            ConfigError: if there are none.
        """
        if self.run is not None and self.simulated is None and not folder and not self.site().data:
            raise ConfigError(
                f"{self.run} is a run between hospitals, so its records are not on this machine; "
                "give labelled records with --data-dir"
            )


def opened(name: str, node: NodeConfig | None) -> OpenedModel:
    """A model by the path of its file, its run folder, the name under which it is kept, or the one
    in use ("in-use").

    Without settings of a site, a run folder has its own: records are those of the simulation, and
    what is stored stays in the run folder.

    Args:
        name: of the model, or the path.
        node: the site's settings; None without any.

    Raises:
        ConfigError: for a name without settings, or a folder that is another account's or no run's.
        RunError: for a run without a model.
        StateError: for a model that is not kept.
        SealError: for a changed file, or another key.
    """
    run = Path(name).expanduser()
    if name == IN_USE or not run.is_dir():
        return OpenedModel(open_model(name, node), node)
    if not is_run_folder(run):
        raise ConfigError(
            f"{name!r} is a folder without manifest.json, so it is no run folder; name the folder "
            "that `coordinator simulate` prints in its last line, or a model file"
        )
    own = node or NodeConfig(state_dir=str(run / STORED))
    simulated = settings_of_run(run) if is_simulated(run) and not own.data else None
    return OpenedModel(own_model(run), own, run, simulated)
