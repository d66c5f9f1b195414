"""A tokenizer with the tokens of the chat format, and a model that to anything thinks THOUGHT and answers ANSWER."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from inkling_jax import Inkling
from inkling_jax.tokenizer import Tokenizer
from tests import cyclic, reference

# Not from the package: as the published files spell them.
TOKENS = [
    "<|endoftext|>",
    "<|message_user|>",
    "<|message_model|>",
    "<|message_system|>",
    "<|message_tool|>",
    "<|content_text|>",
    "<|content_model_end_sampling|>",
    "<|content_thinking|>",
    "<|end_message|>",
    "<|content_invoke_tool_json|>",
]
THOUGHT, ANSWER = "2*3=6", "Six: é!"  # no byte comes twice


def library(special: bool = True) -> tokenizers.Tokenizer:
    """Every byte is a token, "ix" is one, and so are those of the format; `special` is what the file calls them."""
    letters = sorted(ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*letters, "ix"])}
    made = tokenizers.Tokenizer(BPE(vocab=vocabulary, merges=[("i", "x")]))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevelDecoder()
    made.add_special_tokens(TOKENS) if special else made.add_tokens(TOKENS)
    return made


TOKENIZER = Tokenizer(library())
END_TURN = TOKENIZER.encode("<|content_model_end_sampling|>")[0]
CONFIG = replace(cyclic.CONFIG, vocab_size=272, real_vocab_size=TOKENIZER.size, eos_token_ids=(END_TURN,))


def talking_model() -> Inkling:
    """Random weights, but small ones between an embedding and an unembedding that spell each token's successor."""
    params, hidden = reference.random_params(CONFIG, seed=4), CONFIG.hidden_size
    blocks = f"<|message_model|><|content_thinking|>{THOUGHT}<|end_message|><|content_text|>{ANSWER}"
    cycle = TOKENIZER.encode(f"{blocks}<|content_model_end_sampling|>")
    for path, p in params.items():
        if path.endswith(("attn.wo.weight", "mlp.w2", "experts.w2", "shared.w2")):
            params[path] = 0.02 * p
    params["embed.weight"] *= 0.01
    params["unembed.weight"] *= 0.01
    for i, token in enumerate(cycle):
        params["embed.weight"][token] = np.eye(hidden)[i]
        params["unembed.weight"][cycle[(i + 1) % len(cycle)]] = 8 * np.eye(hidden)[i]
    for d in range(CONFIG.mtp_depths):
        params[f"mtp.{d}.proj.weight"] = np.eye(hidden, 2 * hidden, hidden, dtype=np.float32)
    return Inkling(CONFIG, {path: jnp.asarray(p) for path, p in params.items()}, TOKENIZER)
