"""What deepsp changes in other libraries stands in one ledger, and is taken out again."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harness import on_ranks
from torch._inductor.utils import run_and_get_code

import deepsp
from deepsp import patches

_STATE = """
import sys, types
import torch
import torch._inductor.config as config
import torch._inductor.decomposition as table
import torch._functorch.config
import torch.nn.modules.module as modules

def functions(module):
    return {k: v for k, v in vars(module).items() if isinstance(v, types.FunctionType)}

def state():
    found = {
        "finders": list(sys.meta_path),
        "inductor": {k: config._config[k].user_override for k in config._config},
        "functorch": {
            k: v.user_override for k, v in torch._functorch.config._config.items()
        },
        "tag": torch.compiler.config.cache_key_tag,
        "table": dict(table.decompositions),
        "copy": dict(table.select_decomp_table()),
        "torch": dict(vars(torch)),
        "tensor": dict(vars(torch.Tensor)),
        "module": dict(vars(torch.nn.Module)),
        "hooks": [list(v or ()) for k, v in vars(modules).items() if k.startswith("_global_")],
    }
    for library in LIBRARIES:
        for name, x in list(vars(library).items()):
            if getattr(x, "__module__", "").startswith("deepspeed"):
                found[name] = dict(vars(x)) if isinstance(x, type) else x
        found[library] = functions(library)
    return found
"""

_INDUCTOR = (
    _STATE.replace("LIBRARIES", "()")
    + """
before = state()
import deepsp
from deepsp import patches
installed = state()
assert {k for k in before if before[k] != installed[k]} <= {
    "inductor", "finders", "tag", "table", "copy", "torch"}
assert {k for k in installed["torch"] if before["torch"].get(k) is not installed["torch"][k]} <= {
    "_dynamo"}, "something of torch is replaced"
patches.uninstall()
after = state()
del before["torch"], after["torch"]
for k in before:
    assert before[k] == after[k], k
patches.install()
now = state()
assert all(now[k] == installed[k] for k in ("table", "copy", "tag", "inductor"))
print("as before")
"""
)

_ALONE = """
from deepsp.compile.lowering import overlap
import torch._inductor.config as config
assert isinstance(config.post_grad_custom_post_pass, overlap.CustomGraphPass)
print("as before")
"""

_DEEPSPEED = (
    _STATE.replace("LIBRARIES", "(ds_config, engine)")
    + """
import deepspeed
import deepspeed.runtime.config as ds_config
import deepspeed.runtime.engine as engine
before = state()
import deepsp
from deepsp import patches
assert any(before[k] != v for k, v in state().items() if k in ("DeepSpeedEngine", "CompileConfig"))
patches.uninstall()
after = state()
for k in before:
    if k != "torch":
        assert before[k] == after[k], k
print("as before")
"""
)

_TRANSFORMERS = """
from transformers import PreTrainedModel
import deepsp
from deepsp import patches
from deepsp.integrations.transformers import register
before = dict(vars(PreTrainedModel))
register()
registered = dict(vars(PreTrainedModel))
changed = {k for k in registered if before.get(k) is not registered[k]}
listed = {what for patch in patches.PATCHES for what in patch.changes}
assert changed == {"__call__", "get_correct_attn_implementation"}
assert {f"transformers: PreTrainedModel.{k}" for k in changed} <= listed
register(name="again")
assert registered == vars(PreTrainedModel)
patches.uninstall()
assert before == vars(PreTrainedModel)
patches.install()
assert {k for k, v in vars(PreTrainedModel).items() if before.get(k) is not v} == changed
patches.uninstall()
assert before == vars(PreTrainedModel)

import transformers.models.lfm2.modeling_lfm2 as lfm2
from deepsp.integrations.transformers import mixers
before = dict(vars(lfm2))
config = lfm2.Lfm2Config(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, layer_types=["conv"],
)
model = lfm2.Lfm2ForCausalLM(config)
for _ in range(2):
    assert mixers.prepare(model) and mixers.prepare(model)
    changed = {k for k, v in vars(lfm2).items() if before.get(k) is not v}
    assert changed == {"causal_conv1d_fn", "create_recurrent_attention_mask"}
    assert {f"transformers: {k} in modeling files" for k in changed} <= listed
    patches.uninstall()
    assert before == vars(lfm2)
print("as before")
"""


@pytest.mark.parametrize(
    "script, library",
    [
        (_INDUCTOR, "torch"),
        (_ALONE, "torch"),
        (_DEEPSPEED, "deepspeed"),
        (_TRANSFORMERS, "transformers"),
    ],
    ids=["torch", "imported by us", "deepspeed", "transformers"],
)
def test_libraries_are_as_before(script, library):
    pytest.importorskip(library)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and "as before" in done.stdout, done.stderr[-3000:]


def _elsewhere():
    @torch.compile
    def theirs(x):
        return (functional.all_gather_tensor(x.sin(), 0, dist.group.WORLD) @ x).relu()

    def kernels():
        torch._dynamo.reset()
        with torch._inductor.config.patch(force_disable_caches=True):
            _, (code,) = run_and_get_code(theirs, torch.ones(8, 8))
        return [line.strip() for line in code.splitlines() if "_c10d" in line or "extern" in line]

    ours = kernels()
    patches.uninstall()
    try:
        assert ours == kernels() and any("all_gather" in line for line in ours)
    finally:
        patches.install()


def test_graphs_without_our_ops_are_left_alone():
    on_ranks(2, _elsewhere)


_PACKAGE = Path(deepsp.__file__).parent
_CHANGES = {
    "add",
    "append",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "remove",
    "setdefault",
    "update",
}


def _changed(module: str, tree: ast.Module) -> Iterator[str]:
    """What belongs to a module, or is imported from one of deepsp's, and a function changes."""
    names = {}
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for x in ast.walk(node):
                if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store):
                    names[x.id] = f"{module}.{x.id}"
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("deepsp."):
            source = node.module.removeprefix("deepsp.")
            names |= {a.asname or a.name: f"{source}.{a.name}" for a in node.names}
    for function in (x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                yield from (names[n] for n in node.names)
            value = node
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                value = node.func.value if node.func.attr in _CHANGES else None
            elif isinstance(node, (ast.Subscript, ast.Attribute)):
                value = None if isinstance(node.ctx, ast.Load) else node.value
            if value is not node and isinstance(value, ast.Name) and value.id in names:
                yield names[value.id]


def test_ledger_of_state():
    process, objects = set(), set()
    for path in _PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(_PACKAGE).with_suffix("").parts)
        process |= set(_changed(module, ast.parse(path.read_text())))
        if module != "patches":
            objects |= set(re.findall(r'"(_deepsp_[a-z_]+)"', path.read_text()))
    assert process == set(patches.STATE), process ^ set(patches.STATE)
    assert objects == set(patches.ATTRIBUTES), objects ^ set(patches.ATTRIBUTES)
