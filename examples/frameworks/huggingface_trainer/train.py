r"""Hugging Face Trainer on a small GPT-2: resumes from its last complete checkpoint, and saves before a stop.

rallyrun --standalone --nproc-per-node=2 --max-restarts=3 train.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from rallypoint import notices

SAMPLES, CONTEXT, VOCABULARY = 384, 16, 64


class SavingTrainer(Trainer):
    """A stop waits until the checkpoint is written."""

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with notices.saving():
            super()._save_checkpoint(*args, **kwargs)


class SaveBeforeStop(TrainerCallback):
    """Makes the Trainer save when any worker has a notice of a stop, and acknowledges the notice afterwards."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Workers see a notice at different steps, but must save in the same one."""
        told = torch.tensor(float(notices.pending() is not None), device=args.device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        control.should_save = control.should_save or bool(told)
        if state.is_world_process_zero:
            print(f"step {state.global_step} of {state.max_steps}\n", end="", flush=True)
        return control

    def on_save(self, *_: Any, **__: Any) -> None:
        """Does nothing without a notice."""
        notices.acknowledge()


def last_whole(folder: Path) -> str | None:
    """Trainer writes a checkpoint in place, `trainer_state.json` last. Without this file, it is incomplete."""
    whole = [each.parent for each in folder.glob("checkpoint-*/trainer_state.json")]
    last = max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    return None if last is None else str(last)


def main() -> None:
    """Train from the last checkpoint, if there is one, to the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="total number of steps, including earlier runs")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"), help="folder shared by all nodes")
    options = parser.parse_args()

    set_seed(0)
    sizes = {"n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY}
    without_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **without_dropout, bos_token_id=0, eos_token_id=0))
    texts = torch.randint(VOCABULARY, (SAMPLES, CONTEXT))
    trainer = SavingTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(options.checkpoint_dir),
            max_steps=options.steps,
            save_steps=options.every,
            save_total_limit=3,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            # Without a GPU, Trainer must be told so; otherwise every worker trains on its own.
            use_cpu=not torch.accelerator.is_available(),
            report_to=[],
            disable_tqdm=True,
            logging_steps=options.every,
        ),
        train_dataset=[{"input_ids": text, "labels": text} for text in texts],
        callbacks=[SaveBeforeStop()],
    )
    last = last_whole(options.checkpoint_dir)
    if trainer.is_world_process_zero():
        first = last.rpartition("-")[2] if last else 0
        print(f"{trainer.args.world_size} workers, from step {first}\n", end="", flush=True)
    trainer.train(resume_from_checkpoint=last)
    model.eval()
    with torch.no_grad():
        loss = model(input_ids=texts.to(model.device), labels=texts.to(model.device)).loss
    if trainer.is_world_process_zero():
        print(f"final loss {loss.item():.9f}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
