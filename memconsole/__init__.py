"""memconsole: a terminal console that estimates, launches and watches training runs."""

__version__ = "0.1.0"
