"""Ways to generate from a causal language model: weights in safetensors files, and the recipe of the loop around them.

See `saturate.inference.generation.artifact`, which also stores them. Nothing is unpickled or compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from saturate.errors import ArtifactDamaged
from saturate.inference.techniques._api import Entry

FORMAT = "generation"

#: What the lines without saturate call the models: `model` is the user's own.
_NAMES = {"model": "network", "draft": "draft"}

#: Tokens that are looked up in the text at once, where nobody chose a number.
_DRAFTS = 10


def lines(entry: Entry, threads: int, place: Callable[[str], str]) -> str:
    """See `inference.lines.serving`. The loop is saturate's: models of transformers say the same in that of their library, at its speed;
    of others there are the weights."""
    settings, models = entry.settings, entry.settings["architectures"]
    if any("library" not in known for known in models.values()):
        return "\n".join(["# The loop that generates is saturate's: these are the weights, for your own.", "import safetensors.torch",
                          *(f"{name}.load_state_dict(safetensors.torch.load_file({place(file)}), strict=False)"
                            for name, file in zip(models, entry.files))])
    built = [_built(name, known, file, settings.get("device", "cpu"), place) for (name, known), file in zip(models.items(), entry.files)]
    fewer = settings["recipe"]["weights"]
    note = [f"# The program holds its weights by {fewer}, in fewer bits; these lines run them as they are stored."] if fewer else []
    return "\n".join([*note, "import json, safetensors.torch, transformers", f"torch.set_num_threads({threads}); torch.manual_seed({settings['sampling']['seed']})",
                      *built, f"answers = list(network.generate(inputs[0], {_asked(settings)})[:, inputs[0].shape[1]:])"])


def _built(name: str, known: dict[str, Any], file: str, device: str, place: Callable[[str], str]) -> str:
    """Lines that make a model of its configuration, which stands in the manifest, and its weights. Tied ones lie there once."""
    network = _NAMES[name]
    said = f'json.load(open({place("manifest.json")}))["settings"]["architectures"]["{name}"]["configuration"]'
    built = (f"{network} = transformers.{known['class']}(transformers.{known['configuration_class']}.from_dict({said}))\n"
             f"{network}.load_state_dict(safetensors.torch.load_file({place(file)}), strict=False, assign=True)\n")
    beside = {name: format for name, format in known.get("beside", {}).items() if format != "float32"}
    if beside:          # buffers that were cast with the weights, and are not stored with them
        built += (f"for name, format in {beside!r}.items():\n"
                  f"    owner, _, leaf = name.rpartition('.')\n"
                  f"    {network}.get_submodule(owner)._buffers[leaf] = {network}.get_buffer(name).to(getattr(torch, format))\n")
    return built + f"{network}.tie_weights(); {network}.eval().to({device!r})"


def _asked(settings: dict[str, Any]) -> str:
    """The same for `generate` of transformers. It drafts for one text at a time only; the tokens are the same without."""
    sampling, eos, recipe = settings["sampling"], settings["eos"], settings["recipe"]
    asked = {"attention_mask": "torch.ones_like(inputs[0])", "max_new_tokens": settings["max_new_tokens"], "eos_token_id": eos or None,
             "pad_token_id": eos[0] if eos else 0, "do_sample": sampling["temperature"] != 0}
    if asked["do_sample"]:
        asked |= {"temperature": sampling["temperature"], "top_k": sampling["top_k"] or 0, "top_p": sampling["top_p"] or 1.0}
    if recipe["draft"] is not None and settings["batch_size"] == 1:
        asked |= {"assistant_model": "draft"} if "draft" in settings["architectures"] else {"prompt_lookup_num_tokens": max(recipe["lengths"] or [_DRAFTS])}
    return ", ".join(f"{name}={value}" for name, value in asked.items())


def load(torch: Any, folder: Path, entry: Entry, *, model: Any = None, draft: Any = None) -> Any:
    """prompts -> the new tokens of each, long tensors. model, draft: instances of their classes, where these are not of
    transformers. Raises ArtifactDamaged, UsageError."""
    from saturate.inference.generation import artifact

    try:
        return artifact.program(torch, folder, entry.settings, model, draft)
    except (KeyError, TypeError, AttributeError) as error:
        raise ArtifactDamaged(f"the settings of {folder} are incomplete", cause=repr(error),
                              remedy="copy the artifact again, or make it again") from error
