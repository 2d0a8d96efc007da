"""Predictions for new images: streamed into a CSV file in flat memory, and continued after an
interruption.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.common.backbones.backbones import Backbone
from fedsurrogate.common.backbones.power_transform import power_in, raised
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.escapes import as_utf8, csv_rows, csv_text
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.logs import counted
from fedsurrogate.common.models.classifiers import (
    Classifier,
    one_thread,
    scores_alone,
    target_of_model,
)
from fedsurrogate.common.signed_models.gaussians import Gaussians
from fedsurrogate.common.signed_models.signed_model import SignedModel

from ..features.device_processes import Part, in_parts
from ..features.extraction import NOT_FINITE
from .calibration import ABSTAIN, SCORES, Calibration, Probabilities, decided_answers
from .held_out import check_backbone, check_features
from .inputs import ISSUER, PATIENT, Batch, Inputs, digest_of, pooled, slide_means

# Records that are scored and written together.
TOGETHER = 256
BATCH = 64
FILE, BAG, DECISION, PROBLEM = "file", "bag", "decision", "problem"
UNREADABLE = "cannot be read"
# A name that is not UTF-8 is escaped; earlier versions wrote its bytes.
NAMES = "surrogateescape"
LOG = logging.getLogger("fedsurrogate.site")
# A row of a table.
Cells = list[str | float | None]


@dataclass(frozen=True, eq=False)
class Predictor:
    """A model with a site's calibration.

    Attributes:
        classifier: the shared one, or the one that the site has adapted.
        calibration: of the site.
        gaussians: of the model's out-of-distribution scores, if any.

    Raises:
        ConfigError: for a limit of scores without Gaussians, or a calibration of other classes.
    """

    classifier: Classifier
    calibration: Calibration
    gaussians: Gaussians | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "calibration", self.calibration.checked(self.classes))
        if self.calibration.abstain_above is not None and self.gaussians is None:
            raise ConfigError(
                "abstain-above needs out-of-distribution scores, and this model has no Gaussians; "
                "fit them on own records with `site evaluate --store`"
            )

    @property
    def classes(self) -> tuple[str, ...]:
        """The model's classes."""
        return self.classifier.header.classes

    def columns(self) -> list[str]:
        """Names of the columns with results: those of a decision about the class, or of what the
        model answers of another target.
        """
        return list(self._answers(torch.zeros(0, self.classifier.dimension)))

    def results(self, features: Tensor) -> list[Cells]:
        """Cells of the columns with results. Probabilities are not rounded, because the decision
        about a patient comes from them. To the last digit, a record's cells depend on no other
        record: an image has the same row in another batch, and again after an interruption.

        Args:
            features: (n, d), raised to the model's power already.

        Returns:
            The cells of n rows.
        """
        return [list(row) for row in zip(*self._answers(features).values(), strict=True)]

    @torch.no_grad()
    def _answers(self, features: Tensor) -> dict[str, Cells]:
        logits = scores_alone(self.classifier, features)
        if target := target_of_model(self.classifier):
            answers = decided_answers(target, self.classes, logits, self.calibration)
            # As numbers: in a text, a sign would be escaped as the beginning of a formula.
            return {name: column.tolist() for name, column in answers.items()}
        chances, scores = self.calibration.probabilities(logits), dict[str, list[float]]()
        if self.gaussians is not None:
            found = self.gaussians.scores(features, self.classifier)
            scores = {name: each.tolist() for name, each in zip(SCORES, found, strict=True)}
        decided = [self.classes[at] for at in self.calibration.decisions(chances, self.classes)]
        if (limit := self.calibration.abstain_above) is not None:
            beyond = [value > limit for value in scores[self.calibration.score]]
            decided = [ABSTAIN if far else name for far, name in zip(beyond, decided, strict=True)]
        return {
            **{
                f"p_{name}": [*map(repr, chances[:, at].tolist())]
                for at, name in enumerate(self.classes)
            },
            DECISION: [*decided],
            **{name: [float(f"{value:.6g}") for value in each] for name, each in scores.items()},
        }


@dataclass(frozen=True)
class Predicted:
    """What a command has done.

    Attributes:
        written: rows written now.
        earlier: rows written earlier.
        unreadable: images that cannot be read.
        rate: images a second.
    """

    written: int
    earlier: int
    unreadable: int
    rate: float


def predict(
    model: SignedModel,
    predictor: Predictor,
    inputs: Inputs,
    backbone: Backbone | None,
    out: Path,
    overwrite: bool = False,
) -> Predicted:
    """Write a row for every image, or bag of images, to a CSV file; rows that are there already are
    kept and not computed again.

    Next to the file a small JSON file records model and settings: an interrupted command continues
    only with the same ones.

    Args:
        model: the shared one.
        predictor: the model with the site's calibration.
        inputs: the images.
        backbone: of the model; None for slides, which have features.
        out: the CSV file.
        overwrite: begin the file anew.

    Raises:
        BackboneError: for another backbone than the model's.
        ConfigError: for a file that was begun with other settings.
        DataError: for images that give features of another dimension.
        OSError: if the file cannot be written.
    """
    if inputs.slides is not None:
        check_features(model, inputs.slides.fingerprint)
    elif backbone is not None:
        check_backbone(model, backbone)
    units, members = (inputs, None) if inputs.bags is None else inputs.in_bags()
    header = [FILE if members is None else BAG, *units.columns, *predictor.columns(), PROBLEM]
    done = _begin(out, header, _settings(model, predictor, inputs), overwrite)
    rows = [row for row, name in enumerate(units.names) if as_utf8(name) not in done]
    power = power_in(model.manifest.fingerprint)
    own = None if members is None else [members[row] for row in rows]
    if inputs.slides is not None and own is not None:
        batches, power = slide_means(inputs.slides, own, power), 1.0
    else:
        assert backbone is not None
        order = rows if own is None else [image for bag in own for image in bag]
        batches = _batches(inputs, order, backbone)
        if own is not None:
            batches, power = pooled(batches, own, power), 1.0
    started, unreadable = time.perf_counter(), 0
    # More threads would wait for those that extract features, and keep cores busy.
    with one_thread(), out.open("a", newline="", encoding="utf-8", errors=NAMES) as stream:
        for batch in batches:
            unreadable += len(batch.broken)
            lines = _lines(units, rows, batch, predictor, power)
            stream.write(csv_text(lines))
            stream.flush()
    seconds = max(time.perf_counter() - started, 1e-9)
    return Predicted(len(rows), len(done), unreadable, len(rows) / seconds)


def _settings(model: SignedModel, predictor: Predictor, inputs: Inputs) -> dict[str, Any]:
    arrays = sum(float(tensor.double().sum()) for tensor in predictor.classifier.arrays().values())
    return ({} if inputs.bags is None else {"bags": digest_of(inputs.bags)}) | {
        "model": model.manifest.name,
        "tensors": model.manifest.tensors,
        "classifier": f"{arrays:.12g}",
        "folder": str(inputs.root.absolute()),
        "calibration": asdict(predictor.calibration),
    }


def _begin(out: Path, header: list[str], settings: dict[str, Any], overwrite: bool) -> set[str]:
    """Make or continue the output file; return the names of the images that it has already."""
    side = out.with_name(f"{out.name}.json")
    if overwrite or not out.exists():
        replace_file(out, csv_text([header]).encode(encoding="utf-8", errors=NAMES))
        replace_file(side, (json.dumps(settings, indent=2) + "\n").encode())
        return set()
    try:
        before = json.loads(side.read_text())
    except (OSError, ValueError):
        before = None
    if before != settings:
        raise ConfigError(
            f"--out {str(out)!r} exists and was not begun with this model, folder and these "
            "settings; choose another file, or give --overwrite"
        )
    with out.open("rb+") as stream:
        stream.truncate(_whole_rows(stream))
    with out.open(newline="", encoding="utf-8", errors=NAMES) as stream:
        reader = csv_rows(stream)
        if next(reader, None) != header:
            raise ConfigError(
                f"--out {str(out)!r} has other columns than this command writes; choose another "
                "file"
            )
        return {row[0] for row in reader if row}


def _whole_rows(stream: IO[bytes]) -> int:
    """The size of a file without a last row that was not finished. A name may hold a line's end,
    inside of quotes.
    """
    size = at = quotes = 0
    for line in stream:
        at, quotes = at + len(line), quotes + line.count(b'"')
        if quotes % 2 == 0 and line.endswith(b"\n"):
            size = at
    return size


def _batches(inputs: Inputs, rows: Sequence[int], backbone: Backbone) -> Iterator[Batch]:
    """Features of the rows, `TOGETHER` and a few more at a time. What is computed is yielded even
    on Ctrl-C.
    """
    if not rows:
        return
    waiting, count = list[Part](), 0
    pieces = in_parts(inputs.dataset(rows).open_image, [range(len(rows))], backbone, BATCH)
    with counted("predict", len(rows), what="images") as advance, closing(pieces) as parts:
        try:
            for part in parts:
                waiting.append(part)
                count += (size := len(part.rows) + len(part.broken))
                advance(size)
                if count >= TOGETHER:
                    yield _joined(waiting)
                    waiting, count = [], 0
        except KeyboardInterrupt:
            if waiting:
                yield _joined(waiting)
            raise
    if waiting:
        yield _joined(waiting)


def _joined(parts: Sequence[Part]) -> Batch:
    kept = [part.features for part in parts if part.features is not None]
    rows = [row for part in parts if part.features is not None for row in part.rows]
    broken = [(row, _problem(why)) for part in parts for row, why in part.broken]
    if not kept:
        return Batch([], None, broken)
    features = torch.cat(kept).float()
    finite = features.isfinite().all(1)
    broken += [
        (row, NOT_FINITE) for row, good in zip(rows, finite.tolist(), strict=True) if not good
    ]
    return Batch(
        [row for row, good in zip(rows, finite.tolist(), strict=True) if good],
        features[finite],
        broken,
    )


def _problem(why: str) -> str:
    """What the row of an image without a result says: the reason, where it is known what to do."""
    known = f"{DataError.__name__}: "
    return f"{UNREADABLE}: {why.removeprefix(known)}" if why.startswith(known) else UNREADABLE


def _lines(
    inputs: Inputs, rows: Sequence[int], batch: Batch, predictor: Predictor, power: float
) -> Iterator[Cells]:
    columns, empty = list(inputs.columns.values()), [""] * len(predictor.columns())
    lines: dict[int, Cells] = {position: [*empty, why] for position, why in batch.broken}
    if batch.features is not None and len(batch.rows):
        if batch.features.shape[1] != predictor.classifier.dimension:
            raise DataError(
                f"the images give {batch.features.shape[1]} features, the model takes "
                f"{predictor.classifier.dimension}; they have another size than those it was "
                "learned from"
            )
        for position, cells in zip(
            batch.rows, predictor.results(raised(batch.features, power)), strict=True
        ):
            lines[position] = [*cells, batch.notes.get(position, "")]
    for position in sorted(lines):
        row = rows[position]
        texts = (as_utf8(column[row]) for column in (inputs.names, *columns))
        yield [*texts, *lines[position]]


def by_patient(out: Path, target: Path, calibration: Calibration, classes: tuple[str, ...]) -> int:
    """Write one row for each patient of a file of predictions: the mean of the probabilities of its
    images.

    Images that cannot be read, and those on which the model abstains, do not count. The issuer of a
    patient ID is part of it: equal IDs of two issuers are two patients. An image that names no
    issuer has the only one that others name with this ID. Images without a patient ID have no row.

    Args:
        out: the file of predictions.
        target: the file to write.
        calibration: by which it decides.
        classes: of the model.

    Returns:
        The number of patients.

    Raises:
        ConfigError: for a file without patients.
    """
    # By ID and issuer: how many images are used, and left out, and the sums of the probabilities.
    found: dict[tuple[str, str], Probabilities] = {}
    nameless, none = 0, [0.0] * len(classes)
    with out.open(newline="", encoding="utf-8", errors=NAMES) as stream:
        reader = csv_rows(stream)
        columns = next(reader, [])
        if DECISION not in columns:
            raise ConfigError(
                "--by-patient: the model decides no class, and means of its answers are not defined"
            )
        if PATIENT not in columns:
            raise ConfigError(
                "--by-patient: the images name no patients; give --patient-column of their table, "
                "or DICOM files"
            )
        for cells in reader:
            row = dict(zip(columns, cells, strict=True))
            if not row[PATIENT].strip():
                nameless += 1
                continue
            added = [0.0, 1.0, *none]
            if not row[PROBLEM] and row[DECISION] != ABSTAIN:
                added = [1.0, 0.0, *(float(row[f"p_{name}"]) for name in classes)]
            key = row[PATIENT], row.get(ISSUER, "")
            found[key] = found.get(key, 0) + np.array(added)
    if nameless:
        LOG.warning("%d images have no patient ID, so they count for no patient", nameless)
    patients = _with_one_issuer(found)
    keys = [PATIENT, ISSUER] if ISSUER in columns else [PATIENT]
    lines: list[Cells] = [
        [*keys, "images", "left_out", *(f"p_{name}" for name in classes), DECISION]
    ]
    for names, (used, left, *sums) in patients.items():
        counts: Cells = [*names[: len(keys)], int(used), int(left)]
        if not used:
            lines.append([*counts, *[None] * len(classes), ABSTAIN])
            continue
        mean = np.array(sums) / used
        decided = classes[int(calibration.decisions(mean[None], classes)[0])]
        lines.append([*counts, *map(repr, mean.tolist()), decided])
    replace_file(target, csv_text(lines).encode(encoding="utf-8", errors=NAMES))
    return len(patients)


def _with_one_issuer(
    found: dict[tuple[str, str], Probabilities],
) -> dict[tuple[str, str], Probabilities]:
    """Patients by ID and issuer, with the images that name no issuer under the only one, if so."""
    issuers: dict[str, set[str]] = {}
    for name, issuer in found:
        issuers.setdefault(name, set()).update({issuer} - {""})
    joined: dict[tuple[str, str], Probabilities] = {}
    for (name, issuer), each in found.items():
        own = issuer or (next(iter(issuers[name])) if len(issuers[name]) == 1 else "")
        joined[name, own] = joined.get((name, own), 0) + each
    return joined
