"""Secure sums: the server learns the sum of the clients' uploads, and no single upload.

Source: Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine
learning", figure 4, against an honest-but-curious server. Large cohorts use the sparse graph of
Bell et al. 2020, "Secure single-server aggregation with (poly)logarithmic overhead".

Each pair of neighbours agrees on a mask, which one adds to its upload and the other subtracts, so
the masks cancel in the sum. Each client also adds a mask of its own. Shares of both secrets lie
with its neighbours: the server asks them for the self mask of a client whose upload has arrived,
and for the pair masks of a client that was lost, never for both.
"""
