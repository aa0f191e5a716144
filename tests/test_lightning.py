"""Training by Lightning's Trainer over sharded sequences, against its Trainer in one process."""

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from models import VOCABULARY, Model
from reference import attention
from torch.utils.data import DataLoader, DistributedSampler
from trained import one_process

import deepsp
from deepsp.ranks.groups import objects_on_all_ranks

TOTAL = 13
_KEEPS_ENVIRONMENT = mock.patch.dict("os.environ")


def _rows(count, seed=0):
    """All tokens are labelled, so that a mean over groups of their means is the mean."""
    ids = torch.randint(
        0, VOCABULARY, (count, TOTAL), generator=torch.Generator().manual_seed(seed)
    )
    return [{"input_ids": row, "labels": row} for row in ids]


@functools.cache
def _modules():
    """The module of one process, and that of a sharded sequence. Lightning is imported on first
    use: that takes seconds."""
    from pytorch_lightning import LightningModule

    class Whole(LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = None, []

        def configure_model(self):
            if self.model is None:  # called for each of fit and predict
                torch.manual_seed(0)
                self.model = Model(self.attend()).double()

        def attend(self):
            return lambda q, k, v, _: attention(q, k, v, is_causal=True)

        def loss(self, batch):
            ids = batch["input_ids"]
            logits = self.model(ids, torch.arange(TOTAL)[None])[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
            return loss + 0.1 * logits.logsumexp(-1).square().mean()

        def training_step(self, batch, number):
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            self.log("steps", 1.0, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
            return loss

        def validation_step(self, batch, number):
            self.log("evaluated", self.loss(batch), sync_dist=True)

        def predict_step(self, batch, number):
            return self.loss(batch)

        def on_train_batch_end(self, *_):
            self.losses.append(self.trainer.callback_metrics["loss_step"].item())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)

    class Sharded(Whole):
        averages = dist.is_initialized() and dist.get_world_size() == 3  # backward does it, too

        def attend(self):
            attend = deepsp.DistributedAttention(group=self.trainer.strategy.sequence_group)
            return functools.partial(_attended, attend)

        def loss(self, batch):
            strategy = self.trainer.strategy
            # Lightning reads the number of rows, by which it weights means, off any tensor.
            assert {len(x) for x in batch.values()} == {len(batch["input_ids"])}
            logits = self.model(batch["input_ids"], batch["position_ids"], strategy.sequence_lens)
            labels, group = batch["shift_labels"], strategy.sequence_group
            averages = {"average_gradients": self.averages}
            squares = logits.logsumexp(-1).square()
            own = deepsp.token_mean(squares, labels, group, **averages)
            return deepsp.cross_entropy(logits, labels, group, **averages) + 0.1 * own

    return Whole, Sharded


def _attended(attend, q, k, v, lens):
    return attend(q, k, v, is_causal=True, enable_gqa=True, seq_lens=lens)


def _trainer(folder, size=1, roles=None, **kwargs):
    import pytorch_lightning
    from pytorch_lightning.strategies import DDPStrategy

    from deepsp.integrations.lightning import sequence_parallel

    if size > 1:
        kwargs["strategy"] = sequence_parallel(DDPStrategy)(
            sequence_parallel_size=size, roles=roles
        )
        kwargs["devices"] = dist.get_world_size()
        # As Lightning finds it in processes that it hasn't started. The harness has made the group.
        os.environ["LOCAL_RANK"] = str(dist.get_rank())
    return pytorch_lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        num_sanity_val_steps=0,
        **kwargs,
    )


@_KEEPS_ENVIRONMENT
def _trained(size, batch, accumulation):
    """Losses of the steps, what is logged, predictions, and the weights in the checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(
            folder, size, gradient_clip_val=0.5, accumulate_grad_batches=accumulation
        )
        module = _modules()[size > 1]()
        rows = _rows(16)
        # Lightning's own sampler, if there are several processes.
        sampler = DistributedSampler(rows, 1, 0) if size == 1 else None
        loader = DataLoader(rows, batch_size=batch, sampler=sampler)
        trainer.fit(module, loader, DataLoader(_rows(6, seed=1), batch_size=batch))
        logged = [trainer.callback_metrics[n].item() for n in ("loss_epoch", "evaluated", "steps")]
        state = {name: x.clone() for name, x in module.state_dict().items()}
        saved = [torch.load(path)["state_dict"] for path in Path(folder).glob("**/*.ckpt")]
        if trainer.is_global_zero:  # the folders differ by rank
            torch.testing.assert_close(saved, [state], rtol=0, atol=0)
        else:
            assert not saved
        found = trainer.predict(module, DataLoader(_rows(5, seed=2), batch_size=1))
    return module.losses, logged, torch.stack(found), state


@pytest.mark.parametrize(("world", "size", "accumulation"), [(3, 3, 1), (4, 2, 2)])
def test_training_equals_one_process(world, size, accumulation):
    groups = world // size
    losses, logged, predicted, weights = one_process(_trained, 1, 4, accumulation)
    logged = [*logged[:2], logged[2] * groups]  # of each group
    every = on_ranks(world, _trained, size, 4 // groups, accumulation)
    for rank, (mine, logs, found, state) in enumerate(every):
        assert mine == pytest.approx(losses, rel=1e-10)
        assert logs == pytest.approx(logged, rel=1e-10)
        torch.testing.assert_close(found, predicted[rank // size :: groups], rtol=1e-10, atol=0)
        torch.testing.assert_close(state, weights, rtol=1e-9, atol=1e-11)


def _fit(module, loader=None, size=2, **kwargs):
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(
            folder, size, limit_train_batches=2, enable_checkpointing=False, **kwargs
        )
        trainer.fit(module, DataLoader(_rows(4)) if loader is None else loader)
        return trainer.strategy


@_KEEPS_ENVIRONMENT
def _refusals():
    from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy

    from deepsp.integrations.lightning import sequence_parallel

    for wrong in (SingleDeviceStrategy, DDPStrategy(), None):
        with pytest.raises(ValueError, match="strategy_class to be DDPStrategy of lightning"):
            sequence_parallel(wrong)
    once = sequence_parallel(DDPStrategy)
    assert sequence_parallel(once) is once
    sharded = _modules()[1]
    for size in (3, 4, 2.0):
        with pytest.raises(ValueError, match=r"a divisor of 2, the number of processes, got"):
            _fit(sharded(), size=size)

    class Other(sharded):
        def training_step(self, batch, number):
            lens = self.trainer.strategy.sequence_lens
            logits = self.model(batch["input_ids"], batch["position_ids"], lens)
            labels = batch["shift_labels"].flatten()
            own = F.cross_entropy(logits.flatten(0, 1), labels)
            if self.logs:
                self.log("own", own, sync_dist=True, on_epoch=True)
                return self.loss(batch)
            return own

    for logs, message in (
        (False, "loss of the full sequence in backward, the same number on all ranks of a group"),
        (True, r"a value that all ranks of a group have alike, for its mean over groups"),
    ):
        module = Other()
        module.logs = logs
        with pytest.raises(ValueError, match=message):
            _fit(module)

    class Iterates(sharded):
        def training_step(self, dataloader_iter):
            raise AssertionError("a full batch")

    with pytest.raises(ValueError, match=r"batch that the strategy has sharded.* dataloader_iter"):
        _fit(Iterates())
    mine = DataLoader(_rows(4, seed=dist.get_rank()))
    with pytest.raises(ValueError, match=r"batch\['input_ids'\].* leave DistributedSampler out"):
        _fit(sharded(), mine)
    weighted = DataLoader([row | {"weights": row["labels"] / 2} for row in _rows(4)])
    with pytest.raises(ValueError, match=r"weights.* roles=\{"):
        _fit(sharded(), weighted)
    _fit(sharded(), weighted, roles={"weights": "label_weights"})
    with pytest.raises(ValueError, match="batch to map names to tensors"):
        _fit(sharded(), DataLoader([row["input_ids"] for row in _rows(4)]))


@_KEEPS_ENVIRONMENT
def _random_numbers():
    class Draws(_modules()[1]):
        def configure_model(self):
            super().configure_model()
            torch.manual_seed(dist.get_rank())

        def training_step(self, batch, number):
            self.drawn = torch.rand(1).item()
            return super().training_step(batch, number)

    group, module = dist.get_rank() // 2, Draws()
    # Lightning's own sampler would be seeded alike in any case.
    shuffled = DataLoader(_rows(8), shuffle=True)
    strategy = _fit(module, shuffled, use_distributed_sampler=False)
    drawn = [x for (x,) in objects_on_all_ranks([module.drawn], None, torch.device("cpu"))]
    assert len(set(drawn)) == 4  # dropout differs by rank
    after = objects_on_all_ranks(torch.get_rng_state().tolist(), None, torch.device("cpu"))
    assert all(state == after[0] for state in after)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_SEED_WORKERS", "1")  # as seed_everything(workers=True) sets it
        seeded = strategy.process_dataloader(DataLoader([]))
        assert seeded.worker_init_fn.keywords == {"rank": group}
        given = DataLoader([], worker_init_fn=print)
        assert strategy.process_dataloader(given).worker_init_fn is print
        assert strategy.process_dataloader([]) == []


def test_refusals():
    on_ranks(2, _refusals)


def test_random_numbers():
    on_ranks(4, _random_numbers)


@pytest.mark.nightly  # its processes import for seconds each
def test_the_example():
    example = Path(__file__).parents[1] / "examples/lightning_train.py"
    command = [sys.executable, example, "--steps", "2", "--seq-len", "101"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the same to" in done.stdout
