"""`memconsole web`: the same console in a browser, on this machine's loopback interface."""

from __future__ import annotations

import sys

import click

from memconsole.cli import completing
from memconsole.errors import UserError
from memconsole.extras import to_install


@click.command()
@click.argument("run", required=False, shell_complete=completing.run_names)
@click.option(
    "--port",
    default=0,
    type=click.IntRange(0, 65535),
    help="Port of the page; a free one if not given.",
)
@click.option("--write", is_flag=True, help="Let the page launch, stop, resume and delete.")
def command(run: str | None, port: int, write: bool) -> None:
    """Serve the console at 127.0.0.1; read-only unless --write. It shows RUN, if given.

    The printed address holds a token that works once. From another machine: ssh -L
    PORT:127.0.0.1:PORT HOST, then open the same address there.
    """
    try:
        from memconsole.web.server import WebConsole
    except ModuleNotFoundError:
        raise UserError(f"to serve the console, {to_install('web')}") from None
    if run is not None:
        from memconsole.runs.record.run_store import find_run

        run = find_run(run).id
    argv = [sys.executable, "-P", "-m", "memconsole", *(("attach", run) if run else ())]
    server = WebConsole(argv + ([] if write else ["--readonly"]), port)

    def ready(address: str) -> None:
        click.echo(address)
        mode = "may launch, stop and delete runs" if write else "read-only"
        click.echo(f"works once; {mode}; ctrl+c ends it", err=True)
        click.echo(f"from elsewhere: ssh -L {server.port}:127.0.0.1:{server.port} HOST", err=True)

    server.run(ready)
