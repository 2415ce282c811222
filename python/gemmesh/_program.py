"""How this program is started again as ranks, also after it has changed its folder."""

from __future__ import annotations

import os
import sys


def _current() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None  # It has been deleted.


_IMPORTED_IN = _current()


def started(is_own: bool) -> tuple[str | None, list[str] | None, str | None]:
    """The interpreter's name, its arguments if `is_own`, and PYTHONPATH. None: as this process has them."""
    executable = sys.executable if os.path.isabs(sys.executable or "") else None
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    place, folder, root = None, None, None
    if spec is None or spec.name == "__main__":
        place, folder = _script()
    else:
        root = _module_root(spec.name, spec.origin)
    began_in = folder or root or _IMPORTED_IN
    if began_in is None or began_in == _current():
        return executable, None, None
    arguments = None
    if is_own and place is not None:
        arguments = sys.orig_argv[1:]
        arguments[place - 1] = os.path.join(began_in, sys.orig_argv[place])
    path = [os.path.join(began_in, entry) if entry else began_in for entry in _python_path()]
    if is_own and root is not None:
        path.insert(0, root)
    return executable, arguments, os.pathsep.join(path) if path else None


def _python_path() -> list[str]:
    path = os.environ.get("PYTHONPATH", "")
    return path.split(os.pathsep) if path else []


def _script() -> tuple[int | None, str | None]:
    """Where the script stands in the command line, if its path is relative, and the folder from which that leads."""
    file = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    if not os.path.isabs(file):
        return None, None
    # A script may be a folder or an archive, which holds __main__.py.
    folder, inner = os.path.split(file)
    for found in (file, folder) if inner == "__main__.py" else (file,):
        for place, argument in enumerate(sys.orig_argv[1:], 1):
            if sys.orig_argv[place - 1] in ("-X", "-W"):
                continue
            if os.path.isabs(argument):
                if os.path.normpath(argument) == os.path.normpath(found):
                    return None, None
                continue
            end = os.sep + argument.removeprefix("./").rstrip(os.sep)
            if len(end) > 1 and found.endswith(end):
                return place, found.removesuffix(end).removesuffix(os.sep + ".") or os.sep
    return None, None


def _module_root(name: str, file: str | None) -> str | None:
    """The folder in which ``python -m name`` has found `file`, if that was the current one."""
    if file is None or not os.path.isabs(file):
        return None
    root = file
    for _ in name.split("."):
        root = os.path.dirname(root)
    # What -m adds stands before the standard library.
    library = os.path.dirname(os.__file__)
    before = sys.path[: sys.path.index(library)] if library in sys.path else sys.path
    return root if root in before else None
