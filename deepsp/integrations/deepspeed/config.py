"""Adds ``"compile": {"deepcompile": true, "passes": ["deepsp"]}`` to DeepSpeed's config.

``engine.compile()`` then passes Dynamo's graph to :func:`deepsp.compile.parallelize`, where
``"autosp"`` passes it to DeepSpeed's own pass; all else stays DeepSpeed's. Written for 0.19 (tried
with 0.19.8). Replaced in memory (:mod:`deepsp.patches`):

- ``deepspeed.runtime.config.CompileConfig``, by a subclass: the names that ``passes`` may hold are
  a closed ``Literal``, and there is no way to register one.
- ``DeepSpeedConfig.__init__``: refuses, before DeepSpeed reads the config, what can't work with
  this pass. It is the first place inside ``deepspeed.initialize`` that sees config, ``mpu`` and
  mesh; ``initialize`` itself may be bound elsewhere already (``from deepspeed import initialize``).
- ``DeepSpeedEngine.deepspeed_io``: checks that the data loader gives the ranks of one sequence the
  same samples; DeepSpeed's default sampler gives each rank its own.
- ``DeepSpeedEngine.uses_parallelization_pass_only``: returns True for this pass as for
  ``"autosp"``. Otherwise DeepSpeed would expect the graph to reduce gradients through the
  DeepCompile C++ library: it would load that, and skip its own reduction.
- ``DeepSpeedEngine.get_deepspeed_compile_backend``: gives ``engine.compile`` deepsp's backend.
- ``DeepSpeedEngine.forward``: warns once if ``engine.compile`` wasn't called.

Gradients: mesh and ``mpu`` are refused, so DeepSpeed's data-parallel group is the whole world, and
it averages gradients over D data ranks x P sequence ranks. So a rank's partial gradient is
multiplied by P (``gradients="mean"``): the average is then the mean over the D sequences of their
full gradients. (Full gradients on every rank, ``"sum"``, would give the same, but be sent twice.)
ZeRO 1 and 2 average over the same group, outside the graph.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Literal, get_args
from weakref import WeakKeyDictionary

import torch.distributed as dist

PASS = "deepsp"
_WARNED = "_deepsp_warned"  # an attribute of engines
_VERSION = (0, 19)

_OWN_OPTIONS = (
    "free_activation",
    "offload_activation",
    "offload_opt_states",
    "offload_parameters",
    "symmetric_memory",
)
"""Options in the config's section ``compile`` that only DeepSpeed's own ZeRO passes read."""

REPLACED = (
    "runtime.config.CompileConfig",
    "runtime.config.DeepSpeedConfig.__init__",
    "DeepSpeedEngine.deepspeed_io",
    "DeepSpeedEngine.uses_parallelization_pass_only",
    "DeepSpeedEngine.get_deepspeed_compile_backend",
    "DeepSpeedEngine.forward",
)

_originals: list[tuple[object, str, object]] = []
"""The owner, name and original value of each replaced attribute."""

_groups: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()
"""By default group, so that none outlives it: this rank's sequence groups by size."""


def install() -> None:
    """Makes DeepSpeed, which is imported already, accept the pass. A second call does nothing."""
    import deepspeed
    from deepspeed.runtime import config as ds_config

    config_class = ds_config.DeepSpeedConfig
    if getattr(config_class.__init__, "_deepsp", False):
        return
    if (deepspeed.__version_major__, deepspeed.__version_minor__) != _VERSION:
        _refuse_version(config_class, deepspeed.__version__)
        return
    _take_name(ds_config)
    _check_config(config_class)
    _take_engine(deepspeed.DeepSpeedEngine)


def uninstall() -> None:
    """Undoes :func:`install`."""
    while _originals:
        setattr(*_originals.pop())


def _replace(owner, name: str, new) -> None:
    _originals.append((owner, name, getattr(owner, name)))
    setattr(owner, name, new)


def _asks(section) -> bool:
    passes = section.get("passes") if isinstance(section, dict) else None
    return isinstance(passes, (list, tuple)) and PASS in passes


def _refuse_version(config_class: type, version: str) -> None:
    """Makes configs that name the pass raise, and leaves all others of this DeepSpeed alone."""
    original = config_class.__init__
    supported = ".".join(map(str, _VERSION))

    @functools.wraps(original)
    def __init__(self, config, *args, **kwargs):
        if isinstance(config, dict) and _asks(config.get("compile")):
            raise RuntimeError(
                f'expected DeepSpeed {supported} for compile.passes ["{PASS}"], got DeepSpeed '
                f"{version}, to which deepsp can't add a pass; install {supported}, or leave "
                "compile.deepcompile and compile.passes out and call "
                'engine.compile(backend="deepsp", compile_kwargs={"dynamic": True, "options": '
                '{"group": group, "gradients": "mean"}}), which needs nothing of DeepSpeed'
            )
        original(self, config, *args, **kwargs)

    __init__._deepsp = True
    _replace(config_class, "__init__", __init__)


def _take_name(ds_config) -> None:
    base = ds_config.CompileConfig
    (names,) = (
        inner
        for option in get_args(base.model_fields["passes"].annotation)
        for inner in get_args(option)
    )

    class CompileConfig(base):
        __doc__ = base.__doc__

        passes: list[Literal[(*get_args(names), PASS)]] | None = None

    CompileConfig.__qualname__ = base.__qualname__
    _replace(ds_config, "CompileConfig", CompileConfig)


def _check_config(config_class: type) -> None:
    original = config_class.__init__

    @functools.wraps(original)
    def __init__(self, config, mpu=None, mesh_device=None):
        # deepspeed.initialize has loaded the config by now.
        if isinstance(config, dict) and _asks(config.get("compile")):
            _check(config, mpu, mesh_device)
        original(self, config, mpu, mesh_device)

    __init__._deepsp = True
    _replace(config_class, "__init__", __init__)


def _check(config: dict, mpu, mesh_device) -> None:
    """Raises ValueError for what can't work with the pass, with advice."""
    section = config["compile"]
    passes = section["passes"]
    if len(passes) > 1:
        raise ValueError(
            f'expected compile.passes to be ["{PASS}"], got {list(passes)}; "{PASS}" runs with no '
            "other pass: remove the others"
        )
    deepcompile = section.get("deepcompile", False)
    if not deepcompile:
        raise ValueError(
            f"expected compile.deepcompile to be true, got {deepcompile!r}, with which DeepSpeed "
            f"doesn't run compile.passes {list(passes)} and every rank would compute the full "
            "sequence; set it to true"
        )
    for key in _OWN_OPTIONS:
        if section.get(key, False):
            raise ValueError(
                f"expected no compile.{key}, which only DeepSpeed's own ZeRO passes read, got "
                f'{section[key]!r}; remove it: with "{PASS}" it would do nothing'
            )
    _check_stage(config)
    _check_mesh(config, mpu, mesh_device)


def _check_stage(config: dict) -> None:
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if stage not in (0, 1, 2):
        raise ValueError(
            f'expected zero_optimization.stage to be 0, 1 or 2, since "{PASS}" needs full '
            f"parameters in the graph, got {stage!r}, whose gathers only DeepSpeed's own pass puts "
            "there, which needs GPUs and runs with no other; set it to 0, 1 or 2, or leave "
            "compile.deepcompile and compile.passes out and use deepsp in eager mode, with "
            'attn_implementation="deepsp" or deepsp.DistributedAttention'
        )


def _check_mesh(config: dict, mpu, mesh_device) -> None:
    size = config.get("sequence_parallel_size")
    advice = "set it to the number of ranks that share one sequence"
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(
            f'expected sequence_parallel_size to be an int >= 1, for compile.passes ["{PASS}"], '
            f"got {size!r}; {advice}"
        )
    world = dist.get_world_size() if dist.is_initialized() else None
    if world is not None and world % size:
        raise ValueError(
            f"expected sequence_parallel_size to divide the {world} ranks, got {size}; {advice}"
        )
    if mesh_device is not None:
        key = "data_parallel_size" if "data_parallel_size" in config else "mesh_param"
        mesh = config.get("data_parallel_size", "given to deepspeed.initialize")
        raise ValueError(
            f"expected no {key}, got {mesh!r}, a mesh, with which DeepSpeed averages gradients "
            "over the data ranks only, and the ranks of a sequence, with partial gradients, would "
            f"drift apart; leave it out: it follows from sequence_parallel_size, {size}"
        )
    if mpu is not None:
        raise ValueError(
            f"expected mpu to be None, got {type(mpu).__name__} (pipeline modules bring one), "
            f'which changes over which ranks gradients are averaged, and "{PASS}" needs all; leave '
            "it out: the sequence groups follow from sequence_parallel_size"
        )
    tensor = config.get("tensor_parallel")
    autotp = tensor.get("autotp_size", 0) if isinstance(tensor, dict) else 0
    if isinstance(autotp, int) and autotp > 1:
        raise ValueError(
            f"expected tensor_parallel.autotp_size to be 0 or 1, got {autotp}; remove it: "
            f'"{PASS}" would take tensor-parallel ranks for those of a sequence'
        )


def _take_engine(engine_class: type) -> None:
    replaced = (
        _deepspeed_io,
        _uses_parallelization_pass_only,
        _get_deepspeed_compile_backend,
        _forward,
    )
    for replacement in replaced:
        name = replacement.__name__.removeprefix("_")
        original = getattr(engine_class, name)
        _replace(engine_class, name, functools.wraps(original)(replacement(original)))


def _runs(engine) -> bool:
    return PASS in (engine._config.compile_config.passes or ())


def _size(engine) -> int:
    return engine._config._param_dict["sequence_parallel_size"]


def _deepspeed_io(original):
    signature = inspect.signature(original)

    def deepspeed_io(self, *args, **kwargs):
        arguments = signature.bind(self, *args, **kwargs).arguments
        size = _size(self) if _runs(self) else 1
        own_sampler = arguments.get("data_sampler") is not None
        if size > 1 and (not own_sampler or self.curriculum_learning_enabled()):
            raise ValueError(
                f"expected the same samples on the {size} ranks of a sequence "
                "(sequence_parallel_size), got training_data (or a call of engine.deepspeed_io), "
                "for which DeepSpeed's sampler gives every rank different samples; make the "
                "DataLoader yourself, with DistributedSampler(dataset, "
                f"num_replicas=dist.get_world_size() // {size}, rank=dist.get_rank() // {size})"
            )
        return original(self, *args, **kwargs)

    return deepspeed_io


def _forward(original):
    def forward(self, *args, **kwargs):
        if _runs(self) and not self.is_compiled and not getattr(self, _WARNED, False):
            setattr(self, _WARNED, True)
            warnings.warn(
                f'the config has "passes": ["{PASS}"], but engine.compile() wasn\'t called: every '
                "rank computes the full sequence; call engine.compile() before the first step",
                stacklevel=2,
            )
        return original(self, *args, **kwargs)

    return forward


def _uses_parallelization_pass_only(original):
    def uses_parallelization_pass_only(self):
        return _runs(self) or original(self)

    return uses_parallelization_pass_only


def _get_deepspeed_compile_backend(original):
    def get_deepspeed_compile_backend(self, backend, compile_kwargs, schedule):
        if not _runs(self):
            return original(self, backend, compile_kwargs, schedule)
        if schedule is not None:
            raise ValueError(
                f"engine.compile: expected schedule to be None, got {schedule!r}; leave it out, "
                f'since "{PASS}" runs once, on the full graph'
            )
        _check_average(self)
        options = compile_kwargs.get("options") or {}
        return _backend(sequence_group(_size(self)), backend, options), None

    return get_deepspeed_compile_backend


def _check_average(engine) -> None:
    """Checks the engine's groups. DeepSpeed's mesh and ``mpu`` are process-wide, so an earlier
    engine's may apply to this one."""
    ranks, world = dist.get_world_size(engine.seq_data_parallel_group), dist.get_world_size()
    if ranks != world or engine.sequence_parallel_size != 1:
        raise RuntimeError(
            f'expected DeepSpeed to average gradients over all {world} ranks, as "{PASS}" needs '
            f"it, got an average over {ranks} of the {world} ranks, times "
            f"{engine.sequence_parallel_size}, by a mesh or mpu that an engine before this one set "
            "for the process; run that engine in a process of its own"
        )


def sequence_group(size: int) -> dist.ProcessGroup:
    """This rank's group of ``size`` consecutive ranks, ``sequence_parallel_size``, over which the
    pass shards (as ``"autosp"`` would). All ranks call it, in the same order, as ``engine.compile``
    does; further calls return the same group. With data ranks,
    ``prepare_inputs(..., sharded_inputs=True)`` needs it."""
    groups = _groups.setdefault(dist.group.WORLD, {})
    if size not in groups:
        groups[size] = dist.new_subgroups(size)[0]
    return groups[size]


def _backend(group: dist.ProcessGroup, inner: str, options: dict):
    """The backend for ``torch.compile``: deepsp's, with the options that the config decides.

    ``options``: ``engine.compile``'s ``compile_kwargs["options"]``.
    """
    fixed = {"group": "sequence_parallel_size", "gradients": 'DeepSpeed\'s average ("mean")'}
    for key, why in fixed.items():
        if key in options:
            raise ValueError(
                f"engine.compile: expected no {key!r} in compile_kwargs['options'], since it "
                f"follows from {why}, got {options[key]!r}; leave it out"
            )

    from deepsp.compile.sharding import backend

    decided = {"inner": inner, "group": group, "gradients": "mean"}

    def deepsp(gm, example_inputs, *, options=None, **kwargs):
        return backend.deepsp(gm, example_inputs, options=decided | (options or {}), **kwargs)

    return deepsp
