from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from multitok.launcher.parent_death import kill_itself_when_parent_died
from parts import ends_within

CHILD = """
import os, signal, sys
from multitok.launcher.parent_death import kill_itself_when_parent_died
signal.signal(signal.SIGTERM, signal.SIG_IGN)
kill_itself_when_parent_died(os.getppid(), signal.Signals(int(sys.argv[1])))
print(os.getpid(), flush=True)
signal.pause()
"""
PARENT = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]])
signal.pause()
"""


@pytest.mark.parametrize("death_signal", [signal.SIGKILL, signal.SIGUSR2])
def test_a_child_dies_when_its_parent_is_killed(death_signal):
    command = [sys.executable, "-c", PARENT, str(int(death_signal)), CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        assert not ends_within(child, timeout=0)
        parent.kill()
        assert ends_within(child, timeout=5)
        os.close(child)


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
