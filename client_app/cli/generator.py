"""The `site generator` commands: synthetic sets, classifiers, out-of-distribution
scores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsurrogate.common.command_line import Json, RunSettings, console, new_app, run_config_of
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.escapes import csv_text
from fedsurrogate.common.files import replace_file

from .options import MaybeNode, Node, check_writable, node_of, print_json

if TYPE_CHECKING:
    from fedsurrogate.common.models.classifiers import Head
    from fedsurrogate.common.run import Run
    from fedsurrogate.common.wire.generator_files import SyntheticSet

    from ..features.site_features import SiteFeatures
    from ..methods.dpcvae.downstream import LabelledEmbeddings

generator_app = new_app("Draw synthetic embeddings from a generator, and use them.")
File = Annotated[
    Path, typer.Argument(help="A synthetic set, written by `site generator synthesize`.")
]


@generator_app.command()
def synthesize(
    run: str,
    out: Annotated[Path, typer.Option()],
    per_class: Annotated[int, typer.Option(min=0)] = 0,
    total: Annotated[int, typer.Option(min=0)] = 0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    node_config: MaybeNode = None,
    as_json: Json = False,
) -> None:
    """Draw synthetic embeddings from the generator of a dpcvae run.

    This costs no privacy, even if repeated.

    Args:
        run: A run's folder, a generator's file, Flower's number of a run of this site, or 'latest'.
        out: The safetensors file to write: x, y, and a manifest with the privacy claim.
        per_class: Number of embeddings of every class.
        total: Or their number in all; shares of classes as at all sites.
        seed: Another seed gives other embeddings.
    """
    from fedsurrogate.common.models.generators import labels_evenly, labels_like
    from fedsurrogate.common.wire.generator_files import (
        read_generator,
        read_manifest,
        write_synthetic_set,
    )

    if bool(per_class) == bool(total):
        raise ConfigError(
            "give either --per-class, the number for every class, or --total, the number in all"
        )
    check_writable(out)
    file = _generator_file(run, node_config)
    generator, manifest = read_generator(file), read_manifest(file)
    classes = generator.header.classes
    if total and not sum(generator.shares):
        raise ConfigError(
            "--total: no site has reported numbers of records by class; use --per-class"
        )
    labels = (
        labels_like(generator.shares, total) if total else labels_evenly(len(classes), per_class)
    )
    kept = {key: value for key, value in manifest.items() if key != "settings"}
    write_synthetic_set(out, generator, labels, seed, kept)
    if as_json:
        facts = {"file": str(out), "records": len(labels), "dimension": generator.dimension}
        print_json(facts | kept)
        return
    console.print(
        f"{len(labels)} embeddings of dimension {generator.dimension}, {len(classes)} classes: "
        f"{out}"
    )
    privacy = manifest["privacy"]
    if privacy is None:
        console.print(
            "no differential privacy: the generator was trained without it", style="yellow"
        )
    else:
        budget = (
            f"epsilon {privacy['epsilon']:.4g}, delta {privacy['delta']:g}, to "
            f"{privacy['relation']}"
        )
        console.print(budget)


@generator_app.command()
def classify(
    file: File,
    node_config: Node,
    run_config: RunSettings = None,
    groups: Annotated[str, typer.Option(metavar="'name=class,class; ...'")] = "",
    validation: Annotated[float, typer.Option(min=0.01, max=0.9)] = 0.2,
    out: Path | None = None,
    as_json: Json = False,
) -> None:
    """Train a head on this site's records and one on synthetic embeddings, and mix them.

    The weight of the own head maximises validation accuracy. Prints accuracy and balanced accuracy
    on the site's test records. Nothing leaves the site.

    Args:
        groups: Coarser labels; every class in one.
        validation: Share of training records for validation.
        out: Write both heads and the weight: safetensors.
    """
    from rich.table import Table

    from fedsurrogate.common.surrogates.surrogates import Header

    from ..methods.dpcvae.downstream import LabelledEmbeddings, grouped, head_on, mix

    check_writable(out)
    run = run_config_of(run_config)
    synthetic, site_features = _opened(file, run, node_config)
    names, group = grouped(groups, synthetic.classes) if groups else (synthetic.classes, None)
    own, test, made = _records(synthetic, site_features)
    if group is not None:
        own, test, made = (
            LabelledEmbeddings(each.features, group[each.labels]) for each in (own, test, made)
        )
    made_by = synthetic.manifest["method"], synthetic.manifest["run"]
    header = Header(*made_by, "site", synthetic.fingerprint, names)
    shared = head_on(made, header, run.settings.head, run.settings.seed)
    mixture = mix(own, shared, run.settings.head, run.settings.seed, validation)
    scores = mixture.scores(test)
    if out is not None:
        _write_heads(out, {"local": mixture.local, "synthetic": shared}, mixture.share)
    if as_json:
        facts = {"classes": names, "share": mixture.share, "tested": len(test.labels)}
        print_json(facts | {"scores": scores})
        return
    title = f"{len(test.labels)} test records, {len(names)} classes"
    table = Table("head of", "accuracy", "balanced accuracy", title=title)
    own_name = {
        "local": "own records",
        "synthetic": "synthetic embeddings",
        "mixed": f"both, {mixture.share:.0%} own",
    }
    for name, each in scores.items():
        table.add_row(own_name[name], f"{each['accuracy']:.1%}", f"{each['balanced']:.1%}")
    console.print(table)


@generator_app.command()
def ood(
    file: File,
    node_config: Node,
    run_config: RunSettings = None,
    unknown: Annotated[str, typer.Option(metavar="class,class")] = "",
    out: Path | None = None,
    as_json: Json = False,
) -> None:
    """Out-of-distribution scores of this site's test records.

    Against synthetic embeddings, its own, and both. The score is the squared Mahalanobis distance
    to the nearest known class. Classes in --unknown, and classes that the run does not have, are
    not known. The area under the ROC curve measures how well the scores detect them.

    Args:
        unknown: Classes to treat as unknown, for a test of the scores.
        out: Write the score of every test record: CSV.
    """
    import torch
    from rich.table import Table

    from fedsurrogate.common.privacy.gaussian_mechanism import clip

    from ..methods.dpcvae.downstream import (
        LabelledEmbeddings,
        out_of_distribution,
        ranks_above,
        site_records,
    )

    check_writable(out)
    run = run_config_of(run_config)
    synthetic, site_features = _opened(file, run, node_config)
    own = site_records(site_features, synthetic.classes, "train")
    made = LabelledEmbeddings(synthetic.features, synthetic.labels)
    hidden = [name.strip() for name in unknown.split(",") if name.strip()]
    every = dict.fromkeys((*synthetic.classes, *site_features.classes))
    if wrong := [name for name in hidden if name not in every]:
        raise ConfigError(f"--unknown {wrong[0]!r}: the classes are {', '.join(every)}")
    marks = torch.tensor([name in hidden for name in synthetic.classes])
    if bool(marks.all()):
        raise ConfigError(f"--unknown {unknown!r} leaves no known class")
    known = {"local": own.take(~marks[own.labels]), "synthetic": made.take(~marks[made.labels])}
    known["both"] = LabelledEmbeddings(
        torch.cat([each.features for each in known.values()]),
        torch.cat([each.labels for each in known.values()]),
    )
    # Test records keep classes that the run does not have: the scores are meant to detect them.
    test = site_features.test
    features, labels = clip(test.features.double(), 0.0)[0].float(), test.labels
    if not len(labels):
        raise DataError("no test record at this site")
    foreign = torch.tensor(
        [name in hidden or name not in synthetic.classes for name in site_features.classes]
    )
    scores = {
        name: out_of_distribution(each, features)
        for name, each in known.items()
        if len(each.labels) > 1
    }
    outside = foreign[labels]
    areas = {}
    if outside.any() and not outside.all():
        areas = {n: ranks_above(s[~outside], s[outside]) for n, s in scores.items()}
    if out is not None:
        rows = zip(labels.tolist(), *(score.tolist() for score in scores.values()), strict=True)
        cells = ([site_features.classes[label], *row] for label, *row in rows)
        replace_file(out, csv_text([["class", *scores], *cells]))
    medians = {name: float(score.median()) for name, score in scores.items()}
    if as_json:
        facts = {"tested": len(labels), "unknown": hidden, "median": medians, "area": areas}
        print_json(facts)
        return
    table = Table(
        "against", "median score", "finds the unknown (AUROC)", title=f"{len(labels)} test records"
    )
    for name, median in medians.items():
        table.add_row(name, f"{median:.4g}", f"{areas[name]:.3f}" if name in areas else "")
    console.print(table)


def _write_heads(out: Path, heads: Mapping[str, Head], share: float) -> None:
    """Write weights (C, d) and biases (C,) by the head's name; `clip` = 0: divide features by their
    norm first.
    """
    from safetensors.torch import save_file

    tensors = {
        f"{name}.{part}": getattr(head, part).contiguous()
        for name, head in heads.items()
        for part in ("weight", "bias")
    }
    header = heads["local"].header
    facts = {
        "classes": json.dumps(header.classes),
        "fingerprint": header.fingerprint,
        "share": f"{share:g}",
        "clip": "0",
    }
    save_file(tensors, out, facts)


def _generator_file(run: str, node_config: list[str] | None) -> Path:
    path = Path(run).expanduser()
    if path.is_dir():
        path = path / "generator.safetensors"
        if not path.is_file():
            raise DataError(
                f"{path.parent} has no generator.safetensors; give the folder of a dpcvae run"
            )
    if path.is_file():
        return path
    if not node_config:
        raise ConfigError(
            f"{run!r} is neither a run folder nor a file; to name a run by its number, give "
            "--node-config"
        )
    from ..methods.dpcvae.downstream import generators

    folder = generators(node_of(node_config))
    kept = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
    if run == "latest" and kept:
        return kept[-1]
    for file in kept:
        if file.stem.partition("-")[0] == run:
            return file
    there = ", ".join(dict.fromkeys(file.stem.partition("-")[0] for file in kept)) or "none"
    raise DataError(f"this site has no generator of run {run!r}; it has: {there}")


def _opened(file: Path, run: Run, node_config: list[str]) -> tuple[SyntheticSet, SiteFeatures]:
    from fedsurrogate.common.backbones.backbone_names import shown
    from fedsurrogate.common.wire.generator_files import read_synthetic_set

    from ..features.site_features import load_site
    from ..governance.policy import policy_of

    synthetic, node = read_synthetic_set(file), node_of(node_config)
    site_features = load_site(run, node, policy_of(node).cache_mib)
    if site_features.fingerprint != synthetic.fingerprint:
        raise DataError(
            f"{file} is for backbone {shown(synthetic.fingerprint)}, this site has "
            f"{shown(site_features.fingerprint)}; give the run's backbone, weights-path, image-size "
            "and features.power-transform with -c"
        )
    return synthetic, site_features


def _records(
    synthetic: SyntheticSet, site_features: SiteFeatures
) -> tuple[LabelledEmbeddings, LabelledEmbeddings, LabelledEmbeddings]:
    """The site's own training and test records, and the synthetic ones."""
    from ..methods.dpcvae.downstream import LabelledEmbeddings, site_records

    own, test = (site_records(site_features, synthetic.classes, part) for part in ("train", "test"))
    return own, test, LabelledEmbeddings(synthetic.features, synthetic.labels)
