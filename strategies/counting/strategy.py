"""A run that counts: one request to every site, its tables checked and added up; nothing is
learned.

A run that counts in secure aggregation: the coordinator sees the counts of all sites together, and of
no single one.

The model of an evaluation as the bytes that every site receives.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message
from flwr.serverapp import Grid

from fedsurrogate.common.errors import LARGEST_PRIVATE, RunError, SurrogateError
from fedsurrogate.common.methods.counting import tables_in
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.models.classifiers import Classifier, Head
from fedsurrogate.common.secure_aggregation.secrets import Words
from fedsurrogate.common.settings import CountingSettings
from fedsurrogate.common.signed_models.signed_model import SUFFIX, read_signed_model
from fedsurrogate.common.targets.counted import counted as counted_target
from fedsurrogate.common.wire.model_proto import load_model, pack_classifier, unpack_classifier
from fedsurrogate.common.wire.surrogate_proto import Counts, check_counts, unpack_counts

from ..base.collection import Recorder
from ..base.identifications import Group
from ..base.one_shot import OneShot
from ..base.outcome import Defended, Learned
from ..secure_aggregation.strategy import SecureAggregation
from . import results
from .images import images_of_sites


class Counting(OneShot[Counts]):
    """Counts of all sites. The result is the file `evaluation.json` or `survey.json` of the run
    folder.
    """

    def parse(self, payload: bytes) -> Counts:
        """Parse the counts of a site. Raises SurrogateError."""
        return unpack_counts(payload)

    def check(self, sent: Counts) -> None:
        """Check that some records and honest noise can give these counts. Raises SurrogateError."""
        check_counts(sent, self.config, "")

    def dimension(self, sent: Counts) -> int:
        """Counts have no features."""
        return 1

    def records(self, sent: Counts) -> int:
        """Number of counted records, noisy under privacy."""
        if self.config.target is not None:
            return results.records_counted(
                sent.tables, self.config.settings.counting, self.config.target
            )
        first = tables_in(self.config.settings.counting, len(self.config.settings.classes), None)[0]
        return max(0, int(sent.tables[first.name].sum()))

    def learn(self, sent: Sequence[Counts], classes: Sequence[str]) -> Learned:
        """Nothing is learned from counts. Raises RunError."""
        raise RunError("this run counted records; nothing can be learned from counts")

    def defend(self, sent: Sequence[Counts], classes: tuple[str, ...]) -> Defended[Counts]:
        """No site is excluded: every site's counts are as good as its word."""
        return Defended(list(sent))

    def restricted(self, sent: Counts, classes: Sequence[str]) -> Counts | None:
        """Counts of some classes only do not exist."""
        return None

    def evaluate(self, grid: Grid, deadline: float) -> float | None:
        """There is no model to send to the sites."""
        return None

    def receive_late(self, grace: float) -> bool:
        """Late counts are not used and not kept."""
        return False

    def _agreed(self) -> bytes | None:
        return evaluated_payload(self.config.settings.counting, self.recorder)

    def _receive(self, reply: Message, late: bool = False) -> None:
        super()._receive(reply, late)
        node = self._node(reply)
        if node not in self._received:
            return
        info = dict(reply.content.config_records["info"])
        site = self.outcome.sites[node]
        if self.config.settings.counting.kind == "evaluation" and info.get("show") is not True:
            # Its noisy counts are in the sum; nothing in the run folder shows them alone.
            self.recorder.discard(site.name)
            site.records = 0
        else:
            self._shown.add(site.name)
        if self.simulated and isinstance(info.get("exact"), str):
            self._exact[site.name] = self._exact_tables(str(info["exact"]))

    def _exact_tables(self, text: str) -> dict[str, torch.Tensor]:
        try:
            return {
                name: torch.tensor(table, dtype=torch.float64)
                for name, table in json.loads(text).items()
            }
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise SurrogateError("exact counts that cannot be read") from None

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._shown: set[str] = set()
        self._exact: dict[str, dict[str, torch.Tensor]] = {}

    def _conclude(self) -> None:
        counts = self._usable()
        for node, each in self._received.items():
            self.outcome.sites[node].claim = each.claim
        results.keep_result(self.recorder, self.config.settings, len(counts), self._result(counts))
        self.recorder.event("counted", sites=len(counts), records=sum(map(self.records, counts)))

    def _result(self, counts: Sequence[Counts]) -> results.Json:
        counted = results.pooled(counts)
        result = self._result_of(counted)
        if self.config.settings.counting.kind == "survey":
            result |= results.survey_of_sites(counts)
            own = self.config.settings.counting
            if own.images:
                target, asked = self.config.target, self.config.mechanism
                questions = 1 if target is None else len(counted_target(target, own).questions)
                result["images"] = images_of_sites(counts, own, asked, questions)
            return result
        shown = [each for each in counts if each.header.site in self._shown]
        of_target = self.config.target is not None
        part = "outputs" if of_target else "accuracy"
        result["per_site"] = {
            each.header.site: self._result_of(results.pooled([each]))[part] for each in shown
        }
        if self._exact.keys() == {each.header.site for each in counts}:
            tables = {
                name: torch.stack([tables[name] for tables in self._exact.values()]).sum(0)
                for name in counted.tables
            }
            exact = results.PooledCounts(tables, dict.fromkeys(tables, 0.0))
            result["exact"] = self._result_of(exact)
        return result

    def _result_of(self, counts: results.PooledCounts) -> results.Json:
        own = self.config.settings
        return results.result_of(counts, own.counting, own.classes, self.config.target)


class SecureCounting(SecureAggregation):
    """The sum of all sites' counts. The result is the file `evaluation.json` or `survey.json`.

    What needs a single site's counts is not in it.
    """

    def evaluate(self, grid: Grid, deadline: float) -> float | None:
        """There is no model to send to the sites."""
        return None

    def _agreed_payload(self, group: Group) -> tuple[bytes, int]:
        """The model that is evaluated, the same for all sites: a sum with zeros of all others would
        show one site's.
        """
        return evaluated_payload(
            self.config.settings.counting, self.recorder
        ) or b"", group.dimension

    def _learn(self, summed: list[str], numbers: Words) -> None:
        total, self.outcome.learning = self._total(summed, numbers)
        results.keep_result(
            self.recorder,
            self.config.settings,
            len(summed),
            load(self.config.plan.combination.from_sums)(total, self.config),
        )
        self.recorder.event("counted", sites=len(summed))


MODEL_FILE = "evaluated.pb"


def evaluated_payload(counting: CountingSettings, recorder: Recorder) -> bytes | None:
    """The bytes of the model that a run evaluates, kept in its folder.

    Args:
        counting: settings, which name the file and the digest of the model.
        recorder: of the run folder.

    Returns:
        The bytes; None if the run evaluates no model.

    Raises:
        RunError: unless the file holds the model that the settings name.
    """
    if counting.kind != "evaluation":
        return None
    payload, digest = payload_of(read_model(Path(counting.model).expanduser()))
    if digest != counting.digest:
        raise RunError(
            f"counting.model = {counting.model!r} is not the model that counting.digest names"
        )
    recorder.keep(MODEL_FILE, payload)
    return payload


def read_model(file: Path) -> Classifier:
    """The model in a file.

    Args:
        file: a signed file, model.safetensors of a run, or its bytes in a `.pb`.

    Raises:
        RunError, ConfigError: when the model cannot be read.
    """
    try:
        if file.suffix == ".pb":
            return unpack_classifier(file.read_bytes())
        return read_signed_model(file).classifier if file.suffix == SUFFIX else load_model(file)
    except (SurrogateError, OSError) as error:
        raise RunError(f"the model {str(file)!r} cannot be read: {error}") from None


def payload_of(model: Classifier) -> tuple[bytes, str]:
    """The bytes of a model at 16 bits.

    Args:
        model: a linear head is brought within the limit of private runs, as in `bounded`.

    Returns:
        The bytes, and their SHA-256 in hexadecimal.

    Raises:
        RunError: for a model of another target than classes that is beyond the limit: its numbers
            have a scale.
    """
    payload = pack_classifier(bounded(model) if isinstance(model, Head) else model)
    return payload, hashlib.sha256(payload).hexdigest()


def bounded(head: Head) -> Head:
    """A head that decides the same, divided by a power of two until sites accept its numbers in a
    private run.

    Noise that was subtracted from a covariance can leave variances near zero, and so weights beyond
    `LARGEST_PRIVATE`. The order of the scores of two classes stays the same; with more classes,
    probabilities become less extreme.

    Args:
        head: weight (C, d) and bias (C,).
    """
    largest = max(float(each.abs().max()) for each in (head.weight, head.bias))
    if not LARGEST_PRIVATE <= largest < math.inf:
        return head
    if head.target:
        raise RunError(
            f"a model with the number {largest:.3g}, and private runs take none from "
            f"{LARGEST_PRIVATE:g}; scale the features, and learn the model again"
        )
    factor = 2.0 ** -(math.floor(math.log2(largest / LARGEST_PRIVATE)) + 1)
    return replace(head, weight=head.weight * factor, bias=head.bias * factor)
