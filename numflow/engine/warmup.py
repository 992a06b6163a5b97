"""Warm-up: short runs of a model, so that its kernels are compiled and cached for the next start."""

LENGTHS = (1, 64)  # one token and many tokens use different kernels


def warm_up(model) -> None:
    """Run a model as in use: decoders and encoder-decoders generate, encoders read."""
    encodes = model.runner.has_encoder
    for length in LENGTHS:
        ids = [0] * max(1, min(length, model.context - 2))
        if model.runner.causal and "logits" in model.network.outputs:
            model.generate(ids, max_tokens=2, ignore_eos=True, decoder_ids=[0] if encodes else None)
        elif "logits" in model.network.outputs:
            model.logits(ids)
        else:
            model.hidden(ids)
