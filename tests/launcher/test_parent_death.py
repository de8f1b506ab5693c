from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from multitok.launcher.parent_death import kill_itself_when_parent_died
from parts import ends_within, wait_until

CHILD = """
import os, signal, sys, time
from multitok.launcher.parent_death import kill_itself_when_parent_died
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGCONT, lambda *_: os._exit(0))
kill_itself_when_parent_died(os.getppid(), signal.Signals(int(sys.argv[1])))
print(os.getpid(), flush=True)
while True:
    # Not signal.pause: the handler of a signal that comes just before it would not run.
    time.sleep(0.05)
"""
PARENT = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]], process_group=0)
print(child.pid, flush=True)
signal.pause()
"""
# Adopts the child, in the same session: so the kernel sees no reason to wake it up.
GRANDPARENT = """
import subprocess, sys
from multitok.launcher.parent_death import adopt_orphans
adopt_orphans()
parent = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
print(parent.pid, flush=True)
parent.wait()
sys.stdin.read()
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
@pytest.mark.parametrize("death_signal", [signal.SIGKILL, signal.SIGCONT])
def test_a_child_dies_when_its_parent_is_killed(death_signal, stopped):
    command = [sys.executable, "-c", GRANDPARENT, PARENT, str(int(death_signal)), CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as grandparent:
        parent, pid, same = (int(grandparent.stdout.readline()) for _ in range(3))
        assert pid == same
        child = os.pidfd_open(pid)
        if stopped:
            os.kill(pid, signal.SIGSTOP)
            wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        assert not ends_within(child, timeout=0)
        os.kill(parent, signal.SIGKILL)
        try:
            assert ends_within(child, timeout=10)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.close(child)
            grandparent.stdin.close()


def test_a_child_whose_parent_has_died_already_exits():
    code = (
        "import signal; from multitok.launcher.parent_death import kill_itself_when_parent_died;"
        "kill_itself_when_parent_died(1 << 30, signal.SIGKILL); print('goes on')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


def test_a_signal_that_there_is_not_is_an_error():
    with pytest.raises(OSError, match="Invalid argument"):
        kill_itself_when_parent_died(os.getppid(), 1000)
