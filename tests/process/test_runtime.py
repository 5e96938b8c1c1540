"""The local runtime: every process that was started is ended, whoever started it and when."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from prl_notebook.runtime.local import LocalRuntime, Remote


def test_processes_started_by_several_threads_at_once_are_all_ended(tmp_path, no_orphans, monkeypatch):
    def slowly(remote):
        time.sleep(0.02)  # long enough for the threads to get in each other's way
        return remote._process.poll() is None

    monkeypatch.setattr(Remote, "alive", property(slowly))
    runtime = LocalRuntime(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        remotes = list(threads.map(lambda i: runtime.start(f"p{i}", "collections:Counter", {}), range(8)))
    assert sorted(runtime.pids()) == sorted(r.pid for r in remotes)
    runtime.close()
    assert not any(psutil.pid_exists(r.pid) for r in remotes)


def test_a_closed_runtime_starts_nothing(tmp_path, no_orphans):
    """A worker that dies while its session is being closed is not started again."""
    runtime = LocalRuntime(tmp_path)
    runtime.close()
    with pytest.raises(RuntimeError, match="p is not started: the session is being closed"):
        runtime.start("p", "collections:Counter", {})
