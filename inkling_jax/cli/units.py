"""Sizes for people."""


def in_bytes(size: float) -> str:
    """A number of bytes with the unit that suits it."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.2f} GB"
