"""The option by which mpirun's ranks run the tests that are theirs, and no others. Ctrl-C works in all tests."""

from __future__ import annotations

import signal

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "run the tests of ranks that mpirun has started, and no others"
    parser.addoption("--only-mpi", action="store_true", help=words)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "mpi: every rank of mpirun runs the test (needs --only-mpi)")
    # A shell starts what it puts in the background with the signal ignored, which programs hand on.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def is_mpi(item: pytest.Item) -> bool:
        return item.get_closest_marker("mpi") is not None

    if config.getoption("--only-mpi"):
        config.hook.pytest_deselected(items=[item for item in items if not is_mpi(item)])
        items[:] = filter(is_mpi, items)
        return
    for item in filter(is_mpi, items):
        item.add_marker(pytest.mark.skip(reason="needs mpirun and --only-mpi"))
