"""Dashboards and alerts: every query finds what our pages have, and each alert fires when it should."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import Metric

from fedsurrogate.client_app.diagnostics.site_checks import SiteCollector
from fedsurrogate.client_app.processes.app_report import LEDGER, AppReport
from fedsurrogate.common.metrics_page import MachineCollector
from fedsurrogate.server_app.monitoring.prometheus import (
    RunCollector,
    run_series,
    site_series,
    up_series,
)
from tests.children import ok, ran
from tests.deploy.test_compose import DEPLOY, interpolated, settings_of_a_kit, volumes
from tests.server_app.runs.test_reader import make_run

MONITORING = DEPLOY / "monitoring"
DASHBOARDS = sorted((MONITORING / "grafana" / "dashboards").glob("*.json"))
ALERTS = MONITORING / "alerts.yml"
OURS = re.compile(r"fedsurrogate_\w+")
DAY = 86400.0


def program(name: str) -> str:
    """A program of Prometheus; skips without it."""
    if (found := shutil.which(name)) is None:
        pytest.skip(f"needs {name}, of Debian's package prometheus")
    return found


def panels() -> list[dict[str, Any]]:
    return [each for file in DASHBOARDS for each in json.loads(file.read_text())["panels"]]


def queries() -> list[str]:
    """Every query of every dashboard."""
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def rules() -> dict[str, dict[str, Any]]:
    """Every alert by its name."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def names_of(metrics: Iterator[Metric] | Any) -> set[str]:
    return {sample.name for metric in metrics for sample in metric.samples} | {
        metric.name for metric in metrics
    }


def test_every_query_names_only_what_a_page_has(tmp_path: Path) -> None:
    event = {"time": "2026-01-01T00:00:00+00:00", "event": "replied", "site": "a", "bytes": 7}
    make_run(tmp_path, "20260101T000000Z-fedavg-a", "running", event)
    report = AppReport(
        version="1", policy="", found_data=True, site="north", data_present=True,
        disks={"state": (1.0, 2.0)}, ledger=dict.fromkeys(LEDGER, 1.0),
    )  # fmt: skip
    collectors = (
        RunCollector(tmp_path, 5),
        MachineCollector((Path("none.crt"),), {}),
        SiteCollector(lambda: report, of_app=True),
    )
    served = set[str]().union(*(names_of(list(each.collect())) for each in collectors))
    served |= names_of([up_series(1.0), *site_series([]), run_series({})])
    served |= {"fedsurrogate_run_bytes_total"}
    asked = {name for text in queries() for name in OURS.findall(text)}
    watched = {name for rule in rules().values() for name in OURS.findall(rule["expr"])}
    assert asked | watched <= served
    assert len(asked) > 20, "the pattern finds them"


def test_prometheus_and_grafana_have_no_rights_and_are_reached_from_this_machine_only(
    tmp_path: Path,
) -> None:
    known = settings_of_a_kit(tmp_path) | {"GRAFANA_PASSWORD": "secret"}
    compose = yaml.safe_load(interpolated(DEPLOY / "compose.monitoring.yml", known))
    with pytest.raises(AssertionError):
        interpolated(DEPLOY / "compose.monitoring.yml", settings_of_a_kit(tmp_path / "again"))
    for name, service in compose["services"].items():
        assert service["profiles"] == ["monitoring"]
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert service["user"] == "1000:1000"
        assert re.search(r":v?\d+\.\d+\.\d+$|@sha256:[0-9a-f]{64}$", service["image"]), name
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", ()))
        for volume, where in volumes(service).items():
            assert volume.startswith("./monitoring/"), name
            if not volume.startswith("./monitoring/data/"):
                assert where.endswith(":ro")
                assert (DEPLOY / volume).exists(), volume
    assert compose["services"]["prometheus"]["networks"] == ["monitoring"]
    assert compose["networks"]["monitoring"] == {"internal": True}
    provisioned = MONITORING / "grafana" / "provisioning"
    source = yaml.safe_load((provisioned / "datasources" / "prometheus.yml").read_text())
    uids = {t["datasource"]["uid"] for panel in panels() for t in panel["targets"]}
    assert uids == {source["datasources"][0]["uid"]}


def test_promtool_accepts_the_files() -> None:
    done = ok(ran([program("promtool"), "check", "config", str(MONITORING / "prometheus.yml")]))
    assert f"{len(rules())} rules found" in done.stdout


class Case:
    """Series of a machine, constant for an hour, and the alerts that then fire."""

    def __init__(self) -> None:
        self.series: list[str] = []
        self.alerts = dict[str, list[dict[str, str]]]()

    def add(
        self, name: str, value: float, alert: str = "", fires: bool = False, **labels: str
    ) -> None:
        text = ",".join(f'{key}="{each}"' for key, each in labels.items())
        self.series.append(f"{name}{{{text}}}|{value!r}x70")
        if fires:
            self.alerts.setdefault(alert, []).append(labels)


def machine(
    connected: list[float], status: str, hours: float, waiting: int,
    days: float, free: float, left: float, ledger: float, present: float, found: float,
    app: float, up: float, link: float,
) -> Case:  # fmt: skip
    """A machine in one state, for an hour, and the alerts that are due."""
    case, now = Case(), 3600.0
    for number, one in enumerate(connected):
        case.add("fedsurrogate_site_connected", one, "SiteSilent", one == 0, site=f"s{number}")
    for each in ("running", "ok", "failed", "interrupted"):
        bad = each == status and each in ("failed", "interrupted") and hours < 24
        case.add(
            "fedsurrogate_run_status", float(each == status), "RunFailed", bad,
            run="r", method="m", status=each,
        )  # fmt: skip
    case.add("fedsurrogate_run_end_timestamp_seconds", now - hours * 3600, run="r", method="m")
    case.add("fedsurrogate_superlink_runs", waiting, "RunWaits", waiting > 0, state="pending")
    case.add("fedsurrogate_superlink_up", link, "SuperLinkDown", link == 0)
    case.add("fedsurrogate_app_up", app, "AppDown", app == 0)
    case.add("fedsurrogate_data_present", present, "DataMissing", present == 0)
    # Both series have the same labels, so they are one alert.
    case.add(
        "fedsurrogate_data_found", found, "DataMissing", found == 0 and app == 1 and present == 1
    )
    case.add("fedsurrogate_budget_left_ratio", left, "BudgetLow", left < 0.2)
    case.add("fedsurrogate_ledger_usable", ledger, "LedgerUnusable", ledger == 0)
    case.add(
        "fedsurrogate_certificate_expiry_timestamp_seconds", now + days * DAY, "CertificateEnds",
        days < 14, file="server.crt",
    )  # fmt: skip
    case.add("fedsurrogate_disk_free_bytes", free * 1000, "DiskFull", free < 0.1, folder="runs")
    case.add("fedsurrogate_disk_size_bytes", 1000, folder="runs")
    case.add("up", up, "FiguresMissing", up == 0, job="fedsurrogate")
    return case


share = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.0999, 0.1, 0.1999, 0.2, 1.0]))
flag = st.sampled_from([0.0, 1.0])


@given(
    connected=st.lists(flag, max_size=3),
    status=st.sampled_from(["running", "ok", "failed", "interrupted"]),
    hours=st.floats(0.5, 60),
    waiting=st.integers(0, 2),
    days=st.sampled_from([-3.0, 0.0, 13.0, 13.9, 14.1, 30.0, 400.0]),
    free=share, left=share, ledger=flag, present=flag, found=flag, app=flag, up=flag, link=flag,
)  # fmt: skip
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_each_alert_fires_exactly_when_its_condition_has_lasted(
    connected: list[float], status: str, hours: float, waiting: int,
    days: float, free: float, left: float, ledger: float, present: float, found: float,
    app: float, up: float, link: float, tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    case = machine(
        connected, status, hours, waiting, days, free, left, ledger, present,
        found, app, up, link,
    )  # fmt: skip
    ok(judged(case, tmp_path_factory.mktemp("rules"), groups()))


def judged(case: Case, folder: Path, wrong: Any) -> subprocess.CompletedProcess[str]:
    """What promtool says of rules in a case."""
    (folder / "rules.yml").write_text(yaml.safe_dump(wrong))
    (folder / "test.yml").write_text(yaml.safe_dump(rule_test(case)))
    return ran([program("promtool"), "test", "rules", str(folder / "test.yml")])


def groups() -> dict[str, Any]:
    """The rules without their texts, which `promtool check` reads; else each would stand here again."""
    found = yaml.safe_load(ALERTS.read_text())
    for rule in (rule for group in found["groups"] for rule in group["rules"]):
        del rule["annotations"]
    return dict(found)


def rule_test(case: Case) -> dict[str, Any]:
    """What promtool reads: the series, and every alert with the labels that it then has, or none."""
    expected = [
        {
            "eval_time": "60m",
            "alertname": name,
            "exp_alerts": [{"exp_labels": rule["labels"] | labels} for labels in case.alerts.get(name, ())],
        }
        for name, rule in rules().items()
    ]  # fmt: skip
    series = [dict(zip(("series", "values"), text.split("|"), strict=True)) for text in case.series]
    test = {"interval": "1m", "input_series": series, "alert_rule_test": expected}
    return {"rule_files": ["rules.yml"], "tests": [test]}
