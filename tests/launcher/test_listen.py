from __future__ import annotations

import os
import socket
import stat

import pytest

from multitok.launcher.listen import bind_http, listen_http, listen_unix


def test_clients_connect_only_once_it_listens():
    with bind_http("127.0.0.1", 0) as server:
        address = server.getsockname()
        with socket.socket() as client, pytest.raises(ConnectionRefusedError):
            client.connect(address)
        listen_http(server)
        with socket.create_connection(address, timeout=5):
            pass
        assert not server.getblocking()


def test_a_port_that_is_taken_is_an_error():
    with bind_http("127.0.0.1", 0) as server:
        listen_http(server)
        with pytest.raises(OSError, match="in use"):
            bind_http("127.0.0.1", server.getsockname()[1])


def test_a_port_is_free_again_at_once():
    with bind_http("127.0.0.1", 0) as server:
        port = server.getsockname()[1]
        listen_http(server)
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            # With the server's end closed first, its address stays in TIME_WAIT.
            server.setblocking(True)
            server.accept()[0].close()
            assert client.recv(1) == b""
    bind_http("127.0.0.1", port).close()


def test_a_unix_socket_listens_for_this_user_only(tmp_path):
    path = str(tmp_path / "s0")
    with listen_unix(path) as server, socket.socket(socket.AF_UNIX) as client:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        client.connect(path)
        server.accept()[0].close()
