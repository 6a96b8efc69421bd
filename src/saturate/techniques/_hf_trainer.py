"""The Trainer of transformers that runs a training: where it is, and why several of its micro-steps cannot be one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from saturate.records.facts import TrainerFacts
from saturate.techniques._chunk_census import census
from saturate.techniques._interrupts import from_signal_handler

#: The package, whose own classes and callbacks are known.
_PACKAGE = "transformers."

#: What runs the loop, in older versions and in newer ones.
_LOOPS = ("_inner_training_loop", "_run_epoch")

#: What a script's own class may count micro-steps by, or change what one is.
_OWN = ("training_step", "get_batch_samples", "_prepare_inputs", "_prepare_context_parallel_inputs", *_LOOPS)

#: How processes may be together: each with the whole model and its own samples.
_TOGETHER = ("NO", "MULTI_CPU", "MULTI_GPU")


def running() -> Any:
    """The Trainer in whose loop this thread is, or None. It is asked for in the step of an optimizer, which that loop calls."""
    known = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    frame = sys._getframe(1) if known is not None else None
    while frame is not None:
        if frame.f_code.co_name in _LOOPS and f"{frame.f_globals.get('__name__')}.".startswith(_PACKAGE):
            owner = frame.f_locals.get("self")
            if isinstance(owner, known):
                return owner
        frame = frame.f_back
    return None


def facts(torch: Any) -> TrainerFacts | None:
    trainer = running()
    if trainer is None:
        return None
    return TrainerFacts(type(trainer).__name__, trainer.args.gradient_accumulation_steps, why_not(trainer, torch))


def why_not(trainer: Any, torch: Any) -> str:
    """Why micro-steps of this training cannot be merged; "" where nothing is known against it."""
    try:
        return _why_not(trainer, torch)
    except Exception as error:  # another version, or what a script made of one, may lack anything
        if from_signal_handler(error):
            raise
        return f"this Trainer is none that is known here ({type(error).__name__}: {error})"


def _why_not(trainer: Any, torch: Any) -> str:
    return _of_loop(trainer) or _of_surroundings(trainer) or census(trainer.model, torch, "which would run once for several micro-steps")


def _of_loop(trainer: Any) -> str:
    if not hasattr(trainer, "current_gradient_accumulation_steps") or not hasattr(trainer, "get_batch_samples"):
        return "this version of transformers does not take the batches of an update together"
    for name in _OWN:
        if name in vars(trainer):
            return f"{name} was replaced on the Trainer by the script or a library"
        owner = next((kind for kind in type(trainer).__mro__ if name in vars(kind)), None)
        if owner is not None and not f"{owner.__module__}.".startswith(_PACKAGE):
            return f"{owner.__name__} has a {name} of its own, which may count micro-steps"
    return ""


def _of_surroundings(trainer: Any) -> str:
    args, accelerator = trainer.args, trainer.accelerator
    together = str(getattr(accelerator.distributed_type, "name", accelerator.distributed_type))
    if together not in _TOGETHER or args.n_gpu > 1:
        return f"its processes train together in another way than by DistributedDataParallel ({together if args.n_gpu <= 1 else 'DataParallel'})"
    if getattr(accelerator, "parallelism_config", None) is not None:
        return "a batch is shared by several processes (accelerate's parallelism_config)"
    if "lomo" in str(args.optim).lower():
        return "its optimizer updates parameters in the backward pass"
    acting = next((type(one) for one in trainer.callback_handler.callbacks if _acts_on_substeps(type(one))), None)
    return f"{acting.__name__} acts on each micro-step (on_substep_end)" if acting is not None else ""


def _acts_on_substeps(callback: type) -> bool:
    owner = next((kind for kind in callback.__mro__ if "on_substep_end" in vars(kind)), None)
    return owner is not None and not f"{owner.__module__}.".startswith(_PACKAGE)


def divided_by_items(trainer: Any, items: Any) -> bool:
    """Whether losses are sums over what is counted in a whole update, as the Trainer takes them for; they are means of micro-batches
    otherwise, which it divides by their number."""
    said = getattr(trainer, "loss_is_scaled_for_ga", None)
    if said is not None:
        return bool(said)
    return (trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None


def paddings(trainer: Any) -> Mapping[str, int]:
    """What stands behind the end of shorter samples, by the name of an input; nothing where somebody else than transformers collates."""
    collator = trainer.data_collator
    home = getattr(collator, "__module__", None) or type(collator).__module__
    tokenizer = getattr(trainer, "processing_class", None) or getattr(collator, "tokenizer", None)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    pad = getattr(tokenizer, "pad_token_id", None)
    if not f"{home}.".startswith(_PACKAGE) or pad is None:
        return {}
    return {"input_ids": pad, "decoder_input_ids": pad, "attention_mask": 0, "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
            "special_tokens_mask": 1, "labels": getattr(collator, "label_pad_token_id", -100)}


def pads_left(trainer: Any) -> bool:
    tokenizer = getattr(trainer, "processing_class", None) or getattr(trainer.data_collator, "tokenizer", None)
    return getattr(getattr(tokenizer, "tokenizer", tokenizer), "padding_side", "right") == "left"
