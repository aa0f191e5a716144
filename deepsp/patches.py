"""Everything that deepsp changes in the process-wide state of other libraries.

(transformers' models are told by a call, :func:`deepsp.integrations.transformers.register`, which
isn't undone.) A change is made when somebody else imports the library that it is for, and undone by
:func:`uninstall`. Besides, ``torch.compile(backend="deepsp")`` clears, behind each compilation,
what Dynamo has noted of floats for it (``deepsp.compile.sharding.backend``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepsp._after_import import after_import, forget
from deepsp.compile.lowering import inductor_table, overlap
from deepsp.integrations.deepspeed import config


@dataclass(frozen=True)
class Patch:
    """One change.

    library: the module whose import it waits for; until then ``sys.meta_path`` has an entry.
    changes: what it replaces or adds to.
    reason: what for, and for whom it makes a difference.
    """

    library: str
    changes: tuple[str, ...]
    reason: str
    install: Callable[[], None]
    uninstall: Callable[[], None]


PATCHES = (
    Patch(
        "torch._inductor.config",
        ("torch._inductor.config.post_grad_custom_post_pass",),
        "Keeps the order start, compute, wait in graphs with deepsp's ops; others are left alone. "
        "Made at once: a config.patch around the first compilation would undo it later.",
        overlap.install,
        overlap.uninstall,
    ),
    Patch(
        "torch._inductor.decomposition",
        (
            "torch._inductor.decomposition.decompositions",
            "torch._inductor.decomposition.fast_random_decomps",
            "torch.compiler.config.cache_key_tag",
        ),
        "Entries for deepsp's ops, which Inductor then knows as asynchronous collectives. Its copy "
        "of the table is made anew, and compiled graphs are cached under deepsp's version.",
        inductor_table.install,
        inductor_table.uninstall,
    ),
    Patch(
        "deepspeed",
        tuple(f"deepspeed: {what}" for what in config.REPLACED),
        'Takes "passes": ["deepsp"] in DeepSpeed\'s config; others\' configs mean what they did.',
        config.install,
        config.uninstall,
    ),
)


def install() -> None:
    """Makes every change now, or when the library that it is for is imported."""
    for patch in PATCHES:
        after_import(patch.library, patch.install)


def uninstall() -> None:
    """Undoes :func:`install`: Inductor then calls the C++ kernels, as other backends do."""
    for patch in reversed(PATCHES):
        if not forget(patch.library):
            patch.uninstall()
