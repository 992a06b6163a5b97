import pytest

from numflow.errors import RequestError
from numflow.sizes import parse_bytes


@pytest.mark.parametrize(("text", "size"), [("24GB", 24 * 10**9), ("1.5 GiB", 3 << 29), ("512m", 512 * 10**6),
                                            (1000, 1000), ("7", 7), (1.5e9, 1_500_000_000)])
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1XB", 0, True, None, float("inf")])
def test_no_sizes(text):
    with pytest.raises(RequestError, match="memory should be a size"):
        parse_bytes(text)


def test_sizes_in_words():
    from numflow.sizes import in_words

    assert [in_words(n) for n in (12, 4.2e9, 3.1e8, 1.6e10, 2e3)] == ["12 bytes", "4.2 GB", "310 MB", "16 GB", "2.0 kB"]
