"""The debugger: run a shipped kernel in the emulator, step it, break it, read the report."""

from __future__ import annotations

from html import escape
from typing import Any

import ipywidgets as widgets

from .. import explorer, film, film_breaks, film_picture, film_report
from ..source import Source
from ..svg import Svg

SCHEDULES = ("fair", "random", "late", "adverse")
#: why another schedule may leave the picture as it is
ORDER = (
    "Slots follow waits and arrivals alone. The schedule is the order in which the emulator runs "
    "what may run, and so decides what a race does to the result."
)
#: milliseconds between two steps while it plays
PLAY_MS = 350


class DebugExplorer(explorer.Explorer):
    """One CTA of keep_ab over emulated steps: warps, barriers, stages, source line; and broken."""

    source = Source("predicted", detail="emulator")
    frames_over = "broken"

    def controls(self) -> explorer.Knobs:
        roles = [(film_picture.role(warp), warp) for warp in range(film.WARPS)]
        last = len(film_breaks.whole().steps()) - 1
        return explorer.knobs(
            broken=explorer.choice("break", film_breaks.NAMES, film_breaks.NOTHING, "300px"),
            schedule=explorer.choice("schedule", SCHEDULES, "fair", "170px"),
            warp=explorer.choice("warp", roles, 0, "200px"),
            step=explorer.integers("step", 0, last, last // 2, width="420px"),
        )

    def figure(self, state: dict[str, Any]) -> Svg:
        made = film_breaks.named(state["broken"])
        if not film_breaks.is_run(made.name, state["schedule"]):
            return film_picture.to_run(made, state["schedule"])
        found = film_breaks.film_of(made.name, state["schedule"])
        slot = self._slot(found, state["step"])
        lanes = film_picture.lanes(found, made, slot, state["warp"])
        return Svg(lanes.markup + film_picture.panel(found, slot, state["warp"]), lanes.alt)

    def note(self, state: dict[str, Any]) -> str:
        made = film_breaks.named(state["broken"])
        if not film_breaks.is_run(made.name, state["schedule"]):
            return ""
        found = film_breaks.film_of(made.name, state["schedule"])
        order = "" if state["schedule"] == "fair" else f" {ORDER}"
        if not found.findings:
            return f"<div>{escape(made.sentence)} All checks are silent.{order}</div>"
        return f"<div>{escape(made.sentence)}{order}</div>{film_report.report(found)}"

    def redraw(self) -> None:
        """Draws the present state; the slider ends where the film does."""
        named = self.state["broken"], self.state["schedule"]
        if film_breaks.is_run(*named):
            self.limit("step", len(film_breaks.film_of(*named).steps()) - 1)
        super().redraw()

    def run(self, **state: Any) -> DebugExplorer:
        """Emulate what the menus name, and go to its end; returns the explorer."""
        self.set(**state)
        found = film_breaks.film_of(self.state["broken"], self.state["schedule"])
        self.redraw()
        self.set(step=len(found.steps()) - 1)
        return self

    def _slot(self, found: film.Film, step: int) -> int:
        steps = found.steps()
        return steps[min(step, len(steps) - 1)]

    def _move(self, by: int) -> None:
        slider = self.widgets["step"]
        slider.value = min(max(slider.value + by, 0), slider.max)

    def layout(self) -> widgets.Widget:
        """Menus, then the buttons and the slider, then the picture."""
        step = self.widgets["step"]
        run = widgets.Button(description="Run", icon="cogs", button_style="primary")
        back, on = widgets.Button(description="◀ step"), widgets.Button(description="step ▶")
        for button in (run, back, on):
            button.layout.width = "84px"
        run.on_click(lambda _: self.run())
        back.on_click(lambda _: self._move(-1))
        on.on_click(lambda _: self._move(1))
        play = widgets.Play(interval=PLAY_MS, max=step.max, value=step.value)
        widgets.jslink((play, "value"), (step, "value"))
        widgets.jslink((step, "max"), (play, "max"))
        row = widgets.Layout(flex_flow="row wrap", grid_gap="2px 12px", align_items="center")
        menus = [self.widgets[k] for k in ("broken", "schedule")] + [run, self.widgets["warp"]]
        return widgets.VBox(
            [
                widgets.Box(menus, layout=row),
                widgets.Box([play, back, on, step], layout=row),
                self.out,
                self.footer,
            ]
        )

    def frames(self) -> list[tuple[str, explorer.Picture, str]]:
        """Each break at its end, for the static site."""
        for name in film_breaks.NAMES:
            film_breaks.film_of(name, self.state["schedule"])
        return super().frames()
