/* Batch norm, 2x2 max-pool and ReLU of a channels-last float map [n, h, w, c], in two passes over
 * memory instead of seven.
 *
 * The ReLU comes first or last: `least` is the lower bound of x before it is normalised, `floor` that
 * of the maximum of a pool. One of them is 0, and the other NaN, which turns it off, because every
 * comparison with NaN is false.
 *
 * Every function works on the images `from` to `to`, so that threads can share a batch. Sums of
 * single images are merged in order, so results do not depend on the number of threads. Within an
 * image, sums run over blocks of rows in float, and over blocks in double.
 */

#define BLOCK 64
#define MOST 1024 /* channels; the caller checks it */

static inline float raised(float v, float to) { return v < to ? to : v; }

/* mean[image][c], and m2[image][c], the sum of squared deviations from the mean. */
void fedshot_moments(const float *restrict x, size from, size to, size h, size w, size c,
                     float least, double *restrict mean, double *restrict m2) {
    float sum[MOST], square[MOST];
    size rows = h * w;
    for (size i = from; i < to; i++) {
        const float *image = x + i * rows * c;
        double *mu = mean + i * c, *m = m2 + i * c;
        for (size k = 0; k < c; k++) mu[k] = m[k] = 0.0;
        for (size first = 0; first < rows; first += BLOCK) {
            size n = rows - first < BLOCK ? rows - first : BLOCK;
            const float *block = image + first * c;
            for (size k = 0; k < c; k++) sum[k] = square[k] = 0.0f;
            for (size r = 0; r < n; r++)
                for (size k = 0; k < c; k++) sum[k] += raised(block[r * c + k], least);
            for (size k = 0; k < c; k++) sum[k] /= (float)n;
            for (size r = 0; r < n; r++)
                for (size k = 0; k < c; k++) {
                    float d = raised(block[r * c + k], least) - sum[k];
                    square[k] += d * d;
                }
            double share = (double)n / (double)(first + n), both = share * (double)first;
            for (size k = 0; k < c; k++) {
                double d = (double)sum[k] - mu[k];
                mu[k] += d * share;
                m[k] += (double)square[k] + d * d * both;
            }
        }
    }
}

/* Merge the moments of n images with equally many rows, and write the norm as x * scale + shift.
 * out[5][c]: mean, biased variance, 1 / sqrt(variance + eps), scale, shift. */
void fedshot_fold(const double *restrict parts, const float *restrict weight,
                  const float *restrict bias, size n, size rows, size c, float eps,
                  float *restrict out) {
    const double *mean = parts, *m2 = parts + n * c;
    for (size k = 0; k < c; k++) {
        double mu = 0.0, m = 0.0;
        for (size i = 0; i < n; i++) {
            double d = mean[i * c + k] - mu, share = 1.0 / (double)(i + 1);
            mu += d * share;
            m += m2[i * c + k] + d * d * (double)rows * (double)i * share;
        }
        float var = (float)(m / ((double)n * (double)rows)), inverse = 1.0f / sqrtf(var + eps);
        float scale = weight[k] * inverse;
        out[k] = (float)mu;
        out[c + k] = var;
        out[2 * c + k] = inverse;
        out[3 * c + k] = scale;
        out[4 * c + k] = bias[k] - (float)mu * scale;
    }
}

/* Running statistics, old + momentum (new - old), after a batch with `values` per channel, with the
 * unbiased variance. out[2][c]: mean and variance. `bias`, that of the convolution before, may be
 * null. */
void fedshot_keep(const float *restrict mean, const float *restrict var,
                  const float *restrict new_mean, const float *restrict new_var,
                  const float *restrict bias, size c, size values, double momentum,
                  float *restrict out) {
    double whole = (double)values / (double)(values - 1);
    for (size k = 0; k < c; k++) {
        double m = (double)new_mean[k] + (bias ? (double)bias[k] : 0.0);
        out[k] = (float)((1.0 - momentum) * (double)mean[k] + momentum * m);
        out[c + k] = (float)((1.0 - momentum) * (double)var[k] + momentum * (double)new_var[k] * whole);
    }
}

/* The backward pass of batch norm with `values` per channel, from the sums over each image of dz and
 * dz * (x - mean). out[5][c]: their sums S0 and S1 over all images, slope and level of
 * dx = scale * dz + slope * (x - mean) + level, and the gradient of the weight. */
void fedshot_tilt(const double *restrict dz, const double *restrict dzx,
                  const float *restrict inverse, const float *restrict scale, size n, size values,
                  size c, float *restrict out) {
    for (size k = 0; k < c; k++) {
        double s0 = 0.0, s1 = 0.0, i = inverse[k], each = -(double)scale[k] / (double)values;
        for (size at = k; at < n * c; at += c) {
            s0 += dz[at];
            s1 += dzx[at];
        }
        out[k] = (float)s0;
        out[c + k] = (float)s1;
        out[2 * c + k] = (float)(each * i * i * s1);
        out[3 * c + k] = (float)(each * s0);
        out[4 * c + k] = (float)(i * s1);
    }
}

/* y = maxpool(x * scale + shift) with its ReLU; a pool with a NaN gives NaN, as in torch. It is
 * checked once per pair: a comparison for each value would take a third more time. */
void fedshot_pool(const float *restrict x, const float *restrict scale,
                  const float *restrict shift, size from, size to, size h, size w, size c,
                  float least, float floor, float *restrict y) {
    size ph = h / 2, pw = w / 2;
    for (size i = from; i < to; i++)
        for (size r = 0; r < ph; r++)
            for (size q = 0; q < pw; q++) {
                const float *x0 = x + ((i * h + 2 * r) * w + 2 * q) * c;
                const float *x1 = x0 + c, *x2 = x0 + w * c, *x3 = x2 + c;
                float *out = y + ((i * ph + r) * pw + q) * c;
                for (size k = 0; k < c; k++) {
                    float s = scale[k], b = shift[k];
                    float a0 = raised(x0[k], least) * s + b, a1 = raised(x1[k], least) * s + b;
                    float a2 = raised(x2[k], least) * s + b, a3 = raised(x3[k], least) * s + b;
                    float m = a0 > a1 ? a0 : a1, l = a2 > a3 ? a2 : a3;
                    m = m > l ? m : l;
                    m = raised(m, floor);
                    out[k] = isunordered(a0, a1) | isunordered(a2, a3) ? NAN : m;
                }
            }
}

/* Sums over each image of dz and dz * (x - mean), where dz is the gradient that reaches the maximum
 * of a pool.
 *
 * From here on a number wins a comparison with NaN. This cannot matter, because with batch statistics
 * one value that is not finite makes its whole channel NaN. */
void fedshot_sums(const float *restrict x, const float *restrict scale,
                  const float *restrict shift, const float *restrict mean,
                  const float *restrict dy, size from, size to, size h, size w, size c,
                  float least, float floor, double *restrict dz_sum, double *restrict dzx_sum) {
    size ph = h / 2, pw = w / 2;
    float one[MOST], two[MOST];
    for (size i = from; i < to; i++) {
        double *d0 = dz_sum + i * c, *d1 = dzx_sum + i * c;
        for (size k = 0; k < c; k++) d0[k] = d1[k] = 0.0;
        for (size r = 0; r < ph; r++) {
            for (size k = 0; k < c; k++) one[k] = two[k] = 0.0f;
            for (size q = 0; q < pw; q++) {
                const float *x0 = x + ((i * h + 2 * r) * w + 2 * q) * c;
                const float *x1 = x0 + c, *x2 = x0 + w * c, *x3 = x2 + c;
                const float *g = dy + ((i * ph + r) * pw + q) * c;
                for (size k = 0; k < c; k++) {
                    float s = scale[k], b = shift[k];
                    float v0 = raised(x0[k], least), v1 = raised(x1[k], least);
                    float v2 = raised(x2[k], least), v3 = raised(x3[k], least);
                    float a1 = v1 * s + b, a2 = v2 * s + b, a3 = v3 * s + b;
                    float m = v0 * s + b, v = v0;
                    v = a1 > m ? v1 : v;
                    m = a1 > m ? a1 : m;
                    v = a2 > m ? v2 : v;
                    m = a2 > m ? a2 : m;
                    v = a3 > m ? v3 : v;
                    m = a3 > m ? a3 : m;
                    float d = m <= floor ? 0.0f : g[k];
                    one[k] += d;
                    two[k] += d * (v - mean[k]);
                }
            }
            for (size k = 0; k < c; k++) d0[k] += (double)one[k];
            for (size k = 0; k < c; k++) d1[k] += (double)two[k];
        }
    }
}

/* dx = scale * dz + slope * (x - mean) + level, dz as above, and 0 where a first ReLU set x to 0. */
void fedshot_grad(const float *restrict x, const float *restrict scale,
                  const float *restrict shift, const float *restrict mean,
                  const float *restrict slope, const float *restrict level,
                  const float *restrict dy, size from, size to, size h, size w, size c,
                  float least, float floor, float *restrict dx) {
    size ph = h / 2, pw = w / 2;
    for (size i = from; i < to; i++) {
        for (size r = 0; r < ph; r++)
            for (size q = 0; q < pw; q++) {
                size at = ((i * h + 2 * r) * w + 2 * q) * c;
                const float *x0 = x + at, *x1 = x0 + c, *x2 = x0 + w * c, *x3 = x2 + c;
                float *y0 = dx + at, *y1 = y0 + c, *y2 = y0 + w * c, *y3 = y2 + c;
                const float *g = dy + ((i * ph + r) * pw + q) * c;
                for (size k = 0; k < c; k++) {
                    float s = scale[k], b = shift[k], t = slope[k], u = mean[k], l = level[k];
                    float v0 = raised(x0[k], least), v1 = raised(x1[k], least);
                    float v2 = raised(x2[k], least), v3 = raised(x3[k], least);
                    float a0 = v0 * s + b, a1 = v1 * s + b, a2 = v2 * s + b, a3 = v3 * s + b;
                    float m = a0;
                    m = a1 > m ? a1 : m;
                    m = a2 > m ? a2 : m;
                    m = a3 > m ? a3 : m;
                    float d = m <= floor ? 0.0f : g[k] * s;
                    float b0 = v0 - u, b1 = v1 - u, b2 = v2 - u, b3 = v3 - u;
                    float e0 = a0 == m ? d : 0.0f; /* the first of equal values gets the gradient */
                    d = a0 == m ? 0.0f : d;
                    float e1 = a1 == m ? d : 0.0f;
                    d = a1 == m ? 0.0f : d;
                    float e2 = a2 == m ? d : 0.0f;
                    d = a2 == m ? 0.0f : d;
                    y0[k] = x0[k] <= least ? 0.0f : b0 * t + l + e0;
                    y1[k] = x1[k] <= least ? 0.0f : b1 * t + l + e1;
                    y2[k] = x2[k] <= least ? 0.0f : b2 * t + l + e2;
                    y3[k] = x3[k] <= least ? 0.0f : b3 * t + l + d;
                }
            }
        /* A last row or column outside all pools still counts in the statistics. */
        for (size r = 0; r < h; r++)
            for (size q = r < 2 * ph ? 2 * pw : 0; q < w; q++) {
                size at = ((i * h + r) * w + q) * c;
                for (size k = 0; k < c; k++) {
                    float v = (raised(x[at + k], least) - mean[k]) * slope[k] + level[k];
                    dx[at + k] = x[at + k] <= least ? 0.0f : v;
                }
            }
    }
}

/* The sums over each image that the second derivative needs: u, u * (x - mean) and u * dz. From here
 * on a first ReLU is already applied to x, and u is 0 where it set x to 0. */
void fedshot_twice_sums(const float *restrict x, const float *restrict scale,
                        const float *restrict shift, const float *restrict mean,
                        const float *restrict dy, const float *restrict u, size from, size to,
                        size h, size w, size c, float floor, double *restrict u_sum,
                        double *restrict ux_sum, double *restrict uz_sum) {
    size ph = h / 2, pw = w / 2;
    float one[MOST], two[MOST], three[MOST];
    for (size i = from; i < to; i++) {
        double *s0 = u_sum + i * c, *s1 = ux_sum + i * c, *s2 = uz_sum + i * c;
        for (size k = 0; k < c; k++) s0[k] = s1[k] = s2[k] = 0.0;
        for (size r = 0; r < h; r++) {
            const float *row = x + (i * h + r) * w * c, *cot = u + (i * h + r) * w * c;
            for (size k = 0; k < c; k++) one[k] = two[k] = 0.0f;
            for (size q = 0; q < w; q++)
                for (size k = 0; k < c; k++) {
                    one[k] += cot[q * c + k];
                    two[k] += cot[q * c + k] * (row[q * c + k] - mean[k]);
                }
            for (size k = 0; k < c; k++) s0[k] += (double)one[k];
            for (size k = 0; k < c; k++) s1[k] += (double)two[k];
        }
        for (size r = 0; r < ph; r++) {
            for (size k = 0; k < c; k++) three[k] = 0.0f;
            for (size q = 0; q < pw; q++) {
                size at = ((i * h + 2 * r) * w + 2 * q) * c;
                const float *x0 = x + at, *x1 = x0 + c, *x2 = x0 + w * c, *x3 = x2 + c;
                const float *u0 = u + at, *u1 = u0 + c, *u2 = u0 + w * c, *u3 = u2 + c;
                const float *g = dy + ((i * ph + r) * pw + q) * c;
                for (size k = 0; k < c; k++) {
                    float s = scale[k], b = shift[k];
                    float a1 = x1[k] * s + b, a2 = x2[k] * s + b, a3 = x3[k] * s + b;
                    float m = x0[k] * s + b, v = u0[k];
                    v = a1 > m ? u1[k] : v;
                    m = a1 > m ? a1 : m;
                    v = a2 > m ? u2[k] : v;
                    m = a2 > m ? a2 : m;
                    v = a3 > m ? u3[k] : v;
                    m = a3 > m ? a3 : m;
                    three[k] += m <= floor ? 0.0f : g[k] * v;
                }
            }
            for (size k = 0; k < c; k++) s2[k] += (double)three[k];
        }
    }
}

/* gx = slope * (x - mean) + at_z * dz + at_u * u + level, and for the maximum of a pool above `floor`
 * gdy = scale * u + at_z * (x - mean) + base. */
void fedshot_twice_grad(const float *restrict x, const float *restrict scale,
                        const float *restrict shift, const float *restrict mean,
                        const float *restrict slope, const float *restrict at_z,
                        const float *restrict at_u, const float *restrict level,
                        const float *restrict base, const float *restrict dy,
                        const float *restrict u, size from, size to, size h, size w, size c,
                        float floor, float *restrict gx, float *restrict gdy) {
    size ph = h / 2, pw = w / 2;
    for (size i = from; i < to; i++) {
        for (size at = i * h * w * c; at < (i + 1) * h * w * c; at += c)
            for (size k = 0; k < c; k++)
                gx[at + k] = (x[at + k] - mean[k]) * slope[k] + u[at + k] * at_u[k] + level[k];
        for (size r = 0; r < ph; r++)
            for (size q = 0; q < pw; q++) {
                size at = ((i * h + 2 * r) * w + 2 * q) * c, to_y = ((i * ph + r) * pw + q) * c;
                const float *x0 = x + at, *x1 = x0 + c, *x2 = x0 + w * c, *x3 = x2 + c;
                const float *u0 = u + at, *u1 = u0 + c, *u2 = u0 + w * c, *u3 = u2 + c;
                float *y0 = gx + at, *y1 = y0 + c, *y2 = y0 + w * c, *y3 = y2 + c;
                const float *g = dy + to_y;
                float *out = gdy + to_y;
                for (size k = 0; k < c; k++) {
                    float s = scale[k], b = shift[k];
                    float a0 = x0[k] * s + b, a1 = x1[k] * s + b;
                    float a2 = x2[k] * s + b, a3 = x3[k] * s + b;
                    float m = a0, v = u0[k], p = x0[k];
                    v = a1 > m ? u1[k] : v;
                    p = a1 > m ? x1[k] : p;
                    m = a1 > m ? a1 : m;
                    v = a2 > m ? u2[k] : v;
                    p = a2 > m ? x2[k] : p;
                    m = a2 > m ? a2 : m;
                    v = a3 > m ? u3[k] : v;
                    p = a3 > m ? x3[k] : p;
                    m = a3 > m ? a3 : m;
                    float z = s * v + at_z[k] * (p - mean[k]) + base[k];
                    out[k] = m <= floor ? 0.0f : z;
                    float d = m <= floor ? 0.0f : g[k] * at_z[k];
                    float e0 = a0 == m ? d : 0.0f;
                    d = a0 == m ? 0.0f : d;
                    float e1 = a1 == m ? d : 0.0f;
                    d = a1 == m ? 0.0f : d;
                    float e2 = a2 == m ? d : 0.0f;
                    d = a2 == m ? 0.0f : d;
                    y0[k] += e0;
                    y1[k] += e1;
                    y2[k] += e2;
                    y3[k] += d;
                }
            }
    }
}
