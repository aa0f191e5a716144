"""Every public callable says what it takes and what it raises, in sections that Sphinx reads."""

import inspect
import re
import types

import pytest

import deepsp
import deepsp.compile
import deepsp.integrations.deepspeed
import deepsp.integrations.lightning
import deepsp.integrations.transformers
import deepsp.schedule

SECTIONS = ("Args", "Attributes", "Returns", "Raises")
IN_THE_TEXT = {  # what their arguments are
    "deepsp.full_state_dict",
    "deepsp.load_full_state_dict",
    "deepsp.full_parameters",
    "deepsp.integrations.deepspeed.sequence_group",
    "deepsp.sequence.attention.AttentionPlan",
}


def _of(module, names):
    return {f"{module.__name__}.{name}": getattr(module, name) for name in names}


def _public():
    found = {}
    others = (deepsp.integrations.deepspeed, deepsp.integrations.transformers)
    rooms = (deepsp.sequence.attention, deepsp.memory.planning, deepsp.ranks)
    for module in (deepsp, deepsp.schedule, *rooms, *others):
        found |= _of(module, module.__all__)
    found |= _of(deepsp.compile, deepsp.compile._HOMES)
    found |= _of(deepsp.integrations.lightning, ["sequence_parallel"])
    for module in (deepsp.collectives, deepsp.ops, deepsp.schedule.ready, deepsp.ranks.buffers):
        own = inspect.getmembers(module, lambda x: inspect.isfunction(x) or inspect.isclass(x))
        found |= _of(module, [n for n, f in own if f.__module__ == module.__name__ and n[0] != "_"])
    for name, thing in list(found.items()):
        if inspect.isclass(thing):
            methods = {n: m for n, m in vars(thing).items() if n[0] != "_"}
            functions = {n: getattr(m, "__func__", m) for n, m in methods.items()}
            found |= {f"{name}.{n}": m for n, m in functions.items() if inspect.isfunction(m)}
    return {name: thing for name, thing in found.items() if callable(thing)}


PUBLIC = _public()


@pytest.mark.parametrize("name", PUBLIC)
def test_public(name):
    thing, doc = PUBLIC[name], inspect.getdoc(PUBLIC[name])
    assert doc, "no docstring"
    documented = re.findall(r"^ {4}(\w+): ", doc, re.MULTILINE)
    for parameter in () if name in IN_THE_TEXT else inspect.signature(thing).parameters:
        assert parameter in ("self", "cls", *documented), f"{parameter} isn't in Args"
    body = thing.__init__ if inspect.isclass(thing) else thing
    written = isinstance(body, types.FunctionType) and body.__code__.co_filename != "<string>"
    if written and "raise ValueError" in inspect.getsource(body):
        assert "Raises:" in doc, "it raises, and doesn't say so"
    for section in re.findall(r"^(\w+)(?: \(.*\))?:$", doc, re.MULTILINE):
        assert section in SECTIONS, f"{section} isn't a section"
