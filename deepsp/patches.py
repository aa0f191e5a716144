"""The ledger: all changes that deepsp makes to the process-wide state of other libraries, and all
state that it keeps itself beside values and modules (tests compare it with the source).

A change is made when the library is imported by other code, or by a call of the user's; it is
undone by :func:`uninstall`. Two changes are made elsewhere, and aren't undone:

- :func:`deepsp.integrations.transformers.register` also adds an entry to each of transformers' two
  registries of attention functions and masks, by their own method;
- after each compilation, ``torch.compile(backend="deepsp")`` clears Dynamo's notes on floats
  (``deepsp.compile.sharding.backend``).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder

from deepsp.integrations.deepspeed import config
from deepsp.integrations.transformers import calls, mixers
from deepsp.sequence.recurrence import functions as recurrences


@dataclass(frozen=True)
class Patch:
    """One change.

    library: the module whose import it waits for; until then ``sys.meta_path`` has an entry.
    changes: what it replaces or extends.
    reason: its purpose, and who notices it.
    home: the module whose functions make and undo it, imported no earlier than ``library``.
    on_call: it waits for a call of the user's, not for an import.
    """

    library: str
    changes: tuple[str, ...]
    reason: str
    home: str
    on_call: bool = False

    def install(self) -> None:
        home = importlib.import_module(self.home)
        if hasattr(home, "install"):
            home.install()
        else:  # its own import of the library: finish() follows
            _unfinished.add(self.home)

    def uninstall(self) -> None:
        importlib.import_module(self.home).uninstall()


PATCHES = (
    Patch(
        "torch._inductor.config",
        ("torch._inductor.config.post_grad_custom_post_pass",),
        "Keeps the order start, compute, wait in graphs with deepsp's ops; others are left alone. "
        "Made at once: a config.patch around the first compilation would undo it later.",
        "deepsp.compile.lowering.overlap",
    ),
    Patch(
        "torch._inductor.decomposition",
        (
            "torch._inductor.decomposition.decompositions",
            "torch._inductor.decomposition.fast_random_decomps",
            "torch.compiler.config.cache_key_tag",
        ),
        "Entries for deepsp's ops: asynchronous collectives of CUDA tensors. Its copy of the table "
        "is made anew, and compiled graphs are cached under deepsp's version.",
        "deepsp.compile.lowering.inductor_table",
    ),
    Patch(
        "torch._inductor.lowering",
        ("torch._inductor.lowering.lowerings",),
        "Entries for calls of deepsp's kernels: Inductor must not reuse the memory of their "
        "results, nor of what they read while it is in flight.",
        "deepsp.compile.lowering.calls",
    ),
    Patch(
        "torch._dynamo.repro.after_dynamo",
        ("torch._dynamo.repro.after_dynamo.WrapBackendDebug.backend_ctx_ctor",),
        'A call of a model that torch.compile(backend="deepsp") compiled raises if Dynamo ran it '
        "without the pass; other backends' calls run as they did.",
        "deepsp.compile.sharding.watch",
    ),
    Patch(
        "deepspeed",
        tuple(f"deepspeed: {what}" for what in config.REPLACED),
        'Takes "passes": ["deepsp"] in DeepSpeed\'s config; others\' configs mean what they did.',
        config.__name__,
    ),
    Patch(
        "transformers",
        tuple(f"transformers: {what}" for what in calls.REPLACED),
        "Refuses calls of models that would be wrong on one rank's tokens, in processes that call "
        "deepsp.integrations.transformers.register(); in others nothing is replaced.",
        calls.__name__,
        on_call=True,
    ),
    Patch(
        "transformers",
        tuple(f"transformers: {name} in modeling files" for name in mixers.REPLACED),
        "Recurrent layers of models with deepsp's attention work on sharded sequences. Made for "
        "the files of such a model, when it is first called; for other models the functions do "
        "what they did.",
        mixers.__name__,
        on_call=True,
    ),
    Patch(
        "torch._dynamo",
        ("torch._dynamo.trace_rules._allowed_callable_ids",),
        "The compile pass gets a recurrence of a transformers' model as one op, not as the many of "
        "its chunks. Made for the functions of such a model, when the pass first meets it.",
        recurrences.__name__,
        on_call=True,
    ),
)


_unfinished: set[str] = set()


def finish(home: str) -> None:
    """Called at the end of a home: makes its change, if it has imported the library itself."""
    if home in _unfinished:
        _unfinished.remove(home)
        importlib.import_module(home).install()


def install() -> None:
    """Makes every change, or waits for its import or call."""
    for patch in PATCHES:
        if patch.on_call:
            patch.install()  # only if the call was made before
        else:
            _after_import(patch.library, patch.install)


def uninstall() -> None:
    """Undoes :func:`install`: Inductor then calls the C++ kernels, as other backends do."""
    for patch in reversed(PATCHES):
        if not _forget(patch.library):
            patch.uninstall()


# ---- after the import of another library


class _AfterImport(MetaPathFinder, Loader):
    """Imports a module as usual, and then calls a function."""

    def __init__(self, name: str, function: Callable[[], None]):
        self.name, self._function = name, function

    def find_spec(self, fullname, path=None, target=None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        # A namespace package has no loader.
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


def _after_import(name: str, function: Callable[[], None]) -> None:
    """Calls ``function`` now if module ``name`` is imported, else after its import; once, even if
    this is called again."""
    if name in sys.modules:
        function()
    elif not any(_waits_for(finder, name) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(name, function))


def _forget(name: str) -> bool:
    """Undoes :func:`_after_import`; returns whether the module hasn't been imported."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _waits_for(finder, name)]
    return name not in sys.modules


def _waits_for(finder, name: str) -> bool:
    return isinstance(finder, _AfterImport) and finder.name == name


# ---- deepsp's own state

STATE = {
    "compile.sharding.rules.__init__._COMBINED": "rules of the compile pass, filled at import",
    "compile.sharding.rules.__init__._OF_OWN": "rules of the compile pass, filled at import",
    "compile.sharding.rules.__init__._DECOMPOSED": "rules of the compile pass, filled at import",
    "compile.sharding.rules.__init__._REASONS": "rules of the compile pass, filled at import",
    "compile.sharding.rules.__init__._RULES": "rules of the compile pass, filled at import",
    "compile.sharding.watch._BREAKS": "Dynamo's log of graph breaks, which a first call reads",
    "compile.sharding.watch._ran": "by thread: whether the graph of a call has run",
    "data.last_batch._last": "by thread: the roles and lengths of the batch that was sharded last",
    "data.same_batch._of_groups": "by group: batches that the next forward compares",
    "integrations.deepspeed.config._groups": "by group: groups of parts of it",
    "integrations.deepspeed.config._originals": "what patches have replaced",
    "integrations.diffusers.backend._users": "models that use the attention backend",
    "integrations.transformers.calls._originals": "what patches have replaced",
    "integrations.transformers.forward.REGISTRATIONS": "the arguments of register, by name",
    "integrations.transformers.forward.running": "by thread: the call of a model that runs",
    "integrations.transformers.mixers._replaced": "what patches have replaced",
    "integrations.transformers.mixers._times": "how often patches were undone",
    "ops._compared": "groups whose ranks have compared a call of previous_tokens",
    "patches._unfinished": "patches that wait for the end of an import",
    "placement.table._RULES": "rules of placements, filled at import",
    "ranks.groups._replaced": "while a proof runs: the place that stands in for that in a group",
    "ranks.randomness._local": "by thread: the generators of the context that is entered",
    "schedule.flow.flow._local": "by thread: the dry run that runs",
    "schedule.registry._methods": "methods of schedules, filled at import and by users",
    "sequence.attention.chunks._picked": 'what chunks="auto" has picked, by shapes',
    "sequence.recurrence.functions.captured": "functions that Dynamo captures as one op",
}
"""What is kept for the process or a thread, by module and name."""

ATTRIBUTES = {
    "_deepsp_after_head": "a model's: what it does to its logits",
    "_deepsp_averaged": "a weight's: the group whose loss averages its gradients",
    "_deepsp_cache": "a model's: its attentions have hooks that give them stand-ins for caches",
    "_deepsp_called": "a model's: it was checked",
    "_deepsp_checked": "a model's and its parts': the attention with which they were checked",
    "_deepsp_closed": "a module's in a schedule: it runs as it is",
    "_deepsp_compared": "a parameter's: the groups that have compared it",
    "_deepsp_counts_otherwise": "an attention module's: the model makes positions of its own",
    "_deepsp_differs": "a weight's: it differed by rank when it was met first",
    "_deepsp_diffusers": "a model's of diffusers: its sharding",
    "_deepsp_divided": "a module's: the attributes that a schedule has divided",
    "_deepsp_experts": "an experts module's: how experts are dealt out",
    "_deepsp_reads_in_flight": "a graph's of Inductor: how many starts in flight read each buffer",
    "_deepsp_full_rows": "a model's: how it takes full rows",
    "_deepsp_is_tiled": "a module's: it is inside of a tiled one",
    "_deepsp_only_the_loss": "a compiled model's: the hook that leaves out its outputs",
    "_deepsp_prepared": "a model's and its recurrent layers': their functions are replaced",
    "_deepsp_reads": "a start's in Inductor's graph: the buffers that it reads until its wait",
    "_deepsp_recurrence": "a recurrent layer's: what was compared in its first call",
    "_deepsp_running": "a module's: how a schedule runs it",
    "_deepsp_shards": "a module's: its sharded parameters",
    "_deepsp_tile": "a module's: the settings of tile",
    "_deepsp_updates": "a weight's: its version and number of updates",
    "_deepsp_warned": "a DeepSpeed engine's: a warning was given",
}
"""What is kept on modules and parameters of users, by attribute."""
