"""What every ZeroMQ socket has: bounds, and no patience."""

from __future__ import annotations

import ast
import contextlib
import secrets
import socket
import struct
from pathlib import Path

import pytest
import zmq

import multitok
from multitok.config import ServerArgs
from multitok.ipc.sockets import HIGH_WATER_MARK, MOST_FRAME_BYTES, bind_pull, connect_push
from parts import DEADLINE_S, wait_until


@pytest.fixture
def ends(make_site):
    """A bound socket and one that is connected to it."""
    site = make_site()
    receiver = site.keep(bind_pull(site.port_args.endpoint("x")))
    return site, receiver, site.keep(connect_push(site.port_args.endpoint("x")))


def test_every_socket_is_bounded_and_none_lingers(ends):
    _, receiver, sender = ends
    assert (receiver.rcvhwm, sender.sndhwm) == (HIGH_WATER_MARK, HIGH_WATER_MARK)
    assert (receiver.linger, sender.linger) == (0, 0)
    assert receiver.maxmsgsize == MOST_FRAME_BYTES
    assert 0 < receiver.handshake_ivl <= 30_000
    assert 10 <= sender.reconnect_ivl <= 50


def test_sockets_are_made_in_one_place_only():
    """So that none is without its bounds."""
    makers = set()
    for file in Path(multitok.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("PUSH", "PULL", "DEALER", "ROUTER", "REQ", "REP"):
                makers.add(file.name)
    # Those towards SGLang's schedulers are made as SGLang makes them, whose bound is the number of its requests.
    assert makers == {"sockets.py", "sglang_link.py"}


def test_the_largest_legal_message_passes():
    # Two bytes of JSON are an id of four, beside what a body holds once.
    assert 3 * ServerArgs().max_body_bytes < MOST_FRAME_BYTES


def test_a_peer_that_claims_a_message_without_bounds_is_cut_off_and_the_others_are_not(ends):
    site, receiver, sender = ends
    sender.send(b"before")
    assert receiver.poll(DEADLINE_S * 1000)
    assert receiver.recv() == b"before"
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.settimeout(DEADLINE_S)
        foreign.connect(f"{site.runtime_dir.path}/x")
        # ZMTP 3.0: a greeting, the mechanism NULL, the command READY of a PUSH socket.
        foreign.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 4) + b"PUSH"
        foreign.sendall(b"\x04" + bytes([len(ready)]) + ready)
        assert foreign.recv(64, socket.MSG_WAITALL).startswith(b"\xff")
        foreign.sendall(b"\x02" + struct.pack(">Q", MOST_FRAME_BYTES + 1) + b"x" * 64)
        # What it had not read yet, it throws away: that ends a connection with an error.
        with contextlib.suppress(ConnectionResetError):
            while foreign.recv(4096):
                pass
    sender.send(b"after")
    assert receiver.poll(DEADLINE_S * 1000)
    assert receiver.recv() == b"after"


def test_bytes_that_are_no_zeromq_at_all_do_no_harm(ends):
    """ZeroMQ takes some of them for messages of its first version; the mark of the start tells them from ours."""
    site, receiver, sender = ends
    for size in (1, 10, 1000):
        with socket.socket(socket.AF_UNIX) as foreign:
            foreign.connect(f"{site.runtime_dir.path}/x")
            foreign.sendall(secrets.token_bytes(size))
    sender.send(b"after")
    while receiver.poll(DEADLINE_S * 1000):
        if receiver.recv_multipart() == [b"after"]:
            return
    pytest.fail("the message did not come")


def test_a_replaced_receiver_is_reached_again(ends):
    site, receiver, sender = ends
    sender.send(b"one")
    assert receiver.poll(DEADLINE_S * 1000)
    receiver.close()
    again = site.keep(bind_pull(site.port_args.endpoint("x")))

    def arrives() -> bool:
        # What was under way when the last one closed is lost.
        sender.send(b"two", zmq.NOBLOCK)
        return bool(again.poll(10))

    wait_until(arrives)
    assert again.recv() == b"two"
