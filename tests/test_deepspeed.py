"""DeepSpeed itself, with the pass in its config and with the attention alone, against one process
that has neither. On gloo ranks that no other test uses: DeepSpeed changes its process for good."""

import copy
import functools
import os
import subprocess
import sys
import warnings

import harness
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from under_deepspeed import DIM, HEADS, VOCAB, draw_batch, launch_deepspeed

import deepsp
from deepsp.integrations.deepspeed import sequence_group

LR, STEPS = 0.5, 5
ON = {"deepcompile": True, "passes": ["deepsp"]}
# Relative to the largest change that training made to a parameter: float32, five steps.
TOLERANCE = 1e-4

on_ranks = functools.partial(harness.on_ranks, apart="deepspeed")


@pytest.fixture(scope="module", autouse=True)
def ended():
    yield
    harness.stop("deepspeed")


def config_of(**changes):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "sequence_parallel_size": 2,
        "compile": ON,
    } | changes
    return {key: value for key, value in config.items() if value is not None}


def engine_of(model, **changes):
    parameters = list(model.parameters())
    return launch_deepspeed().initialize(
        model=model, model_parameters=parameters, config=config_of(**changes)
    )[0]


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=DIM,
            intermediate_size=2 * DIM,
            num_hidden_layers=1,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS // 2,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )


def train_one_process(model, loss_of, sequences=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        each = [loss_of(model, *draw_batch(step, s)) for s in range(sequences)]
        losses.append([loss.item() for loss in each])
        (sum(each) / sequences).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def equal_to_one_process(start, reference, model):
    """All parameters: near the reference's, and the same on every rank."""
    for (name, p), q, before in zip(
        model.named_parameters(), reference.parameters(), start.parameters(), strict=True
    ):
        change = (q - before).abs().max().item()
        assert change > 0, name
        torch.testing.assert_close(
            p, q, rtol=0, atol=TOLERANCE * change, msg=lambda m, n=name: f"{n}: {m}"
        )
        first = p.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, p), f"{name} differs between ranks"


def own_loss(model, ids, labels):
    return model(input_ids=ids, labels=labels).loss


def _trains(stage, config, sharded_inputs=False):
    start = llama()
    model, reference = copy.deepcopy(start), copy.deepcopy(start)
    expected = train_one_process(reference, own_loss, dist.get_world_size() // 2)
    mine = dist.get_rank() // 2  # which sequence
    engine = engine_of(model, zero_optimization={"stage": stage}, **config)
    if "compile" in config:
        options = {"gradients": "mean", "inner": "eager"}
        engine.compile(backend="deepsp", compile_kwargs={"options": options})
    else:
        # Where Python's floats become symbols, too, Dynamo traces twice: slower.
        engine.compile(backend="aot_eager", compile_kwargs={"dynamic": True} if not stage else {})
    for step in range(STEPS):
        ids, labels = draw_batch(step, mine)
        inputs = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
        given = {}
        if sharded_inputs:
            given = {"sharded_inputs": True, "group": sequence_group(2)}
            part = dist.get_rank() % 2
            inputs = {name: x.tensor_split(2, 1)[part].clone() for name, x in inputs.items()}
        loss = engine(**deepsp.prepare_inputs(inputs, **given)).loss
        assert abs(loss.item() - expected[step][mine]) < 1e-5, step
        engine.backward(loss)
        engine.step()
    equal_to_one_process(start, reference, model)


# Stage 1 is in test_data_and_sequence_parallel.
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.nightly), 2])
def test_trains_like_one_process(stage):
    on_ranks(2, _trains, stage, {})


def test_without_the_config():
    """As the message for other versions of DeepSpeed says: its own torch.compile, our backend."""
    on_ranks(2, _trains, 1, {"compile": None, "sequence_parallel_size": None})


def test_data_and_sequence_parallel():
    on_ranks(4, _trains, 1, {}, True)


class Attending(nn.Module):
    """One layer of attention, by any function of q, k and v [B, S, H, D]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, ids, attend):
        x = self.embed(ids)
        qkv = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).split(HEADS, 2)
        return self.head(x + self.out(attend(*qkv).flatten(2)))


def _attention_alone(stage):
    start = Attending()
    model, reference = copy.deepcopy(start), copy.deepcopy(start)

    def one(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def loss_of(model, ids, labels):
        return F.cross_entropy(model(ids, one)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    expected = train_one_process(reference, loss_of)
    engine = engine_of(
        model, zero_optimization={"stage": stage}, compile=None, sequence_parallel_size=None
    )
    attention = deepsp.DistributedAttention()
    for step in range(STEPS):
        ids, labels = draw_batch(step)
        mine, lens = deepsp.shard_batch({"input_ids": ids, "labels": labels})
        attend = functools.partial(attention, is_causal=True, seq_lens=lens)
        logits = engine(mine["input_ids"], attend)
        loss = deepsp.cross_entropy(logits, mine["shift_labels"], average_gradients=True)
        assert abs(loss.item() - expected[step][0]) < 1e-5, step
        engine.backward(loss)
        engine.step()
    equal_to_one_process(start, reference, model)


@pytest.mark.parametrize("stage", [0, 2])
def test_attention_alone(stage):
    on_ranks(2, _attention_alone, stage)


class Mpu:
    """As little of one as DeepSpeed looks at before the pass refuses it."""

    def get_data_parallel_world_size(self):
        return 1


# What is changed in the config; what is given to deepspeed.initialize; what the message says.
REFUSED = {
    "stage 3": (
        {"zero_optimization": {"stage": 3}},
        {},
        "to be 0, 1 or 2, .* got 3, .*GPUs.*eager mode",
    ),
    "two passes": (
        {"compile": ON | {"passes": ["autosp", "deepsp"]}},
        {},
        r"passes to be \[\"deepsp\"\], got \['autosp', 'deepsp'\];",
    ),
    "deepcompile off": (
        {"compile": ON | {"deepcompile": False}},
        {},
        "deepcompile to be true, got False.*set it",
    ),
    "deepcompile missing": (
        {"compile": {"passes": ["deepsp"]}},
        {},
        "deepcompile to be true, got False.*set it",
    ),
    "another pass's option": (
        {"compile": ON | {"offload_activation": True}},
        {},
        "no compile.offload_activation, .* got True; remove it",
    ),
    "size missing": (
        {"sequence_parallel_size": None},
        {},
        "parallel_size to be an int >= 1, .* got None",
    ),
    "size 3": ({"sequence_parallel_size": 3}, {}, "to divide the 2 ranks, got 3"),
    "size 0": ({"sequence_parallel_size": 0}, {}, "to be an int >= 1, .* got 0"),
    "size in words": ({"sequence_parallel_size": "two"}, {}, "to be an int >= 1, .* got 'two'"),
    "a mesh in the config": (
        {"data_parallel_size": 1},
        {},
        "no data_parallel_size, got 1, .*follows",
    ),
    "a mesh": ({}, {"mesh_param": (1, 2)}, "no mesh_param, got .*follows"),
    "an mpu": ({}, {"mpu": Mpu()}, "mpu to be None, got Mpu .*leave it out"),
    "tensor parallelism": (
        {"tensor_parallel": {"autotp_size": 2}},
        {},
        "autotp_size to be 0 or 1, got 2; remove it",
    ),
    "training_data": (
        {},
        {"training_data": torch.utils.data.TensorDataset(torch.ones(4, 2))},
        "training_data.*num_replicas",
    ),
}


def _refused(change, given, message):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=message):
        launch_deepspeed().initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config=config_of(**change),
            **given,
        )


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_initialize(what):
    on_ranks(2, _refused, *REFUSED[what])


NOT_COMPILED = {
    "schedule": ({"schedule": [(0, ["z1"])]}, "schedule to be None, got .*leave it out"),
    "group": ({"compile_kwargs": {"options": {"group": None}}}, "'group'.*sequence_parallel_size"),
    "gradients": ({"compile_kwargs": {"options": {"gradients": "sum"}}}, "'gradients'.*average"),
}


def _not_compiled(given, message):
    with pytest.raises(ValueError, match=message):
        engine_of(nn.Linear(2, 2)).compile(**given)


@pytest.mark.parametrize("what", NOT_COMPILED)
def test_refused_by_compile(what):
    on_ranks(2, _not_compiled, *NOT_COMPILED[what])


def _never_compiled():
    engine = engine_of(nn.Linear(2, 2))
    with pytest.warns(UserWarning, match=r"engine.compile\(\) wasn't called: every rank computes"):
        engine(torch.ones(1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine(torch.ones(1, 2))  # says so once


def test_an_engine_that_is_never_compiled():
    on_ranks(2, _never_compiled)


def _mesh_of_another_engine():
    deepspeed = launch_deepspeed()
    try:
        engine_of(nn.Linear(2, 2), compile=None, data_parallel_size=1)
        with pytest.raises(RuntimeError, match=r"over 1 of the 2 ranks.*process of its own"):
            engine_of(nn.Linear(2, 2)).compile()
    finally:
        deepspeed.utils.groups.mesh_device = None


def test_mesh_of_another_engine():
    on_ranks(2, _mesh_of_another_engine)


def _others_are_left_alone():
    """Without the pass, none of what it refuses is refused."""
    data = torch.utils.data.TensorDataset(torch.ones(4, 2))
    model = nn.Linear(2, 2)
    engine, _, loader, _ = launch_deepspeed().initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=config_of(compile=None),
        training_data=data,
    )
    assert loader is not None and not engine.uses_parallelization_pass_only()
    assert engine_of(nn.Linear(2, 2), compile=ON | {"passes": ["autosp"]}).compile_autosp()
    with pytest.raises(ValueError, match="deepsq"):
        engine_of(nn.Linear(2, 2), compile=ON | {"passes": ["deepsq"]})


def test_others_are_left_alone():
    on_ranks(2, _others_are_left_alone)


# {first} and {second}: in either order, the name is known, and nothing else is imported.
ORDER = """
import {first}, sys
assert "{first}" == "deepspeed" or "deepspeed" not in sys.modules
import {second}
from deepspeed.runtime.config import CompileConfig
assert CompileConfig(deepcompile=True, passes=["deepsp"]).passes == ["deepsp"]
"""

OTHER_VERSION = """
import deepspeed, deepspeed.runtime.config as c, pytest
deepspeed.__version__, deepspeed.__version_minor__ = "0.20.0", 20
original = c.DeepSpeedConfig.__init__
c.DeepSpeedConfig.__init__ = lambda self, config, mpu=None, mesh_device=None: None
import deepsp
from deepsp.integrations.deepspeed import sequence_group
c.DeepSpeedConfig({"compile": {"passes": ["autosp"]}})
c.DeepSpeedConfig({})
with pytest.raises(RuntimeError, match="DeepSpeed 0.19 .*, got DeepSpeed 0.20.0.*backend="):
    c.DeepSpeedConfig({"compile": {"passes": ["deepsp"]}})
"""


@pytest.mark.parametrize(
    "code",
    [
        ORDER.format(first="deepsp", second="deepspeed"),
        ORDER.format(first="deepspeed", second="deepsp"),
        OTHER_VERSION,
    ],
    ids=["deepsp first", "deepspeed first", "another version"],
)
def test_in_a_process_of_its_own(code):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
