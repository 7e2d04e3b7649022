/* 3x3 convolutions of channels-last maps by Winograd's algorithm F(2x2, 3x3), Lavin & Gray 2016: the
 * transforms before and after the 16 matrix products.
 *
 * A tile is 4x4 values of a map, for 2x2 results and a border of one pixel. Tiles are numbered along
 * the rows of an image, and from image to image. A block begins with tile `first`; position p of its
 * tile t, `from` <= t < `to`, is at room[p * stride + t * c]. Positions are the elements of a tile in
 * row-major order; `turned` swaps the first and last rows and columns, which rotates the filters by
 * 180 degrees. Channels are a multiple of LANES.
 */

static const float nothing[MOST];

/* The address of row a and column b. */
ALONE size place(int a, int b, const int turned) {
    const int swap[4] = {3, 1, 2, 0};
    return turned ? 4 * swap[a] + swap[b] : 4 * a + b;
}

ALONE void tiles_of(const float *restrict x, size from, size to, size first, size h, size w, size c,
                    size stride, const int turned, float *restrict room) {
    size down = (h + 1) / 2, across = (w + 1) / 2;
    for (size t = from; t < to; t++) {
        size u = first + t, i = u / (down * across);
        size y = u / across % down * 2 - 1, z = u % across * 2 - 1;
        const float *at[16];
        for (int a = 0; a < 4; a++)
            for (int b = 0; b < 4; b++) {
                size p = y + a, q = z + b;
                int in = p >= 0 && p < h && q >= 0 && q < w;
                at[4 * a + b] = in ? x + ((i * h + p) * w + q) * c : nothing;
            }
        float *out = room + t * c;
        for (size k = 0; k < c; k += LANES) {
            lanes d[16];
#pragma GCC unroll 4
            for (int b = 0; b < 4; b++) {
                lanes d0 = load(at[b] + k), d1 = load(at[4 + b] + k);
                lanes d2 = load(at[8 + b] + k), d3 = load(at[12 + b] + k);
                d[b] = d0 - d2;
                d[4 + b] = d1 + d2;
                d[8 + b] = d2 - d1;
                d[12 + b] = d1 - d3;
            }
#pragma GCC unroll 4
            for (int a = 0; a < 4; a++) {
                const lanes *e = d + 4 * a;
                store(out + place(a, 0, turned) * stride + k, e[0] - e[2]);
                store(out + place(a, 1, turned) * stride + k, e[1] + e[2]);
                store(out + place(a, 2, turned) * stride + k, e[2] - e[1]);
                store(out + place(a, 3, turned) * stride + k, e[1] - e[3]);
            }
        }
    }
}

/* B^T d B of every tile d of x [n, h, w, c]. */
void fedshot_winograd_in(const float *restrict x, size from, size to, size first, size h, size w,
                         size c, size stride, size turned, float *restrict room) {
    if (turned)
        tiles_of(x, from, to, first, h, w, c, stride, 1, room);
    else
        tiles_of(x, from, to, first, h, w, c, stride, 0, room);
}

ALONE void maps_of(const float *restrict room, const float *restrict bias, size from, size to,
                   size first, size h, size w, size c, size stride, const int turned,
                   float *restrict y) {
    size down = (h + 1) / 2, across = (w + 1) / 2;
    for (size t = from; t < to; t++) {
        size u = first + t, i = u / (down * across), p = u / across % down * 2, q = u % across * 2;
        const float *in = room + t * c;
        float *out = y + ((i * h + p) * w + q) * c;
        int below = p + 1 < h, beside = q + 1 < w;
        for (size k = 0; k < c; k += LANES) {
            lanes e[8], add = load((bias ? bias : nothing) + k);
#pragma GCC unroll 4
            for (int b = 0; b < 4; b++) {
                lanes m0 = load(in + place(0, b, turned) * stride + k);
                lanes m1 = load(in + place(1, b, turned) * stride + k);
                lanes m2 = load(in + place(2, b, turned) * stride + k);
                lanes m3 = load(in + place(3, b, turned) * stride + k);
                e[b] = m0 + m1 + m2;
                e[4 + b] = m1 - m2 - m3;
            }
            store(out + k, e[0] + e[1] + e[2] + add);
            if (beside) store(out + c + k, e[1] - e[2] - e[3] + add);
            if (below) store(out + w * c + k, e[4] + e[5] + e[6] + add);
            if (below && beside) store(out + w * c + c + k, e[5] - e[6] - e[7] + add);
        }
    }
}

/* y [n, h, w, c]: A^T m A of every tile m, plus the bias, which may be null. */
void fedshot_winograd_out(const float *restrict room, const float *restrict bias, size from,
                          size to, size first, size h, size w, size c, size stride, size turned,
                          float *restrict y) {
    if (turned)
        maps_of(room, bias, from, to, first, h, w, c, stride, 1, y);
    else
        maps_of(room, bias, from, to, first, h, w, c, stride, 0, y);
}

/* A dy A^T of the 2x2 results of every tile. */
void fedshot_winograd_back(const float *restrict dy, size from, size to, size first, size h, size w,
                           size c, size stride, float *restrict room) {
    size down = (h + 1) / 2, across = (w + 1) / 2;
    for (size t = from; t < to; t++) {
        size u = first + t, i = u / (down * across), p = u / across % down * 2, q = u % across * 2;
        const float *in = dy + ((i * h + p) * w + q) * c;
        int below = p + 1 < h, beside = q + 1 < w;
        const float *at[4] = {in, beside ? in + c : nothing, below ? in + w * c : nothing,
                              below && beside ? in + w * c + c : nothing};
        float *out = room + t * c;
        for (size k = 0; k < c; k += LANES) {
            lanes d0 = load(at[0] + k), d1 = load(at[1] + k);
            lanes d2 = load(at[2] + k), d3 = load(at[3] + k);
            const lanes left[4] = {d0, d0 + d2, d0 - d2, -d2}, right[4] = {d1, d1 + d3, d1 - d3, -d3};
#pragma GCC unroll 4
            for (int a = 0; a < 4; a++) {
                store(out + (4 * a) * stride + k, left[a]);
                store(out + (4 * a + 1) * stride + k, left[a] + right[a]);
                store(out + (4 * a + 2) * stride + k, left[a] - right[a]);
                store(out + (4 * a + 3) * stride + k, -right[a]);
            }
        }
    }
}

/* Load or store one element of LANES consecutive filters [3, 3]. */
ALONE lanes gather(const float *filters, int p) {
    lanes found;
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) found[j] = filters[9 * j + p];
    return found;
}

ALONE void scatter(float *filters, int p, lanes v) {
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) filters[9 * j + p] = v[j];
}

/* G g G^T of the groups `from` to `to` of 16 filters g [3, 3]: position p of filter f is at
 * out[p * all + f]. */
void fedshot_winograd_filters(const float *restrict filters, size from, size to, size all,
                              float *restrict out) {
    for (size f = from * 16; f < to * 16; f += LANES) {
        const float *g = filters + 9 * f;
        lanes e[4][3];
        for (int b = 0; b < 3; b++) {
            lanes g0 = gather(g, b), g1 = gather(g, 3 + b), g2 = gather(g, 6 + b);
            lanes sum = 0.5f * (g0 + g2), mid = 0.5f * g1;
            e[0][b] = g0;
            e[1][b] = sum + mid;
            e[2][b] = sum - mid;
            e[3][b] = g2;
        }
        for (int a = 0; a < 4; a++) {
            lanes sum = 0.5f * (e[a][0] + e[a][2]), mid = 0.5f * e[a][1];
            store(out + (4 * a) * all + f, e[a][0]);
            store(out + (4 * a + 1) * all + f, sum + mid);
            store(out + (4 * a + 2) * all + f, sum - mid);
            store(out + (4 * a + 3) * all + f, e[a][2]);
        }
    }
}

/* G^T u G, the gradient of the filters. */
void fedshot_winograd_unfold(const float *restrict u, size from, size to, size all,
                             float *restrict filters) {
    for (size f = from * 16; f < to * 16; f += LANES) {
        lanes e[3][4];
        float *g = filters + 9 * f;
        for (int b = 0; b < 4; b++) {
            lanes u0 = load(u + b * all + f), u1 = load(u + (4 + b) * all + f);
            lanes u2 = load(u + (8 + b) * all + f), u3 = load(u + (12 + b) * all + f);
            e[0][b] = u0 + 0.5f * (u1 + u2);
            e[1][b] = 0.5f * (u1 - u2);
            e[2][b] = 0.5f * (u1 + u2) + u3;
        }
        for (int a = 0; a < 3; a++) {
            scatter(g, 3 * a, e[a][0] + 0.5f * (e[a][1] + e[a][2]));
            scatter(g, 3 * a + 1, 0.5f * (e[a][1] - e[a][2]));
            scatter(g, 3 * a + 2, 0.5f * (e[a][1] + e[a][2]) + e[a][3]);
        }
    }
}
