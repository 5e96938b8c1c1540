"""Background processes on this machine: start, call, listen, kill.

A `Remote` is an object living in a child process (runtime/child.py). Calls return futures; events the object emits
reach a listener; when the process ends by itself, every open call fails with `ProcessDied` and a listener is told.
Nothing here knows what the processes do. A cluster runtime would offer the same `start` and `Remote`.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from prl_notebook.runtime.child import CLOSE, Boot, Call, Emitted, Failure, Reply

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
CLOSE_SECONDS = 5.0
"""how long a process may take to end by itself before it is killed"""


class RemoteError(RuntimeError):
    """A method of a background process raised; carries its traceback and says where its log is."""

    def __init__(self, process: str, failure: Failure, log: Path) -> None:
        super().__init__(f"{process}: {failure.type}: {failure.message}  [log: {log}]")
        self.process, self.type, self.message, self.remote_traceback = (
            process,
            failure.type,
            failure.message,
            failure.traceback,
        )
        self.add_note(f"\nTraceback of process {process}:\n{failure.traceback}")


class ProcessDied(RuntimeError):
    """A background process ended while it was needed."""

    def __init__(self, process: str, exit_code: int | None, log: Path) -> None:
        super().__init__(
            f"{process} died with exit code {exit_code}; the end of its log {log} reads:\n{tail(log) or '(empty)'}"
        )
        self.process, self.exit_code = process, exit_code


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a text file, '' when it is missing."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


class Remote:
    """An object in a background process."""

    def __init__(
        self,
        name: str,
        boot: Boot,
        log: Path,
        environment: Mapping[str, str],
        on_event: Callable[[Any], None] | None = None,
        on_death: Callable[[Exception], None] | None = None,
    ) -> None:
        self.name, self.log = name, log
        self.ready: Future[None] = Future()
        """done when the object was made"""
        self._on_event, self._on_death = on_event, on_death
        self._ids = itertools.count(1)
        self._open: dict[int, Future[Any]] = {0: self.ready}
        self._lock = threading.Lock()
        self._ending = False
        ours, theirs = Pipe()
        path = os.pathsep.join(p for p in (PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")) if p)
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "prl_notebook.runtime", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path, **environment},
                start_new_session=True,
            )
        theirs.close()
        self._connection = ours
        self._send(boot)
        threading.Thread(target=self._listen, name=f"listen {name}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method without waiting. The future raises RemoteError or ProcessDied."""
        future: Future[Any] = Future()
        call = Call(next(self._ids), method, args, kwargs)
        with self._lock:
            if self._ending or not self.alive:
                future.set_exception(ProcessDied(self.name, self._process.poll(), self.log))
                return future
            self._open[call.id] = future
        self._send(call)
        return future

    def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call a method and wait for its answer.

        Raises:
            RemoteError: the method raised.
            ProcessDied: the process ended meanwhile.
            TimeoutError: no answer within `timeout` seconds.
        """
        return self.submit(method, *args, **kwargs).result(timeout)

    def kill(self) -> None:
        """End the process at once; nobody is told."""
        self._ending = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self._fail_open()

    def ask_to_close(self) -> None:
        """Let the process finish its current call and end; `close` waits for it."""
        self._ending = True
        self._send(CLOSE)

    def close(self) -> None:
        """End the process: ask, wait CLOSE_SECONDS, kill."""
        self.ask_to_close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_SECONDS)
        self.kill()
        self._connection.close()

    def _send(self, message: Any) -> None:
        with self._lock, contextlib.suppress(OSError):  # a dead process is noticed by the listener
            self._connection.send_bytes(pickle.dumps(message))

    def _listen(self) -> None:
        try:
            while True:
                if self._connection.poll(1.0):
                    self._receive(pickle.loads(self._connection.recv_bytes()))
                elif not self.alive:  # a grandchild may hold the pipe open
                    break
        except (EOFError, OSError):
            pass
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_SECONDS)
        self._fail_open()
        if not self._ending and self._on_death:
            self._on_death(ProcessDied(self.name, self._process.poll(), self.log))

    def _receive(self, message: Reply | Failure | Emitted) -> None:
        if isinstance(message, Emitted):
            if self._on_event:
                self._on_event(message.event)
            return
        if isinstance(message, Failure) and message.id == -1:
            self._ending = True
            if self._on_death:
                self._on_death(RemoteError(self.name, message, self.log))
            return
        with self._lock:
            future = self._open.pop(message.id, None)
        if future is None:
            return
        if isinstance(message, Failure):
            future.set_exception(RemoteError(self.name, message, self.log))
        else:
            future.set_result(message.value)

    def _fail_open(self) -> None:
        with self._lock:
            waiting, self._open = list(self._open.values()), {}
        for future in waiting:
            if not future.done():
                future.set_exception(ProcessDied(self.name, self._process.poll(), self.log))


_runtimes: weakref.WeakSet[LocalRuntime] = weakref.WeakSet()


class LocalRuntime:
    """Starts background processes and ends them all."""

    def __init__(self, log_dir: Path, session_dir: Path | None = None) -> None:
        self.log_dir, self.session_dir = log_dir, session_dir
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._remotes: list[Remote] = []
        self._closed = False
        self._lock = threading.Lock()
        """producer and scorer start processes again, each in its own thread"""
        _runtimes.add(self)

    def start(
        self,
        name: str,
        target: str,
        kwargs: dict[str, Any],
        *,
        threads: int = 1,
        environment: Mapping[str, str] | None = None,
        on_event: Callable[[Any], None] | None = None,
        on_death: Callable[[Exception], None] | None = None,
    ) -> Remote:
        """Start a process that makes `target` ('module:Class') with `kwargs`; returns before it is ready.

        Raises:
            RuntimeError: the runtime has been closed; a process started now would outlive the session.
        """
        boot = Boot(target, kwargs, list(sys.path), str(self.session_dir) if self.session_dir else None)
        env = {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            **(environment or {}),
        }
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{name} is not started: the session is being closed")
            remote = Remote(name, boot, self.log_dir / f"{name}.log", env, on_event, on_death)
            self._remotes = [r for r in self._remotes if r.alive] + [remote]
        return remote

    def pids(self) -> list[int]:
        """Processes that are alive."""
        return [r.pid for r in self._remotes if r.alive]

    def close(self) -> None:
        """End every process; ask all first, so that they end together. No more can be started."""
        with self._lock:
            self._closed = True
        for remote in self._remotes:
            remote.ask_to_close()
        deadline = time.monotonic() + CLOSE_SECONDS
        for remote in self._remotes:
            while remote.alive and time.monotonic() < deadline:
                time.sleep(0.01)
            remote.kill()
        self._remotes = []


@atexit.register
def _close_all() -> None:
    for runtime in list(_runtimes):
        runtime.close()
