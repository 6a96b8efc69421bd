"""Train a small GPT-2 from scratch with the Hugging Face Trainer, on the source text of Python's standard library.

The tokenizer (byte-level BPE) is trained first, on the same text; nothing is downloaded.

    python examples/hf_trainer.py
    python examples/hf_trainer.py --steps 100 --seed 1
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch.utils.data import Dataset
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

END = "<|endoftext|>"


def read_texts(characters: int) -> list[str]:
    texts = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if characters <= 0:
            break
        texts.append(file.read_text(encoding="utf-8")[:characters])
        characters -= len(texts[-1])
    return texts


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=vocabulary, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=END, eos_token=END, pad_token=END)


class Blocks(Dataset):
    """Consecutive blocks of `length` tokens."""

    def __init__(self, tokens: torch.Tensor, length: int):
        self.blocks = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        return {"input_ids": self.blocks[index]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2, help="batches of an optimizer step")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--characters", type=int, default=1_000_000, help="how much of the text is used")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/hf_trainer"))
    args = parser.parse_args()

    set_seed(args.seed)
    texts = read_texts(args.characters)
    tokenizer = train_tokenizer(texts, args.vocabulary)
    tokens = torch.tensor(tokenizer(END.join(texts), verbose=False)["input_ids"])
    cut = int(0.95 * len(tokens))
    train, validation = Blocks(tokens[:cut], args.context), Blocks(tokens[cut:], args.context)

    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=len(tokenizer), n_positions=args.context, n_embd=192, n_layer=4, n_head=4,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    ))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=args.output, max_steps=args.steps, seed=args.seed,
            per_device_train_batch_size=args.batch, per_device_eval_batch_size=args.batch,
            gradient_accumulation_steps=args.accumulate, learning_rate=args.lr, lr_scheduler_type="cosine",
            warmup_steps=args.steps // 20, weight_decay=0.1, logging_steps=10,
            eval_strategy="steps", eval_steps=250, save_steps=500, save_total_limit=2, report_to="none",
        ),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
    )
    result = trainer.train()
    trainer.save_model()
    print(f"loss {result.training_loss:.4f}  validation loss {trainer.evaluate()['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
