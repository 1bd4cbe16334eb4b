"""The terminal application of `tandem top`, on textual."""

from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Sparkline, Static

from controlplane.commands.admin_api import CommandFailed
from controlplane.commands.live_view import (
    CALIBRATION_COLUMNS,
    CLASS_COLUMNS,
    EVENT_COLUMNS,
    LIMIT_OF_BURN,
    OWNER_COLUMNS,
    LiveView,
    Record,
    Row,
)
from controlplane.core.request import Owner

_PERIOD_S = 1.0
_COLOURS = {
    "met": "green", "admitted": "green", "deferred": "yellow", "late": "yellow", "preempted": "magenta",
    "rejected": "red", "evicted": "red", "failed": "red", "quota": "cyan", "fault began": "bold red",
    "engine down": "bold red", "fault ended": "green", "engine up": "green", "worker up": "yellow",
}  # fmt: skip
_BAR = 80
_LLM_STYLE, _EMBEDDING_STYLE = "cyan", "magenta"
_CHARTS = {
    "queue, LLM": ("owners", Owner.LLM.value, "waiting"),
    "queue, embeddings": ("owners", Owner.EMBEDDING.value, "waiting"),
    "device time, LLM": ("device", Owner.LLM.value),
    "device time, embeddings": ("device", Owner.EMBEDDING.value),
}
"""Charts over time: their titles, and where a sample has their number."""


class ExplanationScreen(ModalScreen[None]):
    """The explanation of one request over the page, until Escape."""

    CSS = """
    ExplanationScreen { align: center middle; }
    #explanation {
        width: 90%; max-height: 80%; height: auto; padding: 1 2; border: round $primary; background: $surface;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [("escape", "dismiss", "Close"), ("q", "dismiss", "Close")]

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._title, self._text = title, text

    def compose(self) -> ComposeResult:
        """The text, which scrolls."""
        with VerticalScroll(id="explanation") as page:
            page.border_title, page.border_subtitle = self._title, "Escape closes"
            yield Static(Text(self._text))


class EventTable(DataTable[Text]):
    """Events with a cursor; Enter selects the event under it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Explain")]


class TopApp(App[None]):
    """Reads the feed once a second in a thread, and shows classes, memory, charts and events.

    Args:
        view: what is shown.
        read: brings the view up to date; raises CommandFailed.
        explain: the explanation of a request by its id; raises CommandFailed.
        server: address of the server, for the title.
    """

    CSS = """
    Screen { background: $surface; }
    #title { height: 1; padding: 0 1; background: $primary-background; text-style: bold; }
    #faults { height: auto; padding: 0 1; background: $error; color: $text; display: none; }
    .panel { border: round $primary; border-title-style: bold; padding: 0 1; height: auto; }
    #charts { height: 6; }
    .chart { width: 1fr; border: round $primary; padding: 0 1; height: 6; }
    .chart Sparkline { height: 3; }
    .chart Static { height: 1; }
    #events-panel { height: 1fr; min-height: 6; }
    DataTable { height: auto; background: $surface; }
    #events { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        ("space", "pause", "Pause"),
        ("a", "all_events", "All events"),
    ]

    def __init__(
        self, view: LiveView, read: Callable[[], None], explain: Callable[[str], str], server: str
    ) -> None:
        super().__init__()
        self.view = view
        self._read = read
        self._explain = explain
        self._events: list[Record] = []
        self._reading = Lock()
        self._server = server
        self._is_paused = False
        self._shows_all = False
        self._failure: str | None = None

    def compose(self) -> ComposeResult:
        """The panels, from the most urgent to the most detailed."""
        yield Static(id="title")
        yield Static(id="faults")
        with Vertical(classes="panel", id="classes-panel"):
            yield DataTable[Text](id="classes", cursor_type="none")
        with Vertical(classes="panel", id="owners-panel"):
            yield DataTable[Text](id="owners", cursor_type="none")
            yield Static(id="map")
            yield Static(id="pool")
        with Horizontal(id="charts"):
            for number, title in enumerate(_CHARTS):
                with Vertical(classes="chart", id=f"chart-{number}") as chart:
                    chart.border_title = title
                    yield Sparkline([0.0], summary_function=max, id=f"line-{number}")
                    yield Static(id=f"value-{number}")
        with Vertical(classes="panel", id="calibration-panel"):
            yield DataTable[Text](id="calibration", cursor_type="none")
        with Vertical(classes="panel", id="events-panel"):
            yield EventTable(id="events", cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        """Shows what is known already, and reads on."""
        for name, columns, title in (
            ("classes", CLASS_COLUMNS, "Classes"),
            ("owners", OWNER_COLUMNS, "Memory and device"),
            ("calibration", CALIBRATION_COLUMNS, "Calibration"),
            ("events", EVENT_COLUMNS, "Events"),
        ):
            self.query_one(f"#{name}", DataTable).add_columns(*columns)
            self.query_one(f"#{name}-panel").border_title = title
        self.query_one("#events").focus()
        self.refresh_view()
        self.set_interval(_PERIOD_S, self.poll)

    def action_pause(self) -> None:
        """Holds the display, or goes on."""
        self._is_paused = not self._is_paused
        self.refresh_view()

    def action_all_events(self) -> None:
        """Shows also requests that were admitted at once and met their SLO, or leaves them out."""
        self._shows_all = not self._shows_all
        self.refresh_view()

    def on_data_table_row_selected(self, selected: DataTable.RowSelected) -> None:
        """Explains the request of the selected event; other events have none."""
        if "id" in (event := self._events[selected.cursor_row]):
            self.explain(event["id"])

    @work(thread=True)
    def explain(self, request_id: str) -> None:
        """Asks the server for the explanation of a request, and shows it or why there is none."""
        try:
            text = self._explain(request_id)
        except CommandFailed as error:
            text = str(error)
        self.call_from_thread(self.push_screen, ExplanationScreen(request_id, text))

    @work(thread=True)
    def poll(self) -> None:
        """Reads the feed, unless the former read still runs: both would take the same records."""
        if self._is_paused or not self._reading.acquire(blocking=False):
            return
        try:
            self._read()
        except CommandFailed as error:
            self._failure = str(error)
        else:
            self._failure = None
        finally:
            self._reading.release()
        self.call_from_thread(self.refresh_view)

    def refresh_view(self) -> None:
        """Writes the view into the widgets."""
        view = self.view
        self.query_one("#title", Static).update(self._title())
        problems = [*([self._failure] if self._failure else []), *view.faults()]
        faults = self.query_one("#faults", Static)
        faults.display = bool(problems)
        faults.update(Text("\n".join(problems)))
        self._fill("classes", map(_class_cells, view.class_rows()))
        self._fill("owners", ([Text(cell) for cell in row] for row in view.owner_rows()))
        self.query_one("#map", Static).update(_memory_map(view))
        self.query_one("#pool", Static).update(Text(view.pool_line(), style="dim"))
        self._fill("calibration", ([Text(cell) for cell in row] for row in view.calibration_rows()))
        for number, path in enumerate(_CHARTS.values()):
            values = view.series(path) or [0.0]
            self.query_one(f"#line-{number}", Sparkline).data = values
            shown = f"{100 * values[-1]:.0f} %" if path[0] == "device" else f"{values[-1]:,.0f}"
            self.query_one(f"#value-{number}", Static).update(f"{shown}, at most {_peak(path, values)}")
        self._show_events(view.newest(is_filtered=not self._shows_all))
        note = "all" if self._shows_all else "without requests that met their SLO"
        self.query_one("#events-panel").border_subtitle = note

    def _show_events(self, events: list[Record]) -> None:
        """The cursor stays on its event; on the first row it stays there."""
        table = self.query_one("#events", DataTable)
        chosen = self._events[table.cursor_row]["seq"] if table.cursor_row > 0 else None
        self._events = events
        self._fill("events", map(_event_cells, self.view.event_rows(events)))
        row = next((at for at, event in enumerate(events) if event["seq"] == chosen), None)
        if row is not None:
            table.move_cursor(row=row)

    def _title(self) -> Text:
        sample, models = self.view.sample, self.view.about.get("models", {})
        names = ", ".join(name for of_owner in models.values() for name in of_owner)
        state = "paused" if self._is_paused else "no answer" if self._failure else "live"
        style = {"live": "green", "paused": "yellow", "no answer": "red"}[state]
        version = sample.get("config_version", "-")
        text = Text.assemble("tandem ", (state, style), f"  {self._server}  {names}")
        return text.append(f"  configuration {version}", style="dim")

    def _fill(self, name: str, rows: Iterable[Sequence[Text]]) -> None:
        table = self.query_one(f"#{name}", DataTable)
        top = table.scroll_y
        table.clear()
        table.add_rows(rows)
        table.scroll_to(y=top, animate=False)


def _class_cells(row: Row) -> list[Text]:
    """Burn rates are red above the limit and green below it."""
    cells = [Text(cell) for cell in row]
    cells[0].stylize("bold")
    for column in ("burn 5m", "burn 1h"):
        cell = cells[CLASS_COLUMNS.index(column)]
        if cell.plain != "-":
            cell.stylize("red" if float(cell.plain) > LIMIT_OF_BURN else "green")
    return cells


def _event_cells(row: Row) -> list[Text]:
    cells = [Text(cell) for cell in row]
    cells[0].stylize("dim")
    cells[1].stylize(_COLOURS.get(row[1], "cyan"))
    return cells


def _memory_map(view: LiveView) -> Text:
    """The pool as one bar: the leases of the LLM from the left, those of embeddings from the right."""
    sample = view.sample
    pool, owners = sample.get("pool_bytes", 0), sample.get("owners", {})
    if not pool:
        return Text("")
    llm, embedding = (owners[owner.value] for owner in Owner)
    left, right = (round(_BAR * each["held_bytes"] / pool) for each in (llm, embedding))
    quota = min(_BAR, round(_BAR * llm["quota_bytes"] / pool))
    text = Text()
    for position in range(_BAR):
        text.append("│" if position == quota else "", style="bold")
        if position < left:
            text.append("█", style=_LLM_STYLE)
        elif position >= _BAR - right:
            text.append("█", style=_EMBEDDING_STYLE)
        else:
            text.append("·", style="dim")
    legend = (("  ■ ", _LLM_STYLE), ("LLM", "dim"), ("  │ ", "bold"), ("quotas", "dim"))
    return Text.assemble(text, *legend, ("  ■ ", _EMBEDDING_STYLE), ("embeddings", "dim"))


def _peak(path: Sequence[str], values: Sequence[float]) -> str:
    return f"{100 * max(values):.0f} %" if path[0] == "device" else f"{max(values):,.0f}"
