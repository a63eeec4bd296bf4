"""Finds the cluster, the user and the namespace that kubectl uses.

All programs of Headroom use this module. It follows the rules of kubectl (``tools/clientcmd`` in
client-go). The package ``kubernetes`` follows other rules. It uses the current context of the last
file instead of the first file, rejects empty files, and makes the user anonymous if an exec plugin
fails. Therefore this module selects the context, and uses that package only to connect.
"""

import base64
import ipaddress
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

#: Folder with the credentials of a pod's service account.
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
#: Fields of clusters and users that name a file, relative to the folder of the kubeconfig.
_FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
#: Fields of users that make requests act as another user.
_IMPERSONATION = ("as", "as-uid", "as-groups", "as-user-extra")
#: Value of ``no_proxy`` that matches no host. An empty value would make libraries read the
#: environment.
_NO_HOST = "no-host.invalid"


class BadKubeconfig(ValueError):
    """A kubeconfig that cannot be used. The message names the file or the context."""


class NoContext(BadKubeconfig):
    """The context does not exist. The message lists the existing contexts."""


class NoCluster(BadKubeconfig):
    """No kubeconfig selects a cluster. ``namespace`` is the namespace of the context, or empty if
    it has none."""

    def __init__(self, why: str, namespace: str = "") -> None:
        super().__init__(why)
        self.namespace = namespace


@dataclass(frozen=True, slots=True)
class _File:
    """The lists of a kubeconfig, as mappings from the name of an entry to its content."""

    path: str
    current_context: str
    contexts: dict[str, dict[str, Any]]
    clusters: dict[str, dict[str, Any]]
    users: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Selected:
    """The cluster, the user and the namespace of a context, with absolute paths and without empty
    fields."""

    #: The namespace of the context. Empty if the context has no namespace.
    namespace: str
    cluster: dict[str, Any]
    #: The user of the context as in the kubeconfig. Empty for an anonymous user.
    user: dict[str, Any]
    user_name: str
    #: Path of the kubeconfig that contains the user. Empty for an anonymous user.
    user_file: str


def find(
    explicit: str | None = None,
    context: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Selected:
    """Return the cluster, the user and the namespace of ``context``, which defaults to the current
    context.

    If ``explicit`` is a path, only this kubeconfig is read. Otherwise the files of KUBECONFIG are
    merged: the first file that defines a name or a current context wins. Raises ``NoCluster``,
    ``NoContext`` and ``BadKubeconfig``.
    """
    paths = [explicit] if explicit else _default_paths(environment)
    files = [file for path in paths if (file := _read(path, required=bool(explicit)))]
    where = os.pathsep.join(paths)
    if not files:
        raise NoCluster(f"{where} does not exist")
    name = context or next((each.current_context for each in files if each.current_context), "")
    if not name:
        raise NoCluster(f"{where} has no current context; select one: kubectl config use-context")
    contexts = _first([(each.path, each.contexts) for each in files])
    if name not in contexts:
        known = f"It has: {', '.join(sorted(contexts))}" if contexts else "It has none"
        option = "--context" if context else "current-context"
        raise NoContext(f"{option}: the kubeconfig has no context {name!r}. {known}")
    path, chosen = contexts[name]
    cluster_name, user_name, namespace = (
        _text(chosen.get(key), f"{path}: {key} of context {name!r}")
        for key in ("cluster", "user", "namespace")
    )
    clusters = _first([(each.path, each.clusters) for each in files])
    users = _first([(each.path, each.users) for each in files])
    cluster_path, cluster = clusters.get(cluster_name, ("", {}))
    if not cluster.get("server"):
        raise NoCluster(f"{where}: context {name!r} has no cluster with a server", namespace)
    if user_name and user_name not in users:
        raise BadKubeconfig(
            f"{path}: context {name!r} has user {user_name!r}, which is not defined"
        )
    user_file, user = users.get(user_name, ("", {}))
    return Selected(
        namespace,
        _resolved(cluster, cluster_path),
        _resolved(user, user_file),
        user_name,
        user_file,
    )


def namespace(
    explicit: str | None = None,
    context: str | None = None,
    environment: Mapping[str, str] = os.environ,
    account: Path = ACCOUNT,
) -> str:
    """Return the namespace of the context. Without one, return the namespace of the pod in which
    this process runs, or "default" outside a pod.

    Raises ``BadKubeconfig``, but not ``NoCluster``.
    """
    try:
        found = find(explicit, context, environment).namespace
    except NoCluster as err:
        found = err.namespace
    if not found and in_pod(environment) and (account / "token").is_file():
        file = account / "namespace"
        found = environment.get("POD_NAMESPACE", "")
        found = found or (file.read_text().strip() if file.is_file() else "")
    return found or "default"


def in_pod(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process runs in a pod that can reach its cluster."""
    return bool(environment.get("KUBERNETES_SERVICE_HOST"))


def configure(
    configuration: Any,
    explicit: str | None = None,
    context: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Set the address, the credentials and the proxy of a ``kubernetes.client.Configuration``.

    In a pod without a kubeconfig, the pod's service account is used. Raises ``NoCluster`` and
    ``BadKubeconfig``.
    """
    from kubernetes import config

    load: Any = config  # some releases are partly typed
    try:
        selected = find(explicit, context, environment)
    except NoCluster:
        if not in_pod(environment):
            raise
        try:
            load.load_incluster_config(client_configuration=configuration)
        except config.ConfigException as err:
            raise BadKubeconfig(f"{ACCOUNT}: {err}") from err
        _set_proxy(configuration, "", environment)
        return
    where = f"{selected.user_file}: user {selected.user_name!r}"
    if used := [key for key in _IMPERSONATION if key in selected.user]:
        raise BadKubeconfig(f"{where}: {used[0]} (impersonation) is not supported")
    with _logged_errors() as errors:
        try:
            _load(configuration, selected)
        except Exception as err:  # the package raises many kinds of errors for invalid values
            raise BadKubeconfig(f"{where}: {' '.join(str(err).split())}") from err
    if "exec" in selected.user and not (configuration.api_key or configuration.cert_file):
        raise BadKubeconfig(f"{where}: {'; '.join(errors) or 'the exec plugin returned nothing'}")
    _set_proxy(configuration, selected.cluster.get("proxy-url", ""), environment)


def _load(configuration: Any, selected: Selected) -> None:
    """Let the package ``kubernetes`` read certificates and credentials."""
    from kubernetes.config.kube_config import KubeConfigLoader

    user = dict(selected.user)
    token_file = user.pop("tokenFile", None)
    if "username" in user:
        user.pop("exec", None)  # in this case kubectl does not start the plugin
    scheme, colon, rest = str(selected.cluster["server"]).partition(":")
    # The package uses the certificates only if the scheme is lowercase.
    cluster = {**selected.cluster, "server": f"{scheme.lower()}{colon}{rest}"}
    only: dict[str, Any] = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
    }
    loader: Any = KubeConfigLoader
    loader(only, config_base_path="", config_persister=lambda: _persist(selected)).load_and_set(
        configuration
    )
    if token_file:
        # Read again for each request, because the token can be replaced.
        def read_token(configuration: Any) -> None:
            try:
                token = Path(token_file).read_text().strip()
            except OSError:
                if "token" not in user:
                    raise
            else:
                configuration.api_key["BearerToken"] = f"Bearer {token}"

        configuration.refresh_api_key_hook = read_token
        read_token(configuration)


def _persist(selected: Selected) -> None:
    """Write tokens that an auth provider has renewed to the kubeconfig, as kubectl does."""
    import yaml

    config = yaml.safe_load(Path(selected.user_file).read_text())
    for each in config["users"]:
        if each["name"] == selected.user_name:
            each["user"]["auth-provider"] = selected.user["auth-provider"]
    Path(selected.user_file).write_text(yaml.safe_dump(config))


@contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """Collect the messages that the package ``kubernetes`` logs instead of raising them."""
    messages: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger().removeHandler(handler)


def _set_proxy(configuration: Any, url: str, environment: Mapping[str, str]) -> None:
    """Set the proxy of the cluster, or the proxy from the environment variables that Go programs
    read."""
    parts = urlsplit(configuration.host)
    host = parts.hostname or ""
    if url:  # a proxy in the kubeconfig applies to all hosts
        _use_proxy(configuration, url, "proxy-url")
        configuration.no_proxy = _NO_HOST
        return
    keys = f"{parts.scheme}_proxy".upper(), f"{parts.scheme}_proxy"
    key, proxy = next(((key, value) for key in keys if (value := environment.get(key))), ("", ""))
    configuration.proxy = None
    if proxy:
        _use_proxy(configuration, proxy if "://" in proxy else f"http://{proxy}", key)
    except_for = environment.get("NO_PROXY") or environment.get("no_proxy") or _NO_HOST
    hosts = (each.strip() for each in except_for.split(","))
    local = host == "localhost" or _is_loopback(host)
    # Go programs treat *.example.org like .example.org.
    configuration.no_proxy = host if local else ",".join(re.sub(r"^\*\.", ".", h) for h in hosts)


def _use_proxy(configuration: Any, url: str, source: str) -> None:
    """Set a proxy and the credentials in its URL, which the package would not send.

    Raises ``BadKubeconfig`` if the proxy cannot be used. ``source`` names the origin of the URL in
    the message.
    """
    user, _, address = url.rpartition("@")
    scheme, _, credentials = user.rpartition("://")
    public = f"{scheme}://{address}" if user else url
    try:
        parts = urlsplit(public)
        is_usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise BadKubeconfig(
            f"{source}: {public!r} is not supported. Example: http://proxy.example:3128"
        )
    configuration.proxy = public
    if user:
        name, _, password = credentials.partition(":")
        encoded = base64.b64encode(f"{unquote(name)}:{unquote(password)}".encode()).decode()
        configuration.proxy_headers = {"Proxy-Authorization": f"Basic {encoded}"}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _default_paths(environment: Mapping[str, str]) -> list[str]:
    written = environment.get("KUBECONFIG")
    if not written:
        return [os.path.join(environment.get("HOME") or os.path.expanduser("~"), ".kube", "config")]
    return [path for path in dict.fromkeys(written.split(os.pathsep)) if path] or [written]


def _read(path: str, *, required: bool) -> _File | None:
    """Return the content of a kubeconfig, or None if it does not exist and is not required.

    Raises ``BadKubeconfig``.
    """
    import yaml

    try:
        text = Path(path).read_bytes()
        try:
            content = json.loads(text)  # the YAML parser rejects tabs between JSON tokens
        except ValueError:
            # Like kubectl, read only the first document.
            content = next(iter(yaml.safe_load_all(text)), None)
    except FileNotFoundError:
        if not required:
            return None
        raise BadKubeconfig(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as err:
        raise BadKubeconfig(f"{path}: {' '.join(str(err).split())}") from err
    config = _mapping(_without_nulls(content), f"{path}: the file")
    lists = {
        key: _by_name(path, key, config.get(key, [])) for key in ("contexts", "clusters", "users")
    }
    current = _text(config.get("current-context"), f"{path}: current-context")
    return _File(path, current, **lists)


def _by_name(path: str, key: str, entries: Any) -> dict[str, dict[str, Any]]:
    """Return the content of each entry of a list, by the entry's name. Raises ``BadKubeconfig``."""
    if not isinstance(entries, list):
        raise BadKubeconfig(f"{path}: {key} is not a list")
    found: dict[str, dict[str, Any]] = {}
    for number, each in enumerate(entries, 1):
        where = f"{path}: entry {number} of {key}"
        entry = _mapping(each, where)
        name = _text(entry.get("name"), f"{where}: name")
        if name in found:
            raise BadKubeconfig(f"{path}: {key} has two entries with the name {name!r}")
        found[name] = _mapping(entry.get(key[:-1]), where)
    return found


def _mapping(value: Any, where: str) -> dict[str, Any]:
    """Return the value as a mapping, which is empty for None. Raises ``BadKubeconfig``."""
    if value is not None and not isinstance(value, dict):
        raise BadKubeconfig(f"{where} is not a mapping")
    return value or {}


def _text(value: Any, where: str) -> str:
    """Return the value as a string, which is empty for None. Raises ``BadKubeconfig``."""
    if value is not None and not isinstance(value, str):
        raise BadKubeconfig(f"{where} is {value!r}, which is not a string")
    return value or ""


def _without_nulls(value: Any) -> Any:
    """Return the value without nulls, because null means "not set" in a kubeconfig."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value if each is not None]
    return value


def _first(
    lists: Sequence[tuple[str, Mapping[str, dict[str, Any]]]],
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the first entry of each name, with the path of its file."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for path, entries in lists:
        for name, content in entries.items():
            found.setdefault(name, (path, content))
    return found


def _resolved(fields: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the fields of a cluster or a user with absolute paths and without empty strings."""
    folder = os.path.dirname(os.path.abspath(path))
    resolved = {key: value for key, value in fields.items() if value != ""}
    for key in _FILES:
        if key in resolved:
            resolved[key] = os.path.join(folder, str(resolved[key]))
    command = str(resolved.get("exec", {}).get("command", ""))
    if os.sep in command:
        resolved["exec"] = {**resolved["exec"], "command": os.path.join(folder, command)}
    return resolved
