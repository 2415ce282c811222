"""The option by which mpirun's ranks run the tests that are theirs, and no others."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--only-mpi", action="store_true", help="run the tests of ranks that mpirun has started, and no others")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "mpi: every rank of mpirun runs the test (needs --only-mpi)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only_mpi = config.getoption("--only-mpi")
    for item in items:
        is_mpi = item.get_closest_marker("mpi") is not None
        if is_mpi != only_mpi:
            reason = "needs mpirun and --only-mpi" if is_mpi else "--only-mpi is given"
            item.add_marker(pytest.mark.skip(reason=reason))
