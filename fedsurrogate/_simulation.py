"""A whole federation in this process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from fedsurrogate import _images
from fedsurrogate._arrays import COLUMN, Array, Labels, data_frame, numbered, shown
from fedsurrogate._inputs import class_names, flat_settings, is_whole
from fedsurrogate._model import Model
from fedsurrogate._targets import target_in, with_target_columns
from fedsurrogate.common.backbones.backbone_names import OWN_BACKBONE, check_columns
from fedsurrogate.common.backbones.networks import options_of
from fedsurrogate.common.errors import ConfigError, DataError, RunError
from fedsurrogate.common.identity import check_one_truth
from fedsurrogate.common.methods import METHODS
from fedsurrogate.common.methods.method import Kind
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.settings.base import Scalar, parse_settings
from fedsurrogate.common.surrogates.surrogates import in_class_order
from fedsurrogate.common.wire.model_proto import load_model
from fedsurrogate.server_app.deployment.submit import OnEvent
from fedsurrogate.server_app.monitoring.watch import Progress
from fedsurrogate.server_app.report.build import write_report
from fedsurrogate.server_app.runs.scores import (
    ACCURACY,
    AUROC,
    BALANCED,
    MAJORITY,
    SCORES,
    in_words,
    scores_of,
)
from fedsurrogate.server_app.trial_process import Start

Pair = tuple[Array, Array]
# Settings with which features are computed here.
OF_BACKBONE = ("weights_path", "image_size", "device")
STATED = ("features__mean", "features__std", "features__pooling")


@dataclass(frozen=True, repr=False)
class Result:
    """What a run left.

    Attributes:
        folder: its run folder.
        metrics: the content of metrics.json.
        values: the labels of each entry by class name, as the user has them.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from sklearn.datasets import load_iris
        >>> x, y = load_iris(return_X_y=True)
        >>> with TemporaryDirectory() as runs:
        ...     result = simulate([(x[::2], y[::2]), (x[1::2], y[1::2])], output_dir=runs)
        >>> sorted(result.metrics["quality"]["averages"])[:2]
        ['accuracy', 'balanced_accuracy']
    """

    folder: Path
    metrics: dict[str, Any]
    values: Sequence[Mapping[str, Any]] = ()

    @property
    def accuracy(self) -> float:
        """Of the model, on all test records, from 0 to 1.

        Raises:
            RunError: for a run in which nothing measured it.
        """
        return self._score(ACCURACY)

    @property
    def auroc(self) -> float:
        """The mean area under the ROC curve over the classes of the test records, each against all
        others, or over labels.

        Raises:
            RunError: where it is undefined, or nothing measured it.
        """
        return self._score(AUROC)

    @property
    def balanced_accuracy(self) -> float:
        """The mean accuracy within each class of the test records.

        Raises:
            RunError: where nothing measured it.
        """
        return self._score(BALANCED)

    @property
    def majority(self) -> float:
        """The accuracy of the majority baseline of the test records.

        Raises:
            RunError: where nothing measured it.
        """
        return self._score(MAJORITY)

    @property
    def metric_values(self) -> dict[str, dict[str, float]]:
        """How well a model of another target than classes answers on all test records, by output;
        empty for classes.
        """
        return dict(self.metrics.get("metric_values", {}).get("all", {}))

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """One entry a round, with its accuracy, for methods with rounds."""
        return list(self.metrics["rounds"])

    @property
    def bytes(self) -> int:
        """Bytes that all sites sent together."""
        return int(self.metrics["bytes"]["up"])

    @property
    def model(self) -> Model:
        """The trained classifier.

        Raises:
            RunError: for a run without a model for all sites.
        """
        file = self.folder / "model.safetensors"
        if not file.exists():
            raise RunError(
                f"method = {self._settings()['method']!r}: this run has no model for all sites, "
                "because heads stay at the sites; accuracy and metrics have what they achieved"
            )
        return Model(load_model(file), values=self.values)

    def to_frame(self) -> Any:
        """A pandas data frame, one row a site: accuracy there, and bytes sent.

        Raises:
            PackageError: without pandas.
        """
        accuracy, sent = self.metrics["accuracy"]["per_site"], self.metrics["bytes"]["up_per_site"]
        names = sorted(accuracy.keys() | sent.keys())
        rows = [
            {"site": name, "accuracy": accuracy.get(name), "bytes": sent.get(name)}
            for name in names
        ]
        return data_frame(rows).set_index("site")

    def report(self) -> Path:
        """The page with figures and tables, an HTML file; drawn at the first call, because that
        takes seconds.
        """
        page = self.folder / "report.html"
        return page if page.exists() else write_report(self.folder)

    def __repr__(self) -> str:
        used = self.metrics["sites"]["used"]
        shown = in_words(scores_of(self.metrics)) or "accuracy unknown"
        return f"Result({self._settings()['method']}, {used} sites, {shown}, {self.bytes} bytes up)"

    def _score(self, name: str) -> float:
        if (value := scores_of(self.metrics).get(name)) is None:
            raise RunError(
                f"{SCORES[name]} of the run in '{self.folder}' is undefined for its test records, or "
                "was not measured on all of them; see metrics['accuracy'], which has what the sites "
                "measured, metrics['quality'], and metrics for another target than classes"
            )
        return value

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text())["config"]
        return settings


@dataclass(frozen=True)
class Simulation:
    """What the sites of a simulation have, ready for any number of runs.

    Attributes:
        count: number of sites.
        records: of each site, or all in one, which the sites share; None: sites read the data that
            settings name.
        test: records for evaluation.
        flat: settings that follow from the data and the backbone.
        own: node-config of every site.
        bags: number of the bag of each image, for each of `records`, and for `test`; None where
            images are records.
        columns: names of those of the features; empty without names.
    """

    count: int
    records: list[_images.NamedRecords | _images.ValuedRecords] | None = None
    test: _images.NamedRecords | _images.ValuedRecords | None = None
    flat: Mapping[str, Scalar] = field(default_factory=dict)
    own: Mapping[str, Scalar] = field(default_factory=dict)
    bags: Sequence[torch.Tensor] | None = None
    columns: tuple[str, ...] = ()

    def run(
        self,
        settings: Mapping[str, Scalar],
        output_dir: str | Path,
        on_event: OnEvent,
        start: Start | None = None,
    ) -> Path:
        """Run the federation.

        Args:
            settings: flat keys of the run, and their values.
            output_dir: in which the run folder is made.
            on_event: called with the events of the run.
            start: runs sites elsewhere, from their node-configs and the settings; None for this
                process.

        Returns:
            The run folder.

        Raises:
            FedSurrogateError: for a run that fails.
        """
        from fedsurrogate.server_app.deployment.local_engine import run_here

        flat = dict(self.flat) | dict(settings) | {"output-dir": str(output_dir)}
        nodes = [
            {"partition-id": index, "num-partitions": self.count} | dict(self.own)
            for index in range(self.count)
        ]
        with tempfile.TemporaryDirectory(prefix="fedsurrogate-") as folder:
            if self.records is not None:
                target = parse_run(flat).target
                columns = () if target is None else target.columns
                names, classes = _write(self, self.records, Path(folder), columns)
                flat |= {"data": "safetensors", "data-dir": folder, "dataset": ",".join(names)}
                if flat.get("epsilon") and target is None:
                    flat.setdefault("classes", ",".join(classes))
            if start is not None:
                return start(nodes, flat)
            return run_here(nodes, parse_run(flat), flat, on_event, report=False)


def gather(
    sites: Sequence[Pair | _images.Images] | int,
    data: _images.Images | str | None,
    backbone: str | nn.Module | None,
    test: Pair | _images.Images | None,
    settings: Mapping[str, Any],
    bags: object = None,
) -> Simulation:
    """Compute the features of everything that the user gave.

    Args:
        sites: as in `simulate`.
        data: as in `simulate`.
        backbone: as in `simulate`.
        test: as in `simulate`.
        settings: as keyword arguments; those of the backbone are read.
        bags: names of the bags of images, as in `simulate`; None where images are records.

    Raises:
        DataError: for records that cannot be read.
        BackboneError: for a backbone that cannot be loaded.
        ConfigError: for arguments that do not agree.
    """
    flat: dict[str, Scalar] = {}
    if backbone == OWN_BACKBONE:
        raise ConfigError(
            "backbone = 'own' stands for a module of a site; give the module, or its name, as the "
            "backbone"
        )
    if backbone is not None:
        flat["backbone"] = OWN_BACKBONE if _images.is_own(backbone) else str(backbone)
    if isinstance(sites, int) and (data is None or isinstance(data, str)):
        if test is not None:
            raise ConfigError(
                "test is for data of your own; the data that settings name have their own test "
                "records"
            )
        if data is not None:
            flat["data"] = data
        if not _images.is_own(backbone):
            return Simulation(sites, flat=flat)
        if not isinstance(backbone, str) or not backbone.startswith("python:"):
            raise ConfigError(
                "sites that read files make the backbone themselves; give it as "
                "'python:package.module:function', or give the images as data"
            )
        return Simulation(sites, flat=flat, own={"backbone": backbone})
    if data is not None and not isinstance(sites, int):
        raise ConfigError(
            "sites and data both hold records; give a number of sites with data, or the sites alone"
        )
    options = {key: value for key, value in settings.items() if key in OF_BACKBONE}
    stated = {key.replace("__", "."): each for key, each in settings.items() if key in STATED}
    options["options"] = options_of(parse_settings(Settings, stated).features)
    entries = [data] if isinstance(sites, int) else list(sites)
    listed = settings.get("classes")
    classes = () if listed is None or isinstance(listed, str) else class_names(listed)
    target = target_in(settings)
    records = [_images.records_for(entry, backbone, options, classes, target) for entry in entries]
    extra = None if test is None else _images.records_for(test, backbone, options, classes, target)
    names = _images.feature_columns(entries[0], backbone) if entries else ()
    for entry in [*entries[1:], *([] if test is None else [test])]:
        check_columns(_images.feature_columns(entry, backbone), names, "the first site")
    count = sites if isinstance(sites, int) else len(entries)
    numbers = numbered(bags, [len(x) for x, _ in filter(None, (*records, extra))])
    return Simulation(count, records, extra, flat, bags=numbers, columns=names)


def check_sites(sites: object) -> None:
    """Raise ConfigError unless sites are a number of at least one, or a list."""
    if isinstance(sites, int) and is_whole(sites):
        if sites < 1:
            raise ConfigError(f"sites = {sites}; a simulation needs at least one")
        return
    if not isinstance(sites, list | tuple):
        raise ConfigError(
            f"sites = {shown(sites)}: must be a number of sites, or a list with one entry a site; "
            "records that sites share are data=..."
        )
    if (
        isinstance(sites, tuple)
        and [len(getattr(each, "shape", ())) for each in sites[1:]] == [1]
        and len(getattr(sites[0], "shape", ())) > 1
    ):
        raise ConfigError(
            "sites is one pair (x, y); write [(x, y)] for one site, or simulate(3, data=(x, y)) for "
            "three that share it"
        )


def simulate(
    sites: Sequence[Pair | _images.Images] | int = 3,
    *,
    data: _images.Images | str | None = None,
    backbone: str | nn.Module | None = None,
    method: str = "fedpft",
    test: Pair | _images.Images | None = None,
    output_dir: str | Path = "runs",
    verbose: bool = False,
    **settings: Any,
) -> Result:
    """Run a whole federation in this process, with the messages and checks of a real one.

    Args:
        sites: a list with one entry a site, or a number of sites that share `data` by `partition`.
            An entry is a pair of features or images (n, ...) and labels (n,), or a data set whose
            items are pairs (image, label).
        data: with a number of sites, one such entry to share, or a kind of data as in the settings
            (the bundled digits by default, or "imagefolder" with `data_dir`).
        backbone: a name as in the settings, or your own: a module, a registered name, or
            "python:package.module:function". Arrays (n, d) are taken as features if no backbone is
            given.
        method: its name.
        test: an entry on which the model is evaluated; without it a part of each site's records
            (`test_fraction`).
        output_dir: in which the run folder is made.
        verbose: print the events of the run.
        settings: of the run, as keyword arguments. With `bags`, names of the unit of which each
            record is an image, the images of one are one record, the mean of their features: a list
            with an array (n,) for each site, or one for data, and one more for test.

    Returns:
        What the run left.

    Raises:
        FedSurrogateError: for settings that do not agree, data that cannot be read, or a run that
            fails.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from sklearn.datasets import load_iris
        >>> x, y = load_iris(return_X_y=True)
        >>> with TemporaryDirectory() as runs:
        ...     result = simulate([(x[k::3], y[k::3]) for k in range(3)], output_dir=runs)
        >>> result.accuracy > 0.9, result.metrics["sites"]["used"]
        (True, 3)
    """
    check_sites(sites)
    settings = with_target_columns(settings, [data] if isinstance(sites, int) else sites)
    bags = settings.pop("bags", None)
    if bags is not None:
        settings = settings | {"features__bag": "mean", "bag_column": COLUMN}
    flat = flat_settings(method, settings)
    parse_run(flat)
    federation = gather(sites, data, backbone, test, settings, bags)
    if bags is not None and federation.bags is None:
        raise ConfigError(
            "bags is for arrays; data that settings name have a bag-column, with features.bag = 'mean'"
        )
    progress = Progress()

    def show(event: dict[str, Any]) -> None:
        if verbose:
            print(progress.line(event), flush=True)

    run = federation.run(flat, output_dir, show)
    values = [labels.values for _, labels in federation.records or () if isinstance(labels, Labels)]
    return Result(run, json.loads((run / "metrics.json").read_text()), values)


def _write(
    federation: Simulation,
    known: Sequence[_images.NamedRecords | _images.ValuedRecords],
    folder: Path,
    columns: Sequence[str],
) -> tuple[list[str], tuple[str, ...]]:
    """Write records as files, which sites read as their data. Returns names of the data sets, and
    classes.

    known: of each site, or all in one, which the sites share. columns: of another target than
    classes.
    """
    extra = federation.test
    if not known:
        raise DataError("no site; give at least one")
    everything = [*known, *([extra] if extra else [])]
    if len(dimensions := {x.shape[1] for x, _ in everything}) > 1:
        raise DataError(
            f"features of {' and '.join(map(str, sorted(dimensions)))} dimensions; all sites need "
            "the same"
        )
    classes = in_class_order(
        {name for _, own in everything if isinstance(own, Labels) for name in own.names}
    )
    check_one_truth(set(own.names) for _, own in everything if isinstance(own, Labels))
    if wrong := [name for name in classes if "," in name]:
        raise DataError(f"class {wrong[0]!r} contains a comma; rename it")
    index = {name: number for number, name in enumerate(classes)}
    # Where images are records, each is a bag of its own for the division of test records.
    bags = federation.bags or [torch.arange(len(x)) for x, _ in everything]

    def save(name: str, at: int, rows: torch.Tensor) -> None:
        x, given = everything[at]
        content = {"x": x[rows].contiguous()}
        if isinstance(given, Labels):
            numbers = torch.tensor([index[label] for label in given.names], dtype=torch.int64)
            content["y"] = numbers[rows]
        else:
            content |= {
                column: values[rows].contiguous()
                for column, values in zip(columns, given.T, strict=True)
            }
        if federation.bags is not None:
            content[COLUMN] = bags[at][rows]
        metadata = {"classes": ",".join(classes), "columns": json.dumps(federation.columns)}
        save_file(content, folder / f"{name}.safetensors", metadata)

    names = [f"site-{number}" for number in range(len(known))]
    for number, name in enumerate(names):
        save(
            name if extra is None else f"{name}-train", number, torch.arange(len(known[number][0]))
        )
        if extra is not None:
            # Each site evaluates its share of the test records, so that each record counts once.
            share = (bags[-1] % len(known) == number).nonzero().flatten()
            save(f"{name}-test", len(known), share)
    return names, classes


WORDS: dict[Kind, str] = {
    "one-shot": "once",
    "chain": "site to site",
    "rounds": "in rounds",
    "alone": "nothing",
}


class MethodTable(tuple[dict[str, Any], ...]):
    """A table of methods: of each its name, its title, when sites send, whether it has a mechanism of
    privacy, and its source.

    Example:
        >>> table = methods()
        >>> len(table), sorted(table[0])
        (23, ['method', 'paper', 'privacy', 'sends', 'title'])
    """

    def to_frame(self) -> Any:
        """A pandas data frame, with the names as its index.

        Raises:
            PackageError: without pandas.
        """
        return data_frame(self).set_index("method")

    def __repr__(self) -> str:
        lines = [tuple(self[0]), *(tuple(map(_cell, row.values())) for row in self)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def methods() -> MethodTable:
    """All methods that `method` may name.

    Example:
        >>> [row["method"] for row in methods()][:2]
        ['fedpft', 'fedlap']
    """
    rows = (
        {
            "method": each.name,
            "title": each.title,
            "sends": WORDS[each.usual.kind],
            "privacy": each.private,
            "paper": each.paper,
        }
        for each in METHODS.values()
    )
    return MethodTable(rows)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
