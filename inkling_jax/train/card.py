"""The model card of a trained checkpoint. Every figure in it comes from the run that made the checkpoint."""

import textwrap
from dataclasses import dataclass
from datetime import date

import jax

from ..config import InklingConfig
from .data import Corpus
from .evaluate import HeldOut
from .presets import Recipe


@dataclass(frozen=True)
class Greedy:
    """Greedy decoding of held-out prompts through the package itself."""

    prompts: int
    tokens: int
    drafts: int
    tokens_per_round: float
    acceptance: list[float]


@dataclass(frozen=True)
class Run:
    """Everything the card reports."""

    name: str
    config: InklingConfig
    recipe: Recipe
    corpus: Corpus
    options: str  # of the command, beside the recipe's numbers
    train_files: int
    train_tokens: int
    heldout_files: int
    heldout: HeldOut
    parameters: int
    seconds: float
    greedy: Greedy | None
    samples: list[tuple[str, str]]


def write_card(run: Run) -> str:
    """The card as Markdown."""
    parts = [*_summary(run), *_data(run), *_training(run), *_heldout(run.heldout)]
    parts += _greedy(run.greedy) if run.greedy else []
    parts += ["## Greedy completions"] if run.samples else []
    parts += [f"```python\n{prompt}⟶{text}\n```" for prompt, text in run.samples]
    return "\n\n".join(parts) + "\n"


def _summary(run: Run) -> list[str]:
    c = run.config
    return [
        f"# {run.name}",
        f"A small Inkling that completes Python: {run.parameters:,} parameters, bfloat16, original layout.",
        _paragraph(
            f"{c.num_layers} layers (local: {_ids(c.local_layers)}; dense: {_ids(c.dense_layers)}), in the others",
            f"{c.num_experts} routed experts with {c.experts_per_token} a token and {c.num_shared_experts} shared.",
            f"Hidden size {c.hidden_size}, window {c.window}, {c.mtp_depths} MTP depths (local: {_ids(c.mtp_local)}),",
            f"{c.real_vocab_size:,} tokens, context {c.max_context:,}, trained on windows of {run.recipe.length:,}.",
        ),
        "It knows the look of Python sources and nothing else: for trying out and testing the package, not for use.\n"
        "End a prompt at a word or sign: spaces at the end split differently from those within a text.",
    ]


def _data(run: Run) -> list[str]:
    return [
        "## Data and licence",
        _paragraph(
            f"Python sources: {run.corpus.name}, {len(run.corpus.files):,} files without code tables, generated files,",
            f"duplicates and installed packages. {run.train_files:,} files ({run.train_tokens:,} tokens) were learned",
            f"from; {run.heldout_files} files, chosen by a hash of their path, were held out.",
        ),
        f"sha256 over all paths and texts: `{run.corpus.sha256}`",
        "Data: Python Software Foundation License. Weights: Apache-2.0.",
    ]


def _training(run: Run) -> list[str]:
    r = run.recipe
    seen = r.steps * r.batch * r.length
    device = jax.devices()[0].device_kind
    changed = f"--steps {r.steps} --batch {r.batch} --length {r.length} --seed {r.seed} --peak-rate {r.peak_rate:g}"
    return [
        "## Training",
        f"    python -m inkling_jax.train {run.options} {changed} --out DIR",
        _paragraph(
            f"{r.steps:,} steps of {r.batch} x {r.length} tokens ({seen / 1e6:.1f} M, {seen / run.train_tokens:.1f}",
            f"passes) in {run.seconds / 60:.1f} minutes on {device}, jax {jax.__version__}, {date.today()}.",
            f"Backbone and depths together, each depth's loss weighted {r.depth_weight:g}.",
            "Another run draws the same batches; its figures agree as far as the device's rounding repeats itself.",
        ),
    ]


def _heldout(found: HeldOut) -> list[str]:
    heads = ["backbone", *(f"depth {d}" for d in range(len(found.accepted)))]
    rows = [f"| {head} | {loss:.3f} |" for head, loss in zip(heads, found.losses, strict=True)]
    return [
        "## Held-out figures",
        f"Teacher forced over {found.tokens:,} tokens of the held-out files, in nats a token:",
        "\n".join(["| head | loss |", "|---|---|", *rows]),
        _paragraph(
            "The first 1, 2, ... drafts are all the file's own next tokens at",
            f"{_percent(found.accepted)} of the positions: {found.tokens_per_round:.2f} tokens a round, if the target",
            "always said what the file says.",
        ),
    ]


def _greedy(found: Greedy) -> list[str]:
    return [
        _paragraph(
            f"Greedy decoding with {found.drafts} drafts after {found.prompts} prompts out of held-out files,",
            f"{found.tokens:,} new tokens: **{found.tokens_per_round:.2f} tokens a round**, acceptance by position",
            f"{_percent(found.acceptance)}. The greedy text of a small model repeats itself, which is easy to draft;",
            "the teacher-forced figure is the sterner one.",
        )
    ]


def _paragraph(*parts: str) -> str:
    return textwrap.fill(" ".join(parts), 110, break_on_hyphens=False)


def _ids(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids)) or "none"


def _percent(shares: list[float]) -> str:
    return ", ".join(f"{100 * share:.1f}" for share in shares) + " %"
