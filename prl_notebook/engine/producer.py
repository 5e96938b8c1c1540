"""The producer thread: sends a period's prompts to the rollout workers and collects their groups.

A worker that has room takes the next prompt (work stealing). A worker that dies is started again, and its prompts go
out once more with the same seeds, so nothing is lost and nothing changes. The fence lives here too: prompts wait until
every worker has acknowledged the policy version, with the checksum of the parameters it really holds.

The thread owns all this state; others talk to it through its inbox, so there are no locks.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from prl_notebook.engine.events import (
    EventLog,
    GroupDispatched,
    GroupFinished,
    ProcessDied,
    ProcessStarted,
    RowsFinished,
    WeightsAcknowledged,
)
from prl_notebook.engine.types import Group, GroupRequest, WeightsRef
from prl_notebook.rollout.worker import GroupDone, LoadAck, RowsDone
from prl_notebook.runtime.local import ProcessDied as ProcessDiedError
from prl_notebook.runtime.local import Remote


class FenceError(RuntimeError):
    """A rollout worker does not hold the weights that were published."""


class Launch(Protocol):
    """Starts rollout worker `index`; events and its death are reported to the callbacks."""

    def __call__(
        self, index: int, on_event: Callable[[Any], None], on_death: Callable[[Exception], None]
    ) -> Remote: ...


@dataclass
class _Slot:
    """One rollout worker."""

    index: int
    remote: Remote | None = None
    launched_at: float = 0.0
    deaths: int = 0
    ready: bool = False
    asked: int = -1
    """version it was told to load"""
    version: int = -1
    """version it has acknowledged"""
    in_flight: dict[int, GroupRequest] = field(default_factory=dict)


class Producer(threading.Thread):
    """Owns the rollout workers."""

    def __init__(
        self,
        launch: Launch,
        workers: int,
        groups_in_flight: int,
        max_restarts: int,
        republish: Callable[[], Future[WeightsRef]],
        send: Callable[[], Future[None]],
        release: Callable[[WeightsRef], None],
        on_group: Callable[[Group], None],
        on_failure: Callable[[Exception], None],
        log: EventLog,
    ) -> None:
        """`republish` writes the current policy version once more, for a worker that was started again; `send` has the
        trainer broadcast a version while the workers load it (`WeightsRef.broadcast`); `release` frees a published
        version when every worker has it; `on_group` takes finished groups."""
        super().__init__(name="producer", daemon=True)
        self._launch, self._capacity, self._max_restarts = launch, groups_in_flight, max_restarts
        self._republish, self._send, self._release = republish, send, release
        self._on_group, self._on_failure, self._log = on_group, on_failure, log
        self._slots = [_Slot(i) for i in range(workers)]
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pending: deque[GroupRequest] = deque()
        self._held = False
        self._version = -1
        self._ref: WeightsRef | None = None
        """the version being loaded; None once every worker has it"""
        self._fence: Future[None] | None = None
        self._republishing = False
        for slot in self._slots:
            self._start_worker(slot)

    # ---- called from other threads

    def load(self, ref: WeightsRef) -> Future[None]:
        """Have every worker load a version; done when all have acknowledged it (invariant 2)."""
        fence: Future[None] = Future()
        self._inbox.put(lambda: self._begin_fence(ref, fence))
        return fence

    def begin_period(self, requests: list[GroupRequest]) -> None:
        """Send these prompts out, in this order, as workers have room."""
        self._inbox.put(lambda: self._begin_period(requests))

    def hold(self, held: bool) -> None:
        """While held, no further prompt goes out; groups in flight are finished."""
        self._inbox.put(lambda: setattr(self, "_held", held))

    def abandon_period(self) -> Future[None]:
        """Forget the period's prompts and drop what is in flight; done when every worker has dropped it."""
        done: Future[None] = Future()
        self._inbox.put(lambda: self._abandon(done))
        return done

    def stop(self) -> None:
        """End the thread; the processes are the runtime's to close."""
        self._inbox.put(None)
        self.join()

    # ---- the thread

    def run(self) -> None:
        while (action := self._inbox.get()) is not None:
            try:
                action()
                self._dispatch()
            except Exception as error:  # noqa: BLE001 - raised by the consumer, in the engine's thread
                self._on_failure(error)

    def _dispatch(self) -> None:
        while self._pending and not self._held and not self._fence:
            ready = [s for s in self._slots if s.version == self._version and len(s.in_flight) < self._capacity]
            if not ready:
                return
            slot = min(ready, key=lambda s: len(s.in_flight))
            request = self._pending.popleft()
            slot.in_flight[request.group] = request
            self._log.emit(
                GroupDispatched(period=request.period, group=request.group, worker=slot.index, version=request.version)
            )
            self._call(slot, "submit", request)

    def _begin_period(self, requests: list[GroupRequest]) -> None:
        for slot in self._slots:
            slot.deaths = 0
        stale = [r.version for r in requests if r.version != self._version]
        if stale:
            raise FenceError(f"prompts of policy version {stale[0]} while the workers hold version {self._version}")
        self._pending.extend(requests)

    def _abandon(self, done: Future[None]) -> None:
        self._pending.clear()
        waiting = []
        for slot in self._slots:
            slot.in_flight.clear()
            if slot.remote and slot.version == self._version:
                waiting.append(slot.remote.submit("abort"))
        _when_all_done(waiting, done)

    # ---- weights

    def _begin_fence(self, ref: WeightsRef, fence: Future[None]) -> None:
        self._ref, self._fence, self._version = ref, fence, ref.version
        for slot in self._slots:
            slot.asked = slot.version = -1
        self._load_where_ready(ref)

    def _load_where_ready(self, ref: WeightsRef) -> None:
        due = [slot for slot in self._slots if slot.ready and slot.asked != ref.version]
        if ref.broadcast:
            if len(due) < len(self._slots):
                return  # a broadcast needs everybody at once
            self._send().add_done_callback(lambda sent: self._inbox.put(lambda: sent.result()))
        for slot in due:
            self._load(slot, ref)

    def _load(self, slot: _Slot, ref: WeightsRef) -> None:
        slot.asked = ref.version
        self._call(slot, "load", ref, then=lambda ack: self._loaded(slot, ref, ack))

    def _loaded(self, slot: _Slot, ref: WeightsRef, ack: LoadAck) -> None:
        if (ack.version, ack.checksum) != (ref.version, ref.checksum):
            raise FenceError(
                f"rollout-{slot.index} acknowledged policy version {ack.version} with checksum {ack.checksum}, but "
                f"version {ref.version} with checksum {ref.checksum} was published: it would sample off-policy"
            )
        slot.version = ack.version
        self._log.emit(
            WeightsAcknowledged(worker=slot.index, version=ack.version, checksum=ack.checksum, seconds=ack.seconds)
        )
        if self._ref and all(s.version == ref.version for s in self._slots):
            self._release(ref)
            self._ref = None
            fence, self._fence = self._fence, None
            if fence:
                fence.set_result(None)

    # ---- workers

    def _start_worker(self, slot: _Slot) -> None:
        slot.launched_at = time.perf_counter()
        slot.ready, slot.asked, slot.version = False, -1, -1
        remote = self._launch(
            slot.index,
            lambda event: self._inbox.put(lambda: self._worker_event(slot, remote, event)),
            lambda error: self._inbox.put(lambda: self._worker_died(slot, remote, error)),
        )
        slot.remote = remote
        remote.ready.add_done_callback(lambda _: self._inbox.put(lambda: self._worker_ready(slot, remote)))

    def _worker_ready(self, slot: _Slot, remote: Remote) -> None:
        if error := remote.ready.exception():
            if not isinstance(error, ProcessDiedError):  # a death is reported on its own
                self._on_failure(error)  # type: ignore[arg-type]
            return
        seconds = time.perf_counter() - slot.launched_at
        self._log.emit(ProcessStarted(name=remote.name, pid=remote.pid, seconds=seconds))
        slot.ready = True
        if self._ref:
            self._load_where_ready(self._ref)
        elif self._version >= 0 and not self._republishing:
            self._republishing = True
            self._republish().add_done_callback(lambda f: self._inbox.put(lambda: self._republished(f)))

    def _republished(self, future: Future[WeightsRef]) -> None:
        self._republishing = False
        ref = future.result()
        if ref.version != self._version or self._ref:
            return  # a newer version is on its way to every worker
        self._ref = ref
        self._load_where_ready(ref)

    def _worker_event(self, slot: _Slot, remote: Remote, event: RowsDone | GroupDone) -> None:
        if slot.remote is not remote:
            return
        if isinstance(event, RowsDone):
            if event.group in slot.in_flight:
                self._log.emit(
                    RowsFinished(
                        period=event.period,
                        group=event.group,
                        worker=slot.index,
                        done=event.done,
                        tokens=event.tokens,
                    )
                )
            return
        group = event.group
        request = slot.in_flight.get(group.group)
        if request is None or request.key != group.key:
            return  # of an abandoned period
        del slot.in_flight[group.group]
        group.worker = slot.index
        self._log.emit(
            GroupFinished(
                period=group.period,
                group=group.group,
                worker=slot.index,
                version=group.version,
                lengths=group.lengths,
                finish_reasons=[c.finish_reason for c in group.completions],
            )
        )
        self._dispatch()  # the next prompt goes out before this group is looked at
        self._on_group(group)

    def _worker_died(self, slot: _Slot, remote: Remote, error: Exception) -> None:
        if slot.remote is not remote:
            return
        requests = list(slot.in_flight.values())
        slot.in_flight.clear()
        slot.deaths += 1
        restart = isinstance(error, ProcessDiedError) and slot.deaths <= self._max_restarts
        self._log.emit(
            ProcessDied(
                name=remote.name,
                exit_code=getattr(error, "exit_code", None),
                requeued=[r.group for r in requests],
                log=str(remote.log),
                reason=str(error).splitlines()[0],
            )
        )
        if not restart:
            self._on_failure(error)
            return
        self._pending.extendleft(reversed(requests))
        self._start_worker(slot)

    def _call(self, slot: _Slot, method: str, *args: Any, then: Callable[[Any], None] | None = None) -> None:
        """Call a worker; `then` runs in this thread with the answer. Deaths are reported elsewhere."""
        remote = slot.remote
        assert remote is not None

        def answered(future: Future[Any]) -> None:
            error = future.exception()
            if error is None:
                if then and slot.remote is remote:
                    then(future.result())
            elif not isinstance(error, ProcessDiedError):
                raise error

        remote.submit(method, *args).add_done_callback(lambda f: self._inbox.put(lambda: answered(f)))


def _when_all_done(futures: list[Future[Any]], done: Future[None]) -> None:
    """Resolve `done` when all of `futures` have ended, in whatever way."""
    left = len(futures)
    lock = threading.Lock()

    def one(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left == 0:
                done.set_result(None)

    if not futures:
        done.set_result(None)
    for future in futures:
        future.add_done_callback(one)
