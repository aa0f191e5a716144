"""The functions of transformers' modeling files that convolve or run a recurrence, on a sharded
sequence: a convolution gets the tokens before this rank's own, and a recurrence runs by
:class:`DistributedRecurrence`, around the original function, so that kernels which transformers
takes from fla, mamba-ssm or causal-conv1d are still used."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from deepsp.ranks.groups import Member
from deepsp.sequence.recurrence.convolution import causal_convolution
from deepsp.sequence.recurrence.module import DistributedRecurrence


class Sharded:
    """How the tokens of a layer are sharded.

    Args:
        layer: its name, for errors.
        member: this rank, and the group.
        lens: the number of tokens of each rank.
        documents: [N, 2], or None if each row is one.
        state: as in :class:`DistributedRecurrence`. None: by heads, if there is one for each rank.
        cache: what is found out and compared in a first call, kept for later ones.
    """

    def __init__(
        self,
        layer: str,
        member: Member,
        lens: Sequence[int],
        documents: Tensor | None = None,
        state: str | None = None,
        cache: dict[str, Any] | None = None,
    ):
        self.layer, self.member, self.lens, self.documents = layer, member, lens, documents
        self.state = state
        self.cache = {} if cache is None else cache

    def recurrence(self, heads: int, function: Callable, **how) -> Callable:
        """The layer's recurrence, with so many heads; ``how``: further arguments of
        :class:`DistributedRecurrence`."""
        function.__name__ = f"the recurrence of {self.layer}"
        state = self.state or ("heads" if heads >= self.member[1] else "pass")
        module = DistributedRecurrence(function, self.member, state=state, **how)
        module._compared = self.cache.setdefault("compared", False)
        module._state_shapes = self.cache.setdefault("state_shapes", {})
        self.cache["compared"] = True
        return functools.partial(module, documents=self.documents, seq_lens=self.lens)


def _convolution(original: Callable, sharded: Sharded) -> Callable:
    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **_):
        return causal_convolution(
            lambda x: original(x, weight, bias, activation=activation),
            hidden_states,
            weight.size(-1),
            sharded.member,
            sharded.lens,
            sharded.documents,
        )

    return causal_conv1d_fn


def _knows_borders(original: Callable) -> bool:
    """Whether a kernel computes the function, and knows packed documents: torch's own doesn't."""
    cells = inspect.getclosurevars(original).nonlocals if inspect.isfunction(original) else {}
    kernel = cells.get("implementation") if cells.get("is_new_implementation") else None
    return kernel is not None and "cu_seqlens" in inspect.signature(kernel).parameters


def _delta_rule(original: Callable, sharded: Sharded) -> Callable:
    def chunk_gated_delta_rule(
        query, key, value, g, beta, use_qk_l2norm_in_kernel=False, chunk_size=None, **_
    ):
        more = {} if chunk_size is None else {"chunk_size": chunk_size}

        def run(
            query,
            key,
            value,
            g,
            beta,
            initial_state=None,
            output_final_state=False,
            cu_seqlens=None,
        ):
            borders = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
            return original(
                query,
                key,
                value,
                g=g,
                beta=beta,
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                **more,
                **borders,
            )

        if not _knows_borders(original):
            declared = inspect.signature(run)
            parameters = [p for p in declared.parameters.values() if p.name != "cu_seqlens"]
            run.__signature__ = declared.replace(parameters=parameters)
        call = sharded.recurrence(value.size(2), run)
        return call(query=query, key=key, value=value, g=g, beta=beta), None

    return chunk_gated_delta_rule


def _state_space(original: Callable, sharded: Sharded) -> Callable:
    def mamba2_chunk_scan(
        hidden_states,
        dt,
        A,
        B,
        C,
        chunk_size,
        D=None,
        dt_bias=None,
        dt_softplus=False,
        dt_limit=(0.0, float("inf")),
        **_,
    ):
        how = {"chunk_size": chunk_size, "dt_softplus": dt_softplus, "dt_limit": dt_limit}

        def run(x, dt, B, C, A, D, dt_bias, initial_state=None, output_final_state=False):
            result = original(
                x,
                dt,
                A,
                B,
                C,
                D=D,
                dt_bias=dt_bias,
                initial_states=None if initial_state is None else initial_state.mT.contiguous(),
                return_final_states=output_final_state,
                **how,
            )
            return (result[0], result[1].mT) if output_final_state else result

        def decay(dt, A, dt_bias, **_):
            dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
            dt = F.softplus(dt) if dt_softplus else dt
            return dt.clamp(*dt_limit) * A

        def read(x, C, **_):
            return C.repeat_interleave(x.size(2) // C.size(2), 2)

        call = sharded.recurrence(
            hidden_states.size(2),
            run,
            value="x",
            per_head=("A", "D", "dt_bias"),
            decay=decay,
            read=read,
        )
        return call(x=hidden_states, dt=dt, B=B, C=C, A=A, D=D, dt_bias=dt_bias)

    return mamba2_chunk_scan


def _selective_scan(original: Callable, sharded: Sharded) -> Callable:
    def mamba_selective_scan(
        hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, return_last_state=False, **how
    ):
        """Each channel is a head, and all of them read one B and C."""

        def run(x, dt, B, C, z, A, D, delta_bias):
            x, dt, B, C, z = (
                None if t is None else t.transpose(1, 2).contiguous()
                for t in (x.squeeze(3), dt, B.squeeze(2), C.squeeze(2), z)
            )
            y = original(x, dt, A, B, C, D=D, z=z, delta_bias=delta_bias, **how)
            y = y[0] if isinstance(y, tuple) else y
            return y.transpose(1, 2).unsqueeze(3)

        call = sharded.recurrence(
            hidden_states.size(1), run, value="x", per_head=("A", "D", "delta_bias")
        )
        out = call(
            x=hidden_states.transpose(1, 2).unsqueeze(3),
            dt=dt.transpose(1, 2),
            B=B.transpose(1, 2).unsqueeze(2),
            C=C.transpose(1, 2).unsqueeze(2),
            z=None if z is None else z.transpose(1, 2),
            A=A,
            D=D,
            delta_bias=delta_bias,
        )
        out = out.squeeze(3).transpose(1, 2)
        return (out, None) if return_last_state else out

    return mamba_selective_scan


def unfused(original: Callable, sharded: Sharded) -> Callable:
    """Says that there is no fused kernel: the mixer then calls the functions above."""
    return lambda *_, **__: None


FUNCTIONS: dict[str, Callable[[Callable, Sharded], Callable]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba_selective_scan": _selective_scan,
    "mamba2_split_conv1d_scan_combined": unfused,
    "mamba_inner_fn": unfused,
}
"""By name of a function, what makes one from it that takes its place."""


# ------------------------------------------------------------------- one op for Dynamo

captured: dict[Callable, str] = {}
"""The functions that Dynamo captures as one op, and their names."""


def capture(function: Callable, name: str) -> None:
    """Makes a function of a modeling file one op in what Dynamo captures from now on. Compilers
    other than deepsp's trace into it later, as AOTAutograd does."""
    import torch._dynamo

    torch._dynamo.allow_in_graph(function)
    captured[function] = name


def install() -> None:
    """Does nothing: the compile pass calls :func:`capture` for a model that it meets."""


def uninstall() -> None:
    """Lets Dynamo trace into the functions again."""
    from torch._dynamo import trace_rules

    for function in captured:
        trace_rules._allowed_callable_ids.remove(id(function))
    captured.clear()
