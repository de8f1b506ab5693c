from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from multitok import __version__
from multitok.messages.protocol import protocol_hash
from multitok.messages.to_child import Stop
from multitok.messages.to_launcher import Hello, Ready


def test_a_child_introduces_itself_before_anything_else(make_site):
    site = make_site(workers=2)
    router = site.child("router", ["router", "control"])
    assert site.hear(router) == Hello(protocol_hash(), __version__)
    assert site.hear(router) == Ready()


@pytest.mark.parametrize(
    ("role", "addresses", "index", "title"),
    [
        ("router", ["router", "control"], 0, "multitok::router"),
        ("detokenizer", ["d1"], 1, "multitok::detokenizer:1"),
        ("scheduler", ["s0"], 0, "multitok::scheduler:0"),
    ],
)
def test_a_process_title_says_role_and_index(make_site, role, addresses, index, title):
    site = make_site(workers=2, detokenizers=2)
    child = site.ready_child(role, addresses, index)
    assert Path(f"/proc/{child.pid}/cmdline").read_bytes().rstrip(b"\0").decode() == title


def test_signals_of_the_terminal_are_the_launchers_business(make_site):
    site = make_site(workers=2)
    router = site.ready_child("router", ["router", "control"])
    assert os.getpgid(router.pid) == router.pid
    ignored = next(
        line.split()[1] for line in Path(f"/proc/{router.pid}/status").read_text().splitlines() if "SigIgn" in line
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        assert int(ignored, 16) >> (number - 1) & 1


def test_a_part_that_cannot_start_says_why_and_with_which_status(make_site):
    site = make_site(engine_arg=["no_such_option=1"])
    scheduler = site.child("scheduler", ["s0"])
    failure = site.hear_failure(scheduler)
    assert "no_such_option" in failure.message
    assert failure.exit_status == 2
    assert site.ending(scheduler) == "exited with status 2"


def test_a_part_that_fails_otherwise_says_so_too(make_site):
    site = make_site()
    Path(site.files.tokenizer_file).write_text("no JSON")
    detokenizer = site.child("detokenizer", ["d0"])
    failure = site.hear_failure(detokenizer)
    assert failure.exit_status == 1
    assert failure.message
    assert site.ending(detokenizer) == "exited with status 1"


@pytest.mark.parametrize(
    ("role", "addresses"), [("router", ["router", "control"]), ("detokenizer", ["d0"]), ("scheduler", ["s0"])]
)
def test_every_part_ends_with_its_launchers_channel(make_site, role, addresses):
    site = make_site(workers=2)
    child = site.ready_child(role, addresses)
    site.die(child)
    assert site.ending(child) == "exited with status 1"
    assert not os.path.exists(site.runtime_dir.path)


def test_a_child_that_somebody_wakes_up_goes_on(make_site):
    site = make_site(workers=2)
    router = site.ready_child("router", ["router", "control"])
    os.kill(router.pid, signal.SIGCONT)
    router.send(Stop())
    assert site.ending(router) == "exited with status 0"


def test_a_killed_child_is_reported_with_its_signal(make_site):
    site = make_site()
    detokenizer = site.ready_child("detokenizer", ["d0"])
    detokenizer.kill()
    assert site.ending(detokenizer) == "died of SIGKILL"
