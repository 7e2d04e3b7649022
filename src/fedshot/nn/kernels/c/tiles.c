/* Whole 3x3 convolutions: the transforms of winograd.c and the products of products.c, on one block
 * of tiles at a time, so that intermediate results stay in the cache.
 *
 * `room` holds the 16 matrices of a block before and after the products: c and f channels of each
 * tile, and a gap, because strides of a power of 2 would share cache lines.
 */

#define GAP 48

/* Tiles `from` to `to` of y [n, h, w, f]: x [n, h, w, c] convolved with packed filters [16, c, f],
 * plus the bias, which may be null. */
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

/* The gradient of the transformed filters, du [16, f, c], or du +=, from tiles `from` to `to` of
 * dy [n, h, w, f]. */
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
