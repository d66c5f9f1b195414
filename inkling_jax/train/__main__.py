"""`python -m inkling_jax.train`: from Python sources to a checkpoint directory."""

import argparse
import dataclasses
import math
import sys
import tempfile
import time
from pathlib import Path

from ..checkpoint import save_checkpoint
from ..model import load
from .card import Greedy, Run, write_card
from .data import CorpusError, join, read_corpus, tokenize, train_tokenizer
from .evaluate import make_heldout, prompts
from .loop import initialise, rounded, train
from .presets import PRESETS, Recipe

DESCRIPTION = """
Train a small Inkling (backbone and MTP depths together) and its tokenizer on Python sources, and write a checkpoint
directory: config.json, safetensors with an index (original layout, bfloat16), tokenizer.json and a model card."""

EPILOG = """
The bundled checkpoint is the preset `nano` (minutes on one GPU). `--preset toy` shows in a minute on a CPU that all
parts work; its text is noise. The same Python version gives the same corpus, tokenizer and batches everywhere."""

# Ends at a sign: a prompt that ends in spaces splits differently from the text that was learned.
SAMPLES = (
    "def fibonacci(n):",
    "class QueueTest(unittest.TestCase):\n    def setUp(self):",
    "import os\nimport sys\n\n\ndef main(",
)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m inkling_jax.train", description=DESCRIPTION, epilog=EPILOG)
    made.add_argument(
        "--out", type=Path, required=True, help="directory of the new checkpoint; must not exist or be empty"
    )
    made.add_argument("--preset", choices=PRESETS, default="nano", help="sizes and recipe (default: %(default)s)")
    made.add_argument(
        "--corpus", type=Path, help="folder, .tar.* or .zip with .py files (default: this Python's library)"
    )
    made.add_argument("--corpus-name", help="what the model card calls the corpus (default: its file name or version)")
    made.add_argument(
        "--tests", action=argparse.BooleanOptionalAction, default=True, help="learn from test suites too (default: yes)"
    )
    for name in ("steps", "batch", "length", "seed"):
        made.add_argument(f"--{name}", type=int, help=f"instead of the preset's {name}")
    made.add_argument("--peak-rate", type=float, help="instead of the preset's highest learning rate")
    made.add_argument("--prompts", type=int, default=32, help="held-out prompts decoded greedily for the card; 0: none")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = parser().parse_args(arguments)
    try:
        run(args)
    except (ValueError, FloatingPointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run(args: argparse.Namespace) -> None:
    """Corpus, tokenizer, training, checkpoint, figures, card: in this order, so a late failure costs no weights."""
    preset = PRESETS[args.preset]
    recipe = _recipe(preset.recipe, args, preset.config(preset.real_vocab_size).max_context)
    if args.out.exists() and any(args.out.iterdir()):
        raise CorpusError(f"{args.out}: not empty; name a new directory")
    corpus = read_corpus(args.corpus, args.tests)
    corpus = dataclasses.replace(corpus, name=args.corpus_name or corpus.name)
    print(f"{corpus.name}: {len(corpus.files)} files, sha256 {corpus.sha256}", flush=True)
    learn, held = corpus.split()
    library = train_tokenizer(learn, preset.real_vocab_size)
    end = library.get_vocab_size() - 1
    learn_ids, held_ids = tokenize(library, learn), tokenize(library, held)
    tokens, held_tokens = join(learn_ids, end), join(held_ids, end)
    config = preset.config(library.get_vocab_size())
    graph, params = initialise(config, recipe.seed)
    count = sum(x.size for x in params.values())
    print(f"{len(tokens)} tokens to learn from, {len(held_tokens)} held out, {count} parameters", flush=True)
    heldout = make_heldout(graph, config, held_tokens, recipe.length)

    def watch(params):
        found = heldout(params)
        return (
            f"held-out loss {' '.join(f'{x:.3f}' for x in found.losses)}, {found.tokens_per_round:.2f} tokens a round"
        )

    began = time.perf_counter()
    params, _ = train(config, recipe, tokens, watch)
    seconds = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        library.save(str(Path(folder) / "tokenizer.json"), pretty=False)
        save_checkpoint(args.out, config, rounded(config, params), layout="original", tokenizer_dir=Path(folder))
    greedy, samples = _decoded(args.out, prompts(held_ids, args.prompts, recipe.length // 4), recipe.length // 8)
    result = Run(
        name=args.out.resolve().name,
        config=config,
        recipe=recipe,
        corpus=corpus,
        options=f"--preset {args.preset}" + ("" if args.tests else " --no-tests"),
        train_files=len(learn),
        train_tokens=len(tokens),
        heldout_files=len(held),
        heldout=heldout(params),
        parameters=count,
        seconds=seconds,
        greedy=greedy,
        samples=samples,
    )
    card = write_card(result)
    (args.out / "README.md").write_text(card, encoding="utf-8")
    print(card)


def _recipe(recipe: Recipe, args: argparse.Namespace, most: int) -> Recipe:
    """The preset's recipe with what the command line changes; a short run warms up and reports more often.

    `most` is the longest window that the model takes. Reports divide the steps.
    """
    given = {name: getattr(args, name) for name in ("steps", "batch", "length", "seed", "peak_rate")}
    recipe = dataclasses.replace(recipe, **{name: value for name, value in given.items() if value is not None})
    for name in ("steps", "batch"):
        if getattr(recipe, name) < 1:
            raise ValueError(f"--{name} must be at least 1, found {getattr(recipe, name)}")
    if not 16 <= recipe.length <= most:
        raise ValueError(f"--length must be from 16 to {most}, the preset's context, found {recipe.length}")
    if not (math.isfinite(recipe.peak_rate) and recipe.peak_rate > 0):
        raise ValueError(f"--peak-rate must be a finite number above 0, found {recipe.peak_rate}")
    if not 0 <= recipe.seed < 2**32:
        raise ValueError(f"--seed must be from 0 to {2**32 - 1}, found {recipe.seed}")
    if args.prompts < 0:
        raise ValueError(f"--prompts must be at least 0, found {args.prompts}")
    return dataclasses.replace(
        recipe,
        warmup=min(recipe.warmup, recipe.steps // 5),
        report_every=max(n for n in range(1, recipe.report_every + 1) if recipe.steps % n == 0),
    )


def _decoded(directory: Path, prompts: list[list[int]], new_tokens: int) -> tuple[Greedy | None, list[tuple[str, str]]]:
    """Greedy decoding of the finished checkpoint with as many drafts as it has depths; nothing without prompts."""
    if not prompts:
        return None, []
    model = load(directory, progress=False)
    drafts = model.config.mtp_depths
    stats = model.generate(prompts, max_new_tokens=new_tokens, draft_tokens=drafts).stats
    texts = model.generate(list(SAMPLES), max_new_tokens=new_tokens // 2, draft_tokens=drafts)
    samples = [(prompt, completion.text or "") for prompt, completion in zip(SAMPLES, texts, strict=True)]
    return Greedy(len(prompts), stats.tokens, drafts, stats.tokens_per_round, list(stats.acceptance)), samples


if __name__ == "__main__":
    raise SystemExit(main())
