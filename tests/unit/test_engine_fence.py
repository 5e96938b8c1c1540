"""The fence in front of a period: who loads a policy version when, and when it is passed; workers are played here."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from prl_notebook.engine import events as ev
from prl_notebook.engine.producer import Producer
from prl_notebook.engine.types import WeightsRef
from prl_notebook.rollout.worker import LoadAck

FILE, BROADCAST = WeightsRef(3, "v000003.safetensors", "abc", 8), WeightsRef(3, "v000003.json", "abc", 8)


class PlayedWorker:
    """A process that answers when the test says so."""

    def __init__(self, index: int) -> None:
        self.name, self.pid, self.log = f"rollout-{index}", index, Path("none")
        self.ready: Future[None] = Future()
        self.loads: list[Future[LoadAck]] = []

    def submit(self, method: str, ref: WeightsRef) -> Future[Any]:
        assert method == "load"
        self.loads.append(Future())
        return self.loads[-1]

    def acknowledge(self, ref: WeightsRef) -> None:
        self.loads[-1].set_result(LoadAck(ref.version, ref.checksum, 0.0))


class Played:
    """A producer that runs in the test's thread, with two workers."""

    def __init__(self, folder: Path) -> None:
        self.workers: list[PlayedWorker] = []
        self.sent: list[Future[None]] = []
        self.released: list[WeightsRef] = []
        self.failures: list[Exception] = []
        log = ev.EventLog(folder / "events.jsonl", 0.0, [])
        self.producer = Producer(
            self._launch, 2, 1, 0, Future, self._send, self.released.append, lambda _: None, self.failures.append, log
        )

    def _launch(self, index: int, on_event: Any, on_death: Any) -> Any:
        self.workers.append(PlayedWorker(index))
        return self.workers[-1]

    def _send(self) -> Future[None]:
        self.sent.append(Future())
        return self.sent[-1]

    def settle(self) -> None:
        """Let the producer do all it has been told."""
        self.producer._inbox.put(None)
        self.producer.run()

    @property
    def loads(self) -> list[int]:
        """How often each worker was told to load."""
        return [len(worker.loads) for worker in self.workers]


@pytest.fixture
def played(tmp_path: Path) -> Played:
    return Played(tmp_path)


def test_a_file_is_loaded_by_each_worker_as_soon_as_it_is_ready(played: Played) -> None:
    first, second = played.workers
    first.ready.set_result(None)
    fence = played.producer.load(FILE)
    played.settle()
    assert (played.loads, played.sent) == ([1, 0], [])
    first.acknowledge(FILE)
    second.ready.set_result(None)
    played.settle()
    assert played.loads == [1, 1] and not fence.done()
    second.acknowledge(FILE)
    played.settle()
    assert fence.done() and played.released == [FILE]


def test_a_broadcast_waits_for_all_workers_and_is_sent_once(played: Played) -> None:
    first, second = played.workers
    first.ready.set_result(None)
    fence = played.producer.load(BROADCAST)
    played.settle()
    assert (played.loads, played.sent) == ([0, 0], [])
    second.ready.set_result(None)
    played.settle()
    assert (played.loads, len(played.sent)) == ([1, 1], 1)
    played.sent[0].set_result(None)
    first.acknowledge(BROADCAST)
    second.acknowledge(BROADCAST)
    played.settle()
    assert fence.done() and (played.loads, len(played.sent)) == ([1, 1], 1)


@pytest.mark.parametrize("ref", [FILE, BROADCAST])
def test_the_same_version_again_is_acknowledged_by_all_workers_again(played: Played, ref: WeightsRef) -> None:
    """As after a rewind to where the run stands: until then the file must stay."""
    for loads in (1, 2):
        fence = played.producer.load(ref)
        for worker in played.workers:
            if loads == 1:
                worker.ready.set_result(None)
            played.settle()
        assert played.loads == [loads] * 2
        played.workers[0].acknowledge(ref)
        played.settle()
        assert not fence.done() and len(played.released) == loads - 1
        played.workers[1].acknowledge(ref)
        played.settle()
        assert fence.done() and len(played.released) == loads


def test_a_broadcast_that_fails_fails_the_run(played: Played) -> None:
    for worker in played.workers:
        worker.ready.set_result(None)
    played.producer.load(BROADCAST)
    played.settle()
    played.sent[0].set_exception(ConnectionError("no route"))
    played.settle()
    assert [str(failure) for failure in played.failures] == ["no route"]
