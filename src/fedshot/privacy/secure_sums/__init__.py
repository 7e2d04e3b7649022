"""Secure sums: the server learns the sum of the clients' uploads, and no single upload.

Source: Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine
learning", figure 4, against an honest-but-curious server. Large cohorts use the sparse graph of
Bell et al. 2020, "Secure single-server aggregation with (poly)logarithmic overhead".

Each pair of neighbours agrees on a mask, which one adds to its upload and the other subtracts, so
the masks cancel in the sum. Each client also adds a mask of its own, the self mask. Its neighbours
hold shares of two secrets: one gives its self mask, the other its masks with neighbours. If the
client's upload has arrived, the server asks them for the first; if it was lost, for the second;
never for both.
"""
