"""FRL (few-round learning), its baselines, and the rounds inside an episode."""
