"""The rows that are wanted (op `select_rows`)."""


def select_rows(x, *, batch):
    """y [R, D] = x[logit_rows]."""
    return x[batch.logit_rows]
