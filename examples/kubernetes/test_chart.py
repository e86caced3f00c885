"""The manifests as kubectl renders them belong together. The chart is the kustomize base with values: rendered by helm and compared with
kubectl's output. Both keep to Kubernetes' schemas."""

import json
import pathlib
import subprocess
import unittest

import kubernetes_validate
import yaml

HERE = pathlib.Path(__file__).resolve().parent
CLUSTER_WIDE = {
    "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "DeviceClass", "Namespace",
    "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding",
}


def documents(text):
    return [document for document in yaml.safe_load_all(text) if document]


def by_name(objects):
    named = {(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]): one for one in objects}
    assert len(named) == len(objects), "each object once"
    return named


def rendered(*options, namespace="default"):
    argv = ["helm", "template", "gshare", str(HERE), f"--namespace={namespace}", *options]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr)
    return by_name(documents(done.stdout))


def base(*parts):
    """The objects of the kustomize base. Those that the chart's removal leaves have a mark there."""
    objects = {}
    for part in parts:
        text = subprocess.check_output(["kubectl", "kustomize", str(HERE / part)], text=True)
        objects |= by_name(documents(text.replace("image: gshare\n", "image: gshare:0.1.0\n")))
    for (kind, *_), one in objects.items():
        if kind in ("Namespace", "CustomResourceDefinition"):
            one["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
    return objects


def pod(objects, kind, name):
    return objects[kind, "gshare-system", name]["spec"]["template"]["spec"]


class Manifests(unittest.TestCase):
    def test_objects_name_only_each_other_and_the_place_of_each(self):
        for part in ("", "daemon", "dra", "host", "all-namespaces", "by-node", "kind"):
            objects = base(part)
            for (kind, namespace, name), one in objects.items():
                self.assertIn(namespace, {None} if kind in CLUSTER_WIDE else {"gshare-system", "gshare-functions"}, (part, kind, name))
                self.assertNotEqual(kind, "PodDisruptionBudget", "of the host the leader alone is ready: a drain would never end")
                named = []
                if kind.endswith("RoleBinding"):
                    named.append((one["roleRef"]["kind"], namespace, one["roleRef"]["name"]))
                    named += [("ServiceAccount", subject["namespace"], subject["name"]) for subject in one["subjects"]]
                if kind in ("Deployment", "DaemonSet"):
                    template = one["spec"]["template"]
                    named.append(("ServiceAccount", namespace, template["spec"]["serviceAccountName"]))
                    self.assertLessEqual(one["spec"]["selector"]["matchLabels"].items(), template["metadata"]["labels"].items())
                self.assertLessEqual(set(named), set(objects), (part, kind, name))

    def test_objects_and_examples_keep_to_the_schemas_of_kubernetes(self):
        examples = [one for file in ("example", "allocated-claim") for one in documents((HERE / f"dra/{file}.yaml").read_text())]
        objects = base("by-node")
        for one in [*base("kind").values(), *objects.values(), *examples]:
            kubernetes_validate.validate(one, "1.34", strict=True)
        daemon = objects["DaemonSet", "gshare-system", "gshared"]
        daemon["spec"]["template"]["spec"]["toleration"] = []
        with self.assertRaisesRegex(kubernetes_validate.ValidationError, "toleration"):
            kubernetes_validate.validate(daemon, "1.34", strict=True)

    def test_by_node_the_host_leaves_mounts_to_the_node_and_on_kind_nodes_have_the_labels_of_their_pods(self):
        words = pod(base("by-node"), "Deployment", "gshare-up")["containers"][0]["command"]
        self.assertLessEqual({'--set=host.kubernetes.mounts="node"', "--set=host.kubernetes.all_namespaces=true"}, set(words))
        objects, (cluster,) = base("kind"), documents((HERE / "kind/cluster.yaml").read_text())
        self.assertIs(cluster["featureGates"]["DRAConsumableCapacity"], True)
        for (kind, _, name), one in objects.items():
            if kind == "DaemonSet":
                wanted = one["spec"]["template"]["spec"]["nodeSelector"].items()
                self.assertTrue(any(wanted <= node.get("labels", {}).items() for node in cluster["nodes"]), name)
        self.assertIn("--sim=2", pod(objects, "DaemonSet", "gshare-dra")["containers"][0]["command"])


class Chart(unittest.TestCase):
    def assert_same(self, objects, wanted):
        self.assertEqual(set(objects), set(wanted))
        for name, one in objects.items():
            self.assertEqual(one, wanted[name], name)

    def test_without_values_it_is_the_base(self):
        subprocess.run(["helm", "lint", "--strict", "--quiet", str(HERE)], check=True)
        self.assert_same(rendered(), base("host"))
        self.assert_same(rendered("--set=dra.enabled=true"), base("host", "dra"))
        self.assert_same(rendered("--set=host.enabled=false"), base("daemon"))
        self.assert_same(rendered("--set=dra.enabled=true,host.allNamespaces=true"), base("."))
        self.assert_same(rendered("--set=dra.enabled=true,host.allNamespaces=true,host.mounts=node"), base("by-node"))
        made = base("host")
        del made["Namespace", None, "gshare-system"]
        self.assert_same(rendered(namespace="gshare-system"), made)

    def test_values_reach_their_objects(self):
        values = {
            "image": {"repository": "r.example/gshare", "tag": "2", "pullPolicy": "Always"},
            "imagePullSecrets": [{"name": "pull"}],
            "networkPolicies": False,
            "daemon": {"config": "metrics = '0.0.0.0:9478'\n", "nodeSelector": {"pool": "gpu"}, "tolerations": [{"key": "mine", "operator": "Exists"}]},
            "host": {
                "namespace": "team",
                "credentials": "door",
                "replicas": 3,
                "arguments": ["--set=host.guess=true"],
                "resources": {"limits": {"memory": "1Gi"}},
            },
            "dra": {"enabled": True, "arguments": ["--sim=2"]},
        }
        objects = rendered(f"--set-json={','.join(f'{key}={json.dumps(value)}' for key, value in values.items())}")
        self.assertFalse([name for name in objects if name[0] == "NetworkPolicy"])
        for kind, name in (("DaemonSet", "gshared"), ("Deployment", "gshare-up"), ("DaemonSet", "gshare-dra")):
            spec = pod(objects, kind, name)
            for container in spec.get("initContainers", []) + spec["containers"]:
                self.assertEqual((container["image"], container["imagePullPolicy"]), ("r.example/gshare:2", "Always"))
            self.assertEqual(spec["imagePullSecrets"], [{"name": "pull"}])
        daemon, host = pod(objects, "DaemonSet", "gshared"), pod(objects, "Deployment", "gshare-up")
        self.assertEqual(objects["ConfigMap", "gshare-system", "gshared"]["data"]["gshared.toml"], values["daemon"]["config"])
        self.assertEqual(daemon["nodeSelector"], {"gshare.io/shared": "true", "pool": "gpu"})
        self.assertEqual([one["key"] for one in daemon["tolerations"]], ["nvidia.com/gpu", "mine"])
        self.assertEqual(objects["Deployment", "gshare-system", "gshare-up"]["spec"]["replicas"], 3)
        self.assertEqual(host["containers"][0]["resources"], {"limits": {"memory": "1Gi"}})
        self.assertEqual(host["containers"][0]["command"][-1], "--set=host.guess=true")
        self.assertIn('--set=host.kubernetes.namespace="team"', host["containers"][0]["command"])
        self.assertEqual(host["volumes"][0]["secret"]["secretName"], "door")
        self.assertEqual(pod(objects, "DaemonSet", "gshare-dra")["containers"][0]["command"][-1], "--sim=2")
        self.assertIn(("Role", "team", "gshare-up"), objects)
        self.assertNotIn("gshare-functions", json.dumps(list(objects.values())))

    def test_a_changed_configuration_restarts_the_daemons(self):
        def template(text):
            return rendered(f"--set=daemon.config={text}")["DaemonSet", "gshare-system", "gshared"]["spec"]["template"]

        self.assertNotEqual(template("a"), template("b"))

    def test_monitoring_is_that_of_the_files(self):
        objects = rendered("--set=monitoring.podMonitor=true,monitoring.alerts=true,monitoring.dashboards=true")
        rules = yaml.safe_load((HERE / "monitoring/rules.yml").read_text())
        self.assertEqual(objects["PrometheusRule", "gshare-system", "gshare"]["spec"], rules)
        boards = objects["ConfigMap", "gshare-system", "gshare-dashboards"]
        # The base is validated, and kinds of operators have no schema.
        kubernetes_validate.validate(boards, "1.34", strict=True)
        self.assertEqual({json.loads(text)["title"] for text in boards["data"].values()}, {"gshare", "gshare up"})
        # An alert names the job of a program, which is the label of its pods.
        self.assertFalse([name for name in objects if name[1] not in (None, "gshare-system", "gshare-functions")])
        monitor = objects["PodMonitor", "gshare-system", "gshare"]["spec"]
        self.assertEqual(monitor["jobLabel"], "app")
        ports = {port["name"] for (kind, *_), one in objects.items() if kind in ("DaemonSet", "Deployment")
                 for port in one["spec"]["template"]["spec"]["containers"][0]["ports"]}
        self.assertEqual({endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]}, ports)

    def test_a_typo_or_a_wrong_value_is_refused_by_its_name(self):
        for option, said in (
            ("--set=imgae.tag=2", "imgae"),
            ("--set=host.replica=2", "replica"),
            ("--set=host.replicas=0", "host.replicas"),
            ("--set-string=host.enabled=yes", "host.enabled"),
            ("--set=host.namespace=Team", "host.namespace"),
            ("--set=host.arguments={set}", "host.arguments.0"),
            ("--set=host.mounts=hostPath", "host.mounts"),
            ("--set=image.pullPolicy=always", "image.pullPolicy"),
            ("--set=daemon.resources.limit.cpu=1", "limit"),
            ("--set=daemon.tolerations[0].effect=NoExec", "daemon.tolerations.0.effect"),
            ("--set=dra.simulated=2", "simulated"),
            ("--set=monitoring.podMonitor=1", "monitoring.podMonitor"),
        ):
            with self.subTest(option), self.assertRaises(ValueError) as caught:
                rendered(option)
            self.assertIn(said, str(caught.exception).replace("/", "."))


if __name__ == "__main__":
    unittest.main()
