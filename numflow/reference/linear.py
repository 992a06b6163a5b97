"""Matrix products (ops `linear`, `head_linear`)."""

def linear(x, weight, bias=None):
    """y = x @ weight.T + bias; x [rows, K], weight [N, K], bias [N] -> y [rows, N]."""
    y = x @ weight.T
    return y if bias is None else y + bias


def head_linear(x, weight, *, heads):
    """Head h of y = weight[h] @ head h of x; x [T, H * K], weight [H * N, K] -> y [T, H * N]."""
    x, weight = x.reshape(len(x), heads, -1).transpose(1, 0, 2), weight.reshape(heads, -1, weight.shape[1])
    return (x @ weight.transpose(0, 2, 1)).transpose(1, 0, 2).reshape(x.shape[1], -1)
