"""How to install what an extra of memconsole brings, in words for a message."""


def to_install(extra: str) -> str:
    """What to do to have an extra: ``install the extra web of memconsole: …``."""
    return (
        f"install the extra {extra} of memconsole: pip install '.[{extra}]' in its checkout, "
        f"or pip install 'WHEEL[{extra}]'"
    )
