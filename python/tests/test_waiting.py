"""Calls that wait: without the GIL, with deadlines, and until Ctrl-C."""

from __future__ import annotations

import pickle
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmesh
from ranks import (
    LONG,
    Matrices,
    address,
    ended,
    join,
    matrix,
    outcomes,
    program,
    ranks,
    sharded,
    stretched,
    threads,
    wide,
)

#: Seconds from a signal to its exception, at most.
AT_ONCE = 0.2


def is_at_once(attempt: Callable[[], float]) -> bool:
    """True if one of several attempts takes no longer than it may: the others may have met a busy machine."""
    return any(attempt() < AT_ONCE for _ in range(5))


def interrupted(wait: Any, after: float = 0.3) -> float:
    """Calls `wait` on the main thread, and sends SIGINT meanwhile. Returns the seconds from there to the exception."""
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    timer = threading.Timer(after, send)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        wait()
    passed = time.monotonic() - sent[0]
    timer.join()
    return passed


def test_other_threads_run_while_a_call_waits() -> None:
    at = address()
    counted, ready = [0], threading.Event()

    def late() -> None:
        with join(1, 2, at) as group:
            ready.wait(LONG)
            group.barrier()

    def count() -> None:
        while counted[0] < 1000:
            counted[0] += 1
            time.sleep(0)
        ready.set()

    running = [threading.Thread(target=late), threading.Thread(target=count)]
    running[0].start()
    # On the main thread, where signals are looked for.
    with join(0, 2, at) as group:
        running[1].start()
        group.barrier()
    assert counted[0] == 1000
    for thread in running:
        thread.join()


def test_an_interrupt_ends_a_wait_on_every_rank() -> None:
    def attempt() -> float:
        at = address()
        found: list[Any] = []
        over = threading.Event()

        def late() -> None:
            with join(1, 2, at) as group:
                a = group.sharded(8, 8, "f32")
                over.wait(LONG)
                try:
                    group.all_gather(a)
                except gemmesh.RankError as error:
                    found.append(error)

        thread = threading.Thread(target=late)
        thread.start()
        with join(0, 2, at) as group:
            a = group.sharded(8, 8, "f32")
            passed = interrupted(lambda: group.all_gather(a))
            over.set()
            thread.join(LONG)
        assert (found[0].rank, found[0].peer) == (1, 0)
        assert "KeyboardInterrupt" in str(found[0])
        return passed

    assert is_at_once(attempt)


def test_an_interrupt_ends_a_rendezvous() -> None:
    assert is_at_once(lambda: interrupted(lambda: join(0, 2, address())))


def test_an_interrupt_ends_a_callback_s_rendezvous() -> None:
    def gather(mine: bytes) -> list[bytes]:
        time.sleep(1.0)
        return [mine, mine]

    def wait() -> None:
        gemmesh.Group.from_callback(gather, 0, 2, backend="host")

    assert is_at_once(lambda: interrupted(wait))


def test_a_signal_whose_handler_returns_does_not_end_a_wait() -> None:
    at = address()
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        handled = threading.Event()

        def late() -> None:
            with join(1, 2, at) as group:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                while not seen:
                    time.sleep(0.01)
                handled.set()
                group.barrier()

        thread = threading.Thread(target=late)
        thread.start()
        with join(0, 2, at) as group:
            group.barrier()
        thread.join()
        assert handled.is_set()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_rank_that_is_late_is_named() -> None:
    at = address()
    over = threading.Event()

    def body(rank: int) -> None:
        with join(rank, 2, at, arrival_timeout=stretched(0.5)) as group:
            if rank == 1:
                over.wait(LONG)
                return
            began = time.monotonic()
            try:
                group.barrier()
            finally:
                over.set()
                assert 0.4 < time.monotonic() - began

    error = threads(2, body)[0]
    assert isinstance(error, gemmesh.DeadlineError) and isinstance(error, TimeoutError)
    assert (error.rank, error.at_fault, error.peer) == (0, (1,), 1)
    assert "rank 1" in str(error) and "the option arrival_timeout" in str(error)


def test_a_rank_that_stops_in_a_call_is_named() -> None:
    at = address()
    over = threading.Event()

    def body(rank: int) -> None:
        with join(rank, 2, at, timeout=stretched(0.5)) as group:
            a = group.sharded(8, 4, "f32")

            def produce(chunk: gemmesh.Chunk) -> None:
                if rank == 1:
                    over.wait(LONG)

            try:
                group.produce_and_all_to_all(a, produce)
            finally:
                over.set()

    error = threads(2, body)[0]
    assert isinstance(error, gemmesh.DeadlineError), error
    assert (error.rank, error.peer) == (0, 1)


def test_different_calls_are_told_apart() -> None:
    def body(group: gemmesh.Group) -> None:
        a = group.sharded(8, 4, "f32")
        if group.rank == 0:
            group.all_gather(a)
        else:
            group.barrier()

    for error in outcomes(2, body):
        assert isinstance(error, gemmesh.CallMismatchError)
        assert "all_gather" in str(error) and "barrier" in str(error)


def test_threads_that_use_one_sharded_matrix_at_once_are_served_or_told() -> None:
    k, n, calls = 16, 8, 20
    x = Matrices(1)(12, k)

    def body(group: gemmesh.Group) -> None:
        a, b = sharded(group, x), Matrices(2)(n, k)
        weight, expected = matrix(group, b), wide(x) @ wide(b).T
        group.all_gather(a)
        refused: list[BaseException] = []
        wrong: list[Any] = []

        def work() -> None:
            for _ in range(calls):
                try:
                    found = wide(group.matmul(a.whole, weight))
                    if abs(found - expected).max() > 0.1:
                        wrong.append(found)
                    assert a.shape == (12, k) and a.rows_of(0) == range(6)
                except gemmesh.MisuseError as error:
                    refused.append(error)

        running = [threading.Thread(target=work) for _ in range(3)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert not wrong
        assert all("thread" in str(error) for error in refused)

    ranks(2, body)


def test_rows_do_not_change_while_a_call_uses_them() -> None:
    at = address()
    began, over = threading.Event(), threading.Event()

    def body(rank: int) -> Any:
        with join(rank, 2, at) as group:
            a = group.sharded(8, 4, "f32", capacity=True)
            refused: list[Any] = []

            def consume(chunk: gemmesh.Chunk) -> None:
                if rank == 0 and not refused:
                    began.set()
                    over.wait(LONG)

            def change() -> None:
                began.wait(LONG)
                try:
                    a.set_rows([1, 1])
                except gemmesh.MisuseError as error:
                    refused.append(error)
                over.set()

            thread = threading.Thread(target=change)
            if rank == 0:
                thread.start()
            group.all_gather_and_consume(a, consume)
            if rank == 0:
                thread.join()
            return len(refused), a.shape

    assert threads(2, body) == [(1, (8, 4)), (0, (8, 4))]


def test_exceptions_carry_who_and_what_and_can_be_pickled() -> None:
    error = gemmesh.RankError("rank 3 died", 1, (1, 3), "barrier")
    assert (error.rank, error.at_fault, error.peer, error.call) == (1, (1, 3), 3, "barrier")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is gemmesh.RankError and str(again) == "rank 3 died"
        assert (again.rank, again.at_fault, again.peer, again.call) == (1, (1, 3), 3, "barrier")
    raised = outcomes(1, lambda group: group.zeros(2, 3, "bf16").frombytes(b""))[0]
    assert isinstance(raised, gemmesh.ArgumentError)
    assert vars(pickle.loads(pickle.dumps(raised))) == vars(raised)


def test_exceptions_are_those_that_python_has_for_their_kind() -> None:
    assert issubclass(gemmesh.ArgumentError, ValueError)
    assert issubclass(gemmesh.DeadlineError, TimeoutError)
    assert issubclass(gemmesh.OutOfMemoryError, MemoryError)
    for name in gemmesh.errors.__dict__.values():
        if isinstance(name, type) and issubclass(name, Exception):
            assert issubclass(name, gemmesh.Error) and issubclass(name, RuntimeError)


def test_errors_say_names_and_places_as_python_does() -> None:
    def body(group: gemmesh.Group) -> Any:
        found = []
        calls: list[Any] = [
            lambda: group.zeros(2, 3, "bf16").frombytes(b""),
            lambda: group.matmul(group.zeros(2, 8, "bf16"), group.zeros(8, 4, "bf16")),
            lambda: group.matrix(np.zeros((2, 3))),
            lambda: group.sharded(8, 4, "f32").set_rows([9, 9]),
            lambda: group.sharded(8, 4, "f32", stages=2).shard,
            lambda: join(0, 1, address(), workers=0),
        ]
        for call in calls:
            with pytest.raises(gemmesh.ArgumentError) as raised:
                call()
            found.append(f"{raised.value.call}: {raised.value}")
        return found

    sentences = ranks(1, body)[0]
    for sentence in sentences:
        assert ".rs" not in sentence and "::" not in sentence
    assert sentences[0].startswith("Matrix.frombytes: ")
    assert 'weight_layout="kn"' in sentences[1]


def test_an_interrupt_ends_a_program_of_processes() -> None:
    source = """
import sys, time
import gemmesh
group = gemmesh.Group.connect(int(sys.argv[1]), 2, sys.argv[2], backend="host", workers=1)
print("ready", flush=True)
try:
    group.barrier()
    group.barrier() if sys.argv[1] == "0" else time.sleep(100)
except KeyboardInterrupt:
    print("interrupted", time.monotonic(), flush=True)
    sys.exit(5)
"""

    def attempt() -> float:
        at = address()
        processes = [program(source, str(rank), at) for rank in range(2)]
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(1.0)
        sent = time.monotonic()
        processes[0].send_signal(signal.SIGINT)
        status, out, _ = ended(processes[0])
        processes[1].kill()
        ended(processes[1])
        assert status == 5
        return float(out.split()[-1]) - sent

    assert is_at_once(attempt)
