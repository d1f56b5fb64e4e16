"""The multi-token-prediction layer, which drafts tokens."""
