"""Low-rank adapters (LoRA) of sequences (ops `adapt`, `adapt_rows`)."""


def adapt(x, y, ids=None, *, batch, adapters, parts, first=0):
    """scale * y[row] + B (A x[row]) + bias, with the matrices of the row's adapter; rows without one are unchanged.

    adapters: i32 [T], adapter index of each row, or of each token if there are ids. parts: adapter index -> an
    AdaptedPart per expert from id `first` on, None for no change. x has a row for each row of y, or for each token.
    """
    y, routes = y.copy(), 1 if ids is None else ids.shape[1]
    for row in range(len(adapters) * routes):
        token = row // routes
        experts = parts.get(int(adapters[token]))
        expert = 0 if ids is None else ids.flat[row] - first
        part = experts[expert] if experts and 0 <= expert < len(experts) else None
        if part:
            if part.scale is not None:
                y[row] *= part.scale
            y[row] += part.b @ (part.a @ x[token if len(x) == len(adapters) else row])
            if part.bias is not None:
                y[row] += part.bias
    return y


def adapt_rows(y, *, batch, adapters, parts, rows, first=0):
    """y[t] + B (row tokens[t] of A), with the row's adapter. A has `rows` rows, of tokens from `first` on."""
    y = y.copy()
    for t, token in enumerate(batch.tokens):
        experts = parts.get(int(adapters[t]))
        if experts and 0 <= token - first < rows:
            y[t] += experts[0].b @ experts[0].a[token - first]
    return y
