"""The decoder: language model, scheduler, pages, sampling. Token ids in, token ids out."""
