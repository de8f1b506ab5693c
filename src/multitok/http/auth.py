"""API keys: who may call what.

A request shows its key as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``. The connection asks before anything of
the body is read; what the control routes need beyond that, they check themselves (`check_admin`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import blake2b
from hmac import compare_digest

import msgspec

from multitok.config import OptionError, ServerArgs
from multitok.tokenizer.requests import RequestError

# Load balancers ask without a key.
OPEN_PATHS = frozenset((b"/health", b"/ready"))

_TENANT_MASK = (1 << 63) - 1


class Access(msgspec.Struct, frozen=True):
    """What a request may do.

    Attributes
    ----------
    tenant : int
        Whose limits it counts against: a 63-bit hash of its key, the same in every process; 0 without a key.
    known : bool
        It has shown a key of this server.
    client : bool
        It may call the API.
    admin : bool
        It may call the control routes.
    """

    tenant: int
    known: bool
    client: bool
    admin: bool


# Where there are no keys.
OPEN = Access(0, known=False, client=True, admin=True)


class ApiKeys:
    """The keys of this server.

    Parameters
    ----------
    client_keys : iterable of str
        Open the API; without any, it is open to everybody.
    admin_key : str or None
        Opens everything; without it, client keys open the control routes too.
    """

    def __init__(self, client_keys: Iterable[str], admin_key: str | None) -> None:
        # Hashes of one length are compared, so that neither time nor length says anything of a key.
        self._secret = os.urandom(32)
        clients = list(client_keys)
        entries = [(key, admin_key is None) for key in clients]
        if admin_key is not None:
            entries.append((admin_key, True))
        self._stored = [
            (self._digest(key.encode()), Access(_tenant(key), known=True, client=True, admin=admin))
            for key, admin in entries
        ]
        self._stranger = Access(0, known=False, client=not clients, admin=False)

    @classmethod
    def load(cls, args: ServerArgs) -> ApiKeys | None:
        """Read the keys that the options name.

        Returns
        -------
        ApiKeys or None
            None when there are none, and everything is open.

        Raises
        ------
        OptionError
            A key could not be sent in a header, or the file can't be read or is empty.
        """
        keys = list(args.api_key)
        for key in keys:
            _check(key, "--api-key")
        if args.api_key_file is not None:
            keys += _read(args.api_key_file)
        if args.admin_api_key is not None:
            _check(args.admin_api_key, "--admin-api-key")
        if not keys and args.admin_api_key is None:
            return None
        return cls(keys, args.admin_api_key)

    def access(self, authorization: bytes | None, x_api_key: bytes | None) -> Access:
        """Return what a request with these headers may do.

        Parameters
        ----------
        authorization, x_api_key : bytes or None
            Values of the two headers that may carry a key.
        """
        found = self._stranger
        for shown in (_bearer(authorization), x_api_key):
            if shown is None:
                continue
            digest = self._digest(shown)
            for stored, access in self._stored:
                # To the end of the list, whatever was found.
                if compare_digest(stored, digest) and not found.admin:
                    found = access
        return found

    def _digest(self, key: bytes) -> bytes:
        return blake2b(key, key=self._secret, digest_size=32).digest()


def check_client(access: Access) -> None:
    """Refuse a request that may not call the API.

    Raises
    ------
    RequestError
        401.
    """
    if not access.client:
        raise _unauthorized()


def check_admin(access: Access) -> None:
    """Refuse a request that may not call the control routes.

    Raises
    ------
    RequestError
        401 without a key that this server knows, 403 with one that opens other routes only.
    """
    if access.admin:
        return
    if access.known:
        raise RequestError(403, "this route needs the admin key")
    raise _unauthorized()


def _unauthorized() -> RequestError:
    return RequestError(401, "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY")


def _tenant(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") & _TENANT_MASK or 1


def _bearer(authorization: bytes | None) -> bytes | None:
    if authorization is None:
        return None
    scheme, _, key = authorization.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None


def _check(key: str, option: str) -> None:
    # The message never shows the key.
    if not key or not all("!" <= c <= "~" for c in key):
        raise OptionError(f"{option}: a key must be printable ASCII characters without spaces")


def _read(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii") as file:
            keys = [line for line in map(str.strip, file) if line]
    except OSError as error:
        raise OptionError(f"--api-key-file: can't read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise OptionError(f"--api-key-file: {path} has characters other than ASCII") from None
    if not keys:
        raise OptionError(f"--api-key-file: there is no key in {path}")
    for key in keys:
        _check(key, f"--api-key-file {path}")
    return keys
