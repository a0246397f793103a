"""``python -m memconsole``."""

from memconsole.cli.main import main

main()
