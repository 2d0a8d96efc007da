"""A release is planned for the site's own unit, and nothing of it is in place before it is charged."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.client_app.governance import release as module
from fedsurrogate.client_app.governance.budget import Budget, Release
from fedsurrogate.client_app.governance.gate import Gate
from fedsurrogate.client_app.governance.ledger import Ledger
from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.governance.release import (
    charge_and_release,
    entry,
    planned,
)
from fedsurrogate.client_app.methods.job import MethodOutput, SiteRequest
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import BudgetError, FedSurrogateError
from fedsurrogate.common.run import parse_run
from tests.client_app.governance.ledger_processes import release

PRIVATE = parse_run({"epsilon": 1.0, "delta": 1e-5, "classes": "a,b"})
# The first round sums, the others train on samples of the records.
ROUNDS = parse_run(
    {"method": "dpcvae", "epsilon": 8.0, "delta": 1e-5, "classes": "a,b", "dpcvae.rounds": 4}
)


@pytest.mark.parametrize("data", ["imagefolder", "parquet", "dicom"])
@pytest.mark.parametrize("column", ["", "who"])
@pytest.mark.parametrize("unit", ["patient", "record"])
def test_a_release_is_planned_for_the_unit_that_the_site_protects(
    data: str, column: str, unit: str
) -> None:
    node = NodeConfig(data=data, patient_column=column, unit=unit)  # type: ignore[arg-type]
    plan = planned(SiteRequest(PRIVATE, node, "north", flower_run="1"))
    protected = unit == "patient" and (column or data == "dicom")
    assert plan.unit == ("patient" if protected else "record")


def test_where_records_were_released_a_site_of_patients_refuses_before_the_work(
    tmp_path: Path,
) -> None:
    """Otherwise it would compute first, and the time would show how many records it has."""
    gate = Gate(Policy(), Ledger(tmp_path, "data"))
    gate.let_out(release(100.0))
    node = NodeConfig(data="parquet", patient_column="who")
    with pytest.raises(BudgetError, match="no total can be guaranteed to patients"):
        gate.check_planned(planned(SiteRequest(PRIVATE, node, "north", flower_run="2")))
    gate.check_planned(planned(SiteRequest(PRIVATE, NodeConfig(), "north", flower_run="2")))


@given(st.binary(max_size=9), st.none() | st.integers(1, 4), st.booleans(), st.booleans())
def test_an_entry_says_what_leaves_in_which_round_and_at_which_cost(
    payload: bytes, number: int | None, private: bool, sealed: bool
) -> None:
    """A release outside of any round counts as one of the first."""
    run = ROUNDS if private else parse_run({})
    claim = run.mechanism_for("patient")
    made = MethodOutput(payload, claim, {"fact": 1.0}, sealed=sealed)
    found = entry(run, "7", made) if number is None else entry(run, "7", made, number)
    assert found.round == (number or 1)
    assert (found.run, found.flower_run, found.method) == (run.full_digest, "7", run.method.name)
    assert (found.bytes, found.sha256) == (len(payload), hashlib.sha256(payload).hexdigest())
    assert (found.facts, found.sealed) == ({"fact": 1.0}, sealed)
    if claim is None:
        assert (found.events, found.mechanism, found.epsilon) == ((), "none", 0.0)
        assert (found.sigmas, found.sample_rate) == ({}, 1.0)
        return
    assert found.events == (claim.event(found.round),)
    assert (found.mechanism, found.unit) == (claim.name, "patient")
    assert (found.epsilon, found.delta) == (claim.epsilon, claim.delta)
    assert {name: (found.sigmas[name], found.sensitivities[name]) for name in claim.noise} == (
        claim.noise
    )
    assert found.sample_rate == min(event.sample_rate for event in claim.events)


class Watched(Ledger):
    """A ledger that reports which files are there when a charge begins, and may fail then."""

    def __init__(
        self, folder: Path, seen: Callable[[], None], failure: BaseException | None
    ) -> None:
        super().__init__(folder, "data")
        self._seen, self._failure = seen, failure

    def charge(self, release: Release, budget: Budget) -> float:
        """Record a release."""
        self._seen()
        if self._failure is not None:
            raise self._failure
        return super().charge(release, budget)


FAILURES = st.sampled_from(
    [None, None, FedSurrogateError("no"), OSError("full"), KeyboardInterrupt(), SystemExit(1)]
)


@given(st.lists(st.booleans(), min_size=1, max_size=4), FAILURES, FAILURES, FAILURES)
def test_a_file_is_in_place_only_once_the_charge_is_on_disk(
    there: list[bool],
    in_guard: BaseException | None,
    in_charge: BaseException | None,
    in_place: BaseException | None,
) -> None:
    """Whatever fails, and wherever: no new content without an entry, and no temporary file stays.

    Args:
        there: which of the files have older content.
        in_guard: what fails before the charge.
        in_charge: what fails at the charge.
        in_place: what fails before the last file gets its name.
    """
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        files = {folder / f"{at}": folder / f"{at}.tmp" for at in range(len(there))}
        for old, (file, temporary) in zip(there, files.items(), strict=True):
            temporary.write_text("new")
            if old:
                file.write_text("old")
        ledger = Watched(
            folder / "ledger", lambda: seen.append([f for f in files if is_new(f)]), in_charge
        )

        def is_new(file: Path) -> bool:
            return file.exists() and file.read_text() == "new"

        @contextmanager
        def guard() -> Iterator[None]:
            if in_guard is not None:
                raise in_guard
            yield

        put = module.put_in_place

        def placed(temporary: Path, file: Path) -> None:
            on_disk.append(
                len(ledger.path.read_bytes().splitlines()) if ledger.path.exists() else 0
            )
            if file == [*files][-1] and in_place is not None:
                raise in_place
            put(temporary, file)

        seen: list[list[Path]] = []
        on_disk: list[int] = []
        patch.setattr(module, "put_in_place", placed)
        with suppress(FedSurrogateError, OSError, KeyboardInterrupt, SystemExit):
            charge_and_release(Gate(Policy(), ledger), release(), files, guard)
        charged = in_guard is None and in_charge is None
        assert seen == ([] if in_guard else [[]]), "nothing is in place when the charge begins"
        assert on_disk == [2] * (len(files) if charged else 0), "header and entry are on disk"
        kept = [is_new(file) for file in files]
        assert kept == [charged] * (len(files) - 1) + [charged and in_place is None]
        assert not any(temporary.exists() for temporary in files.values())
