import numpy as np
import pytest

from predictors.output_length.ridge import fit_ridge


def test_solution_satisfies_the_normal_equations():
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(300, 3))
    words = rng.integers(0, 40, size=(300, 6)).astype(np.uint16)
    words.sort(1)
    target = numbers @ [0.5, 0.0, -0.2] + (words == 7).any(1) + rng.normal(0, 0.1, 300)
    ridge = fit_ridge(numbers, words, target)

    rows = np.zeros((300, 40))
    for at, row in enumerate(words):
        np.add.at(rows[at], row, ridge.rarity[row])
        rows[at] /= np.sqrt(np.square(ridge.rarity[row]).sum())
    rows[:, 0] = 0.0
    dense = np.column_stack([rows, np.clip((numbers - numbers.mean(0)) / numbers.std(0), -3, 3)])
    exact = np.linalg.solve(
        dense.T @ dense + np.diag([1.0] * 40 + [60.0] * 3), dense.T @ (target - target.mean())
    )
    assert ridge.weights[:40] == pytest.approx(exact[:40], abs=0.02)
    assert ridge.slopes == pytest.approx(exact[40:], abs=0.01)
    assert ridge.predict(numbers[5], words[5]) == pytest.approx(ridge.predict(numbers, words)[5])


def test_unseen_words_and_outlying_numbers_have_little_effect():
    rng = np.random.default_rng(1)
    numbers, words = rng.normal(size=(200, 2)), rng.integers(1, 20, size=(200, 4)).astype(np.uint16)
    ridge = fit_ridge(numbers, words, numbers[:, 0])
    said = ridge.predict(np.array([1e9, 0.0]), np.array([30_000, 0, 0, 0], np.uint16))
    assert abs(said) < 4.0
