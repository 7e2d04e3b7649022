/* 3x3 convolutions whole: the transforms of winograd.c around the products of products.c, a block of
 * tiles at a time, so that what is between them need not leave the cache.
 *
 * `room` has place for the 16 matrices of a block before the products, and those after: c and f
 * channels of each tile, and a gap, since places that were a power of 2 apart would share lines of
 * the cache.
 */

#define GAP 48

/* y [n, h, w, f], tiles `from` to `to`: x [n, h, w, c] under packed filters [16, c, f], and the bias,
 * which may be null. */
void fedshot_tiles(const float *restrict x, const float *restrict filters,
                   const float *restrict bias, size from, size to, size block, size h, size w,
                   size c, size f, size turned, float *restrict room, float *restrict y) {
    size before = block * c + GAP, after = block * f + GAP;
    float *products = room + 16 * before;
    for (size t = from; t < to; t += block) {
        size some = least(block, to - t);
        fedshot_winograd_in(x, 0, some, t, h, w, c, before, turned, room);
        fedshot_products(room, filters, 0, 16, some, c, f, before, after, products);
        fedshot_winograd_out(products, bias, 0, some, t, h, w, f, after, turned, y);
    }
}

/* du [16, f, c], added to or not: the derivative by the transformed filters, of tiles `from` to `to`;
 * dy is [n, h, w, f]. */
void fedshot_tiles_by_filters(const float *restrict x, const float *restrict dy, size from, size to,
                              size block, size h, size w, size c, size f, size add,
                              float *restrict room, float *restrict du) {
    size before = block * c + GAP, after = block * f + GAP;
    float *back = room + 16 * before;
    for (size t = from; t < to; t += block) {
        size some = least(block, to - t);
        fedshot_winograd_in(x, 0, some, t, h, w, c, before, 0, room);
        fedshot_winograd_back(dy, 0, some, t, h, w, f, after, back);
        fedshot_products_over(back, room, 0, 16, f, some, c, after, before, add || t > from, du);
    }
}
