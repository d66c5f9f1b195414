"""A byte-level tokenizer, and a model that is known to recite one text: every token has one successor.

Its first depth drafts as well as the model itself; the second goes wrong after the bytes of `BLIND`.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from inkling_jax import Inkling
from inkling_jax.tokenizer import Tokenizer
from tests import reference

TEXT = "abcdefghijklm é€😀nopqrstuvw"  # no byte twice; characters of one to four bytes
BLIND = "cfjoq"
END = 256

CONFIG = replace(
    reference.BASE,
    hidden_size=40,
    num_layers=2,
    local_layers=(0,),
    mtp_depths=2,
    mtp_local=(0,),
    vocab_size=264,
    real_vocab_size=END + 1,
    eos_token_ids=(END,),
)


def tokenizer() -> Tokenizer:
    """Every byte is a token, and an end token that is special."""
    letters = sorted(ByteLevel.alphabet())
    library = tokenizers.Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    library.pre_tokenizer = ByteLevel(add_prefix_space=False)
    library.decoder = ByteLevelDecoder()
    library.add_special_tokens(["<|end|>"])
    return Tokenizer(library)


def random_model() -> Inkling:
    """One whose tokens hang on all that came before."""
    params = reference.random_params(CONFIG, seed=4)
    return Inkling(CONFIG, {path: jnp.asarray(p) for path, p in params.items()}, tokenizer())


def cyclic_params() -> dict[str, np.ndarray]:
    """Random weights, but small ones between an embedding and an unembedding that spell the successors."""
    params, hidden = reference.random_params(CONFIG, seed=4), CONFIG.hidden_size
    cycle = [*tokenizer().encode(TEXT), END]
    for path, p in params.items():
        if path.endswith(("attn.wo.weight", "mlp.w2", "experts.w2", "shared.w2")):
            params[path] = 0.02 * p
    params["embed.weight"] *= 0.01
    params["unembed.weight"] *= 0.01
    for i, token in enumerate(cycle):
        params["embed.weight"][token] = np.eye(hidden)[i]
        params["unembed.weight"][cycle[(i + 1) % len(cycle)]] = 8 * np.eye(hidden)[i]
    for d in range(CONFIG.mtp_depths):
        params[f"mtp.{d}.proj.weight"] = np.eye(hidden, 2 * hidden, hidden, dtype=np.float32)  # the token, not h_prev
    params["mtp.1.embed_norm.weight"][[TEXT.index(letter) for letter in BLIND]] = 0
    return params


def cyclic_model() -> Inkling:
    return Inkling(CONFIG, {path: jnp.asarray(p) for path, p in cyclic_params().items()}, tokenizer())


def share_programs(source: Inkling, *others: Inkling) -> None:
    """Models of one config can run each other's programs: what one has compiled is compiled for all."""
    for other in others:
        assert replace(other.config, eos_token_ids=()) == replace(source.config, eos_token_ids=())
        for step in ("prefill", "decode", "teacher_forced"):
            setattr(other._engine, step, getattr(source._engine, step))
