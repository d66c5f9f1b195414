"""A tiny model whose compiled steps the tests of a process share, and the pieces to run them round by round."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np

from inkling_jax.cache import CacheShape
from inkling_jax.config import InklingConfig
from inkling_jax.decode.engine import Engine
from inkling_jax.decode.request import Request
from tests import reference

DRAFTS = 3
PAGE = 8
CONFIG = replace(reference.BASE, num_layers=2, local_layers=(0,), mtp_depths=DRAFTS, mtp_local=(0, 2))
"""Local and global, dense and MoE, in the backbone; local and global among the depths."""


class SmallPages(Engine):
    """An engine whose sequences cross a page edge every few rows, and whose page pool is just large enough."""

    width, page = 16, PAGE

    def shape(self, needed: np.ndarray, drafts: int) -> CacheShape:
        pages = -(-needed // self.page)
        most = int(pages.reshape(self.groups, -1).sum(axis=1).max())
        width = max(self.width, int(pages.max()))
        return CacheShape(len(needed), most * self.groups, width, drafts, self.page, self.groups)


@cache
def engine(config: InklingConfig = CONFIG) -> SmallPages:
    params = {path: jnp.asarray(p) for path, p in reference.random_params(config).items()}
    return SmallPages(config, params, "float32")


def request(tokens: Sequence[int], new: int, **settings) -> Request:
    plain = dict(temperature=0.0, top_k=CONFIG.real_vocab_size, top_p=1.0, seed=0, stop_ids=(), stop_texts=())
    return Request(tokens=[int(t) for t in tokens], max_new_tokens=new, **{**plain, **settings})
