"""How the bundled checkpoint `nano` was trained: `python -m inkling_jax.train --help`."""
