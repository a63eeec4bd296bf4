"""An issuer of OpenID Connect on loopback, whose tokens an API server accepts as users."""

import base64
import json
import ssl
import subprocess
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.certificates import Authority

CLIENT = "kubectl"
_DISCOVERY, _KEYS = "/.well-known/openid-configuration", "/keys"


class Issuer:
    """Serves its keys over TLS from creation on, and signs tokens."""

    def __init__(self, folder: Path) -> None:
        authority = Authority(folder, "issuer-ca")
        self.ca_file = authority.cert
        served = authority.sign("issuer")
        self._key = folder / "id-tokens.key"
        self._openssl("genrsa", "-out", str(self._key), "2048")
        answers: dict[str, Any] = {}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(answers.get(self.path, {})).encode()
                self.send_response(200 if self.path in answers else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(served.cert, served.key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self._server.server_port}"
        answers[_DISCOVERY] = {
            "issuer": self.url,
            "jwks_uri": f"{self.url}{_KEYS}",
            "id_token_signing_alg_values_supported": ["RS256"],
        }
        modulus = self._openssl("rsa", "-in", str(self._key), "-noout", "-modulus")
        number = bytes.fromhex(modulus.decode().partition("=")[2])
        key = {"kty": "RSA", "kid": "1", "use": "sig", "alg": "RS256", "e": "AQAB"}
        answers[_KEYS] = {"keys": [key | {"n": _base64(number)}]}
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def flags(self) -> tuple[str, ...]:
        """Return the flags of an API server that accepts the tokens. Users and groups get the
        prefix ``oidc:``.
        """
        return (
            *(f"--oidc-issuer-url={self.url}", f"--oidc-client-id={CLIENT}"),
            *(f"--oidc-ca-file={self.ca_file}", "--oidc-groups-claim=groups"),
            *("--oidc-username-prefix=oidc:", "--oidc-groups-prefix=oidc:"),
        )

    def token(self, user: str, lasts_s: float = 3600, **claims: Any) -> str:
        """Return a token. ``claims`` are added, or replace others."""
        now_s = int(time.time())
        of_user = {"iss": self.url, "aud": CLIENT, "sub": user, "iat": now_s - 7200}
        body: Mapping[str, Any] = {**of_user, "exp": now_s + int(lasts_s), **claims}
        parts = {"alg": "RS256", "typ": "JWT", "kid": "1"}, body
        signed = ".".join(_base64(json.dumps(each).encode()) for each in parts)
        signature = self._openssl(
            "dgst", "-sha256", "-sign", str(self._key), content=signed.encode()
        )
        return f"{signed}.{_base64(signature)}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @staticmethod
    def _openssl(*arguments: str, content: bytes = b"") -> bytes:
        command = ["openssl", *arguments]
        return subprocess.run(command, input=content, capture_output=True, check=True).stdout


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()
