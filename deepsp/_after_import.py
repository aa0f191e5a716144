"""Something to do once another module has been imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder


class _AfterImport(MetaPathFinder, Loader):
    """Lets the usual machinery import a module, and calls a function then."""

    def __init__(self, name: str, function: Callable[[], None]):
        self.name, self._function = name, function

    def find_spec(self, fullname, path=None, target=None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        # Without a loader it is a bare folder of that name.
        if spec is None or spec.loader is None:
            return None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        sys.meta_path.remove(self)
        self._function()


def after_import(name: str, function: Callable[[], None]) -> None:
    """Calls ``function`` now if module ``name`` is there, else when it is imported; once, however
    often this is called."""
    if name in sys.modules:
        function()
    elif not any(_waits_for(finder, name) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(name, function))


def forget(name: str) -> bool:
    """Undoes :func:`after_import` of a module that hasn't been imported; whether that is so."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _waits_for(finder, name)]
    return name not in sys.modules


def _waits_for(finder, name: str) -> bool:
    return isinstance(finder, _AfterImport) and finder.name == name
