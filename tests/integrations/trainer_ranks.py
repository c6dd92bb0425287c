"""Started by torchrun: both trainers in several processes, or one of them into trouble. Rank 0 writes what came out.

torchrun --nproc-per-node 2 trainer_ranks.py FOLDER [CASE ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from trainer_twins import Texts, history, lora, means, padded, state_of, trainer
from transformers import Trainer, TrainerCallback

from takeback.errors import OptionError
from takeback.integrations.transformers import TakebackTrainer

LENGTHS = {"data": Texts(14, spread=3), "given": lambda: {"data_collator": padded}}
CASES: dict[str, dict[str, Any]] = {
    "one microbatch": {},
    "items of all ranks": {"gradient_accumulation_steps": 2, **LENGTHS},
    "items of each rank": {"gradient_accumulation_steps": 2, "average_tokens_across_devices": False, **LENGTHS},
    "means": {"make": means, "gradient_accumulation_steps": 3, "data": Texts(14)},
    "bf16": {"bf16": True},
    "lora": {"make": lora, "gradient_accumulation_steps": 2},
}


class Looking(TrainerCallback):
    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        pass


REFUSED: dict[str, dict[str, Any]] = {
    "fp16": {"fp16": True},
    "early": {"max_grad_norm": 0.0, "takeback": {"update": "early"}},
    "buffers": {"ddp_broadcast_buffers": False},
    "looking": {"given": lambda: {"callbacks": [Looking()]}},
}


def differences(theirs: Trainer, ours: Trainer) -> list[str]:
    """Between the trainers on this rank, and between the ranks."""
    a, b = state_of(theirs), state_of(ours)
    found = [f"{name} has other bits" for name in a if not torch.equal(a[name], b[name])]
    if history(theirs) != history(ours):
        found.append(f"logged {history(ours)}, not {history(theirs)}")
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, b)
    found += [
        f"{name} differs between ranks" for name in b if not torch.equal(everywhere[0][name], everywhere[1][name])
    ]
    return found


def main(folder: Path, *chosen: str) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, case in ((name, CASES[name]) for name in chosen or CASES):
        trained = []
        for i, kind in enumerate((Trainer, TakebackTrainer)):
            trained.append(trainer(kind, folder / f"{name} {i}", max_steps=4, **case))
            trained[-1].train()
        found[name] = differences(trained[0], trained[1])
        assert isinstance(trained[0].model_wrapped, torch.nn.parallel.DistributedDataParallel)
        assert trained[1].model_wrapped is trained[1].model
        found[f"{name}: steps"] = trained[1].compiled_step.counts.planned
    for name, refused in {} if chosen else REFUSED.items():
        try:
            trainer(TakebackTrainer, folder / name, **refused).train()
        except OptionError as error:
            found[name] = str(error)
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
