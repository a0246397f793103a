"""Reads the devices for a command, and says so if a driver makes it wait."""

from __future__ import annotations

import threading

import click

from memconsole.devices.budget import names_driver
from memconsole.devices.probe import ONCE_SECONDS, read_once
from memconsole.devices.reading import Devices
from memconsole.plan.plan import Plan

QUIET_SECONDS = 2.0
"""After this wait a line on standard error gives its reason."""


def read_devices(plan: Plan | None = None) -> Devices:
    """The devices of this machine. Waits for a slow driver, unless `plan` needs none."""
    if plan is not None and not names_driver(plan):
        return read_once(QUIET_SECONDS)
    words = f"memconsole: waiting for the device drivers, {ONCE_SECONDS:g} s at most"
    notice = threading.Timer(QUIET_SECONDS, click.echo, (words,), {"err": True})
    notice.daemon = True
    notice.start()
    try:
        return read_once(ONCE_SECONDS)
    finally:
        notice.cancel()
