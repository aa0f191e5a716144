"""Checks on each call of a model that ``torch.compile(backend="deepsp")`` compiled that the pass
ran.

Where Dynamo skips a frame (a graph break in a loop or in a checkpoint, its limit of recompiles), it
runs the user's code as it is, in silence, and calls no backend: every rank would compute all
tokens."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator

import torch
from torch import fx
from torch._dynamo import eval_frame
from torch._dynamo.repro import after_dynamo

from deepsp.compile.sharding.report import CannotShard

_BREAKS = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
"""The logger of TORCH_LOGS=graph_breaks: the only place where Dynamo gives a skipped frame's break
and its line."""

_BACKEND = "deepsp.compile.sharding.backend.deepsp"
_CONTEXT = "backend_ctx_ctor"
"""The attribute of a backend by which Dynamo makes the context of each call."""

_SKIPPED = "Dynamo skipped its code, so every rank would compute all tokens"
_LIMIT = "a limit of recompiles, say; TORCH_LOGS=dynamo tells"
_TORCH = os.path.dirname(torch.__file__)
_ran = threading.local()


def note_run() -> None:
    """Called by each compiled graph when it runs."""
    _ran.count = getattr(_ran, "count", 0) + 1


class Watch:
    """Makes the contexts in which Dynamo runs a compiled function, one for each call."""

    def __init__(self):
        self.has_run = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """
        Raises:
            CannotShard: no graph of the pass ran in this call. Names the graph break and its line.
        """
        before, error = getattr(_ran, "count", 0), sys.exc_info()[1]
        with contextlib.nullcontext() if self.has_run else _graph_breaks():
            yield
            reason = skipped()
        # Dynamo doesn't tell contexts about an error that is on its way out of the call.
        failed = sys.exc_info()[1] is not error
        self.has_run |= getattr(_ran, "count", 0) > before
        if getattr(_ran, "count", 0) == before and not failed and not _is_eager():
            raise CannotShard(reason or f"{_SKIPPED}, and gave no reason ({_LIMIT})")


def _is_eager() -> bool:
    """Whether the user has turned compiled code off."""
    return eval_frame._stance.stance == "force_eager"


@contextlib.contextmanager
def _graph_breaks() -> Iterator[None]:
    """Collects the texts that TORCH_LOGS=graph_breaks would print, for :func:`skipped`."""
    collector = _Collector()
    level, propagates = _BREAKS.level, _BREAKS.propagate
    if not _BREAKS.isEnabledFor(logging.DEBUG):  # else the user reads them, too
        _BREAKS.setLevel(logging.DEBUG)
        _BREAKS.propagate = False
    _BREAKS.addHandler(collector)
    try:
        yield
    finally:
        _BREAKS.removeHandler(collector)
        _BREAKS.setLevel(level)
        _BREAKS.propagate = propagates


class _Collector(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def skipped() -> str | None:
    """Why Dynamo skipped the code of the current call, if it did: the graph break, the user's line
    and what to do."""
    texts = [x for h in _BREAKS.handlers if isinstance(h, _Collector) for x in h.texts]
    text = next((x for x in texts if "Skipping the" in x), None)
    if text is None:
        return None
    reason = re.search(r"Explanation: (.*)", text)
    frames = re.findall(r'File "(.*)", line (\d+), in (.*)\n\s*(.*)', text)
    frames = [x for x in frames if not x[0].startswith(_TORCH)]
    place = "\n  {}:{}, in {}: {}\n".format(*frames[-1]) if frames else ". "
    return (
        f"{_SKIPPED}: {reason[1] if reason else 'a graph break'}{place}"
        "Remove the break (a print, .item(), a hook); fullgraph=True stops there, too. FSDP2: call "
        "fully_shard on the whole model, before or after torch.compile, and not on modules within "
        "it, whose hooks break the graph; deepsp.shard_parameters shards module by module"
    )


def break_of(gm: fx.GraphModule) -> str:
    """Why Dynamo cut the user's code here."""
    if text := skipped():
        return f". {text}"
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return (
            "; torch.compile(..., fullgraph=True) says where it isn't. Code that was compiled "
            "with graph breaks before, in this process, keeps them: call torch._dynamo.reset()"
        )
    frame = reason.user_stack[-1] if reason.user_stack else None
    place = f"\n  {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}" if frame else ""
    return f". The graph ends with a break: {reason.reason.splitlines()[0]}{place}"


def install() -> None:
    """Makes Dynamo watch calls of functions whose backend is deepsp's."""

    def constructor(wrapper):
        backend = wrapper._torchdynamo_orig_backend
        backend = getattr(backend, "compiler_fn", backend)  # in torch.compile's own wrapper
        name = f"{getattr(backend, '__module__', '')}.{getattr(backend, '__qualname__', '')}"
        return Watch() if name == _BACKEND else contextlib.nullcontext

    setattr(after_dynamo.WrapBackendDebug, _CONTEXT, property(constructor))


def uninstall() -> None:
    """Undoes :func:`install`: functions that are compiled later aren't watched."""
    delattr(after_dynamo.WrapBackendDebug, _CONTEXT)


sys.modules["deepsp.patches"].finish(__name__)  # which imports this module
