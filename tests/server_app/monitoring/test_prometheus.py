import json
import shutil
import socket
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fedsurrogate.common.command_line import LISTEN, host_and_port
from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.flower.environment import is_loopback
from fedsurrogate.server_app.cli import main as cli
from fedsurrogate.server_app.monitoring import prometheus
from fedsurrogate.server_app.monitoring.prometheus import serve
from tests.grid import metrics_of, run_federation, sites
from tests.server_app.runs.test_reader import make_run

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(url: str) -> Samples:
    """All samples of a page, as Prometheus would read it, by name and labels."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        text = answer.read().decode()
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    samples = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}
    assert len(samples) == len(found), "every series stands once"
    return samples


def reported(samples: Samples, name: str, **labels: str) -> dict[str, float]:
    """The samples of this name that have these labels, by the value of their last other label."""
    wanted = set(labels.items())
    return {
        " ".join(
            value for key, value in sorted(has - wanted) if key not in ("run", "method")
        ): value
        for (each, has), value in samples.items()
        if each == f"fedsurrogate_{name}" and wanted <= has
    }


def test_a_folder_without_runs_says_so(tmp_path: Path) -> None:
    for runs in (tmp_path, tmp_path / "nothing"):
        with serve(runs, "127.0.0.1", 0, 20, exposed=False) as url:
            assert scrape(url) == {("fedsurrogate_runs", frozenset()): 0.0}


def test_the_page_tells_what_the_metrics_tell(tmp_path: Path) -> None:
    rounds = {"method": "fedavg", "fedavg.rounds": 2, "fedavg.local-epochs": 1}
    with serve(tmp_path / "runs", "127.0.0.1", 0, 20, exposed=False) as url:
        folder = run_federation(tmp_path, sites(2), **rounds)
        samples, metrics = scrape(url), metrics_of(folder)
    assert {dict(labels).get("run", folder.name) for _, labels in samples} == {folder.name}
    assert reported(samples, "runs") == {"": 1}
    assert reported(samples, "run_status") == {"running": 0, "ok": 1, "failed": 0, "interrupted": 0}
    assert (
        reported(samples, "run_rounds_done") == reported(samples, "run_rounds_planned") == {"": 2}
    )
    assert reported(samples, "run_sites") == {"waiting": 0, "used": 2, "rejected": 0, "dropped": 0}
    assert reported(samples, "run_bytes_total") == {
        "up": metrics["bytes"]["up"],
        "down": metrics["bytes"]["down"],
    }
    assert reported(samples, "run_accuracy") == {"": metrics["accuracy"]["model"]}
    assert reported(samples, "site_bytes_up") == metrics["bytes"]["up_per_site"]
    assert reported(samples, "site_accuracy") == metrics["accuracy"]["per_site"]
    assert set(reported(samples, "site_seconds")) == {"0", "1"}
    assert reported(samples, "run_seconds_since_event") == {}, "a run that has ended is not silent"


def test_every_question_is_answered_with_what_is_there_now(tmp_path: Path) -> None:
    silent = {"time": "2026-01-01T00:00:00+00:00", "event": "invited", "sites": 2}
    folder = make_run(tmp_path, "20260101T000000Z-fedavg-a", "running", silent)
    with serve(tmp_path, "127.0.0.1", 0, 20, exposed=False) as url:
        first = scrape(url)
        assert reported(first, "run_sites")["waiting"] == 2
        assert reported(first, "run_seconds_since_event")[""] > 0
        with (folder / "events.jsonl").open("a") as file:
            file.write(
                json.dumps({"event": "replied", "site": 'a"\n\\b', "bytes": 7, "epsilon": 1})
                + "\n{"
            )
        second = scrape(url)
        assert reported(second, "run_sites") == {
            "waiting": 1,
            "used": 1,
            "rejected": 0,
            "dropped": 0,
        }
        assert reported(second, "site_bytes_up") == {'a" \\b': 7}
        make_run(tmp_path, "20260102T000000Z-fedpft-b", "failed")
        assert reported(scrape(url), "runs") == {"": 2}
        shutil.rmtree(folder)
        assert reported(scrape(url), "run_status") == {
            "running": 0,
            "ok": 0,
            "failed": 1,
            "interrupted": 0,
        }
        shutil.rmtree(tmp_path)
        assert reported(scrape(url), "runs") == {"": 0}


def test_series_do_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "MOST_SITES", 5)
    replies = [{"event": "replied", "site": f"s{number}", "bytes": 1} for number in range(12)]
    for day in range(1, 10):
        make_run(tmp_path, f"2026010{day}T000000Z-fedavg-a", "running", *replies)
    with serve(tmp_path, "127.0.0.1", 0, 3, exposed=False) as url:
        samples = scrape(url)
    runs = {dict(labels)["run"] for name, labels in samples if name == "fedsurrogate_run_status"}
    assert runs == {f"2026010{day}T000000Z-fedavg-a" for day in (7, 8, 9)}
    newest = reported(samples, "site_bytes_up", run="20260109T000000Z-fedavg-a")
    assert set(newest) == {"s0", "s1", "s2", "s3", "s4"}
    assert reported(samples, "run_sites", run="20260109T000000Z-fedavg-a")["used"] == 12


def test_only_this_machine_is_answered_unless_asked(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.8.9.1"):
        assert is_loopback(f"[{host}]:")
    # A name may lead to other machines tomorrow.
    for host in ("0.0.0.0", "", "::", "192.0.2.1", "fl.example.org"):
        assert not is_loopback(f"[{host}]:")
    with (
        pytest.raises(ConfigError, match=r"'0\.0\.0\.0'.*--exposed"),
        serve(tmp_path, "0.0.0.0", 0, 1, exposed=False),
    ):
        pass
    with serve(tmp_path, "0.0.0.0", 0, 1, exposed=True) as url:
        assert scrape(url.replace("0.0.0.0", "127.0.0.1"))


def test_an_address_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f":{port}: cannot"),
            serve(tmp_path, "127.0.0.1", port, 1, exposed=False),
        ):
            pass
    with (
        pytest.raises(ConfigError, match="cannot listen there"),
        serve(tmp_path, "no.such.host.invalid", 0, 1, exposed=True),
    ):
        pass
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(RunError, match="is a file"),
        serve(tmp_path / "file", "127.0.0.1", 0, 1, exposed=False),
    ):
        pass


def test_without_the_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setattr(sys, "argv", ["coordinator", "log", "--to", "prometheus", str(tmp_path)])
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    error = capsys.readouterr().err
    assert "fedsurrogate[monitor]" in error
    assert error.count("\n") == 1


def test_where_to_listen_is_a_host_and_a_port() -> None:
    assert host_and_port(LISTEN) == ("127.0.0.1", 9464)
    assert host_and_port("[::1]:0") == ("::1", 0)
    for wrong in ("9464", ":9464", "localhost", "localhost:x", "localhost:65536", ""):
        with pytest.raises(ConfigError, match="must be HOST:PORT"):
            host_and_port(wrong)
