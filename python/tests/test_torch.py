"""gemmesh.torch keeps its promises, in processes that gloo connects. The promises are in torch_ranks.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytest.importorskip("torch")
CASES = re.findall(r"^@case\ndef (\w+)", (HERE / "torch_ranks.py").read_text(), re.MULTILINE)
#: A hang ends after so many seconds.
LIMIT = 600

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
    try:
        for rank in ranks:
            rank.wait(LIMIT)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = [folder / f"{rank}.json" for rank in range(world)]
    return [json.loads(each.read_text()) if each.exists() else {} for each in said]


@pytest.mark.parametrize("case", CASES)
def test_promise(told: Told, case: str) -> None:
    failures = [f"rank {rank}: {cases.get(case, 'it did not come to this')}" for rank, cases in enumerate(told)]
    failures = [failure for failure in failures if not failure.endswith(": ")]
    assert not failures, "\n".join(failures)
