"""Checks that Headroom's commands use the same cluster, user and namespace as the real kubectl.

One HTTPS server simulates all clusters, and each cluster has its own path. The server records the
cluster, the credentials and the namespace of each ``kubectl auth can-i``. A proxy records the
targets of its connections.
"""

import base64
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from kubernetes import client

from headroom.client import kubeconfig
from tests.answering import Answer, Request, answering
from tests.certificates import Authority, Certificate
from tests.controlplane import built
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
#: A recorded request: the cluster, the token and the namespace, or "proxy" and the target.
Reached = tuple[str, ...]


@dataclass
class Kubeconfigs:
    """The simulated clusters, the proxy, and a folder with kubeconfigs."""

    folder: Path
    kubectl: Path
    #: Maps the names in angle brackets to their values.
    values: dict[str, str]
    reached: list[Reached] = field(default_factory=list)

    def filled(self, text: str) -> str:
        return re.sub("<(.+?)>", lambda match: self.values[match[1]], text)

    def by_kubectl(self, arguments: Sequence[str], environment: Mapping[str, str]) -> list[Reached]:
        """Return the requests that kubectl sends. The list is empty if kubectl reports an error
        first.
        """
        command = [str(self.kubectl), "auth", "can-i", "get", "pods", *arguments]
        return self.by(command, environment)

    def by(self, command: Sequence[str], environment: Mapping[str, str]) -> list[Reached]:
        self.reached.clear()
        subprocess.run(
            command, env=environment, cwd=self.folder, capture_output=True, timeout=PATIENCE_S
        )
        return list(dict.fromkeys(self.reached))

    def by_headroom(
        self, explicit: str | None, context: str | None, environment: Mapping[str, str]
    ) -> list[Reached]:
        """Return the requests that Headroom sends. The list is empty if Headroom reports an error
        first.
        """
        self.reached.clear()
        configuration = client.Configuration()
        with contextlib.suppress(kubeconfig.BadKubeconfig):
            kubeconfig.configure(configuration, explicit, context, environment)
            ask(configuration, kubeconfig.namespace(explicit, context, environment))
        return list(dict.fromkeys(self.reached))


def ask(configuration: client.Configuration, namespace: str) -> None:
    """Send the request of ``kubectl auth can-i``, which the server rejects."""
    api = client.AuthorizationV1Api(client.ApiClient(configuration))
    attributes = client.V1ResourceAttributes(namespace=namespace, resource="pods", verb="get")
    spec = client.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes)
    with pytest.raises(Exception, match=r"403|502"):
        api.create_self_subject_access_review(client.V1SelfSubjectAccessReview(spec=spec))


@contextlib.contextmanager
def serving(reached: list[Reached], certificate: Certificate | None) -> Iterator[int]:
    def answer(request: Request) -> Answer:
        match request.method:
            case "POST":
                (namespace,) = set(re.findall(rb"ns-[a-z]+|default", request.body))
                sent = re.sub("^[Bb]earer ", "", request.headers.get("Authorization", ""))
                reached.append((request.path.split("/")[1], sent, namespace.decode()))
                return 403, b""
            case "CONNECT":
                sent_to_proxy = request.headers.get_all("Proxy-Authorization", [])
                reached.append(("proxy", request.path, *sent_to_proxy))
                return 502, b""
        return 404, b""

    with answering(answer, certificate) as url:
        yield int(url.rpartition(":")[2])


PLUGIN = """#!/bin/sh
test -f "$0.fails" && { echo "sign in first" >&2; exit 1; }
echo '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
 "status": {"token": "'"$PREFIX"'of-the-plugin"}}'
"""
EXEC = "apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never"
#: Kubeconfigs by file name. Each kubeconfig has one context, and the context's cluster has the same
#: name.
KUBECONFIGS = {
    **{
        name: f"""
current-context: {name}
clusters: [{{name: {name}, cluster: {{server: "<URL>/{name}", certificate-authority: ca.crt}}}}]
contexts: [{{name: {name}, context: {{cluster: {name}, user: {name}, namespace: ns-{name}}}}}]
users: [{{name: {name}, user: {{token: t-{name}}}}}]
"""
        for name in ("alpha", "beta")
    },
    "implicit": """
current-context: gamma
clusters: [{name: gamma, cluster: {server: "<URL>/gamma", certificate-authority-data: <CA64>}}]
contexts: [{name: gamma, context: {cluster: gamma, user: gamma}}]
users: [{name: gamma, user: {token: t-gamma}}]
""",
    "empty": "",
    "nulls": "{apiVersion: v1, kind: Config, clusters: null, contexts: null, users: null,"
    " preferences: {}, current-context: ''}",
    "only-current": "{apiVersion: v1, kind: Config, current-context: beta}",
    "no-current": """
clusters: [{name: gamma, cluster: {server: "<URL>/gamma", certificate-authority: ca.crt}}]
contexts: [{name: gamma, context: {cluster: gamma, user: gamma, namespace: ns-gamma}}]
users: [{name: gamma, user: {token: t-gamma}}]
""",
    "same-names": """
current-context: alpha
clusters: [{name: alpha, cluster: {server: "<URL>/other", certificate-authority: ca.crt}}]
contexts: [{name: alpha, context: {cluster: alpha, user: other, namespace: ns-other}}]
users: [{name: alpha, user: {token: t-other}}, {name: other, user: {token: t-other}}]
""",
    "across": """
current-context: across
contexts: [{name: across, context: {cluster: beta, user: alpha}}]
""",
    "unknown-current": "{current-context: nowhere}",
    "no-such-cluster": """
current-context: c
contexts: [{name: c, context: {cluster: c, user: lost, namespace: ns-lost}}]
""",
    "twice": """
current-context: c
clusters: [{name: c, cluster: {server: "<URL>/one", certificate-authority: ca.crt}},
  {name: c, cluster: {server: "<URL>/two", certificate-authority: ca.crt}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
users: [{name: u, user: {token: t}}]
""",
    "json-with-tabs": """{
\t"current-context": "c",
\t"clusters": [{"name": "c", "cluster":
\t\t{"server": "<URL>/json", "certificate-authority": "ca.crt"}}],
\t"contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
\t"users": [{"name": "u", "user": {"token": "t"}}]
}""",
    "yaml-with-a-tab": """{current-context: c,
clusters: [{name: c, cluster: {server: "<URL>/flow", certificate-authority: ca.crt}}],
contexts: [{name: c, context: {cluster: c, user: u}}],
users: [{name: u, user: {token: t}}], preferences: {x: "\t"}}""",
    "two-documents": """
current-context: c
clusters: [{name: c, cluster: {server: "<URL>/first", certificate-authority: ca.crt}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
users: [{name: u, user: {token: t}}]
---
current-context: other
""",
    "upper-case": """
current-context: c
clusters: [{name: c, cluster: {server: "HTTPS://127.0.0.1:<PORT>/upper",
  certificate-authority: ca.crt}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
users: [{name: u, user: {token: t}}]
""",
    "no-such-user": """
current-context: c
clusters: [{name: c, cluster: {server: "<URL>/c", certificate-authority: ca.crt}}]
contexts: [{name: c, context: {cluster: c, user: lost}}]
""",
    "wrong-type": "{current-context: 7}",
    "list": "[1]",
    "broken": "a: [",
    "impersonation": """
current-context: c
clusters: [{name: c, cluster: {server: "<URL>/c"}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
users: [{name: u, user: {token: t, as: admin}}]
""",
    "token-file": """
current-context: c
clusters: [{name: c, cluster: {server: "<URL>/file", certificate-authority: ca.crt}}]
contexts: [{name: c, context: {cluster: c, user: u, namespace: ""}}]
users: [{name: u, user: {tokenFile: token, token: ""}}]
""",
    "token-file-lost": """
current-context: c
clusters: [{name: c, cluster: {server: "<URL>/file", certificate-authority: ca.crt}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
users: [{name: u, user: {tokenFile: lost, token: t-inline}}]
""",
    "password": """
current-context: c
clusters: [{name: c, cluster: {server: "<URL>/file", certificate-authority: ca.crt}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
users: [{name: u, user: {username: ada, password: secret}}]
""",
    **{
        f"plugin-{name}": f"""
current-context: c
clusters: [{{name: c, cluster: {{server: "<URL>/plugin", certificate-authority: ca.crt}}}}]
contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
users: [{{name: u, user: {{exec: {{{EXEC}, command: "{command}", {more}}}}}}}]
"""
        for name, command, more in (
            ("relative", "./sign-in", "args: null, env: null"),
            ("of-path", "sign-in", "env: [{name: PREFIX, value: x-}]"),
            ("fails", "./failing", ""),
            ("missing", "no-such-plugin", ""),
            ("and-password", "./sign-in", "}, username: ada, password: secret, x: {"),
        )
    },
    **{
        f"proxy-{name}": f"""
current-context: c
clusters: [{{name: c, cluster: {{server: "{server}", certificate-authority: ca.crt,
  proxy-url: "{proxy}"}}}}]
contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
users: [{{name: u, user: {{token: t}}}}]
"""
        for name, server, proxy in (
            ("url", "https://cluster.invalid:6443", "<PROXY>"),
            ("url-local", "<URL>/local", "<PROXY>"),
            ("none", "https://cluster.invalid:6443", ""),
            ("none-local", "<URL>/local", ""),
            ("password", "https://cluster.invalid:6443", "http://ada:p%40ss@<PROXY-ADDRESS>"),
            ("socks", "https://cluster.invalid:6443", "socks5://127.0.0.1:1"),
        )
    },
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubeconfigs]:
    root = tmp_path_factory.mktemp("kubeconfigs")
    authority = Authority(root, "ca")
    reached: list[Reached] = []
    with (
        serving(reached, authority.sign("server")) as port,
        serving(reached, None) as proxy,
    ):
        folder = root / "configs"
        values = {
            "URL": f"https://127.0.0.1:{port}",
            "PORT": str(port),
            "PROXY": f"http://127.0.0.1:{proxy}",
            "PROXY-ADDRESS": f"127.0.0.1:{proxy}",
            "CA64": base64.b64encode(authority.cert.read_bytes()).decode(),
            "DIR": str(folder),
        }
        world = Kubeconfigs(folder, built("kubectl")["kubectl"], values, reached)
        (folder / ".kube").mkdir(parents=True)
        for name in ("ca.crt", ".kube/ca.crt"):
            (folder / name).write_bytes(authority.cert.read_bytes())
        for name, text in KUBECONFIGS.items():
            (folder / name).write_text(world.filled(text))
        default = KUBECONFIGS["alpha"].replace("alpha", "home")
        (folder / ".kube/config").write_text(world.filled(default))
        (folder / "token").write_text("t-file\n")
        for name in ("sign-in", "failing"):
            (folder / name).write_text(PLUGIN)
            (folder / name).chmod(0o755)
        (folder / "failing.fails").touch()
        yield world


#: Each case has the value of KUBECONFIG (paths below the folder, or None if it is unset), the
#: options, and other variables.
CASES: dict[str, tuple[str | None, Sequence[str], Mapping[str, str]]] = {
    "one file": ("alpha", (), {}),
    "first file wins": ("alpha:beta", (), {}),
    "first file wins, other order": ("beta:alpha", (), {}),
    "missing file first": ("missing:beta", (), {}),
    "missing file last": ("beta:missing", (), {}),
    "all files missing": ("missing:absent", (), {}),
    "empty entry": (":beta", (), {}),
    "same file twice": ("beta:beta", (), {}),
    "empty file first": ("empty:alpha", (), {}),
    "empty file last": ("alpha:empty", (), {}),
    "only an empty file": ("empty", (), {}),
    "nulls first": ("nulls:alpha", (), {}),
    "nulls last": ("alpha:nulls", (), {}),
    "only nulls": ("nulls", (), {}),
    "no current context first": ("no-current:beta", (), {}),
    "only no current context": ("no-current", (), {}),
    "current context of a file of its own": ("only-current:alpha:beta", (), {}),
    "current context of the last file": ("no-current:only-current:beta", (), {}),
    "same names in two files": ("alpha:same-names", (), {}),
    "same names, other order": ("same-names:alpha", (), {}),
    "a context across files": ("across:alpha:beta", (), {}),
    "unknown current context": ("unknown-current:alpha", (), {}),
    "a context without its cluster": ("no-such-cluster", (), {}),
    "a name twice in a file": ("twice", (), {}),
    "a number as current context": ("wrong-type:alpha", (), {}),
    "a list": ("list:alpha", (), {}),
    "no YAML": ("alpha:broken", (), {}),
    "JSON with tabs": ("json-with-tabs", (), {}),
    "flow YAML with a tab in a text": ("yaml-with-a-tab", (), {}),
    "two YAML documents": ("two-documents", (), {}),
    "a scheme in capitals": ("upper-case", (), {}),
    "a context without its user": ("no-such-user", (), {}),
    "a folder": ("<DIR>:alpha", (), {}),
    "no KUBECONFIG": (None, (), {}),
    "empty KUBECONFIG": ("", (), {}),
    "--kubeconfig": ("beta", ("--kubeconfig=<DIR>/alpha",), {}),
    "--kubeconfig is one file": (None, ("--kubeconfig=<DIR>/alpha:<DIR>/beta",), {}),
    "--kubeconfig of a missing file": ("beta", ("--kubeconfig=<DIR>/missing",), {}),
    "--kubeconfig is empty": ("beta", ("--kubeconfig=",), {}),
    "--kubeconfig without current context": ("beta", ("--kubeconfig=<DIR>/no-current",), {}),
    "--context": ("alpha:beta", ("--context=beta",), {}),
    "--context of a file without current context": ("no-current", ("--context=gamma",), {}),
    "--context is empty": ("alpha:beta", ("--context=",), {}),
    "--context of no file": ("alpha:beta", ("--context=gamma",), {}),
    "both options": (None, ("--kubeconfig=<DIR>/beta", "--context=beta"), {}),
    "no namespace": ("implicit", (), {}),
    "a pod's address without an account": ("alpha", (), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}),
    "POD_NAMESPACE outside a pod": ("implicit", (), {"POD_NAMESPACE": "ns-pod"}),
    "token file": ("token-file", (), {}),
    "a token beside a missing token file": ("token-file-lost", (), {}),
    "password": ("password", (), {}),
    "password beside an exec plugin": ("plugin-and-password", (), {}),
    "exec plugin beside the file": ("plugin-relative", (), {}),
    "exec plugin of PATH": ("plugin-of-path", (), {}),
    "exec plugin fails": ("plugin-fails", (), {}),
    "exec plugin is missing": ("plugin-missing", (), {}),
    "proxy-url": ("proxy-url", (), {}),
    "proxy-url of a local cluster": ("proxy-url-local", (), {}),
    "proxy-url with a password": ("proxy-password", (), {}),
    "HTTPS_PROXY with a password": (
        "proxy-none",
        (),
        {"HTTPS_PROXY": "http://ada:p%40ss@<PROXY-ADDRESS>"},
    ),
    "HTTPS_PROXY with a user": ("proxy-none", (), {"HTTPS_PROXY": "http://ada@<PROXY-ADDRESS>"}),
    "proxy-url before NO_PROXY": ("proxy-url", (), {"NO_PROXY": "cluster.invalid"}),
    "HTTPS_PROXY": ("proxy-none", (), {"HTTPS_PROXY": "<PROXY>"}),
    "https_proxy without a scheme": ("proxy-none", (), {"https_proxy": "<PROXY-ADDRESS>"}),
    "HTTPS_PROXY before https_proxy": (
        "proxy-none",
        (),
        {"HTTPS_PROXY": "<PROXY>", "https_proxy": "http://127.0.0.1:1"},
    ),
    "HTTPS_PROXY and a local cluster": ("proxy-none-local", (), {"HTTPS_PROXY": "<PROXY>"}),
    "HTTPS_PROXY and proxy-url": ("proxy-url", (), {"HTTPS_PROXY": "http://127.0.0.1:1"}),
}
#: Cases in which kubectl sends no request.
ERRORS = {
    *("all files missing", "only an empty file", "only nulls", "only no current context"),
    *("unknown current context", "a context without its cluster", "a name twice in a file"),
    "a context without its user",
    *("a number as current context", "a list", "no YAML", "a folder"),
    *("--kubeconfig is one file", "--kubeconfig of a missing file"),
    *("--kubeconfig without current context", "--context of no file"),
    *("exec plugin fails", "exec plugin is missing"),
}


@pytest.mark.parametrize("case", CASES)
def test_headroom_reaches_the_same_cluster_as_kubectl(
    case: str, world: Kubeconfigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, options, variables = CASES[case]
    environment = {
        "PATH": f"{world.folder}:{os.environ['PATH']}",
        "HOME": str(world.folder),
        **{key: world.filled(value) for key, value in variables.items()},
    }
    if files is not None:
        paths = (world.filled(each) for each in files.split(":"))
        environment["KUBECONFIG"] = ":".join(p and str(world.folder / p) for p in paths)
    options = [world.filled(each) for each in options]
    given = dict(each.split("=", 1) for each in options)
    expected = world.by_kubectl(options, environment)
    assert bool(expected) == (case not in ERRORS)
    for name in ("PATH", *variables):  # The code that starts plugins reads these variables.
        monkeypatch.setenv(name, environment[name])
    found = world.by_headroom(given.get("--kubeconfig"), given.get("--context"), environment)
    assert found == expected


@pytest.mark.parametrize(
    ("name", "context", "message"),
    [
        ("missing", None, "<DIR>/missing does not exist"),
        ("broken", None, "<DIR>/broken: while parsing a flow node"),
        ("list", None, "<DIR>/list: the file is not a mapping"),
        (
            "wrong-type",
            None,
            "<DIR>/wrong-type: current-context is 7, which is not a string",
        ),
        ("twice", None, "<DIR>/twice: clusters has two entries with the name 'c'"),
        ("no-current", None, "<DIR>/no-current has no current context; select one: kubectl config"),
        (
            "no-such-cluster",
            None,
            "<DIR>/no-such-cluster: context 'c' has no cluster with a server",
        ),
        ("alpha", "x", "--context: the kubeconfig has no context 'x'. It has: alpha"),
        (
            "unknown-current",
            None,
            "current-context: the kubeconfig has no context 'nowhere'. It has none",
        ),
        (
            "plugin-fails",
            None,
            "<DIR>/plugin-fails: user 'u': exec: process returned 1. sign in first",
        ),
        ("plugin-missing", None, "<DIR>/plugin-missing: user 'u': [Errno 2] No such file"),
        (
            "no-such-user",
            None,
            "<DIR>/no-such-user: context 'c' has user 'lost', which is not defined",
        ),
        ("proxy-socks", None, "proxy-url: 'socks5://127.0.0.1:1' is not supported. Example: http"),
        (
            "impersonation",
            None,
            "<DIR>/impersonation: user 'u': as (impersonation) is not supported",
        ),
    ],
)
def test_an_unusable_kubeconfig_is_reported_with_the_reason(
    name: str, context: str | None, message: str, world: Kubeconfigs
) -> None:
    with pytest.raises(kubeconfig.BadKubeconfig) as caught:
        kubeconfig.configure(client.Configuration(), str(world.folder / name), context, {})
    assert str(caught.value).startswith(world.filled(message))


@pytest.mark.parametrize("proxy", ["http://[", "http://host:port", "socks5h://host:1", "://"])
def test_an_unusable_proxy_in_the_environment_is_reported(proxy: str, world: Kubeconfigs) -> None:
    file, environment = str(world.folder / "alpha"), {"HTTPS_PROXY": proxy}
    with pytest.raises(kubeconfig.BadKubeconfig, match=r"^HTTPS_PROXY: .* is not supported"):
        kubeconfig.configure(client.Configuration(), file, None, environment)


def test_an_asterisk_before_a_domain_excludes_its_hosts_from_the_proxy(world: Kubeconfigs) -> None:
    environment = {"HTTPS_PROXY": "http://proxy", "NO_PROXY": "*.example.org, *.invalid,*"}
    configuration = client.Configuration()
    kubeconfig.configure(configuration, str(world.folder / "proxy-none"), None, environment)
    assert configuration.no_proxy == ".example.org,.invalid,*"


def test_a_renewed_token_is_written_to_the_file_of_its_user(
    world: Kubeconfigs, tmp_path: Path
) -> None:
    plugin = tmp_path / "renew"
    credential = {"access_token": "renewed", "token_expiry": "2099-01-01T00:00:00Z"}
    plugin.write_text(f"#!/bin/sh\necho '{json.dumps({'credential': credential})}'\n")
    plugin.chmod(0o755)
    provider = {"name": "gcp", "config": {"cmd-path": str(plugin)}}
    users = [{"name": "x"}, {"name": "beta", "user": {"auth-provider": provider}}]
    (tmp_path / "users").write_text(yaml.safe_dump({"users": users}))
    environment = {"KUBECONFIG": f"{tmp_path}/users:{world.folder}/beta"}
    assert world.by_headroom(None, None, environment) == [("beta", "renewed", "ns-beta")]
    written = yaml.safe_load((tmp_path / "users").read_text())["users"]
    assert [each["name"] for each in written] == ["x", "beta"]
    assert written[1]["user"]["auth-provider"]["config"]["access-token"] == "renewed"


#: A script that mounts the files of the service account and then runs its arguments.
AS_A_POD = """
mount -t tmpfs none /run && mkdir -p "$ACCOUNT" && cp "$0"/* "$ACCOUNT" && exec "$@"
"""
#: A script that sends one request as each program of Headroom, with the variables in each input
#: line.
PROGRAMS = """
import json, os, sys
from agent import kube_client
from headroom.client.kubeconfig import BadKubeconfig
from headroom.errors import BadSettings
from headroom.runtime.kube.client import load_configuration
from headroom.kubectl.debug_api_client import CommandError
from headroom.kubectl.transport import core_api, default_namespace
from tests.kubectl.test_kubeconfig import ask

first = dict(os.environ)
for line in sys.stdin:
    os.environ.clear()
    os.environ.update(first, **json.loads(line))
    for connect in (
        lambda: ask(core_api(None, None).api_client.configuration, default_namespace(None, None)),
        lambda: ask(load_configuration(), default_namespace(None, None)),
        lambda: kube_client.request(
            kube_client.connect(), "POST", "/apis/x", 10.0, body=default_namespace(None, None)
        ),
    ):
        try:
            connect()
        except (BadSettings, CommandError, kube_client.NoCluster):
            pass
    kube_client.request(kube_client.in_cluster(first), "POST", "/end", 10.0, body="default")
"""
#: The environment variables of a pod, and the request that kubectl sends.
IN_A_POD: Sequence[tuple[Mapping[str, str], Reached | None]] = (
    ({}, ("apis", "t-pod", "ns-pod")),
    ({"POD_NAMESPACE": "ns-own"}, ("apis", "t-pod", "ns-own")),
    ({"KUBECONFIG": "missing"}, ("apis", "t-pod", "ns-pod")),
    ({"KUBECONFIG": "empty"}, ("apis", "t-pod", "ns-pod")),
    ({"KUBECONFIG": "no-current"}, ("apis", "t-pod", "ns-pod")),
    ({"KUBECONFIG": "no-such-cluster"}, ("apis", "t-pod", "ns-lost")),
    ({"KUBECONFIG": "alpha"}, ("alpha", "t-alpha", "ns-alpha")),
    ({"KUBECONFIG": "implicit"}, ("gamma", "t-gamma", "ns-pod")),
    ({"KUBECONFIG": "unknown-current"}, None),
)


def test_all_programs_in_a_pod_reach_the_same_cluster_as_kubectl(
    world: Kubeconfigs, tmp_path: Path
) -> None:
    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text("t-pod")
    (account / "namespace").write_text("ns-pod")
    (account / "ca.crt").write_bytes((world.folder / "ca.crt").read_bytes())
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "ACCOUNT": str(kubeconfig.ACCOUNT),
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": world.values["PORT"],
    }
    pod = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", AS_A_POD, str(account)]
    kubectl = [*pod, str(world.kubectl), "auth", "can-i", "get", "pods"]
    for variables, reached in IN_A_POD:
        assert world.by(kubectl, environment | variables) == ([reached] if reached else [])
    world.reached.clear()
    subprocess.run(
        [*pod, sys.executable, "-c", PROGRAMS],
        input="\n".join(json.dumps(variables) for variables, _ in IN_A_POD),
        **{"env": environment, "cwd": world.folder, "timeout": PATIENCE_S},
        text=True,
        check=True,
    )
    expected: list[Reached] = []
    for _, reached in IN_A_POD:
        expected += [reached] * 3 if reached else []
        expected.append(("end", "t-pod", "default"))
    assert world.reached == expected
