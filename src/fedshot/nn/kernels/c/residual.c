/* The operations between the convolutions of a residual block, on channels-last float maps
 * [n, h, w, c]: batch norm with a leaky ReLU, and the end of a block, where two maps are normalised,
 * added, max-pooled 2x2 and passed through a leaky ReLU. Separate operations take twice the memory
 * traffic.
 *
 * Every function works on the images `from` to `to`, with sums for each image, as in fused.c, so
 * results do not depend on the number of threads. A map is normalised as x * scale + shift; `lean` is
 * the slope of the activation below zero.
 */

/* y = leaky(x * scale + shift) */
void fedshot_leaky(const float *restrict x, const float *restrict scale,
                   const float *restrict shift, size from, size to, size rows, size c, float lean,
                   float *restrict y) {
    for (size at = from * rows * c; at < to * rows * c; at += c)
        for (size k = 0; k < c; k++) {
            float a = x[at + k] * scale[k] + shift[k];
            y[at + k] = a > 0.0f ? a : a * lean;
        }
}

/* Sums over each image of dz and dz * (x - mean); dz is the gradient of x * scale + shift. */
void fedshot_leaky_sums(const float *restrict x, const float *restrict scale,
                        const float *restrict shift, const float *restrict mean,
                        const float *restrict dy, size from, size to, size rows, size c, float lean,
                        double *restrict dz_sum, double *restrict dzx_sum) {
    float one[MOST], two[MOST];
    for (size i = from; i < to; i++) {
        double *d0 = dz_sum + i * c, *d1 = dzx_sum + i * c;
        for (size k = 0; k < c; k++) d0[k] = d1[k] = 0.0;
        for (size first = 0; first < rows; first += BLOCK) {
            size last = first + BLOCK < rows ? first + BLOCK : rows;
            for (size k = 0; k < c; k++) one[k] = two[k] = 0.0f;
            for (size at = (i * rows + first) * c; at < (i * rows + last) * c; at += c)
                for (size k = 0; k < c; k++) {
                    float v = x[at + k], g = dy[at + k];
                    float d = v * scale[k] + shift[k] > 0.0f ? g : g * lean;
                    one[k] += d;
                    two[k] += d * (v - mean[k]);
                }
            for (size k = 0; k < c; k++) d0[k] += (double)one[k];
            for (size k = 0; k < c; k++) d1[k] += (double)two[k];
        }
    }
}

/* dx = scale * dz + slope * (x - mean) + level */
void fedshot_leaky_grad(const float *restrict x, const float *restrict scale,
                        const float *restrict shift, const float *restrict mean,
                        const float *restrict slope, const float *restrict level,
                        const float *restrict dy, size from, size to, size rows, size c, float lean,
                        float *restrict dx) {
    for (size at = from * rows * c; at < to * rows * c; at += c)
        for (size k = 0; k < c; k++) {
            float v = x[at + k], s = scale[k], g = dy[at + k] * s;
            float d = v * s + shift[k] > 0.0f ? g : g * lean;
            dx[at + k] = d + (v - mean[k]) * slope[k] + level[k];
        }
}

/* y = leaky(maxpool(x * s + r * t + shift)); a pool with a NaN gives NaN, as in torch. */
void fedshot_join(const float *restrict x, const float *restrict r, const float *restrict s,
                  const float *restrict t, const float *restrict shift, size from, size to, size h,
                  size w, size c, float lean, float *restrict y) {
    size ph = h / 2, pw = w / 2;
    for (size i = from; i < to; i++)
        for (size row = 0; row < ph; row++)
            for (size q = 0; q < pw; q++) {
                size at = ((i * h + 2 * row) * w + 2 * q) * c;
                const float *x0 = x + at, *x1 = x0 + c, *x2 = x0 + w * c, *x3 = x2 + c;
                const float *r0 = r + at, *r1 = r0 + c, *r2 = r0 + w * c, *r3 = r2 + c;
                float *out = y + ((i * ph + row) * pw + q) * c;
                for (size k = 0; k < c; k++) {
                    float u = s[k], v = t[k], b = shift[k];
                    float a0 = x0[k] * u + r0[k] * v + b, a1 = x1[k] * u + r1[k] * v + b;
                    float a2 = x2[k] * u + r2[k] * v + b, a3 = x3[k] * u + r3[k] * v + b;
                    float m = a0 > a1 ? a0 : a1, l = a2 > a3 ? a2 : a3;
                    m = m > l ? m : l;
                    m = m > 0.0f ? m : m * lean;
                    out[k] = isunordered(a0, a1) | isunordered(a2, a3) ? NAN : m;
                }
            }
}

/* Sums over each image of dz, dz * (x - mean) and dz * (r - mid). dz is the gradient that reaches the
 * maximum of a pool, the first of equal values. NaN cannot matter here, for the reason in fused.c. */
void fedshot_join_sums(const float *restrict x, const float *restrict r, const float *restrict s,
                       const float *restrict t, const float *restrict shift,
                       const float *restrict mean, const float *restrict mid,
                       const float *restrict dy, size from, size to, size h, size w, size c,
                       float lean, double *restrict dz_sum, double *restrict dzx_sum,
                       double *restrict dzr_sum) {
    size ph = h / 2, pw = w / 2;
    float one[MOST], two[MOST], three[MOST];
    for (size i = from; i < to; i++) {
        double *d0 = dz_sum + i * c, *d1 = dzx_sum + i * c, *d2 = dzr_sum + i * c;
        for (size k = 0; k < c; k++) d0[k] = d1[k] = d2[k] = 0.0;
        for (size row = 0; row < ph; row++) {
            for (size k = 0; k < c; k++) one[k] = two[k] = three[k] = 0.0f;
            for (size q = 0; q < pw; q++) {
                size at = ((i * h + 2 * row) * w + 2 * q) * c;
                const float *x0 = x + at, *x1 = x0 + c, *x2 = x0 + w * c, *x3 = x2 + c;
                const float *r0 = r + at, *r1 = r0 + c, *r2 = r0 + w * c, *r3 = r2 + c;
                const float *g = dy + ((i * ph + row) * pw + q) * c;
                for (size k = 0; k < c; k++) {
                    float u = s[k], v = t[k], b = shift[k];
                    float a1 = x1[k] * u + r1[k] * v + b, a2 = x2[k] * u + r2[k] * v + b;
                    float a3 = x3[k] * u + r3[k] * v + b;
                    float m = x0[k] * u + r0[k] * v + b, px = x0[k], pr = r0[k];
                    px = a1 > m ? x1[k] : px;
                    pr = a1 > m ? r1[k] : pr;
                    m = a1 > m ? a1 : m;
                    px = a2 > m ? x2[k] : px;
                    pr = a2 > m ? r2[k] : pr;
                    m = a2 > m ? a2 : m;
                    px = a3 > m ? x3[k] : px;
                    pr = a3 > m ? r3[k] : pr;
                    m = a3 > m ? a3 : m;
                    float d = m > 0.0f ? g[k] : g[k] * lean;
                    one[k] += d;
                    two[k] += d * (px - mean[k]);
                    three[k] += d * (pr - mid[k]);
                }
            }
            for (size k = 0; k < c; k++) d0[k] += (double)one[k];
            for (size k = 0; k < c; k++) d1[k] += (double)two[k];
            for (size k = 0; k < c; k++) d2[k] += (double)three[k];
        }
    }
}

/* s * e + slope * (x - mean) + level for the four pixels of a pool, in rows with a stride of `line`
 * floats. A separate function, because compilers check only about ten pairs of pointers for overlap. */
static inline void shift_pool(const float *restrict x, size line, size c, const float *restrict s,
                              const float *restrict mean, const float *restrict slope,
                              const float *restrict level, const float *restrict e0,
                              const float *restrict e1, const float *restrict e2,
                              const float *restrict e3, float *restrict out) {
    for (size k = 0; k < c; k++) {
        float u = s[k], z = mean[k], p = slope[k], l = level[k];
        out[k] = e0[k] * u + (x[k] - z) * p + l;
        out[c + k] = e1[k] * u + (x[c + k] - z) * p + l;
        out[line + k] = e2[k] * u + (x[line + k] - z) * p + l;
        out[line + c + k] = e3[k] * u + (x[line + c + k] - z) * p + l;
    }
}

/* dx = s * dz + slope * (x - mean) + level, and dr likewise with t, bend, mid and rise. */
void fedshot_join_grad(const float *restrict x, const float *restrict r, const float *restrict s,
                       const float *restrict t, const float *restrict shift,
                       const float *restrict mean, const float *restrict mid,
                       const float *restrict slope, const float *restrict level,
                       const float *restrict bend, const float *restrict rise,
                       const float *restrict dy, size from, size to, size h, size w, size c,
                       float lean, float *restrict dx, float *restrict dr) {
    size ph = h / 2, pw = w / 2;
    float e0[MOST], e1[MOST], e2[MOST], e3[MOST];
    for (size i = from; i < to; i++) {
        for (size row = 0; row < ph; row++)
            for (size q = 0; q < pw; q++) {
                size at = ((i * h + 2 * row) * w + 2 * q) * c;
                const float *x0 = x + at, *x1 = x0 + c, *x2 = x0 + w * c, *x3 = x2 + c;
                const float *r0 = r + at, *r1 = r0 + c, *r2 = r0 + w * c, *r3 = r2 + c;
                const float *g = dy + ((i * ph + row) * pw + q) * c;
                for (size k = 0; k < c; k++) {
                    float u = s[k], v = t[k], b = shift[k];
                    float a0 = x0[k] * u + r0[k] * v + b, a1 = x1[k] * u + r1[k] * v + b;
                    float a2 = x2[k] * u + r2[k] * v + b, a3 = x3[k] * u + r3[k] * v + b;
                    float m = a0;
                    m = a1 > m ? a1 : m;
                    m = a2 > m ? a2 : m;
                    m = a3 > m ? a3 : m;
                    float d = m > 0.0f ? g[k] : g[k] * lean;
                    e0[k] = a0 == m ? d : 0.0f; /* the first of equal values gets the gradient */
                    d = a0 == m ? 0.0f : d;
                    e1[k] = a1 == m ? d : 0.0f;
                    d = a1 == m ? 0.0f : d;
                    e2[k] = a2 == m ? d : 0.0f;
                    e3[k] = a2 == m ? 0.0f : d;
                }
                shift_pool(x0, w * c, c, s, mean, slope, level, e0, e1, e2, e3, dx + at);
                shift_pool(r0, w * c, c, t, mid, bend, rise, e0, e1, e2, e3, dr + at);
            }
        /* A last row or column outside all pools still counts in the statistics. */
        for (size row = 0; row < h; row++)
            for (size q = row < 2 * ph ? 2 * pw : 0; q < w; q++) {
                size at = ((i * h + row) * w + q) * c;
                for (size k = 0; k < c; k++) {
                    dx[at + k] = (x[at + k] - mean[k]) * slope[k] + level[k];
                    dr[at + k] = (r[at + k] - mid[k]) * bend[k] + rise[k];
                }
            }
    }
}
