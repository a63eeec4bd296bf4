"""The port of a console's pod, and errors in options before any connection."""

from pathlib import Path

import pytest
from kubernetes.client import V1Container, V1ContainerPort, V1ObjectMeta, V1Pod, V1PodSpec

from headroom.kubectl.debug_api_client import CommandError
from headroom.kubectl.transport import Files, target, transport_for
from tests.certificates import Authority

URL = "https://127.0.0.1:8889"


@pytest.mark.parametrize(
    ("ports", "port", "tls"),
    [
        pytest.param({"verbs": 8888, "debug-tls": 9000}, 9000, True, id="TLS"),
        pytest.param({"verbs": 8888, "debug": 9000}, 9000, False, id="none"),
        pytest.param({"debug": 9000, "debug-tls": 9001}, 9001, True, id="both"),
        pytest.param({"verbs": 8888}, 8889, False, id="not said"),
        pytest.param({}, 8889, False, id="no ports"),
    ],
)
def test_tls_is_used_if_the_port_is_named_debug_tls(
    ports: dict[str, int], port: int, tls: bool
) -> None:
    named = [V1ContainerPort(name=name, container_port=number) for name, number in ports.items()]
    beside = V1Container(name="beside", ports=None)
    spec = V1PodSpec(containers=[beside, V1Container(name="extender", ports=named or None)])
    found = target(V1Pod(metadata=V1ObjectMeta(name="p"), spec=spec))
    assert (found.pod, found.port, found.tls) == ("p", port, tls)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    one, other = authority.sign("one"), authority.sign("other")
    absent, text = str(tmp_path / "absent"), tmp_path / "text"
    text.write_text("not PEM")
    cases = [
        (URL, Files(ca=absent), f"--certificate-authority: {absent}: "),
        (URL, Files(ca=str(text)), f"--certificate-authority: {text}: "),
        (URL, Files(cert=absent), f"the client certificate cannot be used: {absent}: "),
        (URL, Files(cert=str(one.cert), key=str(other.key)), "KEY_VALUES_MISMATCH"),
        (URL, Files(key=str(one.key)), "--client-key is set without --client-certificate"),
        ("http://127.0.0.1:8889", Files(ca=str(one.cert)), "does not use TLS; use https"),
        (None, Files(cert=str(one.cert)), "need --server"),
    ]
    for server, files, says in cases:
        with pytest.raises(CommandError) as caught:
            transport_for(server, None, files, None, None, "headroom-system")
        assert says in str(caught.value)
        assert caught.value.exit_code == 2
    transport_for(
        URL, None, Files(str(authority.cert), str(one.cert), str(one.key)), None, None, ""
    )


@pytest.mark.parametrize("host", ["10.0.0.7", "console.example", "[fd00::7]", "0.0.0.0"])
@pytest.mark.parametrize("token", [None, "t"])
def test_plain_http_is_for_this_machine_only(host: str, token: str | None) -> None:
    """Otherwise others could read the token, and change the answers."""
    with pytest.raises(CommandError, match="is neither encrypted nor on this machine"):
        transport_for(f"http://{host}:8889", token, Files(), None, None, "headroom-system")
    for own in ("127.0.0.1", "localhost", "[::1]"):
        transport_for(f"http://{own}:8889", token, Files(), None, None, "headroom-system")
    transport_for(f"https://{host}:8889", token, Files(), None, None, "headroom-system")
