"""Neural networks as pure functions on trees of parameters, without hidden state."""
