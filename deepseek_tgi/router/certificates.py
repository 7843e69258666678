"""The certificates of the gRPC port, held against each other before anything is loaded. Knows nothing of gRPC."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from deepseek_tgi.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of PEM files: the server's certificate, its key, and the CA whose clients are let in (None: all are)."""

    certificate: str
    key: str
    authority: str | None

    @classmethod
    def of(cls, certificate: str | None, key: str | None, authority: str | None) -> Certificates | None:
        """None if none are used. Raises `ConfigError` for some that do not belong together."""
        if (certificate is None) != (key is None):
            raise ConfigError("gRPC: a certificate and its key belong together: give both or neither")
        if certificate is None or key is None:
            if authority is not None:
                raise ConfigError(
                    "gRPC: clients show certificates over TLS only: give the server's certificate and key too"
                )
            return None
        return cls(certificate, key, authority)

    def check(self) -> None:
        """Raise `ConfigError` naming the file that is not there, is none, or does not fit."""
        for path in (self.certificate, self.key, *([] if self.authority is None else [self.authority])):
            read(path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"gRPC: {self.certificate} and {self.key}: expected a certificate and its own unencrypted key, both "
                f"in PEM ({error})"
            ) from error
        try:
            if self.authority is not None:
                context.load_verify_locations(self.authority)
        except ssl.SSLError as error:
            raise ConfigError(f"gRPC: {self.authority}: expected certificates in PEM ({error})") from error


def check_certificates(certificate: str | None, key: str | None, authority: str | None) -> None:
    """Raise `ConfigError` for files that do not fit: now, and not when a model has been loaded."""
    given = Certificates.of(certificate, key, authority)
    if given is not None:
        given.check()


def read(path: str) -> bytes:
    """A file's bytes. Raises `ConfigError`."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"gRPC: {path}: cannot be read: {error.strerror}") from error


def _no_password() -> str:
    raise ValueError("the key is encrypted")
