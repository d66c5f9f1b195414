"""What the decoding loop carries from round to round, and what it is told once."""

from dataclasses import dataclass

import jax

from ..cache import Cache, Leaf, Ring

RUNNING, STOPPED, FULL, NOT_FINITE = 0, 1, 2, 3


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """A batch of sequences in flight; donated to every step, which returns the next one.

    tokens: int32 [B, capacity], the committed tokens by position; what lies at `length` and beyond is scratch, where a
        round keeps its drafts. Capacity is at least `limit + drafts + 1`.
    drafted: int8 [B, capacity], for each generated token 0 if the target supplied it, j if it was draft j of its round.
    rejected: int32 [B, capacity], the draft that was turned down in favour of the token there, or -1.
    length: int32 [B], tokens committed, the prompt included. The last of them has not been through the target yet.
    limit: int32 [B], the length at which a sequence is full.
    status: int32 [B], RUNNING, STOPPED at an end token, FULL, or NOT_FINITE logits.
    hidden: the target's rows after the final norm, of the last few positions: what depth 0 starts from.
    rounds: int32 [B]; offered, accepted: int32 [B, drafts], rounds in which draft j was offered and accepted; one
    column of zeros where there are no drafts, since XLA crashes on empty arrays under shard_map (jaxlib 0.11.2).
    """

    cache: Cache
    tokens: Leaf
    drafted: Leaf
    rejected: Leaf
    length: Leaf
    limit: Leaf
    status: Leaf
    hidden: Ring
    rounds: Leaf
    offered: Leaf
    accepted: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Settings:
    """Per-sequence settings, all arrays: another value compiles nothing (more than 16 stop ids do).

    temperature: float32 [B], 0 for greedy. top_k: int32 [B], the vocabulary size for none. top_p: float32 [B], 1
    for none.
    seed: uint32 [B]. stop_ids: int32 [B, n], padded with -1.
    """

    temperature: Leaf
    top_k: Leaf
    top_p: Leaf
    seed: Leaf
    stop_ids: Leaf
