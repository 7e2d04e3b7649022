/* Batched products of float32 matrices, for processors with AVX-512.
 *
 * Matrices are row-major unless said otherwise; that of pair p begins p * of_x numbers after the
 * first. Every result is summed over k in order, in pieces of k, so that a piece of the right factor
 * stays in the cache. The number of columns is a multiple of LANES.
 */

#define ROWS 6 /* rows of results summed at once: with their columns, 24 of 32 registers */
#define ACROSS 4
#define PIECE 64

ALONE size least(size a, size b) { return a < b ? a : b; }

/* Whether this is such a processor. */
void fedshot_products_wanted(int32_t *found) {
#if defined(__AVX512F__) && defined(__x86_64__)
    *found = 1;
#else
    *found = 0;
#endif
}

/* across * LANES columns of some rows of y = a b, or y += a b. Element [i, k] of a is at
 * i * down + k * step, [k, j] of b at k * wide + j, [i, j] of y at i * apart + j. */
ALONE void corner(const float *restrict a, size down, size step, const float *restrict b, size wide,
                  size n, const int rows, const int across, int add, float *restrict y,
                  size apart) {
    lanes sum[ROWS][ACROSS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < across; j++)
            sum[i][j] = add ? load(y + i * apart + j * LANES) : (lanes){0};
    for (size k = 0; k < n; k++) {
        lanes e[ACROSS];
#pragma GCC unroll 4
        for (int j = 0; j < across; j++) e[j] = load(b + k * wide + j * LANES);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            float w = a[i * down + k * step];
#pragma GCC unroll 4
            for (int j = 0; j < across; j++) sum[i][j] += w * e[j];
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < across; j++) store(y + i * apart + j * LANES, sum[i][j]);
}

/* All rows of these columns. */
ALONE void strip(const float *restrict a, size down, size step, const float *restrict b, size wide,
                 size n, size rows, const int across, int add, float *restrict y, size apart) {
    size i = 0;
    for (; i + ROWS <= rows; i += ROWS)
        corner(a + i * down, down, step, b, wide, n, ROWS, across, add, y + i * apart, apart);
    for (; i + 2 <= rows; i += 2)
        corner(a + i * down, down, step, b, wide, n, 2, across, add, y + i * apart, apart);
    if (i < rows)
        corner(a + i * down, down, step, b, wide, n, 1, across, add, y + i * apart, apart);
}

/* All of y [rows, columns]; b is packed or row-major. */
ALONE void product(const float *restrict a, size down, size step, const float *restrict b,
                   const int packed, size n, size rows, size columns, int add, float *restrict y) {
    for (size k = 0; k < n; k += PIECE, add = 1)
        for (size j = 0; j < columns; j += ACROSS * LANES) {
            size across = least(columns - j, ACROSS * LANES), some = least(n - k, PIECE);
            size wide = packed ? across : columns;
            const float *left = a + k * step, *right = b + (packed ? j * n : j) + k * wide;
#define STRIP(across) strip(left, down, step, right, wide, some, rows, across, add, y + j, columns)
            switch (across / LANES) {
            case 4: STRIP(4); break;
            case 3: STRIP(3); break;
            case 2: STRIP(2); break;
            default: STRIP(1);
            }
#undef STRIP
        }
}

/* y = a b for pairs `from` to `to`: a [rows, n], b [n, columns] packed, y [rows, columns]. */
void fedshot_products(const float *restrict a, const float *restrict b, size from, size to,
                      size rows, size n, size columns, size of_a, size of_y, float *restrict y) {
    for (size p = from; p < to; p++)
        product(a + p * of_a, n, 1, b + p * n * columns, 1, n, rows, columns, 0, y + p * of_y);
}

/* y = a^T b, or y += a^T b: a [n, rows], b [n, columns], y [rows, columns], without gaps. */
void fedshot_products_over(const float *restrict a, const float *restrict b, size from, size to,
                           size rows, size n, size columns, size of_a, size of_b, size add,
                           float *restrict y) {
    for (size p = from; p < to; p++)
        product(a + p * of_a, 1, rows, b + p * of_b, 0, n, rows, columns, add != 0,
                y + p * rows * columns);
}

/* Pack matrices [n, columns] without gaps between them, with element [k, j] at k * down + j * step,
 * into strips of columns, each of them row-major. */
void fedshot_products_pack(const float *restrict b, size from, size to, size n, size columns,
                           size down, size step, float *restrict out) {
    for (size p = from; p < to; p++)
        for (size j = 0; j < columns; j += ACROSS * LANES) {
            size across = least(columns - j, ACROSS * LANES);
            const float *in = b + p * n * columns + j * step;
            float *strip = out + p * n * columns + j * n;
            for (size k = 0; k < n; k++)
                for (size i = 0; i < across; i++)
                    strip[k * across + i] = in[k * down + i * step];
        }
}
