"""Main program of a background process: `python -m prl_notebook.runtime FD`.

The parent hands over one end of a socket pair. The first message says which object to make; every further one calls
a method of it, in order. Between calls the object's `step()` runs while its `has_work` is true, and what it returns
is sent as events. When the pipe ends the parent is gone, so the process ends too, whatever it is doing, and removes
the session's shared memory. Interrupts are the parent's business and are ignored here.
"""

from __future__ import annotations

import importlib
import os
import pickle
import queue
import shutil
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class Boot:
    """First message: the object to make and the surroundings it needs."""

    target: str
    """'package.module:Class'"""
    kwargs: dict[str, Any]
    sys_path: list[str] = field(default_factory=list)
    """the parent's module search path, so that functions of the user's modules can be imported"""
    session_dir: str | None = None
    """removed when the parent has died"""


@dataclass(frozen=True)
class Call:
    id: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """Answer to a call (id 0: the object was made)."""

    id: int
    value: Any = None


@dataclass(frozen=True)
class Failure:
    """A call (id 0: making the object; -1: a step) raised."""

    id: int
    type: str
    message: str
    traceback: str


@dataclass(frozen=True)
class Emitted:
    event: Any


CLOSE = Call(-1, "close", (), {})


def main() -> None:
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(fd)
    boot: Boot = pickle.loads(connection.recv_bytes())
    sys.path[:] = boot.sys_path or sys.path
    inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox, boot.session_dir), daemon=True).start()

    def send(message: Reply | Failure | Emitted) -> None:
        try:
            connection.send_bytes(pickle.dumps(message))
        except OSError:  # the parent is gone; the receiving thread cleans up
            threading.Event().wait()

    try:
        module, name = boot.target.split(":")
        role = getattr(importlib.import_module(module), name)(**boot.kwargs)
    except Exception as error:  # noqa: BLE001 - reported to the parent, which raises it
        send(_failure(0, error))
        return
    send(Reply(0))
    _serve(role, inbox, send)


def _serve(role: Any, inbox: queue.SimpleQueue[Call], send: Any) -> None:
    while True:
        while not inbox.empty() or not getattr(role, "has_work", False):
            call = inbox.get()
            if call == CLOSE:
                if hasattr(role, "close"):
                    role.close()
                return
            try:
                value = getattr(role, call.method)(*call.args, **call.kwargs)
            except Exception as error:  # noqa: BLE001 - reported to the parent, which raises it
                send(_failure(call.id, error))
            else:
                send(Reply(call.id, value))
        try:
            events = role.step()
        except Exception as error:  # noqa: BLE001 - reported to the parent; a broken step is not retried
            send(_failure(-1, error))
            return
        for event in events:
            send(Emitted(event))


def _receive(connection: Connection, inbox: queue.SimpleQueue[Call], session_dir: str | None) -> None:
    try:
        while (call := pickle.loads(connection.recv_bytes())) != CLOSE:
            inbox.put(call)
        inbox.put(CLOSE)
    except (EOFError, OSError):
        if session_dir:
            shutil.rmtree(session_dir, ignore_errors=True)
        os._exit(1)


def _failure(call_id: int, error: Exception) -> Failure:
    traceback.print_exc()
    return Failure(call_id, type(error).__name__, str(error), traceback.format_exc())
