"""Files that every HTTP worker reads when it starts: keys, certificate and its key."""

from __future__ import annotations

from multitok.config import ServerArgs
from multitok.http.auth import ApiKeys
from multitok.http.tls import load_tls


def check_files(args: ServerArgs) -> None:
    """Read what a worker is going to read, so that a mistake is seen before one is started.

    Parameters
    ----------
    args : ServerArgs
        Name the files.

    Raises
    ------
    OptionError
        One can't be read or used.
    """
    ApiKeys.load(args)
    load_tls(args)
