"""One of several words; a mistyped one is answered with the nearest."""

from __future__ import annotations

import difflib
from typing import Any

import click


class Choice(click.Choice):  # type: ignore[type-arg, unused-ignore]  # click < 8.2
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            known = [str(choice) for choice in self.choices]
            near = difflib.get_close_matches(str(value), known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            self.fail(f"there is no {value!r}.{hint} Known: {', '.join(known)}.", param, ctx)
