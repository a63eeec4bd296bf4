"""Installs Headroom on a real API server, and reads each account's calls from the audit log.

No pods run. Instead, each process runs with the token, flags and files that its manifests specify,
but with other ports and folders.
"""

import http.client
import json
import shutil
import socket
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from kubernetes.client import ApiClient

from agent.kube_client import of_client
from agent.kube_publisher import KubernetesPublisher
from agent.probes.gpunode_watch import GPUNodeWatch
from agent.probes.node_probe import NodeApi
from headroom.contract.console import HEADER
from tests import forks
from tests.admission.site import Site
from tests.controlplane import ROOT, ApiRefused, ControlPlane, built
from tests.deploy.rendered import DEPLOY, NAMESPACE, Objects, named_images, objects, overlay
from tests.e2e.cluster import pod_manifest
from tests.e2e.nodes import Nodes, Shape
from tests.processes import free_ports
from tests.waiting import PATIENCE_S, until

EXTENDER, AGENT, CERTS = "headroom-extender", "headroom-agent", "headroom-certs"
WEBHOOK, CONSOLE = "headroom-webhook", "headroom-console"
SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
USERS_PODS = "/api/v1/namespaces/default/pods"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
GPUNODES = "/apis/headroom.gpu/v1alpha1/gpunodes"
_AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "Metadata", "userGroups": [f"system:serviceaccounts:{NAMESPACE}"]},
        {"level": "None"},
    ],
}


class AuditedPlane(ControlPlane):
    """A control plane whose API server logs the calls of the accounts in Headroom's namespace."""

    #: These controllers delete namespaces and the pods of Deployments.
    controllers = ("namespace-controller", "garbage-collector-controller")

    @property
    def audit_log(self) -> Path:
        return self.folder / "audit.log"

    def spawn_apiserver(self, *flags: str) -> None:
        policy = self.folder / "audit.json"
        policy.write_text(json.dumps(_AUDIT))
        logged = f"--audit-policy-file={policy}", f"--audit-log-path={self.audit_log}"
        super().spawn_apiserver(*flags, *logged, "--audit-log-mode=blocking")

    def asked(self, account: str) -> list[dict[str, Any]]:
        """Return the calls that this account has made so far."""
        events = [json.loads(line) for line in self.audit_log.read_text().splitlines()]
        user = f"system:serviceaccount:{NAMESPACE}:{account}"
        return [event for event in events if event["user"]["username"] == user]


class InstalledNodes(Nodes):
    """Nodes whose agents use the service account from the manifests. Each agent has the token of
    its own pod.
    """

    def __init__(self, plane: ControlPlane, names: Sequence[str], shape: Shape) -> None:
        super().__init__(plane, names, shape, seed=1)
        self.clients: dict[str, ApiClient] = {}

    def create(self) -> None:
        super().create()
        for name in self.names:
            self.clients[name] = ApiClient(self._plane.configuration(self._token(name)))

    def close(self) -> None:
        super().close()
        for client in self.clients.values():
            client.close()

    def _token(self, node: str) -> str:
        """Write the files that the node's kubelet would mount into the agent's pod."""
        pod = {
            "metadata": {"name": f"agent-on-{node}"},
            "spec": {
                "nodeName": node,
                "serviceAccountName": AGENT,
                "containers": [{"name": "agent", "image": "none"}],
            },
        }
        self._plane.call("POST", PODS, pod)
        return Site(self._plane).token(AGENT, node)

    def publisher(self, name: str) -> KubernetesPublisher:
        return KubernetesPublisher(of_client(self.clients[name]), name, NAMESPACE, heartbeat_s=30)

    def look_around(self) -> None:
        """Make the calls of an agent that do not report a status."""
        for name in self.names:
            publisher = self.publisher(name)
            publisher.held()
            publisher.gpunode()
            list(NodeApi(of_client(self.clients[name]), name).read())
            watch = GPUNodeWatch(of_client(self.clients[name]), name, lambda: None)
            watch.start()
            until(lambda watch=watch: watch.device_choice is not None, "a watch of the GPUNode")
            watch.stop()


def token(plane: ControlPlane, account: str) -> str:
    return Site(plane).token(account)


class Installation:
    """Applies an overlay and runs the processes of its pods."""

    def __init__(self, plane: AuditedPlane, platform: str, *names: str) -> None:
        self.plane = plane
        self.manifest = plane.folder / "installed.yaml"
        self.manifest.write_text(named_images(overlay(DEPLOY / "overlays" / platform)))
        self.objects: Objects = objects(self.manifest.read_text())
        self.nodes = InstalledNodes(plane, names, Shape(gpus=2))
        self.debug_port = self.journal_port = self.scheduler_port = self.webhook_port = 0
        self.webhook_probes_port = 0

    @classmethod
    def again(cls, plane: AuditedPlane, platform: str, *names: str) -> "Installation":
        """Return a new installation in the same cluster, after the first installation was
        removed.
        """
        for name in ("etc", "webhook", "console"):
            shutil.rmtree(plane.folder / name, ignore_errors=True)
        return cls(plane, platform, *names)

    def apply(self, *flags: str) -> str:
        server_side = "--server-side", "--validate=strict", f"--filename={self.manifest}"
        return self.plane.kubectl("apply", *server_side, *flags)

    def make_certificates(self) -> str:
        """Run the command of the certificates Job with the Job's account. Add the loopback address
        of the webhook to the certificate.
        """
        spec = self.objects["Job", NAMESPACE, "headroom-certs-first"]["spec"]["template"]["spec"]
        _, *arguments = spec["containers"][0]["command"]
        env = self._environment(spec["serviceAccountName"])
        done = forks.run("headroom", *arguments, "--name", "127.0.0.1", env=env)
        done.check_returncode()
        return done.stdout

    def start(self, replica: str = "") -> None:
        """Start the processes of another scheduler pod, another webhook and another console, and
        wait until they are ready.
        """
        spec = self.objects["Deployment", NAMESPACE, "headroom-scheduler"]["spec"]["template"]
        extender, scheduler = spec["spec"]["containers"]
        verbs_port, self.journal_port, self.scheduler_port = free_ports(3)
        self.verbs_port = verbs_port
        folder = self.mounted(spec["spec"], f"etc{replica}")
        ports = {"verbs": verbs_port, "debug": self.journal_port}
        self._fork(f"extender{replica}", extender, spec["spec"], folder, ports)
        self._wait(f"extender{replica}", self.journal_answers, "/readyz")
        self._start_webhook(replica)
        self._start_console(replica)
        name, *flags = scheduler["command"]
        configured = folder / "scheduler/kube-scheduler.yaml"
        content = yaml.safe_load(configured.read_text())
        for each in content["extenders"]:
            assert each["urlPrefix"] == "https://127.0.0.1:8888"
            each["urlPrefix"] = f"https://127.0.0.1:{verbs_port}"
            for key, path in each["tlsConfig"].items():
                each["tlsConfig"][key] = path.replace("/etc/headroom", str(folder))
        # In a cluster, kube-scheduler needs no kubeconfig, because it uses the account of its pod.
        content["clientConnection"] = {"kubeconfig": str(self._kubeconfig(EXTENDER))}
        configured.write_text(json.dumps(content))
        flags = [flag.replace("/etc/headroom", str(folder)) for flag in flags]
        flags += ["--bind-address=127.0.0.1", f"--secure-port={self.scheduler_port}"]
        self.plane.spawn(f"{name}{replica}", str(built(name)[name]), *flags)

    def end(self, replica: str = "") -> None:
        """End the processes as the deletion of their pods does."""
        for name in ("kube-scheduler", "extender", "webhook", "console"):
            if self.plane.runs(f"{name}{replica}"):
                self.plane.end(f"{name}{replica}")

    def _start_webhook(self, replica: str) -> None:
        spec = self.objects["Deployment", NAMESPACE, WEBHOOK]["spec"]["template"]["spec"]
        self.webhook_port, self.webhook_probes_port = free_ports(2)
        folder = self.mounted(spec, f"webhook{replica}")
        ports = {"webhook": self.webhook_port, "debug": self.webhook_probes_port}
        self._fork(f"webhook{replica}", spec["containers"][0], spec, folder, ports)
        self._wait(f"webhook{replica}", self.webhook_answers, "/readyz")
        self._find_webhook(self.webhook_port)

    def _start_console(self, replica: str) -> None:
        spec = self.objects["Deployment", NAMESPACE, CONSOLE]["spec"]["template"]["spec"]
        (self.debug_port,) = free_ports(1)
        folder = self.mounted(spec, f"console{replica}")
        ports = {"debug": self.debug_port}
        self._fork(f"console{replica}", spec["containers"][0], spec, folder, ports)
        self._wait(f"console{replica}", self.answers, "/readyz")

    def _fork(
        self,
        name: str,
        container: dict[str, Any],
        spec: dict[str, Any],
        folder: Path,
        ports: dict[str, int],
    ) -> None:
        """Start the process of a Headroom container on these loopback ports."""
        command, config, mounted = container["args"]
        settings = folder / Path(mounted).relative_to("/etc/headroom")
        for file in settings.iterdir():
            file.write_text(file.read_text().replace("/etc/headroom/", f"{folder}/"))
        # Use addresses instead of Service names, because there is no DNS.
        here = {"host": "127.0.0.1", "extenders": [f"127.0.0.1:{self.journal_port}"]}
        here |= {f"{each}_port": port for each, port in ports.items()}
        (settings / "machine.yaml").write_text(yaml.safe_dump(here))
        self.plane.fork(
            name,
            *("headroom", command, config, str(settings)),
            env=self._environment(spec["serviceAccountName"]),
        )

    def _wait(self, name: str, answers: Callable[[str], tuple[int, str]], path: str) -> None:
        until(
            lambda: answers(path)[0] == 200,
            f"{name} is ready",
            logs=lambda: f"{answers(path)}\n{self.plane.log(name)[-4000:]}",
        )

    def _find_webhook(self, port: int) -> None:
        """Point the webhook configurations to loopback, because Services do not work without pods.
        Keep the CA from the certificates Job.
        """
        for kind in ("mutating", "validating"):
            path = f"{ADMISSION}/{kind}webhookconfigurations/headroom"
            changes = []
            for i, each in enumerate(self.plane.call("GET", path)["webhooks"]):
                config = each["clientConfig"]
                where = (
                    config["service"]["path"]
                    if "service" in config
                    else urlsplit(config["url"]).path
                )
                address = {
                    "url": f"https://127.0.0.1:{port}{where}",
                    "caBundle": config["caBundle"],
                }
                changes.append(
                    {"op": "replace", "path": f"/webhooks/{i}/clientConfig", "value": address}
                )
            self.plane.call("PATCH", path, changes, "application/json-patch+json")

    def mounted(self, spec: dict[str, Any], name: str) -> Path:
        """Return a folder with the files that the pod mounts at /etc/headroom."""
        root = self.plane.folder / name
        where = {
            mount["name"]: root / Path(mount["mountPath"]).relative_to("/etc/headroom")
            for container in spec["containers"]
            for mount in container["volumeMounts"]
        }
        for volume in spec["volumes"]:
            folder = where[volume["name"]]
            folder.mkdir(parents=True)
            if "configMap" in volume:
                path = f"/api/v1/namespaces/{NAMESPACE}/configmaps/{volume['configMap']['name']}"
                content = {k: v.encode() for k, v in self.plane.call("GET", path)["data"].items()}
            else:
                content = {}
                projected = volume.get("projected", {}).get("sources", ())
                for source in projected or [{"secret": volume["secret"]}]:
                    content |= self._secret(source["secret"])
            for name, data in content.items():
                (folder / name).write_bytes(data)
        return root

    def _secret(self, source: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the files of a Secret. Return an empty dictionary if an optional Secret does not
        exist.
        """
        try:
            name = source.get("secretName") or source["name"]
            secret = self.plane.call("GET", f"{SECRETS}/{name}")
        except ApiRefused as err:
            if source.get("optional") and ": 404 " in str(err):
                return {}
            raise
        keys = [item["key"] for item in source.get("items", ())] or secret["data"]
        return {key: b64decode(secret["data"][key]) for key in keys}

    def answers(
        self, path: str, as_token: str | None = None, session: str | None = None
    ) -> tuple[int, str]:
        """Send a request to the debug API over TLS. Check the server's certificate with the CA of
        its Secret and the name of its Service.
        """
        service = f"headroom-debug.{NAMESPACE}.svc"
        return self._get(self.debug_port, service, path, as_token, session)

    def journal_answers(self, path: str, as_token: str | None = None) -> tuple[int, str]:
        """Send a request to the extender's journal port."""
        return self._get(self.journal_port, f"headroom-journal.{NAMESPACE}.svc", path, as_token)

    def webhook_answers(self, path: str) -> tuple[int, str]:
        return self._get(self.webhook_port, f"{WEBHOOK}.{NAMESPACE}.svc", path)

    def webhook_probes_answer(self, path: str, as_token: str | None = None) -> tuple[int, str]:
        """Send a request to the webhook's port for probes and metrics."""
        return self._get(self.webhook_probes_port, f"{WEBHOOK}.{NAMESPACE}.svc", path, as_token)

    def _get(
        self,
        port: int,
        service: str,
        path: str,
        as_token: str | None = None,
        session: str | None = None,
    ) -> tuple[int, str]:
        import ssl

        context = ssl.create_default_context(cafile=str(self.plane.folder / "etc/tls/ca.crt"))
        connection = http.client.HTTPConnection(service)
        headers = {"Authorization": f"Bearer {as_token}"} if as_token else {}
        headers |= {HEADER: session} if session else {}
        try:
            with (
                socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as raw,
                context.wrap_socket(raw, server_hostname=service) as tls,
            ):
                connection.sock = tls
                connection.request("GET", path, headers=headers)
                answer = connection.getresponse()
                return answer.status, answer.read().decode()
        except ConnectionRefusedError:
            self.plane.raise_if_ended()
            return 0, ""

    def settle(self) -> None:
        """Report all nodes and wait until their GPUNodes are initialised."""

        def initialised() -> bool:
            there = {each["metadata"]["name"]: each for each in self.listed(GPUNODES)}
            return all(there[name].get("spec", {}).get("initialised") for name in self.nodes.names)

        until(lambda: len(self.listed(GPUNODES)) == len(self.nodes.names), "GPUNodes are there")
        self.nodes.report(self.nodes.names)
        until(initialised, "GPUNodes are initialised")

    # The methods below handle the pods of users in namespace default.

    def create_pod(self, name: str, vram: str) -> None:
        pod = pod_manifest(vram)
        pod["metadata"]["name"] = name
        self.plane.call("POST", USERS_PODS, pod)

    def pod(self, name: str) -> dict[str, Any]:
        return self.plane.call("GET", f"{USERS_PODS}/{name}")

    def rejection(self, name: str) -> str:
        """Return why the pod is unschedulable. Return an empty string if it is scheduled or was not
        tried yet.
        """
        for condition in self.pod(name)["status"].get("conditions", ()):
            if condition["type"] == "PodScheduled":
                message: str = condition.get("message", "")
                return message
        return ""

    def delete_users_pods(self) -> None:
        for pod in self.listed(USERS_PODS):
            path = f"{USERS_PODS}/{pod['metadata']['name']}"
            self.plane.call("DELETE", path, {"gracePeriodSeconds": 0})

    def listed(self, path: str) -> list[dict[str, Any]]:
        try:
            items: list[dict[str, Any]] = self.plane.call("GET", path)["items"]
        except ApiRefused as err:
            if ": 404 " not in str(err):
                raise
            return []
        return items

    def _kubeconfig(self, account: str) -> Path:
        path = self.plane.folder / f"{account}.kubeconfig"
        self.plane.write_kubeconfig(path, {"token": token(self.plane, account)})
        return path

    def _environment(self, account: str) -> dict[str, str]:
        kubeconfig = str(self._kubeconfig(account))
        return {"PATH": "/usr/bin:/bin", "KUBECONFIG": kubeconfig, "PYTHONPATH": str(ROOT)}
