"""What do those that run hold, who of them is lost, and what is still to come of each? Of all at once.

What `RequestState` says of one, of everybody, by columns that are kept from step to step: they are what is
true
of those in the crowd, and one alone is brought up to date when it is asked for. To write into each of them in
every step would be mostly waiting for memory.

Of a forecast the columns hold the piece in which the answer is now: until its end the expected rest is a
formula of four numbers (`LengthForecast.expected_remaining`), so only who passes a point of its forecast is
looked up anew.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import ceil

import numpy as np

from controlplane.core.clock import Instant
from controlplane.core.forecast import Piece
from controlplane.core.memory import Floats
from controlplane.policy.engine.column_store import Bools, ColumnStore, Ints
from controlplane.policy.engine.request_state import RequestState

# A gap that is never over may be added to any instant, and ends before all times if that is long past.
_NEVER = 1 << 61
_LONG_PAST = -2 * _NEVER

# Whole numbers: what is known of each, first what nearly every step changes.
# With its first token `_FIRST_DUE` is long past, before it `_LAST`: the later promise counts.
_FACTS = 13
_NOW = slice(3)
_TOKENS, _HELD, _LAST, _PROMPT, _MOST, _BY_ID, _PRIORITY, _GAP = range(8)
_FIRST_DUE, _MISSED, _GUESS, _NUMBER, _UNTIL = range(8, _FACTS)
# Floats: the piece of the forecast, that holds below `_UNTIL` tokens, and the forecast's variance.
_PIECE = 5
_END, _HALF_DENSITY, _BEYOND, _EXCESS, _VARIANCE = range(_PIECE)
_NO_PIECE = (0.0, 0.0, 1.0, 0.0)


class RunningBatch:
    """In the order in which they came. Who leaves or is asked for, by place or in turn, is then up to date.
    What they hold is written into `held`."""

    def __init__(self, these: Iterable[RequestState] = ()) -> None:
        self._all = list(these)
        self.ids = [one.request.id for one in self._all]
        self._facts = ColumnStore(_FACTS, np.int64, [_facts(one) for one in self._all])
        self._pieces = ColumnStore(_PIECE, np.float64, [_unknown(one) for one in self._all])
        self._to_come: Floats | None = None
        self._has_outrun = False
        self._sort_ids()

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, at: int) -> RequestState:
        return _up_to_date(self._all[at], *self._facts.filled[_NOW, at].tolist())

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self.at(range(len(self._all))))

    def at(self, places: Sequence[int]) -> list[RequestState]:
        now = self._facts.filled[_NOW, places].T.tolist()
        return [_up_to_date(self._all[at], *facts) for at, facts in zip(places, now, strict=True)]

    def requests(self, places: Sequence[int]) -> list[RequestState]:
        """As they were when last asked for."""
        return [self._all[at] for at in places]

    def places(self, these: Collection[RequestState]) -> list[int]:
        """Of those of them that are here."""
        return [at for at, one in enumerate(self._all) if one in these]

    # --- what changes ------------------------------------------------------------------------

    def add(self, one: RequestState) -> None:
        """Behind all others."""
        at, name = len(self._all), one.request.id
        self._all.append(one)
        self.ids.append(name)
        self._facts.put(at, _facts(one))
        self._pieces.put(at, _unknown(one))
        self.by_id[at] = place = bisect_left(self._sorted_ids, name)
        self._sorted_ids.insert(place, name)
        self.by_id[:at] += self.by_id[:at] >= place
        self._to_come = None

    def pop(self, at: int) -> RequestState:
        one, place = self[at], int(self.by_id[at])
        del self._all[at], self.ids[at], self._sorted_ids[place]
        self._facts.drop(at)
        self._pieces.drop(at)
        np.subtract(self.by_id, self.by_id > place, out=self.by_id)
        self._to_come = None
        return one

    def without(self, gone: Collection[RequestState]) -> "RunningBatch":
        """Another one; this stays as it is."""
        left_out = set(self.places(gone))
        kept = [at for at in range(len(self._all)) if at not in left_out]
        left = RunningBatch()
        left._all = [self._all[at] for at in kept]
        left.ids = [self.ids[at] for at in kept]
        left._facts, left._pieces = self._facts.only(kept), self._pieces.only(kept)
        left._has_outrun = self._has_outrun
        left._sort_ids()
        return left

    def _sort_ids(self) -> None:
        self._sorted_ids = sorted(self.ids)
        places = {name: place for place, name in enumerate(self._sorted_ids)}
        self.by_id[:] = [places[name] for name in self.ids]

    def set_forecast(self, one: RequestState) -> None:
        """It has another forecast now."""
        at = self._all.index(one)
        self._facts.filled[_GUESS:, at] = _facts(one)[_GUESS:]
        self._pieces.filled[:, at] = _unknown(one)
        self._to_come = None

    def stamp(self, tokens: Ints, now: Instant) -> None:
        """So many each has, in the cache or to be put there; what is more than before has appeared now."""
        facts = self._facts.filled
        last, grown = facts[_LAST], tokens != facts[_TOKENS]
        # Who has its first token, or one too late: the few to which more happens than to all.
        for at in (grown & (last + facts[_GAP] < now)).nonzero()[0].tolist():
            one = self[at]
            one.stamp(now, int(tokens[at]) - one.tokens)
            facts[_MISSED, at], facts[_FIRST_DUE, at] = one.is_missed, _LONG_PAST
        facts[_TOKENS] = tokens
        np.putmask(last, grown, now)
        self._to_come = None

    # --- what is asked -------------------------------------------------------------------------

    @property
    def tokens(self) -> Ints:
        return self._facts.column(_TOKENS)

    @property
    def held(self) -> Ints:
        """Blocks."""
        return self._facts.column(_HELD)

    @property
    def priority(self) -> Ints:
        return self._facts.column(_PRIORITY)

    @property
    def variance(self) -> Floats:
        """Of the whole answer, as it was forecast; 0 where only a number was."""
        return self._pieces.column(_VARIANCE)

    @property
    def is_guess(self) -> Bools:
        return np.not_equal(self._facts.column(_GUESS), 0)

    @property
    def by_id(self) -> Ints:
        """The place of each were they sorted by their ids."""
        return self._facts.column(_BY_ID)

    def has_token_of(self, now: Instant) -> Bools:
        """Whose last token appeared now."""
        return np.equal(self._facts.column(_LAST), now)

    def is_lost(self, now: Instant) -> Bools:
        """`cannot_meet_slo`, whatever is to be done yet."""
        facts = self._facts.filled
        due = np.maximum(facts[_FIRST_DUE], facts[_LAST] + facts[_GAP])
        is_lost: Bools = (due < now) | (facts[_MISSED] != 0)
        return is_lost

    def memory_time(self) -> Floats:
        left = self.to_come()
        return (self.tokens + left / 2) * left

    def to_come(self) -> Floats:
        """`remaining` of each, in whole tokens."""
        if self._to_come is None:
            self._to_come = self._expected()
        return self._to_come

    def _expected(self) -> Floats:
        facts, pieces = self._facts.filled, self._pieces.filled
        tokens = facts[_TOKENS]
        for at in (tokens >= facts[_UNTIL]).nonzero()[0].tolist():
            piece = _piece(self._all[at], int(tokens[at]))
            if piece is None:
                facts[_UNTIL, at], pieces[:_VARIANCE, at], self._has_outrun = _NEVER, _NO_PIECE, True
            else:
                facts[_UNTIL, at], pieces[:_VARIANCE, at] = ceil(piece[0]), piece
        # As `LengthForecast.expected_remaining`.
        left = pieces[_END] - tokens
        half = pieces[_HALF_DENSITY] * left
        later = half + pieces[_BEYOND]
        mean = (later * left + pieces[_EXCESS]) / (later + half)
        if self._has_outrun:
            mean = np.where(facts[_UNTIL] == _NEVER, self._of_outrun(), mean)
        expected: Floats = np.maximum(1.0, np.minimum(np.rint(mean), facts[_MOST] - tokens))
        return expected

    def _of_outrun(self) -> Floats:
        """As `RequestState.remaining` of a number, and `LengthForecast.expected_remaining` of a
        distribution."""
        facts = self._facts.filled
        done = facts[_TOKENS] - facts[_PROMPT]
        of_number, of_forecast = np.maximum(16, done // 4), (1.0 + np.maximum(1.0, done / 2)) / 2
        mean: Floats = np.where(facts[_NUMBER], of_number, of_forecast)
        return mean


def _up_to_date(one: RequestState, tokens: int, held: int, last: int) -> RequestState:
    one.tokens, one.held = tokens, held
    if last > _LONG_PAST:
        one.last_token = Instant(last)
    return one


def _facts(one: RequestState) -> tuple[int, ...]:
    """Its column; the place by id is another's to know."""
    request = one.request
    gap = _NEVER if one.gap is None else one.gap
    last = first_due = _LONG_PAST
    if one.last_token is not None:
        last = one.last_token
    else:
        first_due = _NEVER if one.first_due is None else one.first_due
    most = request.prompt_tokens + request.max_output_tokens
    return (
        one.tokens, one.held, last, request.prompt_tokens, most, 0, one.priority, gap,
        first_due, one.is_missed, one.is_guess, one.forecast is None, _LONG_PAST,
    )  # fmt: skip


def _unknown(one: RequestState) -> tuple[float, ...]:
    """Its forecast, before it was asked where in it the answer is."""
    return (*_NO_PIECE, 0.0 if one.forecast is None else one.forecast.deviation**2)


def _piece(one: RequestState, tokens: int) -> Piece | None:
    """Of its forecast where it has so many, the prompt counted in; a number is a forecast that is sure."""
    prompt = one.request.prompt_tokens
    if one.forecast is not None:
        piece = one.forecast.piece(tokens - prompt)
    else:
        piece = (one.predicted, 0.0, 1.0, 0.0) if tokens - prompt < one.predicted else None
    return None if piece is None else (prompt + piece[0], *piece[1:])
