"""Shares of tests and jobs, as a command line names them."""


def share(text: str) -> tuple[int, int]:
    """The numbers of "3/7".

    Raises:
        ValueError: it is no share.
    """
    number, count = (int(part) for part in text.split("/"))
    if not 0 <= number < count:
        raise ValueError
    return number, count
