"""The model that a person names in a command, with the settings of the site that uses it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedsurrogate.client_app.model_use.store import IN_USE, open_model
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.models.classifiers import target_of_model
from fedsurrogate.common.run import Run
from fedsurrogate.common.signed_models.run_folders import (
    is_run_folder,
    is_simulated,
    own_model,
    settings_of_run,
)
from fedsurrogate.common.signed_models.signed_model import SignedModel

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
