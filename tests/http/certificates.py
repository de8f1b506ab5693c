"""Certificates that tests make for themselves."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme


class Certificates:
    """A certificate for this machine, in files as the server takes them, and its authority.

    Parameters
    ----------
    directory : Path
        Where the files go.
    """

    def __init__(self, directory: Path) -> None:
        self._authority = trustme.CA()
        self.certfile = str(directory / "cert.pem")
        self.keyfile = str(directory / "key.pem")
        self.authority_file = str(directory / "authority.pem")
        self._authority.cert_pem.write_to_path(self.authority_file)
        self.renew()

    def renew(self) -> None:
        """Write a new certificate over the old one."""
        issued = self._authority.issue_cert("localhost", "127.0.0.1")
        issued.private_key_pem.write_to_path(self.keyfile)
        Path(self.certfile).write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))

    @property
    def options(self) -> dict[str, str]:
        return {"ssl_certfile": self.certfile, "ssl_keyfile": self.keyfile}

    def client_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.authority_file)
