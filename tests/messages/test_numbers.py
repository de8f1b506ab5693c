from __future__ import annotations

import pytest

from multitok.messages.numbers import RequestNumbers, owner_address, owner_of


@pytest.mark.parametrize(("index", "life"), [(1, 1), (3, 2), (1023, 2**18 - 1)])
def test_a_number_tells_which_life_made_it(index, life):
    numbers = RequestNumbers(index, life)
    made = [numbers.next() for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(0 < number < 2**64 for number in made)
    assert {owner_of(number) for number in made} == {owner_address(index, life)}


def test_an_address_is_short():
    assert owner_address(3, 2) == "w3.2"


def test_two_lives_never_make_the_same_number():
    lives = [(1, 1), (1, 2), (2, 1), (2, 2)]
    makers = [RequestNumbers(*life) for life in lives]
    assert len({maker.next() for maker in makers for _ in range(100)}) == 400


@pytest.mark.parametrize(("index", "life"), [(0, 1), (1024, 1), (1, 0), (1, 2**18), (-1, 1)])
def test_what_does_not_fit_is_refused(index, life):
    with pytest.raises(ValueError, match=f"worker {index}, life {life}"):
        RequestNumbers(index, life)
