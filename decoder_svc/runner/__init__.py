"""Turns step plans into tokens: inputs, the model's stage, sampling. No decisions are made here."""
