"""Matrix product (op `linear`)."""


def linear(x, weight, bias=None):
    """y = x @ weight.T + bias; x [rows, K], weight [N, K], bias [N] -> y [rows, N]."""
    y = x @ weight.T
    return y if bias is None else y + bias
