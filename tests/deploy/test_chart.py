"""The chart: what Helm renders is what Kubernetes takes, and gives nobody more than he needs.

Long, because every value set is rendered once and then asked everything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import snapcask
from csi.config import MountMode
from snapcask.commands.csi import command
from tests.deploy.chart import (
    BASE,
    CHART,
    MATRIX,
    VERSIONS,
    Object,
    Rendered,
    complaints,
    container,
    containers,
    merged,
    mount,
    volume,
)
from tests.deploy.refusals import REFUSED
from transfer.store.s3.options import OPTIONS

_DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
_POD = {"component": "app.kubernetes.io/component"}
_EVENTS = ("", "events", ("create",))
_TAINT = (
    ("", "nodes", ("get", "patch")),
    ("storage.k8s.io", "csinodes", ("get",)),
)
_CONTROLLER = (
    ("", "persistentvolumes", ("create", "delete", "get", "list", "patch", "watch")),
    ("", "persistentvolumeclaims", ("get", "list", "update", "watch")),
    ("storage.k8s.io", "storageclasses", ("get", "list", "watch")),
    ("", "events", ("create", "patch")),
    ("coordination.k8s.io", "leases", ("create", "get", "update")),
)
_SNAPSHOTS = (
    ("snapshot.storage.k8s.io", "volumesnapshots", ("get", "list", "update", "watch")),
    ("snapshot.storage.k8s.io", "volumesnapshotclasses", ("get", "list", "watch")),
    (
        "snapshot.storage.k8s.io",
        "volumesnapshotcontents",
        ("get", "list", "patch", "update", "watch"),
    ),
    ("snapshot.storage.k8s.io", "volumesnapshotcontents/status", ("patch", "update")),
)


def _values(name: str) -> Any:
    """All values of a rendering, the chart's own below those of the matrix."""
    return merged(merged(_DEFAULTS, BASE), MATRIX[name])


@pytest.fixture
def values(request: pytest.FixtureRequest) -> Any:
    """The values of the rendering that the test looks at."""
    return _values(request.node.callspec.params["chart"])


# ---- Helm and Kubernetes take it ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["nothing", *sorted(MATRIX)])
def test_helm_lint_has_nothing_to_say(
    helm_answers: Mapping[str, Mapping[str, Any]], name: str
) -> None:
    assert helm_answers[f"lint {name}"] == {"name": f"lint {name}", "messages": []}


def test_kubernetes_takes_every_object_strictly_in_every_version(
    charts: Mapping[str, Rendered],
) -> None:
    different = {str(found): found for chart in charts.values() for found in chart.objects}
    assert len(different) > 50
    assert VERSIONS[0] == "1.29"
    assert VERSIONS[-1] == "1.36"
    assert [line for found in different.values() for line in complaints(found)] == []


def test_a_field_that_kubernetes_does_not_know_would_be_noticed(
    charts: Mapping[str, Rendered],
) -> None:
    found = merged(charts["least"].one("CSIDriver"), {"spec": {"attachmentRequired": False}})
    assert len(complaints(found)) == len(VERSIONS)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_bad_values_are_refused_by_name(
    helm_answers: Mapping[str, Mapping[str, Any]], name: str
) -> None:
    answer = helm_answers[f"refuse {name}"]
    assert "files" not in answer
    assert REFUSED[name][1] in answer["error"]


def test_every_object_of_the_values_is_closed_to_unknown_keys() -> None:
    open_to_all = []

    def look(schema: Any, path: str) -> None:
        if isinstance(schema, dict):
            if "properties" in schema and schema.get("additionalProperties") is not False:
                open_to_all.append(path)
            for key, below in schema.items():
                look(below, f"{path}/{key}")

    look(json.loads((CHART / "values.schema.json").read_text()), "")
    variables, condition = "/properties/env/items", "/properties/policy"
    assert open_to_all == [f"{condition}/if", f"{condition}/then", variables]


def test_the_chart_has_the_version_of_the_program() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["appVersion"] == snapcask.__version__


# ---- What the driver is told -------------------------------------------------------------------


def test_the_driver_accepts_its_configuration_and_finds_the_values_in_it(
    chart: Rendered, values: Any
) -> None:
    config = chart.config()
    assert config.driver_name == values["driverName"]
    assert {name: store.url for name, store in config.stores.items()} == {
        name: store["url"] for name, store in values["stores"].items()
    }
    only = next(iter(config.stores)) if len(config.stores) == 1 else None
    assert config.default_store == (values["defaultStore"] or only)
    assert config.allow_pod_stores == values["allowPodStores"]
    assert config.policy.single_tenant == values["policy"]["singleTenant"]
    assert {name: list(found) for name, found in config.policy.namespaces.items()} == values[
        "policy"
    ]["namespaces"]
    assert config.mount.mode == MountMode(values["mount"]["mode"])
    assert dict(config.mount.namespaces) == values["mount"]["namespaces"]
    assert config.mount.require_shared
    assert config.cache.path == values["cache"]["path"]
    assert list(config.cache.disks) == values["cache"]["disks"]
    assert config.cache.watermarks.begin_free == values["cache"]["beginFree"]
    assert config.cache.watermarks.end_free == values["cache"]["endFree"]
    assert config.cache.allow_root_filesystem == values["cache"]["allowRootFilesystem"]
    assert config.cache.scrub_interval_s == values["cache"]["scrubIntervalHours"] * 3600
    assert config.fetch.wait_limit_s == values["fetch"]["waitLimitSeconds"]
    assert config.fetch.idle_cancel_s == values["fetch"]["idleCancelSeconds"]
    assert config.fetch.max_parallel == values["fetch"]["maxParallel"]
    assert config.fetch.buffered == values["fetch"]["buffered"]
    assert config.kubernetes.events == values["kubernetes"]["events"]
    assert config.kubernetes.remove_taint == values["kubernetes"]["removeTaint"]
    assert config.log_level == values["logLevel"]
    metrics = values["metrics"]
    assert config.metrics_address == (("", metrics["port"]) if metrics["enabled"] else None)


def test_sizes_may_be_written_with_units(charts: Mapping[str, Rendered]) -> None:
    text, number = charts["sizes as text"].config(), charts["sizes as numbers"].config()
    assert text.cache.watermarks.max_bytes == 2 << 40
    assert text.fetch.max_memory_bytes == 64 << 20
    assert text.cache.scrub_bytes_per_s == 8 << 20
    assert number.cache.watermarks.max_bytes == 3_000_000_000_000
    assert number.fetch.max_memory_bytes == 6 << 20
    assert charts["least"].config().cache.watermarks.max_bytes is None
    assert charts["least"].config().fetch.max_memory_bytes == 128 << 20


def test_the_schema_knows_the_options_of_buckets() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    pattern = schema["properties"]["stores"]["additionalProperties"]["properties"]["url"]["pattern"]
    assert set(re.findall(r"[a-z-]+", pattern.split("[?](")[1].split(")=")[0])) == set(OPTIONS)


def test_a_label_may_be_said_again_and_is_there_once(charts: Mapping[str, Rendered]) -> None:
    chart = charts["labels over labels"]
    [monitor], [driver] = chart.all("PodMonitor"), chart.all("CSIDriver")
    assert (monitor["metadata"]["labels"]["a"], driver["metadata"]["labels"]["a"]) == ("c", "")
    of_pods = chart.one("DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert (of_pods["example.com/team"], of_pods["a"]) == ("nodes", "b")


def test_without_a_word_of_the_administrator_nothing_may_be_mounted(
    charts: Mapping[str, Rendered],
) -> None:
    policy = charts["least"].config().policy
    assert (policy.single_tenant, dict(policy.namespaces)) == (False, {})
    assert not charts["least"].config().allow_pod_stores


def test_the_command_accepts_the_arguments_that_it_is_given(
    chart: Rendered, tmp_path: Path
) -> None:
    for workload in chart.workloads():
        arguments = container(workload, "driver")["args"]
        assert arguments[0] == "csi"
        missing = str(tmp_path / "missing.json")
        told = [re.sub("^--config=.*", f"--config={missing}", word) for word in arguments[1:]]
        assert told != arguments[1:]
        done = CliRunner().invoke(command, told)
        assert "missing.json" in str(done.exception), done.output  # all options were read by then
        service = "node" if workload["kind"] == "DaemonSet" else "controller"
        assert f"--service={service}" in arguments


def test_another_configuration_restarts_the_driver_and_another_chart_version_does_not(
    charts: Mapping[str, Rendered],
) -> None:
    def template(name: str) -> Object:
        found: Object = charts[name].one("DaemonSet")["spec"]["template"]
        return found

    def checksum(name: str) -> Any:
        return template(name)["metadata"]["annotations"]["checksum/config"]

    assert checksum("least") != checksum("single tenant")
    assert checksum("least") == checksum("closed")
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    labels = template("least")["metadata"]["labels"]
    assert f"snapcask-{about['version']}" not in labels.values()


# ---- Paths and mounts --------------------------------------------------------------------------


def test_pods_and_cache_have_the_same_path_on_the_host_and_in_the_driver(
    chart: Rendered, values: Any
) -> None:
    node = chart.one("DaemonSet")
    driver, config = container(node, "driver"), chart.config()
    pods, cache = mount(driver, "pods"), mount(driver, "cache")
    assert pods["mountPath"] == f"{values['kubeletDir']}/pods"
    assert pods["mountPath"] == volume(node, "pods")["hostPath"]["path"] == config.kubelet_dir
    assert cache["mountPath"] == volume(node, "cache")["hostPath"]["path"] == config.cache.path
    assert volume(node, "cache")["hostPath"]["type"] == values["cache"]["hostPathType"]
    for i, path in enumerate(config.cache.disks):
        on_host = volume(node, f"disk-{i}")["hostPath"]
        assert on_host == {"path": path, "type": values["cache"]["disksHostPathType"]}
        assert mount(driver, f"disk-{i}")["mountPath"] == path


def test_mounts_of_the_driver_reach_the_host_and_only_those_in_pods(chart: Rendered) -> None:
    disks = {f"disk-{i}": "HostToContainer" for i in range(len(chart.config().cache.disks))}
    for workload in chart.workloads():
        for found in containers(workload):
            for item in found["volumeMounts"]:
                expected = None
                if (workload["kind"], found["name"]) == ("DaemonSet", "driver"):
                    known = {"pods": "Bidirectional", "cache": "HostToContainer", **disks}
                    expected = known.get(item["name"])
                assert item.get("mountPropagation") == expected, (found["name"], item)


def test_kubelet_is_told_the_path_of_the_drivers_socket(chart: Rendered, values: Any) -> None:
    node = chart.one("DaemonSet")
    registrar, driver = container(node, "registrar"), container(node, "driver")
    folder = volume(node, "socket")["hostPath"]["path"]
    assert folder == f"{values['kubeletDir']}/plugins/{values['driverName']}"
    assert f"--kubelet-registration-path={folder}/csi.sock" in registrar["args"]
    assert volume(node, "registration")["hostPath"] == {
        "path": f"{values['kubeletDir']}/plugins_registry",
        "type": "Directory",
    }
    assert mount(registrar, "registration")["mountPath"] == "/registration"
    for workload in chart.workloads():
        for found in containers(workload):
            assert mount(found, "socket")["mountPath"] == "/csi"
            socket = "endpoint=unix:///csi/csi.sock" if found["name"] == "driver" else "csi-address"
            assert [word for word in found["args"] if socket in word], found["args"]
    assert "/csi/csi.sock" in " ".join(driver["args"])


def test_nothing_of_the_host_is_seen_beside_what_the_driver_needs(chart: Rendered) -> None:
    for workload in chart.workloads():
        spec = workload["spec"]["template"]["spec"]
        names = {v["name"] for v in spec["volumes"] if "hostPath" in v}
        wanted = {"socket", "registration", "pods", "cache"}
        wanted |= {f"disk-{i}" for i in range(len(chart.config().cache.disks))}
        assert names == (wanted if workload["kind"] == "DaemonSet" else set())
        assert "hostPID" not in spec
        assert "hostIPC" not in spec


def test_the_hosts_network_is_used_only_where_it_is_asked_for(
    charts: Mapping[str, Rendered],
) -> None:
    using = {
        name
        for name, chart in charts.items()
        for workload in chart.workloads()
        if workload["spec"]["template"]["spec"].get("hostNetwork")
    }
    assert using == {"host network"}


# ---- Rights ------------------------------------------------------------------------------------


def _rules(chart: Rendered, component: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    for role in chart.all("ClusterRole") + chart.all("Role"):
        if role["metadata"]["labels"][_POD["component"]] == component:
            for rule in role["rules"]:
                assert set(rule) == {"apiGroups", "resources", "verbs"}
                for group in rule["apiGroups"]:
                    for resource in rule["resources"]:
                        yield group, resource, tuple(sorted(rule["verbs"]))


def test_each_account_may_do_just_what_its_containers_need(chart: Rendered, values: Any) -> None:
    node: set[Any] = {_EVENTS} if values["kubernetes"]["events"] else set()
    if values["kubernetes"]["removeTaint"]:
        node |= set(_TAINT)
    assert set(_rules(chart, "node")) == node
    controller: set[Any] = set()
    if values["controller"]["enabled"]:
        controller = set(_CONTROLLER)
        if values["sidecars"]["snapshotter"]["enabled"]:
            controller |= set(_SNAPSHOTS)
    assert set(_rules(chart, "controller")) == controller


def test_no_rule_is_about_secrets_or_everything(chart: Rendered) -> None:
    rules = [
        rule for role in chart.all("ClusterRole") + chart.all("Role") for rule in role["rules"]
    ]
    for rule in rules:
        assert not [r for r in rule["resources"] if r.startswith("secrets") or "*" in r]
        assert "*" not in rule["verbs"] + rule["apiGroups"]
    assert {"Secret"} & {found["kind"] for found in chart.objects} == set()


def test_bindings_are_of_roles_and_accounts_that_are_there(chart: Rendered, values: Any) -> None:
    used = {w["spec"]["template"]["spec"]["serviceAccountName"] for w in chart.workloads()}
    made = {account["metadata"]["name"] for account in chart.all("ServiceAccount")}
    others = {
        values[component]["serviceAccount"]["name"]
        for component in ("node", "controller")
        if not values[component]["serviceAccount"]["create"]
    }
    assert made == used - others
    for binding in chart.all("ClusterRoleBinding") + chart.all("RoleBinding"):
        role = binding["roleRef"]
        assert role["name"] in {r["metadata"]["name"] for r in chart.all(role["kind"])}
        (subject,) = binding["subjects"]
        assert subject["name"] in used
        assert subject["namespace"] == "storage"


def test_the_api_token_is_in_those_containers_alone_that_use_the_api(
    chart: Rendered, values: Any
) -> None:
    wanted = {"provisioner", "snapshotter"}
    for workload in chart.workloads():
        spec = workload["spec"]["template"]["spec"]
        assert spec["automountServiceAccountToken"] is False
        node = workload["kind"] == "DaemonSet"
        uses = node and any(values["kubernetes"].values())
        for found in containers(workload):
            there = [m for m in found["volumeMounts"] if m["name"] == "api-token"]
            expected = found["name"] in wanted or (uses and found["name"] == "driver")
            assert bool(there) == expected, found["name"]
            assert all("kubernetes.io/serviceaccount" in m["mountPath"] for m in there)
    for account in chart.all("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_only_the_nodes_driver_is_privileged(chart: Rendered) -> None:
    for workload in chart.workloads():
        pod = workload["spec"]["template"]["spec"].get("securityContext", {})
        node = workload["kind"] == "DaemonSet"
        if not node:
            assert pod["runAsNonRoot"] is True
            assert pod["runAsUser"] == pod["fsGroup"] > 0
        for found in containers(workload):
            context = found["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            if node and found["name"] == "driver":
                assert (context["privileged"], context["runAsUser"]) == (True, 0)
                continue
            assert "privileged" not in context
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            assert context.get("runAsUser", 1) == (0 if node else 1)


def test_secrets_are_handed_over_by_kubelet(charts: Mapping[str, Rendered]) -> None:
    def keys(name: str, kind: str) -> dict[str, Any]:
        driver = container(charts[name].one(kind), "driver")
        return {
            item["name"]: item.get("value", item.get("valueFrom", {}).get("secretKeyRef"))
            for item in driver.get("env", [])
        }

    for kind, secret in (("DaemonSet", "reader"), ("Deployment", "writer")):
        found = keys("keys", kind)
        assert found["AWS_ACCESS_KEY_ID"] == {"name": secret, "key": "accessKeyId"}
        assert found["AWS_SECRET_ACCESS_KEY"] == {"name": secret, "key": "secretAccessKey"}
        assert found["AWS_SESSION_TOKEN"]["optional"] is True
        workload = charts["credentials file"].one(kind)
        driver = container(workload, "driver")
        found = keys("credentials file", kind)
        for name, key in (("credentials", "aws"), ("trust", "own.crt")):
            path = mount(driver, name)["mountPath"]
            variable = {"credentials": "AWS_SHARED_CREDENTIALS_FILE", "trust": "AWS_CA_BUNDLE"}
            source = volume(workload, name)
            (item,) = (source.get("secret") or source["configMap"])["items"]
            assert item["key"] == key
            assert found[variable[name]] == f"{path}/{item['path']}"
        assert found["AWS_REGION"] == "eu-central-1"
    assert set(keys("least", "DaemonSet")) == {"NODE_NAME"}
    assert keys("controller", "Deployment") == {}


def test_cloud_identities_are_annotations_of_the_accounts(charts: Mapping[str, Rendered]) -> None:
    accounts = {
        account["metadata"]["name"]: account["metadata"].get("annotations")
        for account in charts["workload identity"].all("ServiceAccount")
    }
    assert accounts == {
        "snapcask-node": {"eks.amazonaws.com/role-arn": "arn:r"},
        "snapcask-controller": {"eks.amazonaws.com/role-arn": "arn:w"},
    }


# ---- Containers --------------------------------------------------------------------------------


def test_every_container_requests_cpu_and_memory_and_is_not_limited(
    charts: Mapping[str, Rendered],
) -> None:
    for name, chart in charts.items():
        for workload in chart.workloads():
            for found in containers(workload):
                assert set(found["resources"]["requests"]) == {"cpu", "memory"}
                limited = name == "host network" and found["name"] == "driver"
                assert ("limits" in found["resources"]) == limited, (name, found["name"])


def test_images_are_pinned(chart: Rendered, values: Any) -> None:
    for workload in chart.workloads():
        for found in containers(workload):
            assert re.search(r":v?[0-9]+\.[0-9]+\.[0-9]+$|@sha256:[0-9a-f]{64}$", found["image"])
            ours = found["image"].startswith(values["image"]["repository"])
            assert ours == (found["name"] == "driver")
            assert ours or found["image"].startswith("registry.k8s.io/sig-storage/")


def test_sidecars_are_there_as_they_are_wanted(chart: Rendered, values: Any) -> None:
    names = [found["name"] for found in containers(chart.one("DaemonSet"))]
    assert names == ["driver", "registrar", "liveness-probe"]
    found = chart.all("Deployment")
    assert len(found) == int(values["controller"]["enabled"])
    for controller in found:
        snapshots = values["sidecars"]["snapshotter"]["enabled"]
        assert [c["name"] for c in containers(controller)] == [
            "driver",
            "provisioner",
            *(["snapshotter"] if snapshots else []),
            "liveness-probe",
        ]
        sweeps = (
            "--snapshot-orphan-sweep-interval=0" not in container(controller, "provisioner")["args"]
        )
        assert sweeps == snapshots
        for sidecar in ("provisioner", "snapshotter")[: 1 + snapshots]:
            assert "--leader-election" in container(controller, sidecar)["args"]


def test_volumes_ports_and_probes_name_what_is_there(chart: Rendered, values: Any) -> None:
    for workload in chart.workloads():
        volumes = [v["name"] for v in workload["spec"]["template"]["spec"]["volumes"]]
        assert len(volumes) == len(set(volumes))
        used, numbers = set(), []
        for found in containers(workload):
            used |= {m["name"] for m in found["volumeMounts"]}
            paths = [m["mountPath"] for m in found["volumeMounts"]]
            assert len(paths) == len(set(paths))
            ports = {port["name"]: port["containerPort"] for port in found.get("ports", [])}
            numbers += list(ports.values())
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if probe in found:
                    assert found[probe]["httpGet"]["port"] in ports
            if found["name"] not in ("driver", "liveness-probe"):
                (listens,) = [a for a in found["args"] if a.startswith("--http-endpoint=")]
                assert listens == f"--http-endpoint=:{ports[found['name']]}"
        assert used == set(volumes)
        assert len(numbers) == len(set(numbers))
        driver, asker = container(workload, "driver"), container(workload, "liveness-probe")
        assert f"--http-endpoint=:{values['ports']['liveness']}" in asker["args"]
        ports = {port["name"]: port["containerPort"] for port in driver["ports"]}
        assert ports["healthz"] == values["ports"]["liveness"]
        asked = driver["readinessProbe"]["httpGet"]
        if values["metrics"]["enabled"]:
            assert (asked["path"], ports["metrics"]) == ("/readyz", values["metrics"]["port"])
        else:
            assert (asked["path"], asked["port"]) == ("/healthz", "healthz")


def test_the_drivers_pages_are_those_that_are_asked_for(charts: Mapping[str, Rendered]) -> None:
    served = (Path(snapcask.__file__).parents[1] / "csi" / "server.py").read_text()
    driver = container(charts["monitored"].one("DaemonSet"), "driver")
    (endpoint,) = charts["monitored"].one("PodMonitor")["spec"]["podMetricsEndpoints"]
    for path in (driver["readinessProbe"]["httpGet"]["path"], endpoint["path"]):
        assert f'"{path}"' in served
    assert endpoint["port"] in {port["name"] for port in driver["ports"]}


def test_nodes_get_the_driver_whatever_their_taints(charts: Mapping[str, Rendered]) -> None:
    spec = charts["least"].one("DaemonSet")["spec"]["template"]["spec"]
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert spec["priorityClassName"] == "system-node-critical"
    assert spec["nodeSelector"] == {"kubernetes.io/os": "linux"}
    assert "tolerations" not in charts["host network"].one("DaemonSet")["spec"]["template"]["spec"]


def test_two_drivers_never_run_on_one_node(chart: Rendered) -> None:
    strategy = chart.one("DaemonSet")["spec"]["updateStrategy"]
    assert "maxSurge" not in strategy.get("rollingUpdate", {})


def test_selectors_find_their_pods(chart: Rendered) -> None:
    labels = []
    for workload in chart.workloads():
        found = workload["spec"]["template"]["metadata"]["labels"]
        labels.append(found.items())
        assert workload["spec"]["selector"]["matchLabels"].items() <= found.items()
    for kind in ("PodMonitor", "NetworkPolicy"):
        for item in chart.all(kind):
            spec = item["spec"]
            selector = spec.get("selector") or spec["podSelector"]
            assert all(selector["matchLabels"].items() <= found for found in labels)


def test_names_are_not_used_twice_and_are_short_enough(chart: Rendered) -> None:
    names = [(found["kind"], found["metadata"]["name"]) for found in chart.objects]
    assert len(names) == len(set(names))
    for kind, name in names:
        assert len(name) <= 63, (kind, name)


# ---- The CSIDriver object ----------------------------------------------------------------------


def test_the_csidriver_object_is_right_from_the_first_release(
    charts: Mapping[str, Rendered],
) -> None:
    found = charts["least"].one("CSIDriver")
    assert found["metadata"]["name"] == "csi.snapcask.dev"
    assert found["spec"] == {
        "attachRequired": False,
        "podInfoOnMount": True,
        "volumeLifecycleModes": ["Persistent", "Ephemeral"],
        "fsGroupPolicy": "None",
        "requiresRepublish": False,
        "storageCapacity": False,
        "seLinuxMount": True,
    }
    assert "annotations" not in found["metadata"]


def test_selinux_contexts_come_as_mount_options_where_a_mount_takes_them(
    charts: Mapping[str, Rendered],
) -> None:
    assert charts["bind"].one("CSIDriver")["spec"]["seLinuxMount"] is False
    assert charts["bind for a namespace"].one("CSIDriver")["spec"]["seLinuxMount"] is True
    assert charts["csidriver"].one("CSIDriver")["spec"]["seLinuxMount"] is False


def test_the_csidriver_object_can_be_kept_narrowed_or_left_to_others(
    charts: Mapping[str, Rendered],
) -> None:
    found = charts["csidriver"].one("CSIDriver")
    assert found["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert found["spec"]["volumeLifecycleModes"] == ["Persistent"]
    profile = "security.openshift.io/csi-ephemeral-volume-profile"
    assert found["metadata"]["labels"][profile] == "restricted"
    assert charts["no csidriver"].all("CSIDriver") == []
    assert charts["another name"].one("CSIDriver")["metadata"]["name"] == "snapshots.example.com"


# ---- Notes -------------------------------------------------------------------------------------


def test_the_notes_tell_of_stores_among_which_each_volume_has_to_choose(
    charts: Mapping[str, Rendered],
) -> None:
    told = [name for name, chart in charts.items() if "no defaultStore" in chart.notes]
    assert told == ["stores without a default"]
    assert "main, nfs" in charts["stores without a default"].notes


def test_the_notes_warn_of_uninstalling_while_volumes_are_mounted(chart: Rendered) -> None:
    assert "BEFORE YOU UNINSTALL" in chart.notes
    assert f'"{chart.config().driver_name}"' in chart.notes
    assert chart.one("DaemonSet")["metadata"]["name"] in chart.notes


def test_the_notes_say_who_may_mount(charts: Mapping[str, Rendered]) -> None:
    assert "NO NAMESPACE MAY MOUNT ANYTHING YET" in charts["least"].notes
    assert "Every namespace may mount every image" in charts["single tenant"].notes
    assert "*, team-a" in charts["policy"].notes
