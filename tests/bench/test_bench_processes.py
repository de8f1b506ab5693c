"""What is read from /proc."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from multitok.bench.processes import cpu_by_role, find_listener, process_tree, snapshot, used_between

_CHILD = """
import subprocess, sys, setproctitle
setproctitle.setproctitle("multitok::" + sys.argv[1])
inner = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdin=subprocess.PIPE) if len(sys.argv) > 2 else None
print("up", flush=True)
for line in sys.stdin:
    for _ in range(int(line)): pass
    print("done", flush=True)
if inner: inner.stdin.close(); inner.wait()
"""


def test_cpu_of_a_tree_by_role() -> None:
    wait = "import sys; sys.stdin.read()"
    command = [sys.executable, "-c", _CHILD, "detokenizer:1", wait]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin and child.stdout
        assert child.stdout.readline() == "up\n"
        assert process_tree(child.pid)[0] == child.pid
        assert len(process_tree(child.pid)) == 2
        before = snapshot(child.pid)
        child.stdin.write("10000000\n")
        child.stdin.flush()
        assert child.stdout.readline() == "done\n"
        after = snapshot(child.pid)
        child.stdin.close()
    cpu = cpu_by_role(used_between(before, after))
    assert set(cpu) == {"detokenizer", "other"}
    assert cpu["detokenizer"] > 0
    own = next(process for process in used_between(before, after) if process.pid == child.pid)
    assert own.cpu_s == own.main_thread_cpu_s == round(sum(thread.cpu_s for thread in own.threads), 3)
    assert after[child.pid].rss_mb >= after[child.pid].pss_mb > 0


def test_who_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert find_listener(listener.getsockname()[1]) == os.getpid()
        port = listener.getsockname()[1]
    assert find_listener(port) is None
