"""The decoder: language model, scheduler, pages of K and V, sampling. Token ids in, token ids out."""
