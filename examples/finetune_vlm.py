"""Fine-tune a small Qwen2.5-VL on pictures on one process, then on sharded sequences.

Each row has two pictures of different sizes, a white square on a colored ground, and after each the
name of its color, which the model learns. Trainer gets the batches of the model's image
processor. The second training differs in the class, SequenceParallelTrainer, and in two arguments:
`sequence_parallel_size=ranks` and `deal_images=True`, with which each rank encodes its share of the
pictures. Losses must agree at every step, or the script exits with an error.

    python examples/finetune_vlm.py              # two ranks on the CPU
    python examples/finetune_vlm.py --ranks 3    # parts of unequal length
"""

import argparse
import json
import os
from pathlib import Path

import side_by_side
import torch

LOSS_TOLERANCE = 1e-4  # what rounding explains in float32
COLORS = {"red": (200, 30, 30), "green": (30, 160, 30), "blue": (40, 40, 220), "gray": (120,) * 3}
WORDS = ["<pad>", *COLORS, "<begin>", "<end>", "<image>", "<video>"]
ID = {word: n for n, word in enumerate(WORDS)}
SIZES = ((48, 64), (96, 80))  # of the pictures of a row, in pixels


def picture(color: str, height: int, width: int):
    from PIL import Image

    made = Image.new("RGB", (width, height), COLORS[color])
    made.paste((255, 255, 255), (width // 4, height // 4, width // 2, height // 2))
    return made


class Rows(torch.utils.data.Dataset):
    """The colors of each row's pictures."""

    def __init__(self, count: int):
        generator = torch.Generator().manual_seed(0)
        self.colors = torch.randint(len(COLORS), (count, len(SIZES)), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.colors)

    def __getitem__(self, i: int) -> list[str]:
        return [list(COLORS)[n] for n in self.colors[i]]


class Collator:
    """Batches of an image processor's pixels and grids, and of ids with a token for each 2 x 2
    patches of a picture."""

    def __init__(self):
        from transformers import Qwen2VLImageProcessorPil

        self.processor = Qwen2VLImageProcessorPil(
            patch_size=8, merge_size=2, temporal_patch_size=2, min_pixels=256, max_pixels=1 << 16
        )

    def __call__(self, rows: list) -> dict[str, torch.Tensor]:
        shown = [
            picture(color, *size) for row in rows for color, size in zip(row, SIZES, strict=True)
        ]
        batch = dict(self.processor(images=shown, return_tensors="pt"))
        tokens = iter((batch["image_grid_thw"].prod(-1) // 4).tolist())
        ids = []
        for row in rows:
            ids.append([])
            for color in row:
                image = [ID["<image>"]] * next(tokens)
                ids[-1] += [ID["<begin>"], *image, ID["<end>"], ID[color]]
        batch["input_ids"] = torch.tensor(ids)
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["mm_token_type_ids"] = (batch["input_ids"] == ID["<image>"]).int()
        learned = batch["input_ids"] <= len(COLORS)
        batch["labels"] = batch["input_ids"].masked_fill(~learned, -100)
        return batch


def tiny():
    """A Qwen2.5-VL with new weights."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": len(WORDS),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 8,
        "out_hidden_size": 64,
        "window_size": 32,
        "fullatt_block_indexes": [1],
    }
    tokens = {
        "image_token_id": ID["<image>"],
        "video_token_id": ID["<video>"],
        "vision_start_token_id": ID["<begin>"],
        "vision_end_token_id": ID["<end>"],
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    return Qwen2_5_VLForConditionalGeneration(config)


def train(options: argparse.Namespace) -> None:
    """One process of a training. The first writes the losses."""
    from transformers import Trainer, TrainingArguments, set_seed

    torch.set_num_threads(1)
    more = {}
    if "WORLD_SIZE" in os.environ:
        from deepsp.integrations.transformers import SequenceParallelTrainer as Trainer

        more = {"sequence_parallel_size": options.ranks, "deal_images": True}
    set_seed(0)
    trainer = Trainer(
        tiny(),
        TrainingArguments(
            output_dir=options.output,
            use_cpu=not torch.cuda.is_available(),
            per_device_train_batch_size=options.rows,
            max_steps=options.steps,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            remove_unused_columns=False,
            ddp_find_unused_parameters=False,
        ),
        train_dataset=Rows(options.steps * options.rows),
        data_collator=Collator(),
        **more,
    )
    trainer.train()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        Path(options.output, side_by_side.LOGS).write_text(json.dumps(losses))
    side_by_side.leave()


if __name__ == "__main__":
    side_by_side.main(__file__, __doc__, train, LOSS_TOLERANCE, steps=40, rows=8)
