"""What a Trainer over sharded sequences refuses before its first step."""

from __future__ import annotations

from accelerate import ParallelismConfig

from deepsp.integrations.transformers.experts import refuse_dealt
from deepsp.integrations.transformers.mixers import mixers_in


class Refusals:
    """The part of :func:`deepsp.integrations.transformers.sequence_parallel` that checks a
    trainer's arguments, each against the others."""

    def _check_arguments(self) -> None:
        if getattr(self.args, "train_sampling_strategy", "") == "batch_rebalance":
            raise ValueError(
                "expected a train_sampling_strategy other than 'batch_rebalance', which deals "
                "batches to processes instead of groups that share a sequence; use "
                "'group_by_length'"
            )
        if getattr(self.args, "predict_with_generate", False):
            raise ValueError(
                "expected predict_with_generate=False: a cache would hold one rank's tokens only; "
                "generate after training, on a model with attn_implementation='sdpa'"
            )
        if self.args.eval_use_gather_object:
            raise ValueError(
                "expected eval_use_gather_object=False, got True; only tensors are gathered once "
                "for each group; leave it out"
            )
        if self.args.neftune_noise_alpha:
            raise ValueError(
                "expected neftune_noise_alpha=None, since the noise would be that of a rank's "
                f"length, which is too much, got {self.args.neftune_noise_alpha}; leave it out"
            )
        if self._deal_images and (self._compiled is not None or self._shard_at == "inputs"):
            raise ValueError(
                "expected deal_images with a vision-language model and without compiled, got "
                f"{type(self._base_model()).__name__} and compiled={self._compiled}; leave it out"
            )
        if self.args.label_smoothing_factor and self._shard_at == "decoder":
            raise ValueError(
                "expected label_smoothing_factor=0 with a vision-language model, whose labels "
                "transformers' Trainer doesn't shift then, got "
                f"{self.args.label_smoothing_factor}; leave it out, or pass it to "
                "deepsp.causal_lm_loss in a loop of your own"
            )
        if self._mix_lengths and self._shard_at == "decoder":
            raise ValueError(
                f"expected mix_lengths=False for {type(self._base_model()).__name__}, which is "
                "sharded where its decoder begins, got True; leave it out"
            )
        if self._tensor_size > 1:
            self._check_tensor_parallel()
        if self._own_batches:
            self._check_own_batches()
        if self._compiled is not None:
            return self._check_compiled()
        for name, given in (
            ("label_smoothing_factor", self.args.label_smoothing_factor),
            ("compute_loss_func", self.compute_loss_func),
        ):
            if given and self._has_own_loss():
                raise ValueError(
                    f"expected no {name}, since {self._loss_class().__name__} computes its loss "
                    f"itself, from the local batch, got {given}; leave it out"
                )
        # TRL's classes compute their losses without logits anyway.
        logits = self._has_own_loss() and self._loss_class().__module__.split(".")[0] != "trl"
        if self._without_logits and (logits or self.compute_loss_func is not None):
            raise ValueError(
                "expected without_logits=False where a class or compute_loss_func computes the "
                "loss itself, got True; leave it out"
            )
        config = self._base_model().config.get_text_config()
        balances = getattr(config, "output_router_logits", False)
        if balances and (self._without_logits or self._has_own_loss()):
            raise ValueError(
                "expected output_router_logits=False in the model's config with without_logits, or "
                "where a class computes its loss itself, since the loss that balances experts "
                "would be left out or counted more than once, got True; set it to False"
            )
        if self._mix_lengths and self.compute_loss_func is not None:
            raise ValueError(
                "expected no compute_loss_func with mix_lengths=True, since it gets outputs and "
                "labels in the order of the batch, got one; leave one of them out"
            )
        if self._mix_lengths and any(mixers_in(self._base_model())):
            raise ValueError(
                f"expected mix_lengths=False for {type(self._base_model()).__name__}, whose "
                "recurrent layers need the tokens in order on the ranks; leave it out"
            )

    def _check_tensor_parallel(self) -> None:
        refuse_dealt(self.model, "in a tensor-parallel model", "leave one of them out")
        config = self._base_model().config.distributed_config
        ranks = self._groups * self._size
        if config.dp_size != ranks:
            raise ValueError(
                f"expected fsdp_size={ranks} in the model's DistributedConfig, the ranks over "
                f"which gradients are averaged ({self._groups} group(s) of "
                f"{self._size} sequence ranks), got {config.dp_size}; load the model with that"
            )
        refused = {
            f"{self._loss_class().__name__}, which computes its loss itself": self._has_own_loss(),
            "compiled": self._compiled is not None,
            "own_batches": self._own_batches,
            "mix_lengths": self._mix_lengths,
            "without_logits": self._without_logits,
            "average_tokens_across_devices=False": not self.args.average_tokens_across_devices,
        }
        for name in (n for n, given in refused.items() if given):
            raise ValueError(
                f"expected a tensor-parallel model without {name}, which hasn't been made to work "
                f"with one, got tp_size={self._tensor_size}; leave one of them out"
            )

    def _check_parallelism(self, config: ParallelismConfig) -> None:
        if config.tp_size != self._tensor_size:
            raise ValueError(
                "expected tp_size of parallelism_config to be that of the model, "
                f"{self._tensor_size}, got {config.tp_size}; load the model with from_pretrained("
                "name, distributed_config=DistributedConfig(tp_size=..., fsdp_size=...))"
            )
        if config.dp_replicate_size > 1:
            raise ValueError(
                "expected parallelism_config without dp_replicate_size, got "
                f"{config.dp_replicate_size}; leave it out"
            )
