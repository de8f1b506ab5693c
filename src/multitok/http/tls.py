"""TLS of the HTTP workers."""

from __future__ import annotations

import ssl
from typing import Any

from multitok.config import OptionError, ServerArgs


def load_tls(args: ServerArgs) -> ssl.SSLContext | None:
    """Read certificate and key, as each worker does when it starts.

    Returns
    -------
    ssl.SSLContext or None
        None when the options name no certificate.

    Raises
    ------
    OptionError
        A file can't be read, or the two don't belong together.
    """
    if args.ssl_certfile is None:
        if args.ssl_keyfile is not None:
            raise OptionError("--ssl-keyfile: needs --ssl-certfile")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # No other protocol is spoken here.
    context.set_alpn_protocols(["http/1.1"])
    for option, path in (("--ssl-certfile", args.ssl_certfile), ("--ssl-keyfile", args.ssl_keyfile)):
        if path is not None:
            _check_readable(option, path)
    try:
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, _no_password)
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).replace("_", " ").lower()
        where = "--ssl-certfile, --ssl-keyfile" if args.ssl_keyfile else "--ssl-certfile, without --ssl-keyfile"
        raise OptionError(f"{where}: not a certificate and its key in PEM ({reason})") from error
    return context


def connection_options(args: ServerArgs) -> dict[str, Any]:
    """Return what ``connect_accepted_socket`` needs for TLS; nothing without a certificate. Raises as `load_tls`."""
    context = load_tls(args)
    if context is None:
        return {}
    return {
        "ssl": context,
        "ssl_handshake_timeout": args.receive_timeout,
        # Also for taking what was written before.
        "ssl_shutdown_timeout": args.slow_client_timeout,
    }


def _check_readable(option: str, path: str) -> None:
    # OpenSSL's own error does not say which of the files it means.
    try:
        with open(path, "rb"):
            return
    except OSError as error:
        raise OptionError(f"{option}: can't read {path}: {error.strerror}") from error


def _no_password() -> str:
    raise OptionError("--ssl-keyfile: the key has a password; no one is there to type it")
