"""Creates certificate authorities and certificates with openssl."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Certificate:
    cert: Path
    key: Path

    def put(self, other: "Certificate") -> None:
        """Overwrite the key and certificate files with ``other``, as a renewal does."""
        for mine, theirs in ((self.key, other.key), (self.cert, other.cert)):
            renewed = mine.with_suffix(".renewed")
            renewed.write_bytes(theirs.read_bytes())
            renewed.rename(mine)


class Authority:
    """A certificate authority. ``cert`` is the path of the authority's own certificate."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self.cert = folder / f"{name}.crt"
        self._key = folder / f"{name}.key"
        _openssl("req", "-x509", *_new_key(self._key), "-subj", f"/CN={name}", "-out", self.cert)

    def sign(
        self,
        name: str,
        groups: Sequence[str] = (),
        usage: str = "serverAuth,clientAuth",
        days: int = 30,
    ) -> Certificate:
        """Sign a certificate that clients and a server at 127.0.0.1 can use.

        ``name`` is both the common name and the file name. ``groups`` are the Kubernetes groups of
        the user.
        """
        signed = Certificate(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        # Go clients such as kube-scheduler check the address in the server's certificate.
        _openssl(
            *("req", "-x509", "-CA", self.cert, "-CAkey", self._key, *_new_key(signed.key)),
            *("-days", str(days)),
            *("-subj", "".join(f"/O={group}" for group in groups) + f"/CN={name}"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-addext", f"extendedKeyUsage={usage}"),
            *("-addext", "basicConstraints=critical,CA:FALSE", "-out", signed.cert),
        )
        return signed


def make_api_certificate(cert: Path, address: str) -> None:
    """Create a certificate for an API server at this address, and write its key next to it.

    The API server uses these files if they exist. Otherwise it creates RSA keys, which take more
    CPU per connection.
    """
    service = "kubernetes.default.svc"
    hosts = ("localhost", "kubernetes", "kubernetes.default", service, f"{service}.cluster.local")
    addresses = {address, "127.0.0.1", "10.0.0.1", "10.96.0.1"}
    names = [f"DNS:{each}" for each in hosts] + [f"IP:{each}" for each in sorted(addresses)]
    cert.parent.mkdir()
    _openssl(
        *("req", "-x509", *_new_key(cert.with_suffix(".key")), "-subj", "/CN=kube-apiserver"),
        *("-addext", f"subjectAltName={','.join(names)}", "-out", cert),
    )


def _new_key(path: Path) -> tuple[str | Path, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path)


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"openssl {' '.join(map(str, arguments))}: {done.stderr}")
