"""A wav2vec 2.0 of transformers that is trained with SpecAugment, whose masks numpy draws: eager and takeback (mode
exact) side by side on the CPU, in one run.

    python benchmarks/speech.py [--rounds 6] [--memory auto keep min] [--out FILE]

Width 256, 4 layers, 4 x 1 s of sound at 16 kHz, CTC, AdamW fused, dropout as configured, without LayerDrop. Measured as
benchmarks/architectures.py says.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from architectures import MEMORY, measure, table_of
from common import machine
from takeback import zoo

BATCH, SECONDS, LABELS, RATE = 4, 1, 12, 16_000


def loss_of(model: nn.Module, sound: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = model(input_values=sound, labels=labels).loss
    return loss


def case() -> zoo.Case:
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        conv_dim=(256,) * 7,
        num_conv_pos_embeddings=64,
        layerdrop=0.0,
        mask_time_prob=0.2,
        ctc_loss_reduction="mean",
    )
    model = Wav2Vec2ForCTC(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = (torch.randn(BATCH, SECONDS * RATE), torch.randint(1, config.vocab_size, (BATCH, LABELS)))
    return zoo.Case("speech", model, loss_of, optimizer, batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--memory", nargs="*", default=list(MEMORY), choices=list(MEMORY))
    parser.add_argument("--threads", type=int, default=None, help="torch threads (default: as torch finds them)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "speech-cpu.json")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    rows = measure("speech", case, arguments.rounds, arguments.memory)
    found = {"machine": machine() | {"rounds": arguments.rounds}, "rows": [asdict(r) for r in rows]}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    console = Console(width=120)
    console.print(table_of(rows))
    console.print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
