"""Fine-tunes a small Llama with LoRA on Python's own source code: transformers' Trainer, compiled by takeback.

    python examples/finetune_lora.py
    torchrun --nproc-per-node 2 examples/finetune_lora.py   # two processes, each with half of the batches

Nothing is downloaded: the model is made from its config, and the base is trained first, for a while, on one half of the
text. Then the base is frozen, and adapters of rank 8 are trained on the other half. Tokens are bytes. Needs
`pip install 'takeback[peft]'`.
"""

from __future__ import annotations

import argparse
import tempfile

import peft
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from takeback.integrations.transformers import TakebackTrainer
from takeback.zoo.data import corpus

START = b"    def __init__(self"


class Windows(Dataset[dict[str, Tensor]]):
    """Pieces of a text, one after the other."""

    def __init__(self, text: bytes, length: int) -> None:
        self.length = length
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        piece = self.tokens[i * self.length : (i + 1) * self.length].long()
        return {"input_ids": piece, "labels": piece}


def train(model: torch.nn.Module, data: Windows, name: str, options: argparse.Namespace, rate: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=2,
            learning_rate=rate,
            lr_scheduler_type="cosine",
            warmup_steps=options.steps // 10,
            max_grad_norm=1.0,
            bf16=options.bf16,
            logging_steps=max(options.steps // 10, 1),
            save_strategy="no",
            dataloader_pin_memory=torch.cuda.is_available(),
            report_to=[],
            disable_tqdm=True,
        )
        trainer = TakebackTrainer(model=model, args=args, train_dataset=data, takeback={"memory": options.memory})
        trainer.train()
        if trainer.is_world_process_zero():
            report = trainer.takeback_report()
            ours, eager = (peak - report.resident_bytes for peak in (report.peak_bytes, report.eager_peak_bytes))
            print(f"{name}: peak above resident {ours / 2**20:.1f} MiB, {ours / eager:.2f} of eager's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="updates of the base, and again of the adapters")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--memory", default="auto", help="as for takeback.compile_step")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--letters", type=int, default=200, help="how much it writes at the end")
    options = parser.parse_args()

    text = corpus()
    base, own = (Windows(half, options.length) for half in (text[: len(text) // 2], text[len(text) // 2 :]))

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    train(model, base, "base", options, rate=2e-3)

    adapters = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear")
    tuned = peft.get_peft_model(model, adapters)
    tuned.print_trainable_parameters()
    train(tuned, own, "adapters", options, rate=1e-3)

    tuned.eval()
    start = torch.tensor([list(START)], device=tuned.device)
    mask = torch.ones_like(start)
    wrote = tuned.generate(
        input_ids=start, attention_mask=mask, max_new_tokens=options.letters, do_sample=True, temperature=0.7
    )
    print(bytes(wrote[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
