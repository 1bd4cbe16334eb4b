"""Struct-of-arrays state of all running requests: blocks held, missed deadlines, expected remaining tokens.

The columns hold for every request what `RequestState` holds for one, and are updated once per step. They are
authoritative while a request runs; a `RequestState` is brought up to date when it is read. Writing into every
object in every step would mostly wait for memory.

For each forecast the columns hold the piece of the distribution that the output is in. Up to its end the
expected remaining length is a formula of four numbers (`LengthForecast.expected_remaining`), so only a
request that passes a point of its forecast is looked up again.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import ceil

import numpy as np

from controlplane.core.clock import Duration, Instant
from controlplane.core.forecast import Piece
from controlplane.core.memory_ledger import Floats
from controlplane.policy.engine.column_store import Bools, ColumnStore, Ints
from controlplane.policy.engine.request_state import RequestState

# Fits int64 when added to any instant; added to `_LONG_PAST` it is still before every instant.
_NEVER = 1 << 61
_LONG_PAST = -2 * _NEVER
# An hour a token. With a million tokens it still fits int64 when added to `_NEVER`.
_LONGEST_TPOT = 3_600_000_000_000

# Integer columns; those that nearly every step changes, `_LATEST`, come first. After the first token
# `_FIRST_DUE` is `_LONG_PAST`, before it `_LAST` is: the later deadline counts. `_PACED_FROM` plus TPOT per
# token, the prompt included, is the TPOT deadline; it is `_NEVER` before the first token and without a TPOT.
# `_NUMBER` is 1 if only a number of output tokens is predicted. `_FEWEST` and `_LIKELY` are the tokens before
# the last one at the likely totals, the prompt included.
_INTEGER_COLUMNS = 18
_LATEST = slice(3)
_TOKENS, _HELD, _LAST, _PROMPT, _MOST, _BY_ID, _PRIORITY, _GAP = range(8)
_FIRST_DUE, _MISSED, _PACED_FROM, _TPOT, _E2E_DUE = range(8, 13)
_GUESS, _NUMBER, _UNTIL, _FEWEST, _LIKELY = range(13, _INTEGER_COLUMNS)
# Float columns: the piece of the forecast, valid below `_UNTIL` tokens, and the class's weight.
_FLOAT_COLUMNS = 5
_END, _HALF_DENSITY, _BEYOND, _EXCESS, _WEIGHT = range(_FLOAT_COLUMNS)
_NO_PIECE = (0.0, 0.0, 1.0, 0.0)


class RunningBatch:
    """The running requests in order of arrival in the batch.

    A request that is removed, indexed or iterated over is brought up to date first. The host writes the
    blocks held into `held`.
    """

    def __init__(self, states: Iterable[RequestState] = ()) -> None:
        self._all = list(states)
        self.ids = [state.request.id for state in self._all]
        self._integers = ColumnStore(_INTEGER_COLUMNS, np.int64, [_integer_row(state) for state in self._all])
        self._floats = ColumnStore(_FLOAT_COLUMNS, np.float64, [_float_row(state) for state in self._all])
        self._remaining: Floats | None = None
        self._has_outrun = False
        self._sort_ids()

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> RequestState:
        return _up_to_date(self._all[index], *self._integers.filled[_LATEST, index].tolist())

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self.at(range(len(self._all))))

    def at(self, places: Sequence[int]) -> list[RequestState]:
        """The requests at these positions, brought up to date."""
        latest = self._integers.filled[_LATEST, places].T.tolist()
        return [_up_to_date(self._all[index], *row) for index, row in zip(places, latest, strict=True)]

    def requests(self, places: Sequence[int]) -> list[RequestState]:
        """The requests at these positions, as of their last update."""
        return [self._all[index] for index in places]

    def places(self, states: Collection[RequestState]) -> list[int]:
        """Positions of those of `states` that are in the batch."""
        return [index for index, state in enumerate(self._all) if state in states]

    def add(self, state: RequestState) -> None:
        """Appends a request."""
        index, name = len(self._all), state.request.id
        self._all.append(state)
        self.ids.append(name)
        self._integers.put(index, _integer_row(state))
        self._floats.put(index, _float_row(state))
        self.by_id[index] = place = bisect_left(self._sorted_ids, name)
        self._sorted_ids.insert(place, name)
        self.by_id[:index] += self.by_id[:index] >= place
        self._remaining = None

    def pop(self, index: int) -> RequestState:
        """Removes the request at this position and returns it, brought up to date."""
        state, place = self[index], int(self.by_id[index])
        del self._all[index], self.ids[index], self._sorted_ids[place]
        self._integers.drop(index)
        self._floats.drop(index)
        np.subtract(self.by_id, self.by_id > place, out=self.by_id)
        self._remaining = None
        return state

    def without(self, gone: Collection[RequestState]) -> "RunningBatch":
        """A copy without these requests."""
        left_out = set(self.places(gone))
        kept = [index for index in range(len(self._all)) if index not in left_out]
        left = RunningBatch()
        left._all = [self._all[index] for index in kept]
        left.ids = [self.ids[index] for index in kept]
        left._integers, left._floats = self._integers.select(kept), self._floats.select(kept)
        left._has_outrun = self._has_outrun
        left._sort_ids()
        return left

    def _sort_ids(self) -> None:
        self._sorted_ids = sorted(self.ids)
        places = {name: place for place, name in enumerate(self._sorted_ids)}
        self.by_id[:] = [places[name] for name in self.ids]

    def set_forecast(self, state: RequestState) -> None:
        """Rereads the forecast of a request after it changed."""
        index = self._all.index(state)
        self._integers.filled[_GUESS:, index] = _integer_row(state)[_GUESS:]
        self._floats.filled[:, index] = _float_row(state)
        self._remaining = None

    def stamp(self, tokens: Ints, now: Instant) -> None:
        """Sets the tokens of each request, int64 [n], in the cache or to be computed in this step.

        A request with more tokens than before produced them at `now`.
        """
        integers = self._integers.filled
        last, grown = integers[_LAST], tokens != integers[_TOKENS]
        # The few requests with their first token, or with a late one, need more than the vector update.
        for index in (grown & (last + integers[_GAP] < now)).nonzero()[0].tolist():
            state = self[index]
            state.stamp(now, int(tokens[index]) - state.tokens)
            integers[_MISSED, index], integers[_FIRST_DUE, index] = state.is_missed, _LONG_PAST
            integers[_PACED_FROM, index] = _paced_from(state)
        integers[_TOKENS] = tokens
        np.putmask(last, grown, now)
        self._remaining = None

    @property
    def tokens(self) -> Ints:
        """Tokens of each request, int64 [n]."""
        return self._integers.column(_TOKENS)

    @property
    def held(self) -> Ints:
        """Blocks held by each request, int64 [n]; writable."""
        return self._integers.column(_HELD)

    @property
    def priority(self) -> Ints:
        """Priority of each request's class, int64 [n]."""
        return self._integers.column(_PRIORITY)

    @property
    def weight(self) -> Floats:
        """Weight of each request's class, float64 [n]."""
        return self._floats.column(_WEIGHT)

    @property
    def is_guess(self) -> Bools:
        """Whether each request has no forecast but max_tokens, bool [n]."""
        return np.not_equal(self._integers.column(_GUESS), 0)

    @property
    def by_id(self) -> Ints:
        """Position of each request in the order of request ids, int64 [n]."""
        return self._integers.column(_BY_ID)

    def has_token_of(self, now: Instant) -> Bools:
        """Whether the last token of each request appeared at `now`, bool [n]."""
        return np.equal(self._integers.column(_LAST), now)

    def is_lost(self, now: Instant, step: Duration) -> Bools:
        """`RequestState.cannot_meet_slo` of each request without further work, bool [n]."""
        # Updates the likely totals.
        self.remaining_tokens()
        integers = self._integers.filled
        tokens, tpot = integers[_TOKENS], integers[_TPOT]
        # As `core.deadlines.last_chance`.
        due = np.maximum(integers[_FIRST_DUE], integers[_LAST] + integers[_GAP])
        regained = np.maximum(tpot - step, 0) * np.maximum(integers[_LIKELY] - tokens, 0)
        paced = integers[_PACED_FROM] + tpot * tokens + regained
        whole = integers[_E2E_DUE] - step * np.maximum(integers[_FEWEST] - tokens, 0)
        due = np.minimum(np.minimum(due, paced), whole)
        is_lost: Bools = (due < now) | (integers[_MISSED] != 0)
        return is_lost

    def memory_time(self) -> Floats:
        """Remaining memory-time of each request in token-steps, float64 [n]."""
        left = self.remaining_tokens()
        return (self.tokens + left / 2) * left

    def remaining_tokens(self) -> Floats:
        """`RequestState.remaining` of each request, in whole tokens, float64 [n]."""
        if self._remaining is None:
            self._remaining = self._expected()
        return self._remaining

    def _expected(self) -> Floats:
        integers, floats = self._integers.filled, self._floats.filled
        tokens = integers[_TOKENS]
        for index in (tokens >= integers[_UNTIL]).nonzero()[0].tolist():
            piece = _piece(self._all[index], int(tokens[index]))
            if piece is None:
                integers[_UNTIL, index], floats[:_WEIGHT, index], self._has_outrun = _NEVER, _NO_PIECE, True
            else:
                integers[_UNTIL, index], floats[:_WEIGHT, index] = ceil(piece[0]), piece
            integers[_FEWEST : _LIKELY + 1, index] = _likely(self._all[index], int(tokens[index]))
        # As `LengthForecast.expected_remaining`.
        left = floats[_END] - tokens
        half = floats[_HALF_DENSITY] * left
        later = half + floats[_BEYOND]
        mean = (later * left + floats[_EXCESS]) / (later + half)
        if self._has_outrun:
            mean = np.where(integers[_UNTIL] == _NEVER, self._of_outrun(), mean)
        expected: Floats = np.maximum(1.0, np.minimum(np.rint(mean), integers[_MOST] - tokens))
        return expected

    def _of_outrun(self) -> Floats:
        """Expected remaining tokens beyond the forecast; same formulae as for one request."""
        integers = self._integers.filled
        done = integers[_TOKENS] - integers[_PROMPT]
        of_number, of_forecast = np.maximum(16, done // 4), (1.0 + np.maximum(1.0, done / 2)) / 2
        mean: Floats = np.where(integers[_NUMBER], of_number, of_forecast)
        return mean


def _up_to_date(state: RequestState, tokens: int, held: int, last: int) -> RequestState:
    state.tokens, state.held = tokens, held
    if last > _LONG_PAST:
        state.last_token = Instant(last)
    return state


def _integer_row(state: RequestState) -> tuple[int, ...]:
    """The integer column of a request; the position by id is set by the caller."""
    request, slo = state.request, state.request.slo
    gap = _NEVER if slo.gap is None else slo.gap
    e2e_due = _NEVER if slo.e2e is None else request.arrival + slo.e2e
    last = first_due = _LONG_PAST
    if state.last_token is not None:
        last = state.last_token
    else:
        first_due = _NEVER if state.first_due is None else state.first_due
    most = request.prompt_tokens + request.max_output_tokens
    return (
        state.tokens, state.held, last, request.prompt_tokens, most, 0, state.priority, gap,
        first_due, state.is_missed, _paced_from(state), _tpot(state), e2e_due,
        state.is_guess, state.forecast is None, _LONG_PAST, 0, 0,
    )  # fmt: skip


def _paced_from(state: RequestState) -> int:
    if state.first_token is None or state.request.slo.tpot is None:
        return _NEVER
    return state.first_token - _tpot(state) * state.request.prompt_tokens


def _tpot(state: RequestState) -> int:
    return min(state.request.slo.tpot or 0, _LONGEST_TPOT)


def _likely(state: RequestState, tokens: int) -> tuple[int, int]:
    """The columns `_FEWEST` and `_LIKELY` at `tokens`; they hold until the next piece."""
    prompt = state.request.prompt_tokens
    fewest, most = state.likely_total(tokens - prompt)
    return prompt + fewest - 1, prompt + most - 1


def _float_row(state: RequestState) -> tuple[float, ...]:
    """The float column of a request before its piece of the forecast is known."""
    return (*_NO_PIECE, state.weight)


def _piece(state: RequestState, tokens: int) -> Piece | None:
    """The piece of the forecast at `tokens`, prompt included; None if the output outran the forecast."""
    prompt = state.request.prompt_tokens
    if state.forecast is not None:
        piece = state.forecast.piece(tokens - prompt)
    else:
        piece = (state.predicted, 0.0, 1.0, 0.0) if tokens - prompt < state.predicted else None
    return None if piece is None else (prompt + piece[0], *piece[1:])
