"""Every name of another library that deepsp imports or reaches for exists in the versions that it
is tested with. A renamed private one would otherwise fail late, or in silence."""

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepsp.integrations import door

ROOT = Path(__file__).parents[1] / "deepsp"
LIBRARIES = ("torch", "transformers", "trl", "accelerate", "diffusers", "peft", "deepspeed")
OF_LIGHTNING = ("pytorch_lightning", "lightning_fabric")

# What only other versions have, and what a class makes for its instances.
_ABSENT: set[str] = set()


def _files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def _is_foreign(module: str) -> bool:
    return module.split(".")[0] in (*LIBRARIES, *OF_LIGHTNING)


def _imported(tree: ast.AST) -> Iterator[tuple[str, str, str | None]]:
    """A local name, the module, and the name in it (None: the module itself)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _is_foreign(node.module):
            for alias in node.names:
                yield alias.asname or alias.name, node.module, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_foreign(alias.name):
                    local = alias.asname or alias.name.split(".")[0]
                    yield local, alias.name if alias.asname else local, None


def _resolved(module: str, name: str | None):
    found = importlib.import_module(module)
    if name is None:
        return found
    if not hasattr(found, name):
        return importlib.import_module(f"{module}.{name}")
    return getattr(found, name)


def _chains(tree: ast.AST, names: set[str]) -> Iterator[tuple[int, list[str]]]:
    """Attributes of attributes of imported names: torch._C._dispatch_keys -> its parts."""
    inside = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in inside:
            continue
        parts, line = [], node.lineno
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in names:
            yield line, [node.id, *reversed(parts)]


@functools.cache
def _attributes_of_a_graph() -> set[str]:
    """Of what Inductor's V.graph is."""
    from torch._inductor.graph import GraphLowering

    return set(re.findall(r"self\.(\w+)\b.* = ", inspect.getsource(GraphLowering)))


@pytest.mark.parametrize("path", _files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imported_names_exist(path):
    tree = ast.parse(path.read_text())
    imported = {}
    for local, module, name in _imported(tree):
        imported[local] = _resolved(module, name)
    missing = []
    for line, chain in _chains(tree, set(imported)):
        if chain[:2] == ["V", "graph"]:  # only there while Inductor runs
            if chain[2:] and chain[2] not in _attributes_of_a_graph():
                missing.append(f"{path.name}:{line}: {'.'.join(chain)}")
            continue
        value, text = imported[chain[0]], chain[0]
        for part in chain[1:]:
            text += f".{part}"
            if text.startswith("torch.ops.") or not hasattr(value, "__dict__"):
                break
            if not hasattr(value, part):
                missing.append(f"{path.name}:{line}: {text}")
                break
            value = getattr(value, part)
    assert not missing


@pytest.mark.parametrize("kind", ["GroupedAccelerator", "TrainerAccelerator", "_Prepared"])
def test_hooks_of_accelerate_exist(kind):
    from accelerate import Accelerator

    from deepsp.integrations import accelerate, grouped
    from deepsp.integrations.transformers import dealt_experts

    homes = (accelerate, grouped, dealt_experts)
    own = next(getattr(m, kind) for m in homes if hasattr(m, kind))
    assert issubclass(door.subclass(own, Accelerator), Accelerator)


def test_hooks_of_trainers_exist():
    import trl
    from accelerate.scheduler import AcceleratedScheduler
    from pytorch_lightning.strategies import DDPStrategy
    from transformers import Trainer

    from deepsp.integrations import accelerate, lightning
    from deepsp.integrations.transformers import trainer

    for cls in (Trainer, trl.SFTTrainer, trl.GRPOTrainer):
        door.subclass(trainer.SequenceParallel, cls)
    door.subclass(lightning._OfGroups, DDPStrategy)
    for name in ("step", "scheduler", "split_batches", "step_with_optimizer"):
        assert name in inspect.getsource(AcceleratedScheduler), name
    assert issubclass(accelerate._Scheduler, AcceleratedScheduler)


def test_a_missing_hook_is_an_error():
    class Own:
        def renamed(self): ...

        def sequence_added(self): ...

    with pytest.raises(RuntimeError, match=r"expected Path of pathlib to have \['renamed'\]"):
        door.subclass(Own, Path)


_GENERATES = {"_generate_and_score_completions", "_generate_single_turn"}
_HOOKS = {
    "DPOTrainer": {"_precompute_ref_logps"},
    "KTOTrainer": {"_precompute_ref_logps"},
    "RLOOTrainer": _GENERATES,
    "GRPOTrainer": {*_GENERATES, "_tool_call_loop"},
    "DistillationTrainer": {*_GENERATES, "_tool_call_loop"},
    "experimental.gkd.GKDTrainer": {"generate_on_policy_outputs"},
    "experimental.server_distillation.ServerDistillationTrainer": {
        *_GENERATES,
        "_tool_call_loop",
        "_get_teacher_token_logprobs_from_server",
    },
    "experimental.async_grpo.AsyncGRPOTrainer": {
        "sequence_has_loader",
        "get_train_dataloader",
        "_sync_weight",
        "_streaming_iter",
    },
}


@pytest.mark.parametrize("name", _HOOKS)
def test_hooks_of_trl_exist(name):
    from deepsp.integrations.transformers.trl import hooks

    module, _, cls = f"trl.{name}".rpartition(".")
    cls = getattr(importlib.import_module(module), cls)
    assert set(hooks(cls)) == _HOOKS[name]
    assert all(hasattr(cls, hook) or hook.startswith("sequence_") for hook in _HOOKS[name])


def test_vllm_in_trl():
    from trl.generation import vllm_generation
    from trl.trainer import distillation_trainer, grpo_trainer, rloo_trainer

    from deepsp.integrations.transformers.rollouts import Rollouts

    cls = vllm_generation.VLLMGeneration
    door.subclass(Rollouts, cls)
    for module in (distillation_trainer, grpo_trainer, rloo_trainer):
        assert module.VLLMGeneration is cls
    for name in ("gather_object", "broadcast_object_list", "VLLMClient"):
        assert hasattr(vllm_generation, name), name
    for name in (
        "accelerator.is_main_process",
        "accelerator.process_index",
        "vllm_client.generate",
    ):
        assert name in inspect.getsource(cls.generate), name
    assert "_forward_redirection(" in inspect.getsource(
        distillation_trainer.DistillationTrainer.compute_loss
    )
