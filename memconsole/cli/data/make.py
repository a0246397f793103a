"""`memconsole data make`: write a dataset to train on."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from memconsole.cli import completing
from memconsole.cli.data.writing import absolute, check_place, write
from memconsole.plan.data.made import KINDS, kind, parse_options, parse_size
from memconsole.plan.plan import PlanError


class _Help(click.Command):
    """A command whose help lists the kinds and their options."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Kinds"):
            formatter.write_dl([(k.name, f"{k.help}; a size counts {k.units}") for k in KINDS])
        for data_kind in KINDS:
            if data_kind.options:
                with formatter.section(f"--set of {data_kind.name}"):
                    formatter.write_dl(
                        [
                            (o.name, f"{o.help} [default: {o.default or 'none'}]")
                            for o in data_kind.options
                        ]
                    )


@click.command("make", cls=_Help)
@click.argument("name", metavar="KIND", shell_complete=completing.kinds)
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--size", required=True, help="How much: 100000, 100k, 1.5M, 1g; or bytes: 512MiB, 2GB."
)
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0), help="Same seed, same data."
)
@click.option(
    "--set", "assignments", multiple=True, metavar="NAME=VALUE", help="An option of KIND."
)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def make_command(
    name: str,
    out: Path,
    size: str,
    seed: int,
    assignments: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Write a dataset of KIND to OUT, in constant memory.

    The size is approximate, because rows that belong together are never separated. OUT appears when it is complete.
    """
    data_kind = kind(name)
    path = absolute(out)
    request = {
        "kind": data_kind.name,
        "out": path,
        "size": msgspec.to_builtins(parse_size(size)),
        "seed": seed,
        "options": parse_options(data_kind, assignments),
    }
    if data_kind.suffixes and out.suffix.lower() not in data_kind.suffixes:
        allowed = " or ".join(data_kind.suffixes)
        raise PlanError(
            f"{out}: {data_kind.name} is read from a file whose name ends with {allowed}"
        )
    check_place(out, force)
    write("memconsole_trainer.data.make", request, as_json)
