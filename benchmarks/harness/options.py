"""Command lines of the benchmarks."""

import argparse
from collections.abc import Mapping
from typing import Any

from benchmarks.harness.samples import BACKBONES, MOBILENET, feature_settings
from fedsurrogate.common.settings.base import Scalar, parse_overrides


def described(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the script's description.

    Without options of its own, it keeps `--help` from starting the script.

    Args:
        doc: the script's `__doc__`.
    """
    kept = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=kept)


def named(name: str, backbone: str) -> str:
    """The name of a result with features of a backbone.

    Args:
        name: with features of MobileNetV2.
        backbone: of the sample data.

    Example:
        >>> named("cifar10", "mobilenet_v2"), named("cifar10", "lite0")
        ('cifar10', 'cifar10-lite0')
    """
    return name if backbone == MOBILENET else f"{name}-{backbone}"


class _Backbone(argparse.Action):
    """--backbone, which is in the default of --name too."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        namespace.backbone = values
        if (name := parser.get_default("name")) and namespace.name == name:
            namespace.name = named(name, values)


def with_backbone(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """A parser with the option --backbone.

    Args:
        parser: which may have --name already.
    """
    text = "whose features of the sample images are taken"
    parser.add_argument(
        "--backbone", action=_Backbone, choices=list(BACKBONES), default=MOBILENET, help=text
    )
    return parser


def arguments(doc: str | None, name: str) -> argparse.ArgumentParser:
    """A parser with the options of scripts that measure rows over seeds: --name, --backbone, --seeds
    and -c.

    Args:
        doc: the script's `__doc__`.
        name: default of --name, of the files in benchmarks/results.

    Example:
        >>> arguments("A benchmark.", "cifar10").parse_args(["--seeds", "1"]).seeds
        1
        >>> arguments("A benchmark.", "cifar10").parse_args(["--backbone", "lite0"]).name
        'cifar10-lite0'
    """
    parser = described(doc)
    parser.add_argument("--name", default=name, help="of the files in benchmarks/results")
    with_backbone(parser)
    parser.add_argument("--seeds", type=int, default=3)
    words = "'key=value ...'"
    parser.add_argument("-c", "--run-config", action="append", default=[], metavar=words)
    return parser


def settings_of(
    options: argparse.Namespace,
    stand_in: Mapping[str, Scalar],
) -> tuple[dict[str, Scalar], str]:
    """Settings for the user's data and backbone (`-c`), or for the sample features; described.

    Args:
        options: of a parser of `arguments`.
        stand_in: settings that go with the sample features: `dataset`, and others.
    """
    if given := parse_overrides(options.run_config):
        return given, ", ".join(f"{key}={value}" for key, value in without_paths(given).items())
    title, dataset = BACKBONES[options.backbone].title, stand_in["dataset"]
    of_samples = f"STAND-IN: {title} features of {dataset}, not the paper's backbone and data"
    return {**feature_settings("", options.backbone), **stand_in}, of_samples


def without_paths(settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The settings without those that name places on this machine, as they go into a result.

    Example:
        >>> without_paths({"data-dir": "/data", "alpha": 0.1})
        {'alpha': 0.1}
    """
    paths = ("data-dir", "weights-path")
    return {key: value for key, value in settings.items() if key not in paths}
