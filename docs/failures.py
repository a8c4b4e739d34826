"""The rows of the page *What a failure means*, whose symptoms are the sentences in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_EXPRESSION = re.compile(r"\{(?:[^{}]|\{[^{}]*\})*\}")
_VERDICT = Path(__file__).parents[1] / "pytest_aorta/verdict"
# Texts of fewer words are names, and texts that begin with a space or a comma continue a sentence, as these do.
_FEWEST_WORDS = 2
_CONTINUE = (
    *(
        "gradients of the step before are set to None",
        "backward passes",
        "clipped to",
        "trained elements",
        "tied parameters",
        "{text} {",
        "{name}: {text",
        "the optimizer",
        "the model",
    ),
    *("from step", "at step", "the same samples", "other samples", "after the first loss", "when the optimizer"),
    *(
        "with equal {",
        "weights after step",
        "and sampler.set_epoch",
        "the sampler, and",
        "{weights}, and gradients",
        "what draws",
        "{backward}how",
        "gradient norm",
        "{('augmentation'",
        "the hosts are late",
        "rank {self.rank} arrives last",
    ),
    *("{num_hot}", "the launch", "new {family}", "gone {family}", "{family}", "{text}, ", "straggler's", "rest {rest"),
    # What the device did, and what was not compared, is no edit.
    *("GPUs throttled", "launch {number}:", "{len(hot)} of the", "the SM clock", "costs of a step are not"),
    *("the step's graph of streams is not", "the step's graph of streams does not show", "buffers are not compared"),
    *("{row.metric}: the change can't be split", "the {row.reference} has graphs"),
    *("exposed communication", "device idle", "no compute", "the {now.stream}"),
)


class Meaning(NamedTuple):
    """What a sentence means: its beginning as in the code, the likely edit, and where to look."""

    begin: str
    edit: str
    look: str


# Module -> the heading of its sentences, and their meanings.
MEANINGS: dict[str, tuple[str, tuple[Meaning, ...]]] = {
    "edits": (
        "What was edited",
        (
            Meaning(
                "the learning rate", "rate, warm-up or schedule", "from step 1: the rate; later: `schedule.step()`"
            ),
            Meaning("weight decay", "decay, or what has it", "the groups of the optimizer"),
            Meaning("the batch", "batch size, length, dtype", "the loader; in the last step, `drop_last`"),
            Meaning("the number of backward passes", "accumulation", "its count, `no_sync()`"),
            Meaning("the mode of the model", "`train()` or `eval()`", "what follows an evaluation"),
            Meaning("the norm that gradients", "clipping", "`max_norm`; is `clip_grad_norm_` called?"),
            Meaning("the number of trained parameters", "layers, widths, frozen parts", "config, `requires_grad`"),
            Meaning("{what} changed: {change", "the setting that is named", "optimizer, autocast, dropout, loss scale"),
            Meaning("{what} changed: {before", "another class", "the optimizer, the wrapper of the model"),
            Meaning("gradients of the step before are no longer", "`zero_grad` lost, or called too early", "the loop"),
            Meaning("gradients of the step before are cleared", "`zero_grad` added", "the loop"),
            Meaning("gradients of the step before are set to", "`set_to_none`", "`zero_grad`"),
            Meaning("optimizers came or went", "an optimizer that no longer steps, or a new one", "the loop"),
            Meaning("{kind} came or went", "a layer, a bias or a tie came or went", "the model's constructor"),
            Meaning(
                "data: {what}", "order, shuffling or content of samples", "seed, `set_epoch`, `shuffle`, transforms"
            ),
            Meaning("{name}: {before}", "a collective came or went, or another dtype", "the named line; wrappers"),
            Meaning("the host reads a value", "`.item()`, `print`, `float`", "the named line"),
            Meaning("{name} computes", "a forward pass more or less, other shapes", "evaluation, checkpointing"),
            Meaning("each operator computes", "more samples, or longer ones", "batch, padding"),
            Meaning(
                "the initial weights", "initialization, or another checkpoint", "the constructor, `load_state_dict`"
            ),
            Meaning("the loss of step {step} differs", "the model, its loss, or augmentation", "the forward pass"),
            Meaning(
                "the {what} of step {step} is",
                "a sum in place of a mean, no division",
                "reduction, accumulation, `unscale_`",
            ),
            # Parameters that it no longer changes, or now changes.
            Meaning("the update of step {step} no", "parameters frozen or unfrozen", "`requires_grad`"),
            Meaning(
                "the update of step {step} differs",
                "gradients or optimizer",
                "communication hooks, the optimizer's code",
            ),
            Meaning("buffers{of} differ on {who} before", "data, BatchNorm", "the first forward pass"),
            Meaning("buffers{of} differ on {who} after", "decay or interval of an average", "what updates copies"),
            Meaning("{here.steps} were made", "epochs, steps, or the length of the data", "the end of the loop"),
            Meaning("{RANDOM}: torch's", "the seed, or one more draw", "`manual_seed`; what draws numbers before"),
        ),
    ),
    "causes": (
        "What takes the time",
        (
            Meaning("rank {self.rank} is late", "more work on this rank", "branches by rank; data"),
            Meaning(
                "no straggler: {late}", "Python code, or load of the hosts", "[a late host](overlap.md#a-late-host)"
            ),
            Meaning("the others wait for rank", "a slow part on one rank", "what this rank alone does"),
            Meaning("ranks arrive late in turns", "uneven work", "lengths of samples, workers of loaders"),
            Meaning("rank {rank} arrives late", "more work before this collective", "this rank"),
            Meaning("steps get", "a leak, or a growing list", "what the loop keeps"),
            Meaning("memory grows", "tensors that stay alive", "losses kept without `detach()`"),
            Meaning("{what} per step, mean over ranks:", "other operators or kernels", "new, gone, slower"),
            Meaning("{kind} exposed", "less to hide a collective", "[overlap](overlap.md)"),
            Meaning("transfer {now_ms:", "more bytes, or a slower network", "dtype of communication, topology"),
            Meaning("split of {total:", "the largest part", "[parts](overlap.md#what-got-slower)"),
            Meaning("the host is the bottleneck", "`.item()`, Python in the loop", "the host's profile"),
            Meaning("{key} is {launch", "a choice of `setup()`", "the config"),
            Meaning("the step's graph of streams is unchanged", "kernels, or the machine", "clocks, load"),
        ),
    ),
    "schedules": (
        "What no longer overlaps",
        (
            Meaning("{here.serialized} of", "a collective lost what hides it", "the named module and line"),
            Meaning("is new", "a collective more", "the named line"),
            Meaning("is issued on", "another stream, or `async_op=False`", "how it is called"),
            Meaning("waits for", "a wait in front of a collective", "prefetch, `wait()`, `synchronize()`"),
            Meaning("is awaited by", "a wait too early", "`reshard_after_forward`, `wait()`"),
            Meaning("is exposed for", "less compute beside it", "order of layers, bucket sizes"),
        ),
    ),
}


def failures() -> str:
    """Return a table of symptoms, likely edits and places to look at for each module.

    Raises:
        ValueError: A sentence has no row, or a row has no sentence.
    """
    parts = []
    for module, (heading, meanings) in MEANINGS.items():
        found = list(_sentences(module))
        rows = [(next((text for text in found if text.startswith(one.begin)), ""), one) for one in meanings]
        known = (*(one.begin for one in meanings), *_CONTINUE)
        without = [text for text in found if not text.startswith(known)]
        without += [one.begin for text, one in rows if not text]
        if without:
            raise ValueError(f"docs/failures.py: in verdict/{module}.py, {without[0]!r} has a row or a sentence alone")
        lines = (f"| `{_shown(text)}` | {one.edit} | {one.look} |\n" for text, one in rows)
        parts.append(
            f"## {heading}\n\n| symptom | likely edit | where to look |\n| --- | --- | --- |\n{''.join(lines)}"
        )
    return "\n".join(parts)


def _shown(text: str) -> str:
    """Return a sentence until its advice, with its expressions left out."""
    return re.sub("…+", "…", _EXPRESSION.sub("…", text)).split("; look")[0].strip()


def _sentences(module: str) -> Iterator[str]:
    tree = ast.parse((_VERDICT / f"{module}.py").read_text(encoding="utf-8"))
    for text in _texts(tree):
        if (text[0].isalpha() or text[0] == "{") and len(_EXPRESSION.sub("", text).split()) >= _FEWEST_WORDS:
            yield text


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts of a module, with the expressions in them in braces."""
    match node:
        case ast.JoinedStr():
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else ast.unparse(part) for part in node.values
            )
        case ast.Constant(value=str(text)) if text:
            yield text
        case ast.Expr(value=ast.Constant()):  # a docstring
            pass
        case _:
            for inner in ast.iter_child_nodes(node):
                yield from _texts(inner)
