"""How ranks find one another, and how groups end."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
import venv
from pathlib import Path
from typing import Any

import pytest

import gemmesh
from ranks import LONG, address, ended, join, outcomes, program, ranks, stretched, threads

#: A program of a rank at an address: its group is `group`.
RANK = """
import os, signal, sys, threading, time
import gemmesh
rank, world, at = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
group = gemmesh.Group.connect(rank, world, at, backend="host", workers=1, arrival_timeout=60)
"""


def rank_program(source: str, rank: int, world: int, at: str, **options: Any) -> subprocess.Popen[str]:
    return program(RANK + source, str(rank), str(world), at, **options)


def test_a_group_knows_its_ranks() -> None:
    def body(group: gemmesh.Group) -> None:
        assert group.world_size == 3
        assert (group.backend, group.device, group.stream, group.name) == ("host", (1, 0), 0, "a name")
        assert repr(group) == f"Group(rank {group.rank} of 3)"
        assert group.even_rows(8) == [3, 3, 2]
        assert len(group.wait_times()) == 3
        group.set_stream(0)
        group.synchronize()
        group.check()
        group.barrier()

    ranks(3, body, name="a name")


def test_ranks_meet_by_a_callback_that_gathers_bytes() -> None:
    world = 3
    mailboxes: list[queue.Queue[bytes]] = [queue.Queue() for _ in range(world * world)]

    def body(rank: int) -> Any:
        calls = []

        def gather(mine: bytes) -> list[bytes]:
            calls.append(mine)
            for to in range(world):
                mailboxes[world * to + rank].put(mine)
            return [mailboxes[world * rank + source].get(timeout=LONG) for source in range(world)]

        with gemmesh.Group.from_callback(gather, rank, world, backend="host") as group:
            assert len(calls) == 1
            return group.all_gather_bytes(bytes([rank]))

    assert threads(world, body) == [[b"\0", b"\1", b"\2"]] * world


def test_an_exception_of_the_callback_is_the_cause() -> None:
    original = OSError("no network")

    def gather(mine: bytes) -> list[bytes]:
        raise original

    with pytest.raises(gemmesh.Error, match="no network") as raised:
        gemmesh.Group.from_callback(gather, 0, 2, backend="host")
    assert raised.value.__cause__ is original


def test_a_callback_that_returns_something_else_is_refused() -> None:
    for wrong in ([b""], "bytes", None, [b"short", b"short"]):
        with pytest.raises(gemmesh.Error):
            gemmesh.Group.from_callback(lambda mine, wrong=wrong: wrong, 0, 2, backend="host")


class Store:
    """What `from_store` uses of a torch Store."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def add(self, key: str, amount: int) -> int:
        with self.changed:
            self.values[key] = b"%d" % (int(self.values.get(key, b"0")) + amount)
            return int(self.values[key])

    def set(self, key: str, value: bytes) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, LONG)
            return self.values[key]


def test_ranks_meet_by_a_store_several_times() -> None:
    store = Store()

    def body(rank: int) -> Any:
        found = []
        for _ in range(2):
            with gemmesh.Group.from_store(store, rank, 2, backend="host") as group:
                found += group.all_gather_bytes(bytes([rank]))
        with gemmesh.Group.from_store(store, rank, 2, backend="host", name="other") as group:
            assert group.name == "other"
        return found

    assert threads(2, body) == [[b"\0", b"\1"] * 2] * 2


def test_a_rank_that_the_group_of_a_store_has_not_is_refused_by_the_call_s_name() -> None:
    for rank, words in ((5, "rank is 5 and must be below"), (-1, "rank is -1")):
        with pytest.raises(gemmesh.ArgumentError, match=f"Group.from_store.*{words}") as refused:
            gemmesh.Group.from_store(Store(), rank, 2, backend="host")
        assert refused.value.call == "Group.from_store"


def test_a_group_is_split_by_color_and_key() -> None:
    def body(group: gemmesh.Group) -> Any:
        with group.split(group.rank % 2, 10 - group.rank, name=f"part {group.rank % 2}") as part:
            return part.rank, part.world_size, part.name, part.all_gather_bytes(bytes([group.rank]))

    found = ranks(4, body)
    assert found[0] == (1, 2, "part 0", [b"\2", b"\0"])
    assert found[3] == (0, 2, "part 1", [b"\3", b"\1"])


def test_options_that_no_group_has_are_refused_by_name() -> None:
    call: Any = gemmesh.Group.connect
    for options, error, words in [
        ({"time_out": 1}, TypeError, "time_out"),
        ({"timeout": -1.0}, gemmesh.ArgumentError, "timeout is -1.0 and must be"),
        ({"numerics": "exact"}, gemmesh.ArgumentError, "invariant"),
        ({"workers": "many"}, TypeError, "argument 'workers': 'str'"),
        ({"timeout": "long"}, TypeError, "argument 'timeout'"),
        ({"device": -1}, gemmesh.ArgumentError, "device is -1 and must not be negative"),
        ({"backend": "mps"}, gemmesh.ArgumentError, 'backend is "mps" and must be one of "cuda", "host"'),
    ]:
        with pytest.raises(error, match=words) as refused:
            call(0, 1, address(), **{"backend": "host", **options})
        if isinstance(refused.value, gemmesh.Error):
            assert (refused.value.rank, refused.value.call) == (0, "Group.connect")


@pytest.mark.parametrize("rank", [-1, 1 << 64])
def test_a_rank_that_is_no_number_of_a_rank_is_refused(rank: int) -> None:
    for call in (
        lambda: gemmesh.Group.connect(rank, 2, address(), backend="host"),
        lambda: gemmesh.Group.from_callback(lambda mine: [mine], rank, 2, backend="host"),
        lambda: gemmesh.launch(rank, ["-c", "pass"]),
    ):
        with pytest.raises(gemmesh.ArgumentError, match=f" is {rank}( and must not be negative|, which is too large)") as refused:
            call()
        assert refused.value.rank is None and refused.value.call is not None


@pytest.mark.skipif(gemmesh.HAS_CUDA, reason="this build has the CUDA backend")
def test_a_build_without_cuda_says_so() -> None:
    with pytest.raises(gemmesh.ArgumentError, match="host backend only"):
        gemmesh.Group.connect(0, 1, address())
    assert gemmesh.nvcc_release() is None


def test_without_a_launcher_from_env_says_what_is_missing() -> None:
    source = "import gemmesh; gemmesh.Group.from_env(backend='host')"
    status, _, err = ended(program(source, env=unlaunched()))
    assert status == 1 and "LaunchError" in err


def unlaunched() -> dict[str, str]:
    """The environment without what launchers set."""
    prefixes = ("OMPI_", "PMI", "PRTE", "SLURM_", "GEMMESH_", "MV2_", "PALS_", "FLUX_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes) and name not in names}


LAUNCHED = """
import sys
import gemmesh

if not gemmesh.is_rank():
    try:
        gemmesh.launch(3)
    except gemmesh.RankError as error:
        print("launcher:", error.at_fault, error)
        sys.exit(7)
    sys.exit(0)
with gemmesh.Group.from_env(backend="host") as group:
    assert gemmesh.is_rank()
    print(f"rank {group.rank} of {group.world_size}: {sys.argv[1:]}")
    group.barrier()
    if sys.argv[1] == "fails" and group.rank == 1:
        raise ValueError("no such file: weights")
    group.barrier()
    try:
        gemmesh.launch(2)
    except gemmesh.MisuseError:
        print("refused")
"""


def launched(tmp_path: Path, source: str, *arguments: str) -> subprocess.Popen[str]:
    path = tmp_path / "program.py"
    path.write_text(source)
    command = [sys.executable, str(path), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=unlaunched())


def test_launch_runs_the_program_as_ranks(tmp_path: Path) -> None:
    status, out, err = ended(launched(tmp_path, LAUNCHED, "well", "two words"))
    assert (status, err) == (0, "")
    lines = sorted(out.splitlines())
    assert [line for line in lines if "refused" in line] == [f"[{rank}] refused" for rank in range(3)]
    arguments = ["well", "two words"]
    assert [line for line in lines if "of" in line] == [f"[{rank}] rank {rank} of 3: {arguments}" for rank in range(3)]


def test_launch_raises_what_a_rank_failed_of(tmp_path: Path) -> None:
    status, out, err = ended(launched(tmp_path, LAUNCHED, "fails"))
    assert status == 7
    assert "launcher: (1,)" in out
    assert "no such file: weights" in out
    # The other ranks say why they ended.
    why = "rank 1 failed in its own program: ValueError: no such file: weights"
    for rank in (0, 2):
        assert re.search(rf"^\[{rank}\] gemmesh.errors.RankError: .*{why}$", err, re.MULTILINE)


@pytest.mark.parametrize("arguments", [["-"], []])
def test_launch_refuses_a_program_that_no_rank_could_read(arguments: list[str]) -> None:
    program = "import gemmesh\ngemmesh.launch(2)\n"
    found = subprocess.run(
        [sys.executable, *arguments], input=program, capture_output=True, text=True, timeout=LONG, check=False
    )
    assert found.returncode == 1
    assert "MisuseError: gemmesh.launch: the program comes from standard input" in found.stderr


AWAY = """
import os, sys
import gemmesh
{imports}

if not gemmesh.is_rank():
    os.chdir(sys.argv[1])
    gemmesh.launch(2)
    sys.exit(0)
with gemmesh.Group.from_env(backend="host") as group:
    group.barrier()
    print(f"in {{os.getcwd()}}: {{sys.argv[1:]}}")
"""


WAYS = ["script", "dotted", "above", "absolute", "folder", "absolute folder", "module", "package", "path"]


@pytest.mark.parametrize("way", WAYS)
def test_launch_finds_the_program_after_it_has_changed_its_folder(tmp_path: Path, way: str) -> None:
    began_in, away = tmp_path / "began in", tmp_path / "away"
    for folder in (began_in / "package", began_in / "modules", away):
        folder.mkdir(parents=True)
    imports = {"module": "import beside", "package": "import package.inner", "path": "import further"}.get(way, "")
    source = AWAY.format(imports=imports)
    for file in ("job.py", "package/__main__.py"):
        (began_in / file).write_text(source)
    for file in ("beside.py", "package/__init__.py", "package/inner.py", "modules/further.py"):
        (began_in / file).write_text("")
    commands = {
        "script": ["job.py"],
        "dotted": ["-W", "ignore", "./job.py"],
        "above": ["../began in/job.py"],
        "absolute": [str(began_in / "job.py")],
        "folder": ["package"],
        "absolute folder": ["-X", "package", str(began_in / "package") + "/"],
        "module": ["-m", "job"],
        "package": ["-bm", "package"],
        "path": ["job.py"],
    }
    # The interpreter finds gemmesh by its own place, or by PYTHONPATH.
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path = [os.path.abspath(entry) for entry in path] + (["modules"] if way == "path" else [])
    env = {**unlaunched(), **({"PYTHONPATH": os.pathsep.join(path)} if path else {})}
    command = [sys.executable, *commands[way], str(away), "a word"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    status, out, err = ended(subprocess.Popen(command, cwd=began_in, text=True, env=env, **pipes))
    assert (status, err) == (0, "")
    said = f"in {away}: {[str(away), 'a word']}"
    assert sorted(out.splitlines()) == [f"[{rank}] {said}" for rank in range(2)]


@pytest.mark.parametrize("to", [".", "away"])
def test_launch_leaves_arguments_that_end_the_path_of_the_program(tmp_path: Path, to: str) -> None:
    folder = tmp_path / "me"
    for each in (folder / "app", tmp_path / "away"):
        each.mkdir(parents=True)
    arguments = [to, "me", "run.py", "me/run.py", "app", "me/app"]
    for program in (folder / "run.py", folder / "app"):
        file = program / "__main__.py" if program.is_dir() else program
        file.write_text(AWAY.format(imports=""))
        command = [sys.executable, str(program), *arguments]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        status, out, err = ended(subprocess.Popen(command, cwd=tmp_path, text=True, env=unlaunched(), **pipes))
        assert (status, err) == (0, "")
        said = f"in {os.path.normpath(tmp_path / to)}: {arguments}"
        assert sorted(out.splitlines()) == [f"[{rank}] {said}" for rank in range(2)]


def test_launch_finds_an_interpreter_of_a_relative_path(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, system_site_packages=True, symlinks=True)
    (tmp_path / "away").mkdir()
    (tmp_path / "job.py").write_text(AWAY.format(imports="print(sys.prefix)"))
    # The environment has the packages of the one in which this test runs, as far as those are not the system's.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = ["environment/bin/python", "job.py", "away"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    env = {**unlaunched(), "PYTHONPATH": path}
    status, out, err = ended(subprocess.Popen(command, cwd=tmp_path, text=True, env=env, **pipes))
    assert (status, err) == (0, "")
    prefixes = [line for line in out.splitlines() if " in " not in line]
    assert sorted(prefixes) == sorted([str(environment), f"[0] {environment}", f"[1] {environment}"])


INPUT = """
import sys
import gemmesh

if not gemmesh.is_rank():
    gemmesh.launch(2, inherit_stdin="give" in sys.argv)
    sys.exit(0)
with gemmesh.Group.from_env(backend="host") as group:
    print("input", repr(sys.stdin.read()))
"""


@pytest.mark.parametrize(("argument", "input"), [("give", "two\nlines"), ("keep", "")])
def test_launch_gives_rank_0_the_input_if_it_is_to(tmp_path: Path, argument: str, input: str) -> None:
    path = tmp_path / "program.py"
    path.write_text(INPUT)
    command = [sys.executable, str(path), argument]
    found = subprocess.run(
        command, input="two\nlines", capture_output=True, text=True, timeout=LONG, check=True, env=unlaunched()
    )
    assert sorted(found.stdout.splitlines()) == [f"[0] input {input!r}", "[1] input ''"]


def test_launch_raises_if_what_ranks_print_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("import gemmesh\nprint('a line') if gemmesh.is_rank() else gemmesh.launch(2)")
    command = [sys.executable, str(path)]
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LONG, check=False, env=unlaunched()
        )
    assert found.returncode == 1
    assert "gemmesh: standard output fails: No space left on device" in found.stderr
    assert "HostError: cannot write all that ranks printed: 22 bytes were not written" in found.stderr


def test_launch_ends_its_ranks_with_the_interrupt(tmp_path: Path) -> None:
    source = """
import os, signal, sys, threading, time
import gemmesh

if not gemmesh.is_rank():
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        gemmesh.launch(2)
    except KeyboardInterrupt:
        sys.exit(9)
    sys.exit(0)
with gemmesh.Group.from_env(backend="host") as group:
    print("pid", os.getpid(), flush=True)
    group.barrier()
    time.sleep(100)
"""
    began = time.monotonic()
    status, out, err = ended(launched(tmp_path, source))
    assert status == 9, err
    assert time.monotonic() - began < stretched(30.0)
    for line in out.splitlines():
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[-1]), 0)


def test_a_closed_group_refuses_calls_and_its_matrices_live() -> None:
    def body(group: gemmesh.Group) -> None:
        made, a = group.zeros(4, 4, "f32"), group.sharded(8, 4, "f32")
        group.barrier()
        group.close()
        group.close()
        assert repr(group) == "Group(closed)"
        calls: list[Any] = [
            group.barrier,
            group.check,
            group.synchronize,
            lambda: group.rank,
            lambda: group.zeros(1, 1, "f32"),
            lambda: group.matmul(made, made),
            lambda: group.all_gather(a),
            lambda: group.split(0),
        ]
        for call in calls:
            with pytest.raises(gemmesh.MisuseError, match="closed"):
                call()
        assert made.tobytes() == bytes(64)
        a.shard.frombytes(bytes(len(a.rows) * 16))

    ranks(2, body)


def test_a_block_that_raises_tells_the_other_ranks_why() -> None:
    def body(group: gemmesh.Group) -> None:
        if group.rank == 1:
            raise LookupError("no such token")
        group.barrier()

    found = outcomes(3, body)
    assert isinstance(found[1], LookupError)
    for rank in (0, 2):
        assert isinstance(found[rank], gemmesh.RankError)
        assert "rank 1 failed in its own program: LookupError: no such token" in str(found[rank])
        assert found[rank].peer == 1


def test_two_groups_of_one_address_are_told_apart_or_refused() -> None:
    at = address()

    def pair(rank: int) -> Any:
        found = []
        # One after the other, and both alive.
        first, second = join(rank, 2, at), join(rank, 2, at)
        for group in (first, second):
            found += group.all_gather_bytes(bytes([rank]))
        first.close()
        second.close()
        return found

    assert threads(2, pair) == [[b"\0", b"\1"] * 2] * 2


def test_two_ranks_of_one_number_are_refused() -> None:
    at = address()
    # The third comes when the first two are rank 0.
    found = threads(2, lambda _: join(0, 2, at, arrival_timeout=stretched(1.0)))
    assert all(isinstance(error, gemmesh.RendezvousError) for error in found), found


def test_ranks_that_never_come_are_named() -> None:
    with pytest.raises(gemmesh.RendezvousError) as raised:
        join(0, 3, address(), arrival_timeout=0.3)
    assert raised.value.at_fault == (1, 2)
    assert raised.value.rank == 0


def test_a_group_takes_the_time_after_which_a_silent_host_is_lost() -> None:
    join(0, 1, address(), host_timeout=2.0).close()
    with pytest.raises(TypeError, match="host_timeout"):
        join(0, 1, address(), host_timeout="soon")


def test_processes_and_threads_are_ranks_of_one_group() -> None:
    at = address()
    source = "print(group.all_gather_bytes(bytes([rank])))\ngroup.close()"
    others = [rank_program(source, rank, 3, at) for rank in (1, 2)]
    with join(0, 3, at) as group:
        found = group.all_gather_bytes(b"\0")
    assert found == [b"\0", b"\1", b"\2"]
    for process in others:
        status, out, err = ended(process)
        assert (status, out.strip()) == (0, str(found)), err


def test_a_rank_that_is_killed_is_named_on_the_others() -> None:
    at = address()
    victim = rank_program("group.barrier()\nos.kill(os.getpid(), signal.SIGKILL)", 1, 2, at)
    group = join(0, 2, at)
    group.barrier()
    with pytest.raises(gemmesh.RankError, match="rank 1 died") as raised:
        group.barrier()
    assert (raised.value.rank, raised.value.at_fault, raised.value.peer) == (0, (1,), 1)
    # The group has failed.
    for call in (group.check, group.barrier):
        with pytest.raises(gemmesh.RankError, match="rank 1 died"):
            call()
    ended(victim)


def test_a_child_of_a_rank_is_no_rank_and_ends_cleanly() -> None:
    at = address()
    source = """
child = os.fork()
if child == 0:
    made = None
    try:
        group.barrier()
    except gemmesh.MisuseError as error:
        made = str(error)
    print("child:", made, flush=True)
    sys.exit(0 if made else 3)
_, status = os.waitpid(child, 0)
group.barrier()
print("parent:", os.waitstatus_to_exitcode(status), flush=True)
group.close()
"""
    other = rank_program(source, 1, 2, at)
    with join(0, 2, at) as group:
        group.barrier()
    status, out, err = ended(other)
    assert (status, err) == (0, "")
    assert "child: " in out and "fork" in out
    assert "parent: 0" in out


def test_a_child_may_import_the_package_and_make_groups() -> None:
    source = """
import os, sys
import gemmesh
child = os.fork()
if child == 0:
    with gemmesh.Group.connect(0, 1, sys.argv[1], backend="host", workers=1) as group:
        out = group.matmul(group.zeros(4, 8, "bf16"), group.zeros(4, 8, "bf16"))
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    status, _, err = ended(program(source, address()))
    assert (status, err) == (0, "")


@pytest.mark.parametrize("kept", ["group", "matrix", "waiting thread", "callback"])
def test_a_process_ends_at_once_with_a_group_alive(kept: str) -> None:
    at = address()
    source = {
        "group": "",
        "matrix": """
made = [group.sharded(8, 8, 'f32'), group.zeros(2, 2, 'f32')]
made.append(made[0].whole)
del group
""",
        "waiting thread": "threading.Thread(target=group.barrier, daemon=True).start()\ntime.sleep(0.2)\n",
        "callback": """
import numpy
kept = numpy.from_dlpack(group.zeros(2, 2, 'f32'))
class Late:
    def __del__(self):
        gemmesh.Group.close(held)
held, late = group, Late()
""",
    }[kept]
    other = rank_program(source + "print('at', time.monotonic(), flush=True)\n", 1, 2, at)
    group = join(0, 2, at)
    if kept == "matrix":
        group.sharded(8, 8, "f32")
    with pytest.raises(gemmesh.RankError) as raised:
        for _ in range(3):
            group.barrier()
    assert raised.value.at_fault == (1,)
    status, out, err = ended(other)
    assert status == 0, err
    assert time.monotonic() - float(out.split()[-1]) < stretched(2.0)
    assert "Fatal" not in err and "panicked" not in err
