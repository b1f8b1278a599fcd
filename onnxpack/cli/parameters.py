"""Options that several commands share."""

from __future__ import annotations

import click


class _Dim(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic from click 8.4 on
    name = "NAME=SIZE"

    def convert(
        self, value: str | tuple[str, int], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        name, _, size = value.rpartition("=")
        if not name or not size.isdecimal():
            self.fail(f"{value!r} is not NAME=SIZE", param, ctx)
        return name, int(size)


def _as_dict(ctx: click.Context, param: click.Parameter, value: tuple[tuple[str, int], ...]) -> dict[str, int]:
    return dict(value)


DIMS = click.option(
    "--dim",
    "dims",
    type=_Dim(),
    multiple=True,
    callback=_as_dict,
    help="Size of a symbolic dimension of random inputs; may be repeated. Default: 1 for batches, 16 for others.",
)
DEVICE = click.option(
    "--device",
    type=click.Choice(("auto", "host", "reference", "npu")),
    default="auto",
    show_default=True,
    help="What runs the bound products.",
)
