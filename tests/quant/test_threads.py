"""Ranges of rows, distributed to threads."""

import time

import numpy as np
import pytest

from numflow.quant.threads import default_threads, over_rows


@pytest.mark.parametrize("threads", [1, 2, 5, None])
@pytest.mark.parametrize("rows", [0, 1, 7, 1000])
def test_every_row_is_done_once(rows, threads):
    done = np.zeros(rows, int)

    def work(array, begin, end):
        assert begin < end
        array[begin:end] += 1

    over_rows(work, rows, threads, done)
    assert (done == 1).all()
    assert default_threads() >= 1


@pytest.mark.parametrize("threads", [1, 3])
def test_a_failure_is_raised_and_stops_the_rest(threads):
    begun = []

    def work(begin, end):
        begun.append(begin)
        if begin == 0:
            raise KeyboardInterrupt
        time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        over_rows(work, 1000, threads)
    assert len(begun) < 16 * threads  # the ranges there are
