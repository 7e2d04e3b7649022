"""One-round methods: classifiers in closed form, from sums over the clients' features."""
