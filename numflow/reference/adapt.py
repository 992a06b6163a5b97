"""Products of low rank that rows of a batch add by adapters of their own (ops `adapt`, `adapt_rows`)."""


def adapt(x, y, ids=None, *, batch, adapters, parts, first=0):
    """scale * y[row] + B (A x[row]) + bias, of the row's adapter; rows without one as they are.

    adapters: i32 [T], number of each row, of each token where there are ids. parts: number -> an AdaptedPart for each
    expert from number `first` on, None for no change. x has a row for each row of y, or one for each token.
    """
    y, routes = y.copy(), 1 if ids is None else ids.shape[1]
    for row in range(len(adapters) * routes):
        token = row // routes
        own = parts.get(int(adapters[token]))
        expert = 0 if ids is None else ids.flat[row] - first
        found = own[expert] if own and 0 <= expert < len(own) else None
        if found:
            if found.scale is not None:
                y[row] *= found.scale
            y[row] += found.b @ (found.a @ x[token if len(x) == len(adapters) else row])
            if found.bias is not None:
                y[row] += found.bias
    return y


def adapt_rows(y, *, batch, adapters, parts, rows, first=0):
    """y[t] + B (row tokens[t] of A), of the row's adapter. A has `rows` rows from number `first` on."""
    y = y.copy()
    for t, token in enumerate(batch.tokens):
        found = parts.get(int(adapters[t]))
        if found and 0 <= token - first < rows:
            y[t] += found[0].b @ found[0].a[token - first]
    return y
