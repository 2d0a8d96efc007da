"""Command lines of the benchmarks."""

import argparse
from collections.abc import Mapping

from benchmarks.harness.samples import feature_settings
from fedsurrogate.common.settings.base import Scalar, parse_overrides


def described(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the script's description.

    Without options of its own, it keeps `--help` from starting the script.

    Args:
        doc: the script's `__doc__`.
    """
    kept = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=kept)


def arguments(doc: str | None, name: str) -> argparse.ArgumentParser:
    """A parser with the options of scripts that measure rows over seeds: --name, --seeds and -c.

    Args:
        doc: the script's `__doc__`.
        name: default of --name, of the files in benchmarks/results.

    Example:
        >>> arguments("A benchmark.", "cifar10").parse_args(["--seeds", "1"]).seeds
        1
    """
    parser = described(doc)
    parser.add_argument("--name", default=name, help="of the files in benchmarks/results")
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
    of_samples = f"STAND-IN: MobileNetV2 features of {stand_in['dataset']}"
    return {**feature_settings(""), **stand_in}, f"{of_samples}, not the paper's backbone and data"


def without_paths(settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The settings without those that name places on this machine, as they go into a result.

    Example:
        >>> without_paths({"data-dir": "/data", "alpha": 0.1})
        {'alpha': 0.1}
    """
    paths = ("data-dir", "weights-path")
    return {key: value for key, value in settings.items() if key not in paths}
