"""The base of every explorer: controls, one pure `figure(state)`, a state line to copy.

Setting a control's value in a cell redraws before the next statement runs, so that a test can act
as a reader. Changes from the browser are debounced: only the last of a burst is drawn. Pictures are
put into the `Output` as data, not printed inside `with out:`, so that an error in a callback is
raised where the value was set.
"""

from __future__ import annotations

import asyncio
import json
import os
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from html import escape
from typing import Any, TypeAlias

import ipywidgets as widgets
import plotly.graph_objects as go
from IPython import get_ipython
from traitlets import TraitError

from ..core.errors import InvalidInput, MlaLabError, invalid
from .source import Source
from .style import CONFIG
from .svg import Svg

#: seconds of silence before a burst of slider moves is drawn
DEBOUNCE_S = 0.03
PLOTLY_MIME = "application/vnd.plotly.v1+json"
#: output type that `make html` reads in place of a live widget
FRAMES_MIME = "application/vnd.mla-lab.frames+json"

Picture: TypeAlias = go.Figure | Svg
Knobs: TypeAlias = dict[str, Callable[[], widgets.Widget]]


def mime_bundle(picture: Picture) -> dict[str, Any]:
    """A picture as notebook output data."""
    if isinstance(picture, Svg):
        return {"text/html": picture.markup, "text/plain": words_of(picture)}
    # plotly's own writer keeps long arrays in a compact binary form
    data = json.loads(picture.to_json())
    data["config"] = CONFIG
    return {PLOTLY_MIME: data, "text/plain": words_of(picture)}


def words_of(picture: Picture) -> str:
    """The finding of a picture in words."""
    return picture.alt if isinstance(picture, Svg) else str(picture.layout.title.text)


def called_from_browser() -> bool:
    """True while a callback of a control moved in the browser runs."""
    shell = get_ipython()
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return False
    header = (kernel.get_parent() or {}).get("header") or {}
    return bool(header.get("msg_type") == "comm_msg")


#: every explorer of this process that is still in use
_LIVE: weakref.WeakSet[Explorer] = weakref.WeakSet()


def forget() -> None:
    """Begin a notebook: forget the explorers of an earlier one."""
    _LIVE.clear()


def moved() -> list[str]:
    """State lines of the explorers whose state differs from the initial one."""
    return sorted(e.line() for e in _LIVE if e.state != e.first)


class Explorer:
    """Controls over one picture.

    A subclass sets `source`, `frames_over` and `knobs` (or builds its `controls()`), and
    implements `figure(state)` from plain values alone; `note(state)` may add HTML below.
    """

    #: expression that creates this explorer: by default its class as a public name
    name = "lab.Explorer"
    #: chip beside the state line
    source: Source | None = None
    #: its controls by state name
    knobs: Knobs = {}  # noqa: RUF012
    #: control whose values `make html` precomputes, "" for the first picture alone
    frames_over = ""

    def __init_subclass__(cls) -> None:
        cls.name = vars(cls).get("name", f"lab.{cls.__name__}")

    def __init__(self, **state: Any) -> None:
        self.widgets = {name: make() for name, make in self.controls().items()}
        for key, value in state.items():
            self._put(key, value)
        self.out = widgets.Output()
        self.footer = widgets.HTML()
        self.pending: asyncio.TimerHandle | None = None
        self.draws = 0
        self.first = self.state
        _LIVE.add(self)
        for widget in self.widgets.values():
            widget.observe(self._changed, names="value")
        self.redraw()

    # -- implemented by a subclass -------------------------------------------------------------
    def controls(self) -> Knobs:
        """The controls by state name, at their defaults."""
        return self.knobs

    def figure(self, state: dict[str, Any]) -> Picture:
        """The picture of `state`, a pure function."""
        raise invalid("figure", "Explorer itself", "a subclass that draws")

    def note(self, state: dict[str, Any]) -> str:
        """A sentence of HTML below the picture, or nothing."""
        return ""

    # -- provided by the base ------------------------------------------------------------------
    @property
    def state(self) -> dict[str, Any]:
        """The controls' values, plain and copyable."""
        return {key: widget.value for key, widget in self.widgets.items()}

    def picture(self, **state: Any) -> Picture:
        """The picture for these values; the controls stay unchanged."""
        unknown = next((key for key in state if key not in self.widgets), None)
        if unknown is not None:
            raise self._refuse(unknown, state[unknown])
        return self.figure({**self.state, **state})

    def title(self, **state: Any) -> str:
        """The finding of the picture: the title of a chart, the alt text of a drawing."""
        return words_of(self.picture(**state))

    def _refuse(self, key: str, value: Any) -> InvalidInput:
        return invalid(key, repr(value), f"a control of {self.name}: {list(self.widgets)}")

    def _put(self, key: str, value: Any) -> None:
        """Sets a control. Raises InvalidInput for an unknown one, and for a value that it lacks."""
        if key not in self.widgets:
            raise self._refuse(key, value)
        widget = self.widgets[key]
        try:
            widget.value = value
        except TraitError:
            a_choice = hasattr(widget, "options")
            supported = tuple(slider_values(widget)) if a_choice else f"a value as {widget.value!r}"
            raise invalid(key, repr(value), supported) from None

    def line(self, state: dict[str, Any] | None = None) -> str:
        """Expression that creates this explorer in `state`, by default its present one."""
        arguments = ", ".join(f"{key}={value!r}" for key, value in (state or self.state).items())
        return f"{self.name}({arguments})"

    def words(self, state: dict[str, Any]) -> str:
        """HTML below the picture of `state`: note, source chip, state line."""
        chip = self.source.chip() if self.source else ""
        return (
            f"{self.note(state)}<div style='margin-top:4px'>{chip} "
            f"<code style='user-select:all;font-size:12px'>{escape(self.line(state), quote=False)}"
            "</code></div>"
        )

    def set(self, **state: Any) -> Explorer:
        """Sets several controls, drawing once; returns the explorer."""
        with self._unseen():
            for key, value in state.items():
                self._put(key, value)
        self.redraw()
        return self

    def limit(self, key: str, most: int) -> None:
        """Ends a slider at `most`, without a redraw; a larger value moves to it."""
        with self._unseen():
            self.widgets[key].max = most

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Where changes of controls redraw nothing."""
        for widget in self.widgets.values():
            widget.unobserve(self._changed, names="value")
        try:
            yield
        finally:
            for widget in self.widgets.values():
                widget.observe(self._changed, names="value")

    def redraw(self) -> None:
        """Draws the present state into the output."""
        state = self.state
        bundle = mime_bundle(self.figure(state))
        self.out.outputs = ({"output_type": "display_data", "data": bundle, "metadata": {}},)
        self.footer.value = self.words(state)
        self.draws += 1

    def _changed(self, _change: object) -> None:
        if not called_from_browser():
            self.redraw()
            return
        if self.pending is not None:
            self.pending.cancel()
        self.pending = asyncio.get_event_loop().call_later(DEBOUNCE_S, self._redraw_shown)

    def _redraw_shown(self) -> None:
        """Redraw after a reader's change."""
        self.pending = None
        self.guarded(self.redraw)

    def guarded(self, act: Callable[[], object]) -> None:
        """Does what a reader asked for in the browser. An error is shown in place of the picture
        and of the words about it: one that refuses a value as its sentence, another with frames.
        """
        try:
            act()
        except Exception as error:
            name, frames = type(error).__name__, traceback.format_exc().splitlines()
            self.out.outputs = (
                {
                    "output_type": "error",
                    "ename": name,
                    "evalue": str(error),
                    "traceback": [f"{name}: {error}"] if isinstance(error, MlaLabError) else frames,
                },
            )
            self.footer.value = ""

    def layout(self) -> widgets.Widget:
        """Controls above, picture below."""
        row = widgets.Layout(flex_flow="row wrap", grid_gap="2px 14px")
        return widgets.VBox(
            [widgets.Box(list(self.widgets.values()), layout=row), self.out, self.footer]
        )

    def frames(self) -> list[tuple[str, Picture, str]]:
        """(value, picture, words below) for every value of `frames_over`, for the static site."""
        values = slider_values(self.widgets[self.frames_over]) if self.frames_over else []
        states = [{**self.state, self.frames_over: v} for v in values] or [self.state]
        return [(str(s.get(self.frames_over, "")), self.figure(s), self.words(s)) for s in states]

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        view: dict[str, Any] = dict(self.layout()._repr_mimebundle_() or {})
        if os.environ.get("MLA_LAB_HTML") == "1":
            frames = [{"value": v, "data": mime_bundle(p), "words": w} for v, p, w in self.frames()]
            view[FRAMES_MIME] = {
                "control": self.frames_over,
                "now": str(self.state.get(self.frames_over, "")),
                "frames": frames,
            }
        return view


def slider_values(widget: widgets.Widget) -> list[Any]:
    """All values of a slider or a choice, in order."""
    if hasattr(widget, "options"):
        return [o[1] if isinstance(o, tuple) else o for o in widget.options]
    if isinstance(widget, widgets.IntSlider):
        return list(range(widget.min, widget.max + 1, widget.step))
    raise invalid("frames_over", type(widget).__name__, "an IntSlider or a choice")


def knobs(**made: Callable[[], widgets.Widget]) -> Knobs:
    """Controls by state name, each made anew for every explorer."""
    return made


def choice(
    label: str, options: Any, value: Any, width: str = "250px"
) -> Callable[[], widgets.Dropdown]:
    """A drop-down."""
    return partial(widgets.Dropdown, options=options, value=value, **_named(label, width))


def steps(
    label: str, options: Any, value: Any, width: str = "330px"
) -> Callable[[], widgets.SelectionSlider]:
    """A slider over named values."""
    return partial(widgets.SelectionSlider, options=options, value=value, **_named(label, width))


def integers(
    label: str, low: int, high: int, value: int, *, step: int = 1, width: str = "330px"
) -> Callable[[], widgets.IntSlider]:
    """A slider over integers."""
    limits = {"min": low, "max": high, "step": step}
    return partial(widgets.IntSlider, value=value, **limits, **_named(label, width))


def field(label: str, value: str, width: str = "330px") -> Callable[[], widgets.Text]:
    """A text field that acts when Enter is pressed or the focus leaves."""
    return partial(widgets.Text, value=value, continuous_update=False, **_named(label, width))


def tick(label: str, value: bool) -> Callable[[], widgets.Checkbox]:
    """A check box."""
    return partial(widgets.Checkbox, value=value, indent=False, **_named(label, "auto"))


def _named(label: str, width: str) -> dict[str, Any]:
    style = {"description_width": f"{8 * len(label) + 12}px"}
    return {"description": label, "layout": {"width": width}, "style": style}
