"""The Helm chart keeps the promises of the compose files: what each pod reaches, sees and may do."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fedsurrogate.client_app.diagnostics.site_checks import is_isolated, is_supernode
from fedsurrogate.client_app.governance.policy import Policy, load_policy
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.client_app.processes.own_account import SETTINGS
from fedsurrogate.common.settings.base import parse_overrides
from tests.deploy.charts import CHART, rendered, values
from tests.deploy.test_compose import DEPLOY, check_ours, check_started

COORDINATOR: dict[str, Any] = {"role": "coordinator", "coordinator": {"sites": ["north", "south"]}}
SITE: dict[str, Any] = {
    "role": "site",
    "site": {
        "name": "north",
        "coordinator": "fl.example.org:9092",
        "coordinatorNetwork": "192.0.2.7/32",
        "proxySecret": "proxy",
        "policy": (DEPLOY / "kit" / "policy.toml").read_text(),
        "limits": "most-rounds = 7",
        "weightsClaim": "weights",
        "heldOutClaim": "held-out",
        "data": {"claim": "images", "patientColumn": "patient"},
        "gpus": 1,
    },
}
ROLES = {
    "coordinator": COORDINATOR,
    "coordinator with metrics": {**COORDINATOR, "coordinator": {"sites": ["north"], "metrics": {"enabled": True}}},
    "site": SITE,
    "smallest site": {"role": "site", "site": {"name": "north", "coordinator": "fl.example.org:9092"}},
}  # fmt: skip


@pytest.fixture(params=ROLES, ids=str)
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> list[dict[str, Any]]:
    jsonschema.validate(
        values(ROLES[request.param]), json.loads((CHART / "values.schema.json").read_text())
    )
    return rendered(ROLES[request.param], tmp_path)


def kind(objects: list[dict[str, Any]], name: str) -> dict[str, dict[str, Any]]:
    """Objects of a kind by name, without the name of the release."""
    return {
        each["metadata"]["name"].removeprefix("north-"): each
        for each in objects
        if each["kind"] == name
    }


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: each["spec"]["template"]["spec"] for name, each in kind(objects, "Deployment").items()
    }


def containers(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for pod in pods(objects).values() for each in pod["containers"]]


def sources(pod: dict[str, Any]) -> set[str]:
    """Claims and secrets that a pod mounts."""
    found = set()
    for volume in pod["volumes"]:
        found |= {each["claimName"] for each in [volume.get("persistentVolumeClaim")] if each}
        found |= {each["secretName"] for each in [volume.get("secret")] if each}
    return found


def test_no_container_has_a_right_that_it_does_not_need(objects: list[dict[str, Any]]) -> None:
    for pod in pods(objects).values():
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert not any("hostPath" in volume for volume in pod["volumes"])
    for each in containers(objects):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert each["resources"]["limits"]["memory"]


def test_every_volume_that_is_mounted_exists_and_every_claim_is_made(
    objects: list[dict[str, Any]],
) -> None:
    made = {f"north-{name}" for name in kind(objects, "PersistentVolumeClaim")}
    for pod in pods(objects).values():
        named = {volume["name"] for volume in pod["volumes"]}
        mounted = {mount["name"] for each in pod["containers"] for mount in each["volumeMounts"]}
        assert mounted == named
        claims = {each for each in sources(pod) if each.startswith("north-")}
        assert claims <= made
    kept = {"state", "check-log", "cache", "runs"} & set(kind(objects, "PersistentVolumeClaim"))
    for name in kept:
        notes = kind(objects, "PersistentVolumeClaim")[name]["metadata"]["annotations"]
        assert notes["helm.sh/resource-policy"] == "keep"


def test_every_pod_has_a_network_policy_that_selects_it(objects: list[dict[str, Any]]) -> None:
    for name, deployment in kind(objects, "Deployment").items():
        policy = kind(objects, "NetworkPolicy")[name]["spec"]
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
        assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert policy["policyTypes"] == ["Ingress", "Egress"]


def test_apps_reach_nothing_and_are_reached_by_nothing(objects: list[dict[str, Any]]) -> None:
    policy = kind(objects, "NetworkPolicy")["app"]["spec"]
    assert not {"ingress", "egress"} & set(policy)


def test_every_command_is_one_that_its_program_takes(objects: list[dict[str, Any]]) -> None:
    for each in containers(objects):
        command = [str(word) for word in each["command"]]
        assert is_isolated(command) or not is_supernode(command)
        if command[0] != "sh":
            known = {one["name"]: one.get("value", "") for one in each.get("env", ())}
            check_started(command, known.get(SETTINGS, ""))
        probe = each.get("readinessProbe", {}).get("exec", {}).get("command", [])
        if probe[:1] == ["site"]:
            check_ours(probe)


def test_a_site_has_its_data_in_its_app_and_its_key_in_its_node(tmp_path: Path) -> None:
    objects = rendered(SITE, tmp_path)
    found = pods(objects)
    assert "images" in sources(found["app"]) - sources(found["node"])
    assert sources(found["app"]) & sources(found["node"]) == {"fedsurrogate-site", "north-runtime"}
    (keys,) = [volume for volume in found["app"]["volumes"] if volume.get("secret")]
    assert [item["key"] for item in keys["secret"]["items"]] == ["coordinator.pub"]
    (node,), (app,) = found["node"]["containers"], found["app"]["containers"]
    read = ("/data", "/weights", "/held-out")
    assert [
        mount.get("readOnly") for mount in app["volumeMounts"] if mount["mountPath"] in read
    ] == [True] * 3
    environment = {each["name"]: each.get("value") for each in app["env"]}
    config = parse_node_config(parse_overrides([environment[SETTINGS]]))
    assert "--node-config" not in node["command"]
    assert (config.site, config.patient_column, str(config.check_log)) == (
        "north",
        "patient",
        "/check-log",
    )
    assert config.held_out_dir == "/held-out"
    assert "--runtime unix:/runtime/own/app" in " ".join(node["readinessProbe"]["exec"]["command"])
    # An app that looks at many files is not ended: liveness counts from the node's socket on.
    assert app["startupProbe"]["exec"] == app["livenessProbe"]["exec"]
    assert app["startupProbe"]["periodSeconds"] * app["startupProbe"]["failureThreshold"] >= 3600
    assert app["resources"]["limits"]["nvidia.com/gpu"] == 1
    proxy = next(each for each in node["env"] if each["name"] == "https_proxy")
    assert proxy["valueFrom"]["secretKeyRef"] == {"name": "proxy", "key": "proxy"}
    policy = tmp_path / "policy.toml"
    for name, text in kind(objects, "ConfigMap")["policy"]["data"].items():
        (tmp_path / name).write_text(text)
    assert load_policy(str(policy)) == Policy(most_rounds=7)
    egress = kind(objects, "NetworkPolicy")["node"]["spec"]["egress"]
    assert egress[0]["to"] == [{"ipBlock": {"cidr": "192.0.2.7/32"}}]
    assert "ingress" not in kind(objects, "NetworkPolicy")["node"]["spec"]


def test_a_coordinator_shows_the_fleet_port_alone_and_keeps_the_authority_outside(
    tmp_path: Path,
) -> None:
    objects = rendered(COORDINATOR, tmp_path)
    service = next(each for each in objects if each["kind"] == "Service")
    assert [port["targetPort"] for port in service["spec"]["ports"]] == ["fleet"]
    ports = kind(objects, "NetworkPolicy")["superlink"]["spec"]["ingress"]
    assert [port for rule in ports for port in rule["ports"]] == [{"protocol": "TCP", "port": 9092}]
    pod = pods(objects)["superlink"]
    superlink = pod["containers"][0]["command"]
    assert "--control-api-address" not in superlink
    control = {"name": "FEDSURROGATE_CONTROL", "value": "unix:/tmp/link/control:9093"}
    assert all(control in each["env"] for each in pod["containers"][:2])
    items = next(volume for volume in pod["volumes"] if volume["name"] == "certificates")["secret"][
        "items"
    ]
    assert {item["key"] for item in items} == {"ca.crt", "server.crt", "server.key"}
    app = pods(objects)["app"]
    (signing,) = [volume["secret"]["items"] for volume in app["volumes"] if volume.get("secret")]
    assert [item["key"] for item in signing] == ["coordinator.key"]
    assert {"name": "FEDSURROGATE_SIGNING", "value": "/certificates"} in app["containers"][0]["env"]
    projected = next(volume for volume in pod["volumes"] if volume["name"] == "keys")["projected"][
        "sources"
    ]
    assert [item["path"] for item in projected[1]["configMap"]["items"]] == [
        "sites/north/site.pub",
        "sites/south/site.pub",
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"role": "both"},
        {"runAsUser": 0},
        {"image": {"digest": "sha256:12"}},
        {"site": {"name": "../x"}},
        {"site": {"coordinator": ""}},
        {"site": {"data": {"kind": "zip"}}},
        {"site": {"unknown": 1}},
        {"site": {"resources": {"app": {"limits": {"cpu": 1}}}}},
    ],
    ids=str,
)
def test_the_schema_refuses_wrong_values(wrong: dict[str, Any]) -> None:
    from tests.deploy.charts import merged

    schema = json.loads((CHART / "values.schema.json").read_text())
    good = values(SITE)
    jsonschema.validate(good, schema)
    broken = merged(good, wrong)
    if "resources" in wrong.get("site", {}):
        broken["site"]["resources"]["app"] = wrong["site"]["resources"]["app"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, schema)


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_every_object_has_the_form_that_kubernetes_takes(
    objects: list[dict[str, Any]], version: str
) -> None:
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="needs the package kubernetes-validate"
    )
    for each in objects:
        assert kubernetes_validate.validate(each, version, strict=True) == version
    objects[0]["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(objects[0], version, strict=True)


def test_helm_accepts_the_chart(tmp_path: Path) -> None:
    if (helm := shutil.which("helm")) is None:
        pytest.skip("needs helm; the other tests render the chart without it")
    file = tmp_path / "values.json"
    file.write_text(json.dumps(SITE))
    subprocess.run([helm, "lint", "--strict", str(CHART), "--values", str(file)], check=True)
