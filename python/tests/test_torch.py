"""gemmesh.torch keeps its promises, in processes that gloo connects. The promises are in torch_ranks.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import LONG

HERE = Path(__file__).parent
pytest.importorskip("torch")
CASES = re.findall(r"^@case\ndef (\w+)", (HERE / "torch_ranks.py").read_text(), re.MULTILINE)

Told = list[dict[str, str]]


def environment(kept: Path) -> dict[str, str]:
    """`kept`: where compiled programs are."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(kept)}


@pytest.fixture(scope="module", params=[2, 4])
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What each rank has to say about each case: nothing, or how it failed."""
    world: int = request.param
    folder = tmp_path_factory.mktemp(f"world{world}")
    kept = tmp_path_factory.getbasetemp() / "inductor"
    program = [sys.executable, str(HERE / "torch_ranks.py")]
    ranks = [
        subprocess.Popen([*program, str(rank), str(world), str(folder / "store"), str(folder)], env=environment(kept))
        for rank in range(world)
    ]
    said = [folder / f"{rank}.json" for rank in range(world)]
    try:
        until_silent(ranks, said)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads(each.read_text()) if each.exists() else {} for each in said]


def until_silent(ranks: list[subprocess.Popen[bytes]], said: list[Path]) -> None:
    """Waits until all ranks have ended, or until none has finished a case for so long that one hangs."""
    finished: list[int] = []
    since = time.monotonic()
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < since + LONG:
        now = [each.stat().st_mtime_ns if each.exists() else 0 for each in said]
        if now != finished:
            finished, since = now, time.monotonic()
        time.sleep(0.05)


@pytest.mark.parametrize("case", CASES)
def test_promise(told: Told, case: str) -> None:
    failures = []
    for rank, cases in enumerate(told):
        missing = next((each for each in CASES if each not in cases), None)
        failure = cases.get(case, f"it did not end {missing}, the first case that it lacks")
        if failure:
            failures.append(f"rank {rank}: {failure}")
    assert not failures, "\n".join(failures)
