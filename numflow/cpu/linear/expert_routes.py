"""Routes (token, chosen expert) grouped by expert, so that an expert's weights meet all its rows at once.

groups i32: order [R], the routes sorted by expert, and then by number; first [X + 1], where an expert's begin in it;
place [X + 1], the row of the operand where they begin: an expert's rows are cut into token tiles of their own
(activations.py), of which the last may have rows without a route.
"""


def group_bytes(routes: int, experts: int) -> int:
    """Bytes of `groups` for up to that many routes."""
    return 4 * (routes + 2 * (experts + 1))


def operand_rows(routes: int) -> int:
    """Rows an operand of that many routes may need: the last tile of an expert may be up to 3/5 empty."""
    return 2 * routes
