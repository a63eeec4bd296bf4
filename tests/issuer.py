"""An OpenID Connect issuer on loopback. An API server accepts its tokens as users."""

import base64
import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.answering import Answer, Request, answering
from tests.certificates import Authority

CLIENT = "kubectl"
_DISCOVERY, _KEYS = "/.well-known/openid-configuration", "/keys"


class Issuer:
    """Serves its public keys over TLS as soon as it is created, and signs tokens."""

    def __init__(self, folder: Path) -> None:
        authority = Authority(folder, "issuer-ca")
        self.ca_file = authority.cert
        served = authority.sign("issuer")
        self._key = folder / "id-tokens.key"
        self._openssl("genrsa", "-out", str(self._key), "2048")
        answers: dict[str, Any] = {}

        def answer(request: Request) -> Answer:
            found = request.path in answers
            headers = {"Content-Type": "application/json"}
            return 200 if found else 404, answers.get(request.path, {}), headers

        self._served = answering(answer, served)
        self.url = self._served.__enter__()
        answers[_DISCOVERY] = {
            "issuer": self.url,
            "jwks_uri": f"{self.url}{_KEYS}",
            "id_token_signing_alg_values_supported": ["RS256"],
        }
        modulus = self._openssl("rsa", "-in", str(self._key), "-noout", "-modulus")
        number = bytes.fromhex(modulus.decode().partition("=")[2])
        key = {"kty": "RSA", "kid": "1", "use": "sig", "alg": "RS256", "e": "AQAB"}
        answers[_KEYS] = {"keys": [key | {"n": _base64(number)}]}

    def flags(self) -> tuple[str, ...]:
        """Return the flags with which an API server accepts the tokens. User and group names get
        the prefix ``oidc:``.
        """
        return (
            *(f"--oidc-issuer-url={self.url}", f"--oidc-client-id={CLIENT}"),
            *(f"--oidc-ca-file={self.ca_file}", "--oidc-groups-claim=groups"),
            *("--oidc-username-prefix=oidc:", "--oidc-groups-prefix=oidc:"),
        )

    def token(self, user: str, lasts_s: float = 3600, **claims: Any) -> str:
        """Return a token. ``claims`` are added to the default claims or replace them."""
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
        self._served.__exit__(None, None, None)

    @staticmethod
    def _openssl(*arguments: str, content: bytes = b"") -> bytes:
        command = ["openssl", *arguments]
        return subprocess.run(command, input=content, capture_output=True, check=True).stdout


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()
