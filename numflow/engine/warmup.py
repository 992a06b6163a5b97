"""Runs of a model for the sake of its kernels: what compiles is compiled, and kept for the next start."""

LENGTHS = (1, 64)  # one token and many take different kernels


def warm_up(model) -> None:
    """Run a model as it is used: a decoder and an encoder-decoder write, an encoder reads."""
    encodes = model.runner.has_encoder
    for length in LENGTHS:
        ids = [0] * max(1, min(length, model.context - 2))
        if model.runner.causal and "logits" in model.network.outputs:
            model.generate(ids, max_tokens=2, ignore_eos=True, decoder_ids=[0] if encodes else None)
        elif "logits" in model.network.outputs:
            model.logits(ids)
        else:
            model.hidden(ids)
