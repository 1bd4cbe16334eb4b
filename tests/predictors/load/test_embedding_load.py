from controlplane.core.clock import Instant, milliseconds, seconds
from predictors.load.embedding_load import EmbeddingLoad, LoadForecast


def test_windows_count_requests_and_tokens():
    load = EmbeddingLoad(seconds(1))
    for second in range(40):
        for number in range(3):
            load.arrived(Instant(seconds(second) + milliseconds(100 * number)), 50)
    forecast = load.next_window(Instant(seconds(40)))
    assert load.arrivals.quantiles == (3.0, 3.0, 3.0)
    assert forecast == LoadForecast((150.0, 150.0, 150.0))
    assert load.tokens_per_second() == 150


def test_current_window_is_not_counted():
    load = EmbeddingLoad(seconds(1))
    for second in range(40):
        load.arrived(Instant(seconds(second)), 10)
    load.arrived(Instant(seconds(39.5)), 10_000)
    assert load.next_window(Instant(seconds(39.9))).tokens == (10.0, 10.0, 10.0)
    assert load.next_window(Instant(seconds(40.1))).tokens[-1] > 1_000


def test_idle_time_is_learned_at_bounded_cost():
    load = EmbeddingLoad(seconds(1))
    for second in range(30):
        load.arrived(Instant(seconds(second)), 100)
    seen = load.arrivals.mean
    # One week at one window per second would take minutes if each window were counted.
    assert load.next_window(Instant(seconds(7 * 86_400))) is not None
    assert load.arrivals.mean < seen
    assert load.next_window(Instant(seconds(7 * 86_400 + 0.5))) is not None


def test_level_rounds_up_to_the_next_quantile():
    forecast = LoadForecast((10.0, 20.0, 30.0))
    assert [forecast.tokens_within(level) for level in (0.5, 0.8, 0.9, 0.95)] == [10, 20, 20, 30]
